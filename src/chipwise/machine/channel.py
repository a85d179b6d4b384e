"""Messages between hosts besides their arrays: which hosts are there, shared decisions, failures and losses.

JAX's runtime transfers the arrays. It aborts a process some time after a peer is gone, without saying which
one, and does not say for which hosts it waits. So each host has a plain connection to host 0, with lines of
JSON and regular beats from both sides. A host whose connection ends without a farewell, or is silent for
`silence` seconds, is lost, and every host is told.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

LINE_BYTES = 1 << 20  # the longest message of a host
_HELLO_SECONDS = 10.0  # for the first message on a new connection
_RETRY_SECONDS = 0.5
_FIRST_WORD_SECONDS = 3.0  # of waiting, after which the missing hosts are reported
_AGAIN_SECONDS = 60.0
_GRACE_SECONDS = 2.0  # in which host 0 may find the error itself that another host reported

Awaiting = Callable[[list[int]], None]

_MESSAGES: tuple[dict[str, Any], ...] = (  # the fields of every message, with their types
    *({"host": int, "of": int}, {"refused": list}, {"all": str}),
    {"what": str, "turn": int, "host": int, "value": object},
    *({"bye": int}, {"noted": bool}, {"gone": int}, {"leave": int}, {"beat": int}),
    {"fail": int, "text": str, "host": int},
)


class PortTaken(OSError):
    """Another program listens on the port at which the hosts meet."""


class Connection:
    """A connection that carries JSON objects as lines.

    *Fields:* `heard`, the time of the last message from the other side; `most`, the longest line to receive;
    `garbled`, whether something else than a message came.
    """

    def __init__(self, connection: socket.socket):
        self._socket, self._rest, self._sending = connection, b"", threading.Lock()
        self.most, self.garbled = LINE_BYTES, False
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.heard = time.monotonic()

    def send(self, message: dict[str, Any]) -> None:
        """Sends `message`. Ignores a closed connection, which `receive` notices."""
        line = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(line)
        except OSError:
            pass

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """The next message; `None` at the end, after `seconds`, and for anything but a message."""
        try:
            self._socket.settimeout(seconds)
            while b"\n" not in self._rest:
                data = self._socket.recv(1 << 16)
                if not data:
                    return None
                if len(self._rest) > self.most:
                    raise ValueError(f"a line of more than {self.most} bytes")
                self._rest += data
            line, _, self._rest = self._rest.partition(b"\n")
            message = json.loads(line)
            if not (isinstance(message, dict) and any(_fits(message, fields) for fields in _MESSAGES)):
                raise ValueError("no message of a host")
        except OSError:
            return None
        except (ValueError, RecursionError):
            self.garbled = True
            return None
        self.heard = time.monotonic()
        return message

    def sending_within(self, seconds: float) -> None:
        """Limits the time of a `send`, which would otherwise block if the other side does not read."""
        packed = int(seconds).to_bytes(8, "little") + bytes(8)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)

    def close(self) -> None:
        self._socket.close()


def _fits(message: dict[str, Any], fields: dict[str, Any]) -> bool:
    return message.keys() == fields.keys() and all(isinstance(message[n], fields[n]) for n in fields)


def accept_hosts(
    address: str, port: int, count: int, name: str, wait: float, awaiting: Awaiting
) -> dict[int, Connection]:
    """On host 0: waits for the other hosts, which send their numbers. *Returns* their connections.

    *Arguments:* `awaiting` is called with the numbers of the missing hosts, now and then.

    Raises `PortTaken`; `TimeoutError` with the missing hosts; and `ValueError` with the number of a second
    host of that number, or of a host that expects another number of hosts.
    """
    connections: dict[int, Connection] = {}
    with _listening(address, port) as server:
        began, next_report = time.monotonic(), _FIRST_WORD_SECONDS
        while len(connections) < count - 1:
            missing = [i for i in range(1, count) if i not in connections]
            waited = time.monotonic() - began
            if waited > wait:
                raise TimeoutError(missing)
            if waited > next_report:
                awaiting(missing)
                next_report = waited + _AGAIN_SECONDS
            for i in [i for i, connection in connections.items() if _ended(connection)]:
                connections.pop(i).close()  # the host was killed, and may start again
            if not select.select([server], [], [], _RETRY_SECONDS)[0]:
                continue
            connection = Connection(server.accept()[0])
            hello = connection.receive(_HELLO_SECONDS) or {}
            index = hello.get("host")
            if type(index) is not int:
                connection.close()  # another program
                continue
            if hello.get("of") != count or index in connections or not 0 < index < count:
                for other in (connection, *connections.values()):
                    other.send({"refused": [index, hello.get("of"), count]})
                    other.close()
                raise ValueError(index, hello.get("of"), count)
            connections[index] = connection
    for connection in connections.values():
        connection.send({"all": name})
    return connections


def connect_to_first(
    address: str, port: int, index: int, count: int, wait: float, awaiting: Awaiting
) -> dict[int, Connection]:
    """On another host: sends its number to host 0, and waits until all hosts are there. *Returns* the
    connection to host 0. Raises as `accept_hosts`."""
    began, next_report = time.monotonic(), _FIRST_WORD_SECONDS
    while (waited := time.monotonic() - began) <= wait:
        if waited > next_report:
            awaiting([0])
            next_report = waited + _AGAIN_SECONDS
        try:
            connection = Connection(socket.create_connection((address, port), timeout=5))
        except OSError:
            time.sleep(_RETRY_SECONDS)
            continue
        connection.send({"host": index, "of": count})
        answer = connection.receive(max(1.0, wait - waited)) or {}
        if "refused" in answer:
            connection.close()
            raise ValueError(*answer["refused"])
        if "all" in answer:
            return {0: connection}
        connection.close()  # host 0 was killed, or another program listens there
        time.sleep(_RETRY_SECONDS)
    raise TimeoutError([0])


def _listening(address: str, port: int) -> socket.socket:
    """A server at `port`, on the loopback interface only if that is `address`."""
    loopback = address in ("localhost", "::1") or address.startswith("127.")
    try:
        if loopback:
            return socket.create_server((address, port))
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise PortTaken(error.errno, error.strerror) from error


def _ended(connection: Connection) -> bool:
    """Whether a connection has ended, on which the other side sends nothing yet."""
    return bool(select.select([connection._socket], [], [], 0)[0])


class Channel:
    """The connections of a host after all have met: to host 0, or from host 0 to each.

    *Arguments:* `connections` by host; `silence`, the seconds after which a silent host is lost; `gone`,
    called with the number of a lost host and whether it sent something else than a message, and `left`,
    called with an exit code and a sentence. Both run in a thread of the channel and end the process.
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
        self.index, self.count = index, count
        self._connections, self.silence, self._gone, self._left = connections, silence, gone, left
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
        """The values of all hosts, in their order; all wait for all. JSON values."""
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
        """Ends all other hosts, since this one ends with an error. *Returns* whether to show `sentence` here.

        *Arguments:* `alike`, whether every host finds this error itself, so that host 0 will show it.
        """
        self._ending.set()
        if self.index == 0:
            self._send({"leave": code})
            return True
        if alike:
            time.sleep(5 * _GRACE_SECONDS)  # host 0 ends all hosts meanwhile
        self._send({"fail": code, "text": sentence, "host": self.index})
        return not self._noted.wait(4 * _GRACE_SECONDS)

    def bye(self) -> None:
        """This host has done its part, so its end is no loss."""
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
            elif "fail" in message:
                self._failed(host, connection, message)
        if host not in self._farewells:
            self._lost(host, connection.garbled)

    def _failed(self, host: int, connection: Connection, message: dict[str, Any]) -> None:
        """On host 0, another host has failed: ends all hosts with that error, unless this one finds its
        own."""
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
            self._send({"beat": self.index})
            self._ending.wait(min(5.0, self.silence / 6))
            for host, connection in self._connections.items():
                if host not in self._farewells and time.monotonic() - connection.heard > self.silence:
                    self._lost(host)
