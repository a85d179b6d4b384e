"""What hosts tell each other beside their arrays: who is there, what all say, who failed, who is gone.

JAX's own runtime moves the arrays. It ends a process whose peers are gone by an abort, after a wait, without
saying which; and it says nothing of whom it waits for. So each host keeps a plain connection to host 0, lines
of JSON, on which both sides beat. A connection that ends without a farewell, or is silent for `silence`
seconds, is a host that is gone, and every host hears of it.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

LINE_BYTES = 1 << 20  # the longest that a host may say at once
_HELLO_SECONDS = 10.0  # for a new connection to say who it is
_RETRY_SECONDS = 0.5
_FIRST_WORD_SECONDS = 3.0  # from when on somebody waits long enough to be told for whom
_AGAIN_SECONDS = 60.0
_GRACE_SECONDS = 2.0  # for host 0 to come upon by itself what another host told it

Told = Callable[[list[int]], None]


class PortTaken(OSError):
    """Another program listens where the hosts are to meet."""


class Line:
    """One connection: objects as lines of JSON. `heard` is when the other side last said anything."""

    def __init__(self, connection: socket.socket):
        self._socket, self._rest, self._sending = connection, b"", threading.Lock()
        self.most = LINE_BYTES
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.heard = time.monotonic()

    def send(self, said: dict[str, Any]) -> None:
        """Says it, unless the other side is gone: whoever reads finds that out."""
        line = json.dumps(said).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(line)
        except OSError:
            pass

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """What was said next; `None` at the end, after `seconds`, or for anything else than our lines."""
        try:
            self._socket.settimeout(seconds)
            while b"\n" not in self._rest:
                more = self._socket.recv(1 << 16)
                if not more or len(self._rest) > self.most:
                    return None
                self._rest += more
            line, _, self._rest = self._rest.partition(b"\n")
            said = json.loads(line)
        except (OSError, ValueError, RecursionError):
            return None
        self.heard = time.monotonic()
        return said if isinstance(said, dict) else None

    def sending_within(self, seconds: float) -> None:
        """A side that no longer reads must not hold up who sends."""
        packed = int(seconds).to_bytes(8, "little") + bytes(8)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)

    def close(self) -> None:
        self._socket.close()


def call_the_roll(address: str, port: int, count: int, name: str, wait: float, told: Told) -> dict[int, Line]:
    """As host 0: waits for the others, each of which says its number. *Returns* their lines.

    `told` is given the numbers of those who are not there, now and then. Raises `PortTaken`; `TimeoutError`
    with the missing hosts; and `ValueError` with a number that comes twice, or with another number of hosts.
    """
    lines: dict[int, Line] = {}
    with _listening(address, port) as server:
        began, word = time.monotonic(), _FIRST_WORD_SECONDS
        while len(lines) < count - 1:
            missing = [i for i in range(1, count) if i not in lines]
            waited = time.monotonic() - began
            if waited > wait:
                raise TimeoutError(missing)
            if waited > word:
                told(missing)
                word = waited + _AGAIN_SECONDS
            for i in [i for i, line in lines.items() if _ended(line)]:  # killed and started again, perhaps
                lines.pop(i).close()
            if not select.select([server], [], [], _RETRY_SECONDS)[0]:
                continue
            line = Line(server.accept()[0])
            said = line.receive(_HELLO_SECONDS) or {}
            index = said.get("host")
            if type(index) is not int:
                line.close()  # somebody else's
                continue
            if said.get("of") != count or index in lines or not 0 < index < count:
                for other in (line, *lines.values()):
                    other.send({"refused": [index, said.get("of"), count]})
                    other.close()
                raise ValueError(index, said.get("of"), count)
            lines[index] = line
    for line in lines.values():
        line.send({"all": name})
    return lines


def answer_the_roll(
    address: str, port: int, index: int, count: int, wait: float, told: Told
) -> dict[int, Line]:
    """As another host: says its number to host 0, and waits until all are there. Raises as `call_the_roll`
    does."""
    began, word = time.monotonic(), _FIRST_WORD_SECONDS
    while (waited := time.monotonic() - began) <= wait:
        if waited > word:
            told([0])
            word = waited + _AGAIN_SECONDS
        try:
            line = Line(socket.create_connection((address, port), timeout=5))
        except OSError:
            time.sleep(_RETRY_SECONDS)
            continue
        line.send({"host": index, "of": count})
        said = line.receive(max(1.0, wait - waited)) or {}
        if "refused" in said:
            line.close()
            raise ValueError(*said["refused"])
        if "all" in said:
            return {0: line}
        line.close()  # host 0 was killed, or a program of somebody else answers there
        time.sleep(_RETRY_SECONDS)
    raise TimeoutError([0])


def _listening(address: str, port: int) -> socket.socket:
    """A server at `port`: for this machine alone where `address` is the loopback's."""
    loopback = address in ("localhost", "::1") or address.startswith("127.")
    try:
        if loopback:
            return socket.create_server((address, port))
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise PortTaken(error.errno, error.strerror) from error


def _ended(line: Line) -> bool:
    """Whether the other side of a line on which nothing is said yet has gone."""
    readable = select.select([line._socket], [], [], 0)[0]
    return bool(readable)


class Wire:
    """The connections of one host once all are there: to host 0, or from host 0 to each.

    *Arguments:* `lines` by host; `silence`, the seconds after which a silent host is gone; `gone`, called
    with a host's number, and `left`, with an exit code and a sentence, in a thread of the wire: both end the
    process.
    """

    def __init__(
        self,
        index: int,
        count: int,
        lines: dict[int, Line],
        silence: float,
        gone: Callable[[int], None],
        left: Callable[[int, str], None],
    ):
        self.index, self.count = index, count
        self._lines, self.silence, self._gone, self._left = lines, silence, gone, left
        self._heard = threading.Condition()
        self._said: dict[tuple[str, int, int], Any] = {}  # (what, turn, host) to its value
        self._turn: dict[str, int] = {}
        self._farewell: set[int] = set()  # whose end is no loss
        self._done: set[int] = set()  # of those, who have ended well, and will say no more
        self._ending = threading.Event()  # this host knows why it leaves
        self._noted = threading.Event()  # host 0 knows what this one told
        for host, line in lines.items():
            line.sending_within(max(1.0, silence))
            line.most = count * LINE_BYTES  # of what all said
            line.heard = time.monotonic()
            threading.Thread(target=self._listen, args=(host, line), daemon=True).start()
        threading.Thread(target=self._beat, name="chipwise-beat", daemon=True).start()

    def agree(self, what: str, value: Any = None) -> Any:
        """The `value` of host 0, on all hosts; the others wait for it. JSON values."""
        turn = self._next(what)
        if self.index == 0:
            self._tell({"what": what, "turn": turn, "host": 0, "value": value})
            return value
        return self._await(what, turn, [0])[0]

    def everyone(self, what: str, value: Any = None) -> list[Any]:
        """What each host says, in their order; all wait for all. JSON values."""
        turn = self._next(what)
        mine = {"what": what, "turn": turn, "host": self.index, "value": value}
        if self.index:
            self._tell(mine)
            return self._await(what, turn, [0])[0]
        others = self._await(what, turn, list(range(1, self.count)))
        values = [value, *others]
        self._tell({**mine, "value": values})
        return values

    def fail(self, code: int, sentence: str, alike: bool) -> bool:
        """This host leaves with an error; all others do too. *Returns* whether it is to show the sentence.

        `alike`: that every host comes upon it by itself, so that host 0 will say it.
        """
        self._ending.set()
        if self.index == 0:
            self._tell({"leave": code})
            return True
        if alike:
            time.sleep(5 * _GRACE_SECONDS)  # host 0 sends everyone home
        self._tell({"fail": code, "text": sentence, "host": self.index})
        return not self._noted.wait(4 * _GRACE_SECONDS)

    def bye(self) -> None:
        """This host has done its part: that it ends is no loss."""
        self._ending.set()
        self._tell({"bye": self.index})

    def _next(self, what: str) -> int:
        self._turn[what] = self._turn.get(what, 0) + 1
        return self._turn[what]

    def _tell(self, said: dict[str, Any]) -> None:
        for line in self._lines.values():
            line.send(said)

    def _await(self, what: str, turn: int, hosts: list[int]) -> list[Any]:
        def missing() -> list[int]:
            return [host for host in hosts if (what, turn, host) not in self._said]

        with self._heard:
            self._heard.wait_for(lambda: not missing() or self._done.intersection(missing()))
            if not missing():
                return [self._said.pop((what, turn, host)) for host in hosts]
            ended = min(self._done.intersection(missing()))
        self._lost(ended)  # whose program was another, and is over
        raise ConnectionAbortedError(what, ended)

    def _listen(self, host: int, line: Line) -> None:
        while (said := line.receive()) is not None:
            if "what" in said:
                with self._heard:
                    self._said[said["what"], said["turn"], host] = said["value"]
                    self._heard.notify_all()
            elif "bye" in said:
                self._farewell.add(host)
                with self._heard:
                    self._done.add(host)
                    self._heard.notify_all()
            elif "noted" in said:
                self._noted.set()
            elif "gone" in said:
                self._lost(said["gone"])
            elif "leave" in said:
                self._left(said["leave"], "")
            elif "fail" in said:
                self._failed(host, line, said)
        if host not in self._farewell:
            self._lost(host)

    def _failed(self, host: int, line: Line, said: dict[str, Any]) -> None:
        """Host 0 hears that another failed: it says so and sends all home, unless it knows better by then."""
        self._farewell.add(host)
        line.send({"noted": True})
        if not self._ending.wait(_GRACE_SECONDS):
            self._ending.set()
            self._tell({"leave": said["fail"]})
            self._left(said["fail"], said["text"])

    def _lost(self, host: int) -> None:
        if self.index == 0:
            self._tell({"gone": host})
        if not self._ending.is_set():
            self._gone(host)

    def _beat(self) -> None:
        while not self._ending.is_set():
            self._tell({"beat": self.index})
            self._ending.wait(min(5.0, self.silence / 6))
            for host, line in self._lines.items():
                if host not in self._farewell and time.monotonic() - line.heard > self.silence:
                    self._lost(host)
