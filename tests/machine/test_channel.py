"""Hosts that meet over a port of this machine: threads of one process play them."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import processes
from chipwise.machine import channel
from chipwise.machine.channel import (
    LINE_BYTES,
    Channel,
    HostTwice,
    PortTaken,
    accept_hosts,
    connect_to_first,
    own_interface,
)
from chipwise.machine.cluster import Seat

HERE = "127.0.0.1"


class Player:
    """A host, and what it was told."""

    def __init__(self, index, count, lines, silence):
        self.gone, self.garbled, self.left, self.heard = [], [], [], threading.Event()
        self.channel = Channel(index, count, lines, silence, self._gone, self._leave)

    def _gone(self, host, garbled):
        self.gone.append(host)
        self.garbled.append(garbled)
        self.heard.set()

    def _leave(self, code, sentence):
        self.left.append((code, sentence))
        self.heard.set()

    def kill(self):
        for line in self.channel._connections.values():
            with contextlib.suppress(OSError):
                line._socket.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def meet():
    met = []

    def meeting(count, silence=30.0):
        met.extend(players := _meet(count, silence))
        return players

    yield meeting
    for player in met:
        player.channel._ending.set()
        player.kill()
    for player in met:
        for line in player.channel._connections.values():
            line.close()


def _meet(count, silence):
    port = processes.free_port()
    with ThreadPoolExecutor(count) as pool:
        others = [
            pool.submit(connect_to_first, Seat(i, count, HERE, port), 20, lambda missing: None)
            for i in range(1, count)
        ]
        lines = [accept_hosts(Seat(0, count, HERE, port), "a", 20, lambda missing: None)]
        lines += [one.result() for one in others]
    return [Player(i, count, lines[i], silence) for i in range(count)]


def together(players, ask):
    with ThreadPoolExecutor(len(players)) as pool:
        return list(pool.map(lambda player: ask(player.channel), players))


def test_hosts_agree_and_tell_each_other(meet):
    players = meet(3)
    for turn in range(3):
        assert together(players, lambda one: one.agree("save", [one.index, turn])) == [[0, turn]] * 3
    assert together(players, lambda one: one.everyone("ready", one.index)) == [[0, 1, 2]] * 3
    for player in reversed(players):
        player.channel.bye()
        player.kill()
    assert not any(player.gone for player in players)


def test_what_all_say_may_be_longer_than_what_one_may(meet):
    players, long = meet(3), "x" * (LINE_BYTES * 9 // 10)
    assert together(players, lambda one: one.everyone("recipe", long)) == [[long] * 3] * 3


@pytest.mark.parametrize("dead", [0, 2])
def test_a_host_that_dies_is_named_to_all(meet, dead):
    players = meet(3)
    players[dead].channel._ending.set()
    players[dead].channel._send = lambda message: None  # its threads, here, outlive it
    players[dead].kill()
    for player in players:
        if player is not players[dead]:
            assert player.heard.wait(10) and player.gone[0] == dead


@pytest.mark.parametrize(("early", "ask"), [(2, "everyone"), (0, "agree")])
def test_nobody_waits_for_a_host_that_said_goodbye(meet, early, ask):
    players = meet(3)
    together(players, lambda one: one.everyone("ready"))
    players[early].channel.bye()
    asking = players[0 if early else 1]
    with pytest.raises(ConnectionAbortedError):
        getattr(asking.channel, ask)("again", 1)
    assert asking.gone == [early]
    if early:  # host 0 tells the others
        assert players[1].heard.wait(10) and players[1].gone == [early]


def test_what_was_said_before_a_goodbye_is_heard(meet):
    players = meet(2)
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(players[1].channel.everyone, "last", 1)
        assert players[0].channel.everyone("last", 0) == [0, 1] == last.result()
    players[0].channel.agree("more", 5)
    players[0].channel.bye()
    assert players[1].channel.agree("more") == 5


def test_a_silent_host_is_gone(meet):
    players = meet(2, silence=1.0)
    players[1].channel._ending.set()  # it beats no more, and its connection stays
    assert players[0].heard.wait(10) and players[0].gone[0] == 1


@pytest.mark.parametrize(
    "line",
    [
        b"HTTP/1.1 400 Bad Request",
        b"[1]",
        b'{"else": 1}',
        b'{"what": "save"}',
        b'{"what": [], "turn": 1, "host": 1, "value": 1}',
        b'{"leave": "no"}',
        b'{"fail": 3}',
        b'{"leave": 0}',
        b'{"leave": true}',
        b'{"leave": 256}',
        b'{"leave": %d}' % 10**30,
        b'{"fail": 0, "text": "", "host": 1}',
        b'{"fail": %d, "text": "", "host": 1}' % 10**30,
        b'{"gone": 2}',
        b'{"gone": -1}',
        b'{"beat": 7, "paces": []}',
        b'{"beat": 1}',
        b'{"beat": 1, "paces": [[1, 2, 3]]}',
        b'{"beat": 1, "paces": [[1, 2, 3, 0.5]]}',
        b'{"beat": 1, "paces": [[1, 2, -3, 4]]}',
        b'{"stacks": 1}',
        b'{"bye": 7}',
        b'{"noted": false}',
        b'{"what": "save", "turn": 1, "host": 7, "value": 1}',
        b'{"what": "save", "turn": %d, "host": 0, "value": 1}' % 10**30,
        b'{"refused": [1]}',
        b'{"all": "a", "proof": ""}',
        b'{"host": 1, "of": 2, "proof": ""}',
        b"x" * (2 * LINE_BYTES + (1 << 17)),
    ],
)
@pytest.mark.parametrize("sender", [0, 1])
def test_what_is_no_message_ends_the_run_at_once(meet, line, sender):
    players = meet(2)
    (connection,) = players[sender].channel._connections.values()
    with contextlib.suppress(OSError):
        connection._socket.sendall(line + b"\n")
    other = players[1 - sender]
    assert other.heard.wait(10) and (other.gone, other.garbled, other.left) == ([sender], [True], [])


@pytest.mark.parametrize(
    ("line", "sender"),
    [
        (b'{"leave": 3}', 1),
        (b'{"gone": 0}', 1),
        (b'{"noted": true}', 1),
        (b'{"beat": 0, "paces": []}', 1),
        (b'{"beat": 1, "paces": [[0, 1, 1, 1]]}', 1),
        (b'{"stacks": true}', 1),
        (b'{"fail": 3, "text": "", "host": 0}', 0),
        (b'{"fail": 3, "text": "", "host": 0}', 1),
    ],
)
def test_a_host_speaks_for_itself_and_only_the_first_ends_others(meet, line, sender):
    test_what_is_no_message_ends_the_run_at_once(meet, line, sender)


def test_all_hosts_see_who_is_behind(meet):
    players = meet(3)
    for player in players:
        player.channel.beat_seconds = 0.02
        i = player.channel.index
        player.channel.paces[i] = [i, 9 - i, 20 - i, 10 * i]
    wanted = {0: [0, 9, 20, 0], 1: [1, 8, 19, 10], 2: [2, 7, 18, 20]}
    until = time.monotonic() + 20
    while any(player.channel.paces != wanted for player in players):
        assert time.monotonic() < until, [player.channel.paces for player in players]
        time.sleep(0.01)
    assert not any(player.gone for player in players)


def test_host_0_gathers_the_stacks_of_those_that_answer(meet):
    players = meet(3)
    for player in players:
        player.channel.stack = lambda i=player.channel.index: {"text": f"of {i}"}
    assert players[0].channel.stacks(10) == {i: {"text": f"of {i}"} for i in range(3)}
    players[2].channel._send = lambda message: None
    with players[0].channel._changed:
        players[0].channel._values.clear()
    assert players[0].channel.stacks(0.5).keys() == {0, 1}


def test_a_failure_is_said_once_by_host_0(meet):
    players = meet(3)
    assert players[2].channel.fail(3, "a shard is damaged", alike=False) is False
    assert players[0].heard.wait(10) and players[0].left == [(3, "a shard is damaged")]
    assert players[1].heard.wait(10) and players[1].left == [(3, "")]


def test_host_0_says_its_own(meet):
    players = meet(2)
    assert players[0].channel.fail(6, "NaN", alike=True) is True
    assert players[1].heard.wait(10) and players[1].left == [(6, "")]


def test_who_is_missing_is_told_and_named():
    told = []
    with pytest.raises(TimeoutError) as caught:
        accept_hosts(Seat(0, 4, HERE, processes.free_port()), "a", 4.5, told.append)
    assert told == [[1, 2, 3]] and caught.value.args[0] == [1, 2, 3]
    with pytest.raises(TimeoutError):
        connect_to_first(Seat(1, 2, HERE, processes.free_port()), 0.1, told.append)


@pytest.mark.parametrize(("index", "of"), [(1, 3), (2, 2)])
def test_a_host_of_another_run_is_refused_on_both_sides(index, of):
    port = processes.free_port()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(connect_to_first, Seat(index, of, HERE, port), 20, lambda missing: None)
        with pytest.raises(HostTwice) as caught:
            accept_hosts(Seat(0, 2, HERE, port), "a", 20, lambda missing: None)
        assert caught.value.args == (index, of, 2)
        with pytest.raises(HostTwice):
            other.result()


def test_strangers_are_left_outside():
    port = processes.free_port()
    with ThreadPoolExecutor(2) as pool:
        roll = pool.submit(accept_hosts, Seat(0, 2, HERE, port), "a", 20, lambda missing: None)
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"{}\n", b"\xff\n"):
            while True:
                try:
                    stranger = socket.create_connection((HERE, port), timeout=5)
                    break
                except OSError:
                    continue
            stranger.sendall(words)
            stranger.close()
        other = pool.submit(connect_to_first, Seat(1, 2, HERE, port), 20, lambda missing: None)
        assert list(roll.result()) == [1] and list(other.result()) == [0]
        for line in (*roll.result().values(), *other.result().values()):
            line.close()


def test_a_port_that_is_taken():
    with socket.create_server((HERE, 0)) as other, pytest.raises(PortTaken):
        accept_hosts(Seat(0, 2, HERE, other.getsockname()[1]), "a", 5, lambda missing: None)


@pytest.fixture
def stranger():
    """Connects to a port, as soon as it is open, and sends bytes, one each 0.2 s, until the test ends."""
    over, threads, opened = threading.Event(), [], []

    def drip(port, data):
        while not over.is_set():
            with contextlib.suppress(OSError):
                opened.append(socket.create_connection((HERE, port), timeout=5))
                break
            time.sleep(0.02)
        for i in range(len(data)):
            if over.wait(0.2):
                return
            with contextlib.suppress(OSError):
                opened[-1].send(data[i : i + 1])

    def start(port, data):
        threads.append(threading.Thread(target=drip, args=(port, data)))
        threads[-1].start()

    yield start
    over.set()
    for thread in threads:
        thread.join()
    for one in opened:
        one.close()


def test_one_who_drips_bytes_delays_nobody(stranger):
    port = processes.free_port()
    stranger(port, b"x" * 1000)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        accept_hosts(Seat(0, 2, HERE, port), "a", 1.5, lambda missing: None)
    assert time.monotonic() - began < 5


def test_host_0_that_drips_bytes_is_given_up():
    with socket.create_server((HERE, 0)) as server, ThreadPoolExecutor(1) as pool:
        port, over = server.getsockname()[1], threading.Event()

        def drip():
            with server.accept()[0] as one:
                while not over.wait(0.2):
                    with contextlib.suppress(OSError):
                        one.send(b"x")

        dripping = pool.submit(drip)
        began = time.monotonic()
        try:
            with pytest.raises(TimeoutError):
                connect_to_first(Seat(1, 2, HERE, port), 1.5, lambda missing: None)
            assert time.monotonic() - began < 5
        finally:
            over.set()
        dripping.result(5)


def test_hosts_meet_among_a_hundred_silent_strangers():
    port = processes.free_port()
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as opened:
        roll = pool.submit(accept_hosts, Seat(0, 2, HERE, port), "a", 20, lambda missing: None)
        while time.monotonic() - began < 15 and len(strangers := opened._exit_callbacks) < 100:
            with contextlib.suppress(OSError):
                opened.enter_context(socket.create_connection((HERE, port), timeout=5))
        assert len(strangers) == 100
        other = pool.submit(connect_to_first, Seat(1, 2, HERE, port), 20, lambda missing: None)
        assert list(roll.result()) == [1] and list(other.result()) == [0]
        for line in (*roll.result().values(), *other.result().values()):
            line.close()
    assert time.monotonic() - began < 9  # none of them was waited for


@pytest.mark.parametrize("token", ["", "another", "ü" * 40])
def test_who_cannot_prove_the_token_is_no_host(token):
    port, of = processes.free_port(), 2
    with ThreadPoolExecutor(2) as pool:
        roll = pool.submit(accept_hosts, Seat(0, of, HERE, port), "a", 20, lambda missing: None, "secret")
        with pytest.raises(TimeoutError):  # as the same number, and as one that would end the run
            connect_to_first(Seat(1, of, HERE, port), 0.6, lambda missing: None, token)
        with pytest.raises(TimeoutError):
            connect_to_first(Seat(1, 9, HERE, port), 0.6, lambda missing: None, token)
        other = pool.submit(connect_to_first, Seat(1, of, HERE, port), 20, lambda missing: None, "secret")
        assert list(roll.result()) == [1] and list(other.result()) == [0]
        for line in (*roll.result().values(), *other.result().values()):
            line.close()


def test_host_0_proves_the_token_too():
    port = processes.free_port()
    with socket.create_server((HERE, port)) as server, ThreadPoolExecutor(1) as pool:
        other = pool.submit(connect_to_first, Seat(1, 2, HERE, port), 1.0, lambda missing: None, "secret")
        with server.accept()[0] as one:
            hello = one.recv(4096)
            assert b"secret" not in hello
            one.sendall(b'{"all": "evil", "proof": "' + hello.split(b'"')[-2] + b'"}\n')
            with pytest.raises(TimeoutError):
                other.result()


def test_only_the_interface_of_a_numbered_address_listens():
    own = {name: own_interface(name) for name in ("127.0.0.1", "localhost", "0.0.0.0", "192.0.2.1", "host-0")}
    assert own == {
        "127.0.0.1": True,
        "localhost": True,
        "0.0.0.0": False,
        "192.0.2.1": False,
        "host-0": False,
    }
    with channel._listening("127.0.0.2", 0) as server:
        assert server.getsockname()[0] == "127.0.0.2"


LISTENING = """
import json, jax, psutil, chipwise as cw
here = cw.machine.hosts.hosts()
jax.numpy.ones(3).block_until_ready()
from jax._src.lib import _jax
gloo = _jax.make_gloo_tcp_collectives.keywords["hostname"]
found = psutil.Process().net_connections("tcp")
told = here.everyone("listening", [gloo, *sorted({one.laddr.ip for one in found if one.status == "LISTEN"})])
print(json.dumps(told))
"""


@pytest.mark.slow
def test_nothing_listens_beyond_loopback_for_hosts_of_one_machine():
    told = processes.answer(processes.start(LISTENING, 2, 1, CHIPWISE_TOKEN="secret"))
    assert len(told) == 2 and HERE in told[0][1:]
    assert all(address in (HERE, "::1", "::ffff:127.0.0.1") for one in told for address in one)


NAMED = """
import json, socket
socket.gethostname = lambda: "a\\x1b[2J\\u202e\\n" + "x" * 900
import chipwise as cw
print(json.dumps(cw.machine.hosts.hosts().names))
"""


@pytest.mark.slow
def test_the_name_of_a_host_is_shown_escaped_and_short():
    names = processes.answer(processes.start(NAMED, 2))
    assert len(names) == 2 and all(name.isprintable() and len(name) == 64 for name in names)
