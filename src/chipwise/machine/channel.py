"""Messages between hosts besides their arrays: which hosts are there, shared decisions, failures
and losses.

JAX's runtime transfers the arrays. It aborts a process some time after a peer is gone, without
saying which one, and does not say for which hosts it waits. So each host has a plain connection to
host 0, with lines of JSON and regular beats from both sides. A host is lost if its connection ends
without a farewell, or if it is silent for `silence` seconds. Host 0 reports the loss to every host.

Anybody may reach an open port. A message is one of `_MESSAGES`, from the host that it names.
Anything else ends its connection. Hosts that share a token (`CHIPWISE_TOKEN`, set by
`chipwise --processes`) prove it when they meet. Without one they trust their network, as JAX's own
service does.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from .cluster import Seat

LINE_BYTES = 1 << 20  # the longest message of a host
_HELLO_SECONDS = 10.0  # for the first message on a new connection
_HELLO_BYTES = 1 << 12
_STRANGERS = 64  # connections without a first message; more end the oldest
_RETRY_SECONDS = 0.5
_FIRST_WORD_SECONDS = 3.0  # of waiting, after which the missing hosts are reported
_AGAIN_SECONDS = 60.0
_GRACE_SECONDS = 2.0  # in which host 0 may find the error itself that another host reported

Awaiting = Callable[[list[int]], None]


def _whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _text(most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and len(value) <= most


def _paces(value: Any) -> bool:
    """Whether `value` has rows of four whole numbers, see `Channel.paces`."""
    whole = _whole(0, 1 << 53)
    return isinstance(value, list) and all(
        isinstance(row, list) and len(row) == 4 and all(map(whole, row)) for row in value
    )


_HOST = _whole(0, 1 << 20)
_CODE = _whole(1, 255)
_PROOF = _text(64)
_ASKED = {
    "what": _text(100),
    "turn": _whole(1, 1 << 53),
    "host": _HOST,
    "value": lambda value: True,
}
# The fields of every message, with their bounds
_MESSAGES: tuple[dict[str, Callable[[Any], bool]], ...] = (
    {"host": _HOST, "of": _HOST, "proof": _PROOF},
    {
        "refused": lambda value: (
            isinstance(value, list) and len(value) == 3 and all(map(_HOST, value))
        )
    },
    *({"all": _text(1000), "proof": _PROOF}, _ASKED, {"noted": lambda value: value is True}),
    *({"bye": _HOST}, {"beat": _HOST, "paces": _paces}, {"gone": _HOST}, {"leave": _CODE}),
    {"stacks": lambda value: value is True},
    {"fail": _CODE, "text": _text(10_000), "host": _HOST},
)
_HELLO, _REFUSED, _ALL = (fields.keys() for fields in _MESSAGES[:3])


class PortTaken(OSError):
    """Another program listens on the port at which the hosts meet."""


class HostTwice(Exception):
    """A host's number, the number of hosts that it expects, and the number that host 0 expects."""


class Connection:
    """A connection that carries JSON objects as lines.

    *Fields:* `since`: the time of the connection. `heard`: the time of the last message from the
    other side. `most`: the longest line to receive, in bytes. `ended`: whether no more will come.
    `garbled`: whether the other side sent something that is not a message.
    """

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._rest = b""
        self._sending = threading.Lock()
        self.most = _HELLO_BYTES
        self.ended = False
        self.garbled = False
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.since = self.heard = time.monotonic()

    def fileno(self) -> int:
        """The descriptor, for `select`."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Sends `message`. Ignores a closed connection, which `receive` notices."""
        line = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(line)
        except OSError:
            pass

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """The next message. `None` at the end, after `seconds`, and for anything but a message."""
        until = None if seconds is None else time.monotonic() + seconds
        try:
            while b"\n" not in self._rest:  # however slowly it comes
                self._socket.settimeout(
                    None if until is None else max(0.0, until - time.monotonic())
                )
                data = self._socket.recv(1 << 16)
                if not data:
                    raise ConnectionError
                if len(self._rest) > self.most:
                    raise ValueError(f"a line of more than {self.most} bytes")
                self._rest += data
            line, _, self._rest = self._rest.partition(b"\n")
            message = json.loads(line)
            if not (
                isinstance(message, dict) and any(_fits(message, fields) for fields in _MESSAGES)
            ):
                raise ValueError("no message of a host")
        except (TimeoutError, BlockingIOError):
            return None
        except OSError:
            self.ended = True
            return None
        except (ValueError, RecursionError):
            self.ended = self.garbled = True
            return None
        self.heard = time.monotonic()
        return message

    def sending_within(self, seconds: float) -> None:
        """Limits the time of a `send`, which would otherwise block if the other side does not
        read."""
        packed = int(seconds).to_bytes(8, "little") + bytes(8)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)

    def close(self) -> None:
        self._socket.close()


def _fits(message: dict[str, Any], fields: dict[str, Callable[[Any], bool]]) -> bool:
    return message.keys() == fields.keys() and all(fields[n](message[n]) for n in fields)


def _proof(token: str, *words: Any) -> str:
    """Shows that a host has `token`, without sending it."""
    return hmac.new(
        token.encode("utf-8", "surrogateescape"), repr(words).encode(), "sha256"
    ).hexdigest()


def _proves(message: dict[str, Any], token: str, *words: Any) -> bool:
    return hmac.compare_digest(
        message["proof"].encode("utf-8", "replace"), _proof(token, *words).encode()
    )


def accept_hosts(
    seat: Seat, name: str, wait: float, awaiting: Awaiting, token: str = ""
) -> dict[int, Connection]:
    """On host 0: waits for the other hosts, which send their numbers. *Returns* their connections.

    *Arguments:* `awaiting` is called with the numbers of the missing hosts, now and then. A
    connection that does not prove `token` is closed.

    Raises `PortTaken`. Raises `TimeoutError` with the missing hosts. Raises `HostTwice` if a number
    is taken, or for another number of hosts.
    """
    connections: dict[int, Connection] = {}
    strangers: list[Connection] = []
    with _listening(seat.address, seat.port) as server:
        server.setblocking(False)
        began = time.monotonic()
        next_report = _FIRST_WORD_SECONDS
        while len(connections) < seat.count - 1:
            missing = [i for i in range(1, seat.count) if i not in connections]
            waited = time.monotonic() - began
            if waited > wait:
                for one in (*strangers, *connections.values()):
                    one.close()
                raise TimeoutError(missing)
            if waited > next_report:
                awaiting(missing)
                next_report = waited + _AGAIN_SECONDS
            for i in [i for i, one in connections.items() if select.select([one], [], [], 0)[0]]:
                # Which send nothing yet: the host was killed, and may start again
                connections.pop(i).close()
            reading: list[Any] = [server, *strangers]
            if select.select(reading, [], [], min(_RETRY_SECONDS, wait))[0]:
                with contextlib.suppress(OSError):  # nobody, or already gone
                    strangers.append(Connection(server.accept()[0]))
            for one in list(strangers):
                hello = _hello(one, token)
                late = (
                    time.monotonic() - one.since > _HELLO_SECONDS or one in strangers[:-_STRANGERS]
                )
                if hello is None and not late and not one.ended:
                    continue
                strangers.remove(one)
                if hello is None:  # another program
                    one.close()
                    continue
                index, of = hello
                if of != seat.count or index in connections or not 0 < index < seat.count:
                    for other in (one, *strangers, *connections.values()):
                        other.send({"refused": [index, of, seat.count]})
                        other.close()
                    raise HostTwice(index, of, seat.count)
                connections[index] = one
        for one in strangers:
            one.close()
    for connection in connections.values():
        connection.send({"all": name, "proof": _proof(token, "all", seat.count)})
    return connections


def _hello(connection: Connection, token: str) -> tuple[int, int] | None:
    """The number of a host, and the number of hosts that it expects, once it has sent them with a
    proof of `token`."""
    message = connection.receive(0)
    if message is None:
        return None
    if message.keys() == _HELLO and _proves(message, token, message["host"], message["of"]):
        return message["host"], message["of"]
    connection.ended = True
    return None


def connect_to_first(
    seat: Seat, wait: float, awaiting: Awaiting, token: str = ""
) -> dict[int, Connection]:
    """On another host: sends its number to host 0, and waits until all hosts are there. *Returns*
    the connection to host 0.

    Raises `TimeoutError` with the number of host 0. Raises `HostTwice` as `accept_hosts` does, if
    host 0 refuses this host.
    """
    began = time.monotonic()
    next_report = _FIRST_WORD_SECONDS
    while (waited := time.monotonic() - began) <= wait:
        if waited > next_report:
            awaiting([0])
            next_report = waited + _AGAIN_SECONDS
        try:
            connection = Connection(socket.create_connection((seat.address, seat.port), timeout=5))
        except OSError:
            time.sleep(_RETRY_SECONDS)
            continue
        connection.send(
            {"host": seat.index, "of": seat.count, "proof": _proof(token, seat.index, seat.count)}
        )
        answer = connection.receive(max(1.0, wait - waited)) or {}
        if answer.keys() == _REFUSED:
            connection.close()
            raise HostTwice(*answer["refused"])
        if answer.keys() == _ALL and _proves(answer, token, "all", seat.count):
            return {0: connection}
        connection.close()  # host 0 was killed, or another program listens there
        time.sleep(_RETRY_SECONDS)
    raise TimeoutError([0])


def own_interface(address: str) -> bool:
    """Whether `address` is the number of one of this machine's own interfaces, so that the hosts
    can reach this machine there alone. A name may mean another interface to other hosts, so only
    "localhost" counts."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        with socket.socket(family) as attempt:
            attempt.bind((address, 0))
    except (ValueError, OSError):
        return address == "localhost"
    return not ipaddress.ip_address(address).is_unspecified


def _listening(address: str, port: int) -> socket.socket:
    """A server at `port`, on the interface of `address` only if that is this machine's own."""
    try:
        if own_interface(address):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise PortTaken(error.errno, error.strerror) from error


class Channel:
    """The connections of a host after all have met: to host 0, or from host 0 to each.

    *Arguments:*

    - `connections`: by host.
    - `silence`: the seconds after which a silent host is lost.
    - `gone`: called with the number of a lost host and whether it sent something else than a
      message.
    - `left`: called with an exit code and a sentence.

    `gone` and `left` run in a thread of the channel and end the process.

    *Fields:* `paces`: for each host its number, its last ended step, the number of steps, blocks
    and decisions that it has passed, and the milliseconds since the last of them. `beat_seconds`:
    the time between beats. `stack`: a function that describes what this host does. The code that
    measures these sets `beat_seconds`, `stack` and this host's row of `paces`.
    """

    def __init__(
        self,
        index: int,
        count: int,
        connections: dict[int, Connection],
        silence: float,
        gone: Callable[[int, bool], None],
        left: Callable[[int, str], None],
    ):
        self.index = index
        self.count = count
        self._connections = connections
        self.silence = silence
        self._gone = gone
        self._left = left
        self.paces: dict[int, list[Any]] = {}
        self.stack: Callable[[], Any] = lambda: None
        self.beat_seconds = min(5.0, silence / 6)
        self._changed = threading.Condition()
        self._values: dict[tuple[str, int, int], Any] = {}  # by (what, turn, host)
        self._turns: dict[str, int] = {}
        self._farewells: set[int] = set()  # hosts whose end is no loss
        self._done: set[int] = set()  # of these, the hosts that ended well and send nothing more
        self._ending = threading.Event()  # this host knows why it ends
        self._noted = threading.Event()  # host 0 has this host's error
        for host, connection in connections.items():
            connection.sending_within(max(1.0, silence))
            connection.most = count * LINE_BYTES  # the values of all hosts
            connection.heard = time.monotonic()
            threading.Thread(target=self._listen, args=(host, connection), daemon=True).start()
        threading.Thread(target=self._beat, name="chipwise-beat", daemon=True).start()

    def agree(self, what: str, value: Any = None) -> Any:
        """Host 0's `value` on all hosts, which wait for it. JSON values."""
        turn = self._next(what)
        if self.index == 0:
            self._send({"what": what, "turn": turn, "host": 0, "value": value})
            return value
        return self._await(what, turn, [0])[0]

    def everyone(self, what: str, value: Any = None) -> list[Any]:
        """The values of all hosts, JSON values, in their order. All wait for all."""
        turn = self._next(what)
        message = {"what": what, "turn": turn, "host": self.index, "value": value}
        if self.index:
            self._send(message)
            return self._await(what, turn, [0])[0]
        others = self._await(what, turn, list(range(1, self.count)))
        values = [value, *others]
        self._send({**message, "value": values})
        return values

    def fail(self, code: int, sentence: str, alike: bool) -> bool:
        """Ends all other hosts, since this one ends with an error. *Returns* whether to show
        `sentence` here.

        *Arguments:* `alike`: whether every host meets this error itself, so that host 0 will show
        it.
        """
        self._ending.set()
        if self.index == 0:
            self._send({"leave": code})
            return True
        if alike:
            time.sleep(5 * _GRACE_SECONDS)  # host 0 ends all hosts meanwhile
        self._send({"fail": code, "text": sentence[:10_000], "host": self.index})
        return not self._noted.wait(4 * _GRACE_SECONDS)

    def stacks(self, seconds: float) -> dict[int, Any]:
        """On host 0: the result of `stack` on each host that answers within `seconds`."""
        self._send({"stacks": True})
        keys = {host: ("stack", 1, host) for host in self._connections}
        with self._changed:
            self._changed.wait_for(lambda: self._values.keys() >= set(keys.values()), seconds)
            told = {host: self._values[key] for host, key in keys.items() if key in self._values}
        return {0: self.stack(), **told}

    def bye(self) -> None:
        """Reports that this host has done its part, so that its end is no loss."""
        self._ending.set()
        self._send({"bye": self.index})

    def _next(self, what: str) -> int:
        self._turns[what] = self._turns.get(what, 0) + 1
        return self._turns[what]

    def _send(self, message: dict[str, Any]) -> None:
        for connection in self._connections.values():
            connection.send(message)

    def _await(self, what: str, turn: int, hosts: list[int]) -> list[Any]:
        def missing() -> list[int]:
            return [host for host in hosts if (what, turn, host) not in self._values]

        with self._changed:
            self._changed.wait_for(lambda: not missing() or self._done.intersection(missing()))
            if not missing():
                return [self._values.pop((what, turn, host)) for host in hosts]
            ended = min(self._done.intersection(missing()))
        self._lost(ended)  # its program was another, and has ended
        raise ConnectionAbortedError(what, ended)

    def _listen(self, host: int, connection: Connection) -> None:
        while (message := connection.receive()) is not None:
            if not self._may_say(host, message):
                connection.garbled = True
                break
            if "what" in message:
                with self._changed:
                    self._values[message["what"], message["turn"], host] = message["value"]
                    self._changed.notify_all()
            elif "bye" in message:
                self._farewells.add(host)
                with self._changed:
                    self._done.add(host)
                    self._changed.notify_all()
            elif "noted" in message:
                self._noted.set()
            elif "gone" in message:
                self._lost(message["gone"])
            elif "leave" in message:
                self._left(message["leave"], "")
            elif "paces" in message:
                self.paces |= {row[0]: row for row in message["paces"] if row[0] != self.index}
            elif "stacks" in message:
                self._send({"what": "stack", "turn": 1, "host": self.index, "value": self.stack()})
            elif "fail" in message:
                self._failed(host, connection, message)
        if host not in self._farewells:
            self._lost(host, connection.garbled)

    def _may_say(self, host: int, message: dict[str, Any]) -> bool:
        """Whether `host` may send `message`. A host speaks only for itself. Only host 0 ends
        others, and only the others report failures to it."""
        if message.keys() & {"all", "refused", "of"} or any(
            message.get(name, host) != host for name in ("host", "bye", "beat")
        ):
            return False
        if host:
            alone = all(row[0] == host for row in message.get("paces", ()))
            return alone and not message.keys() & {"gone", "leave", "noted", "stacks"}
        return "fail" not in message and message.get("gone", 0) < self.count

    def _failed(self, host: int, connection: Connection, message: dict[str, Any]) -> None:
        """On host 0, another host has failed: ends all hosts with that error, unless this one finds
        its own."""
        self._farewells.add(host)
        connection.send({"noted": True})
        if not self._ending.wait(_GRACE_SECONDS):
            self._ending.set()
            self._send({"leave": message["fail"]})
            self._left(message["fail"], message["text"])

    def _lost(self, host: int, garbled: bool = False) -> None:
        if self.index == 0:
            self._send({"gone": host})
        if not self._ending.is_set():
            self._gone(host, garbled)

    def _beat(self) -> None:
        while not self._ending.is_set():
            known = [row for host, row in sorted(self.paces.items()) if self.index in (0, host)]
            self._send({"beat": self.index, "paces": known})
            self._ending.wait(self.beat_seconds)
            for host, connection in self._connections.items():
                if (
                    host not in self._farewells
                    and time.monotonic() - connection.heard > self.silence
                ):
                    self._lost(host)
