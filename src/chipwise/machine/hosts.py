"""The hosts of a run: one call before any device is touched, and what they decide together.

    here = hosts()      # SLURM, Open MPI, GKE, Cloud TPU, SkyPilot; one host elsewhere
    here.agree("save", due)

`fit` and the others make the call; a program makes it itself to say which host it is
(`cw.hosts(4, 1, "10.0.0.1:8482")`), or to see that before. Later calls return what the first did.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import glob
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from ..errors import ChipwiseError, DeviceError, DivergedError, HostLost, RecipeError, Stopped
from ..words.facts import fact
from . import cluster
from .cluster import Seat
from .facts import installed
from .wire import PortTaken, Wire, answer_the_roll, call_the_roll

WAIT_SECONDS = 1800.0  # for all hosts to come: a slice that was preempted may take half an hour
SILENCE_SECONDS = 30.0  # after which a host is gone
_LATER_SECONDS = 15  # that JAX, which would abort, waits beyond that
_JAX_SECONDS = 300
_ABORT_SECONDS = 3.0
_PORTS = 16  # looked at for JAX's own service, from the next one on
_COMPARED = ("chipwise", "jax", "jaxlib", "libtpu")


class Hosts:
    """This host among those of the run, of which there may be one.

    *Fields:* `index` of `count`; `names` of all, as their systems call them.
    """

    def __init__(self, seat: Seat, wire: Wire | None = None, names: tuple[str, ...] = ()):
        self.index, self.count, self.place = seat.index, seat.count, seat.place
        self._wire, self.names = wire, names or (socket.gethostname(),)
        self._asked = 0
        self._code: int | None = None
        self.shows = True  # whether this host is to show the error with which it ends

    @property
    def first(self) -> bool:
        """Whether this is host 0, which writes and speaks for all."""
        return self.index == 0

    def agree(self, what: str, value: Any = None) -> Any:
        """The `value` of host 0, a JSON value, on all hosts: each asks for it at the same place."""
        return value if self._wire is None else self._wire.agree(what, value)

    def everyone(self, what: str, value: Any = None) -> list[Any]:
        """What each host says, JSON values in their order. All wait for all."""
        return [value] if self._wire is None else self._wire.everyone(what, value)

    def compare(self, what: str, facts: dict[str, dict[str, Any]]) -> None:
        """Raises `DeviceError`, the same on all hosts, unless all say the same.

        *Arguments:* `facts`: the code of the error to the values that it is about, JSON values by name.
        """
        rows = self.everyone(what, json.loads(json.dumps(facts, default=str)))
        every = dict.fromkeys((code, name) for row in rows for code in row for name in row[code] or {})
        for host, row in enumerate(rows):
            for code, name in every:
                here, there = ((told.get(code) or {}).get(name) for told in (row, rows[0]))
                if here != there:
                    which = {"host": host, "host_name": self.names[host], "name": name}
                    if there is None and code == "host-differs-version":  # nothing to install
                        code = "host-differs"
                    raise DeviceError(code, **which, here=here, there=there)

    def alone(self, what: str) -> None:
        """Raises `DeviceError` where several hosts have met for `what` one host does."""
        if self.count > 1:
            raise DeviceError("one-host-only", what=what, hosts=self.count)

    def stopping(self) -> bool:
        """To be asked by every host before every step: whether all stop there, since one was told to."""
        if self._wire is None:
            return False
        from jax.experimental.multihost_utils import reached_preemption_sync_point

        self._asked += 1
        return reached_preemption_sync_point(self._asked)

    def failed(self, error: BaseException) -> None:
        """This host cannot go on: all others leave too. Host 0 shows `error`, if it is there to do so."""
        if self._wire is None or self._code is not None:
            return
        if isinstance(error, Stopped):  # as all did, at one step
            self.shows = self.first
            return
        self._code = getattr(error, "exit_code", 130 if isinstance(error, KeyboardInterrupt) else 1)
        if type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError"):
            time.sleep(self._wire.silence + 1)  # a collective broke: the wire learns why, and ends this
        text = str(error) if isinstance(error, ChipwiseError) else f"{type(error).__name__}: {error}"
        text = str(fact("host-failed", host=self.index, host_name=self.names[self.index], text=text))
        alike = isinstance(error, (DivergedError, RecipeError, DeviceError))
        self.shows = self._wire.fail(self._code, text, alike)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """What is raised inside has `failed`."""
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise

    def leave(self) -> None:
        """At the end of the process: a farewell, or an end at once where JAX would wait for who is gone."""
        if self._wire is None:
            return
        uncaught = getattr(sys, "last_value", None)
        if uncaught is not None and not hasattr(sys, "ps1"):  # or the others would wait for this host
            self.failed(uncaught)
        if self._code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._code)
        self._wire.bye()


_LOCK = threading.Lock()
_LEAVING = threading.Lock()  # once taken: one thread says the last sentence
_KEPT: list[Any] = []
_here: Hosts | None = None


def hosts(
    count: int | None = None,
    index: int | None = None,
    coordinator: str | None = None,
    *,
    wait: float | None = None,
    silence: float | None = None,
) -> Hosts:
    """Joins the hosts of this run, and says which one this is.

    *Arguments:* `count` of hosts, the `index` of this one and the address of host 0 (`"10.0.0.1:8482"`),
    where the environment does not say them; `wait`, seconds for all to come (1,800), and `silence`, seconds
    after which one is gone (30).

    Raises `DeviceError` when hosts are missing, differ in a version, or cannot meet; the message names them.
    """
    global _here
    with _LOCK:
        if _here is None:
            seat = cluster.given(count, index, coordinator) or _seat()
            if seat is None or seat.count == 1:
                _here = Hosts(Seat(0, 1, "localhost"))
            else:
                _here = _join(
                    seat, _seconds("WAIT", wait, WAIT_SECONDS), _seconds("SILENCE", silence, SILENCE_SECONDS)
                )
                atexit.register(_here.leave)
        return _here


def joined() -> Hosts | None:
    """What `hosts` returned, if it was called."""
    return _here


def _seat() -> Seat | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = glob.glob("/dev/nvidia[0-9]*") if visible is None else [v for v in visible.split(",") if v]
    return cluster.found(os.environ, len(shown))


def _seconds(name: str, asked: float | None, usual: float) -> float:
    if asked is not None:
        return asked
    variable = f"CHIPWISE_{name}"
    text = os.environ.get(variable, str(usual))
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]*)?", text):
        raise DeviceError("variable-not-seconds", variable=variable, value=text)
    return float(text)


def _join(seat: Seat, wait: float, silence: float) -> Hosts:
    """Meets the others, compares what must be equal, and starts JAX's own runtime."""
    from .detect import started

    if started():
        raise DeviceError("hosts-too-late", hosts=seat.count)
    name = socket.gethostname()

    def told(missing: list[int]) -> None:
        where = f"{seat.address}:{seat.port}"
        waiting = fact("hosts-awaited", missing=missing, hosts=seat.count, host=seat.index, where=where)
        print(waiting, file=sys.stderr, flush=True)

    where = {"address": seat.address, "port": seat.port}
    try:
        if seat.index == 0:
            lines = call_the_roll(seat.address, seat.port, seat.count, name, wait, told)
        else:
            lines = answer_the_roll(seat.address, seat.port, seat.index, seat.count, wait, told)
    except PortTaken as error:
        other = seat.port + 100 if seat.port < 65000 else seat.port - 1000
        facts = {**where, "other": other, "host_name": name, "reason": error.strerror}
        raise DeviceError("hosts-port-taken", **facts) from error
    except TimeoutError as error:
        raise DeviceError(
            "hosts-missing", **where, missing=error.args[0], hosts=seat.count, waited=wait
        ) from None
    except ValueError as error:
        host, other, mine = error.args
        raise DeviceError("host-twice", **where, host=host, other=other, hosts=mine) from None

    def gone(host: int) -> None:
        if host == seat.index:  # stopped and woken, or cut off
            lost = HostLost("host-left-behind", host=host, silence=silence)
            _end(lost.exit_code, str(lost))
        lost = HostLost("host-lost", host=seat.index, lost=host, lost_name=here.names[host], silence=silence)
        _end(lost.exit_code, str(lost))

    wire = Wire(seat.index, seat.count, lines, silence, gone, _end)
    here = Hosts(seat, wire, (name,) * seat.count)
    here.names = tuple(here.everyone("names", name))
    _outlive_aborts()
    try:
        _alike(here)
        _start_jax(seat, wire, silence)
    except BaseException as error:
        here.failed(error)
        raise
    return here


def _alike(here: Hosts) -> None:
    versions = {package: installed(package) for package in _COMPARED}
    here.compare(
        "program", {"host-differs-version": versions, "host-differs": {"NPROC": os.environ.get("NPROC")}}
    )


def _start_jax(seat: Seat, wire: Wire, silence: float) -> None:
    import jax

    # gRPC would ask a proxy for the way to the coordinator, and wait for ever.
    direct = "no_grpc_proxy"
    kept = os.environ.get(direct) or os.environ.get("no_proxy")
    os.environ[direct] = ",".join(filter(None, [kept, seat.address]))
    logging.getLogger("jax._src.distributed").addFilter(lambda said: "proxy" not in said.getMessage())
    loopback = seat.address in ("localhost", "::1") or seat.address.startswith("127.")
    port = wire.agree("port", _free_port(seat.port + 1) if seat.index == 0 else None)
    try:
        jax.distributed.initialize(
            f"[{seat.address}]:{port}" if ":" in seat.address else f"{seat.address}:{port}",
            seat.count,
            seat.index,
            local_device_ids=seat.gpus,
            cluster_detection_method="deactivate",
            initialization_timeout=_JAX_SECONDS,
            heartbeat_timeout_seconds=int(silence) + _LATER_SECONDS,
            shutdown_timeout_seconds=_JAX_SECONDS,
            coordinator_bind_address=f"{seat.address}:{port}" if loopback else None,
        )
    except RuntimeError as error:
        said = " ".join(str(error).split())[:300]
        raise DeviceError("hosts-not-joined", host=seat.index, said=said) from error


def _outlive_aborts() -> None:
    """JAX aborts as soon as its coordinator is gone. Here that ends with a sentence and a code of our own,
    after the wire had the time to say who it was. In C, since Python's handlers wait for the main thread."""

    def aborted(_: int) -> None:
        time.sleep(_ABORT_SECONDS)
        _end(HostLost.exit_code, str(fact("host-runtime-lost")))

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
    _KEPT.append(handler)
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)


def _free_port(first: int) -> int:
    """A port from `first` on that nobody has, or any."""
    for port in (*range(first, min(first + _PORTS, 65536)), 0):
        with socket.socket() as attempt:
            try:
                attempt.bind(("", port))
            except OSError:
                continue
            return attempt.getsockname()[1]
    return first


def _end(code: int, sentence: str) -> None:
    """Ends the process at once: its own threads may wait for a host that is gone."""
    _LEAVING.acquire()
    if sentence:
        line = f"error: {' '.join(sentence.split())}\n"
        os.write(2, line.encode())
    logging.shutdown()
    os._exit(code)
