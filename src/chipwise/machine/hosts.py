"""The hosts of a run: one call before devices are used, and decisions that all hosts share.

    here = hosts()      # SLURM, Open MPI, GKE, Cloud TPU, SkyPilot; otherwise one host
    here.agree("save", due)

`fit` and the other functions call `hosts`. A program calls it itself to pass the number of its host
(`cw.machine.hosts.hosts(4, 1, "10.0.0.1:8482")`), or to get it earlier. Later calls return the
first call's result.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import glob
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base import (
    ChipwiseError,
    DeviceError,
    DivergedError,
    HostLost,
    RecipeError,
    Stopped,
    ending,
    fact,
    invalid,
)
from ..base.annotations import as_annotated
from ..base.figures import one_line
from ..base.json_types import as_stored
from . import arithmetic, cluster
from .channel import Channel, HostTwice, PortTaken, accept_hosts, connect_to_first, own_interface
from .cluster import TOKEN, Seat

_LONGEST_SECONDS = 1e6  # of which a socket can wait
WAIT_SECONDS = 1800.0  # for all hosts: a preempted slice may return after half an hour
SILENCE_SECONDS = 30.0  # after which a host is lost
_LATER_SECONDS = 15  # that JAX waits longer before it aborts
_JAX_SECONDS = 300
_ABORT_SECONDS = 3.0
# A progress bar hides it, and has no chance to show it on an exit at once
SHOW_CURSOR = b"\x1b[?25h"
_PORTS = 16  # to try for JAX's own service, from the next port on


@dataclass
class Pace:
    """The progress of this process, for threads that watch it."""

    step: int = 0  # steps started
    calls: int = 0  # decisions of all hosts and blocks of evaluations so far, equal on all hosts
    beats: int = 0  # signs of work that this host alone does, such as timing kernels
    queued: Sequence[Any] = ()  # tokens of started steps to wait for, oldest first
    stepping: bool = False  # the main thread takes steps, not reads, compiles, evaluates or saves
    folder: Path | None = None  # which this process locked, for what is written about it

    def advanced(self, step: int, queued: Sequence[Any]) -> None:
        """Records that step `step`, the last of `queued`, was started."""
        self.step = step
        self.queued = queued
        self.stepping = True

    def unready(self) -> list[Any]:
        """The tokens of the started steps that are not done, oldest first."""
        return [token for token in list(self.queued) if not token.is_ready()]


class Hosts:
    """This host among the hosts of the run. A run on one machine has one host.

    *Fields:* `index` of `count`. `place` that started the hosts. `names`: the host names of all.
    `shows`: whether this host is to show the error with which it ends. `pace`. `channel` to other
    hosts, if any.
    """

    def __init__(self, seat: Seat, channel: Channel | None = None, names: tuple[str, ...] = ()):
        self.index = seat.index
        self.count = seat.count
        self.place = seat.place
        self.channel = channel
        self.names = names or (socket.gethostname(),)
        self.pace = Pace()
        self._steps = 0
        self._code: int | None = None
        self.shows = True

    @property
    def first(self) -> bool:
        """Whether this is host 0, the only one that writes and reports."""
        return self.index == 0

    def agree(self, what: str, value: Any = None) -> Any:
        """Host 0's `value`, a JSON value, on all hosts, which must all make the same calls."""
        self.pace.calls += 1
        return value if self.channel is None else self.channel.agree(what, value)

    def everyone(self, what: str, value: Any = None) -> list[Any]:
        """The values of all hosts, JSON values, in their order. All wait for all."""
        self.pace.calls += 1
        return [value] if self.channel is None else self.channel.everyone(what, value)

    def compare(self, what: str, facts: dict[str, dict[str, Any]]) -> None:
        """Raises `DeviceError`, the same on all hosts, unless their values are equal.

        *Arguments:* `facts`: an error's code to the values that it reports, JSON values by name.
        """
        rows = self.everyone(what, as_stored(facts, str))
        names = dict.fromkeys(
            (code, name) for row in rows for code in row for name in row[code] or {}
        )
        for host, row in enumerate(rows):
            for code, name in names:
                here, there = ((values.get(code) or {}).get(name) for values in (row, rows[0]))
                if here != there:
                    which = {"host": host, "host_name": self.names[host], "name": name}
                    if there is None and code == "host-differs-version":  # nothing to install
                        code = "host-differs"
                    raise DeviceError(code, **which, here=here, there=there)

    def alone(self, what: str) -> None:
        """Raises `DeviceError` if there are several hosts, since `what` runs on one host."""
        if self.count > 1:
            raise DeviceError("one-host-only", what=what, hosts=self.count)

    def stopping(self) -> bool:
        """Whether all hosts stop at this step, since one got a signal. Every host calls this before
        every step."""
        if self.channel is None:
            return False
        from jax.experimental.multihost_utils import reached_preemption_sync_point

        self._steps += 1
        return reached_preemption_sync_point(self._steps)

    def failed(self, error: BaseException) -> None:
        """Ends all hosts, since this one cannot continue. Host 0 shows `error`, if it still
        runs."""
        if self.channel is None or self._code is not None:
            return
        if isinstance(error, Stopped | GeneratorExit):  # all hosts stop, at the same step
            self.shows = self.first
            return
        self._code = getattr(error, "exit_code", 130 if isinstance(error, KeyboardInterrupt) else 1)
        if not isinstance(error, ChipwiseError | KeyboardInterrupt):
            # A broken collective, most often: the channel finds out why, and ends this host
            of_jax = type(error).__name__ in (
                "JaxRuntimeError",
                "XlaRuntimeError",
            ) or "Gloo" in str(error)
            time.sleep(self.channel.silence + 1 if of_jax else _ABORT_SECONDS)
        text = (
            str(error) if isinstance(error, ChipwiseError) else f"{type(error).__name__}: {error}"
        )
        text = str(
            fact("host-failed", host=self.index, host_name=self.names[self.index], text=text)
        )
        alike = isinstance(error, (DivergedError, RecipeError, DeviceError))
        self.shows = self.channel.fail(self._code, text, alike)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """A context that calls `failed` for an exception."""
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise

    def end(self, error: ChipwiseError) -> None:
        """On host 0: ends all hosts at once with `error`, whatever their threads wait for."""
        if self.channel is not None:
            self.channel.fail(error.exit_code, "", alike=False)
        _end(error.exit_code, str(error))

    def leave(self) -> None:
        """Runs at exit. Sends a farewell, unless this host has failed. Then the command line exits
        at once. Another program, which got the error, ends as it would, with its own code and what
        it has registered for its exit."""
        if self.channel is None:
            return
        uncaught = getattr(sys, "last_value", None)
        # Otherwise the others would wait for this host
        if uncaught is not None and not hasattr(sys, "ps1"):
            self.failed(uncaught)
        if self._code is None:
            self.channel.bye()
        elif ending.own:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._code)
        else:
            _leave_jax()


_LOCK = threading.Lock()
_LEAVING = threading.Lock()  # taken for good by the first thread that ends the process
_HANDLERS: list[Any] = []  # C callbacks, which must not be garbage-collected
_here: Hosts | None = None


@as_annotated
def hosts(
    count: int | None = None,
    index: int | None = None,
    coordinator: str | None = None,
    *,
    wait: float | None = None,
    silence: float | None = None,
) -> Hosts:
    """Joins the hosts of this run. *Returns* this host.

    *Arguments:*

    - `count`, `index`, `coordinator`: the number of hosts, the number of this one, and the address
      of host 0 (`"10.0.0.1:8482"`), if the environment does not define them.
    - `wait`: the seconds to wait for all hosts (1,800).
    - `silence`: the seconds after which a silent host is lost (30).

    Raises `DeviceError` when hosts are missing, have different versions, or cannot connect. The
    message names them.
    """
    global _here
    with _LOCK:
        if _here is None:
            cluster.check_threads(os.environ)
            seat = cluster.given(count, index, coordinator) or _seat()
            if seat is None or seat.count == 1:
                _here = Hosts(Seat(0, 1, "localhost"))
            else:
                _here = _join(
                    seat,
                    _seconds("WAIT", wait, WAIT_SECONDS),
                    _seconds("SILENCE", silence, SILENCE_SECONDS),
                )
                atexit.register(_here.leave)
        return _here


def joined() -> Hosts | None:
    """The result of `hosts`, if it was called. Otherwise None."""
    return _here


def _seat() -> Seat | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = (
        glob.glob("/dev/nvidia[0-9]*") if visible is None else [v for v in visible.split(",") if v]
    )
    if gpus == ["-1"] or os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        gpus = []
    return cluster.found(os.environ, len(gpus))


def _seconds(name: str, given: float | None, default: float) -> float:
    """`given`, or the value of the environment's `CHIPWISE_<name>`, or `default`."""
    if given is not None:
        if not 0 <= given <= _LONGEST_SECONDS:
            raise invalid("hosts-seconds", name.lower(), given, "0 to 1,000,000 seconds")
        return given
    variable = f"CHIPWISE_{name}"
    value = os.environ.get(variable, str(default))
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]*)?", value) or float(value) > _LONGEST_SECONDS:
        raise DeviceError("variable-not-seconds", variable=variable, value=value)
    return float(value)


def _join(seat: Seat, wait: float, silence: float) -> Hosts:
    """Connects to the other hosts, compares versions, and starts JAX's distributed runtime."""
    from .jax_settings import started  # imports JAX

    if started():
        raise DeviceError("hosts-too-late", hosts=seat.count)
    name = socket.gethostname()

    def awaiting(missing: list[int]) -> None:
        waiting = fact(
            "hosts-awaited",
            missing=missing,
            hosts=seat.count,
            host=seat.index,
            where=f"{seat.address}:{seat.port}",
        )
        print(waiting, file=sys.stderr, flush=True)

    where = {"address": seat.address, "port": seat.port}
    token = os.environ.get(TOKEN, "")
    try:
        if seat.index == 0:
            connections = accept_hosts(seat, name, wait, awaiting, token)
        else:
            connections = connect_to_first(seat, wait, awaiting, token)
    except PortTaken as error:
        other = seat.port + 100 if seat.port < 65000 else seat.port - 1000
        facts = {**where, "other": other, "host_name": name, "reason": error.strerror}
        raise DeviceError("hosts-port-taken", **facts) from error
    except TimeoutError as error:
        facts = {**where, "missing": error.args[0], "hosts": seat.count, "waited": wait}
        raise DeviceError("hosts-missing", **facts) from None
    except HostTwice as error:
        host, other, mine = error.args
        raise DeviceError("host-twice", **where, host=host, other=other, hosts=mine) from None

    def gone(host: int, garbled: bool) -> None:
        if host == seat.index:  # this process was suspended, or cut off from the network
            lost = HostLost("host-left-behind", host=host, silence=silence)
            _end(lost.exit_code, str(lost))
            return
        lost = HostLost(
            "host-garbled" if garbled else "host-lost",
            host=seat.index,
            lost=host,
            lost_name=here.names[host],
            silence=silence,
        )
        _end(lost.exit_code, str(lost))

    channel = Channel(seat.index, seat.count, connections, silence, gone, _end)
    here = Hosts(seat, channel, (name,) * seat.count)
    here.names = tuple(one_line(other, 64) for other in here.everyone("names", name))
    _outlive_aborts()
    try:
        versions, settings = arithmetic.versions(), arithmetic.settings()
        here.compare("program", {"host-differs-version": versions, "host-differs": settings})
        _start_jax(seat, channel, silence)
    except BaseException as error:
        here.failed(error)
        raise
    return here


def _start_jax(seat: Seat, channel: Channel, silence: float) -> None:
    import jax
    from jax._src.lib import _jax

    # gRPC would connect to the coordinator through a proxy, and wait forever.
    variable = "no_grpc_proxy"
    without_proxy = os.environ.get(variable) or os.environ.get("no_proxy")
    os.environ[variable] = ",".join(filter(None, [without_proxy, seat.address]))
    logger = logging.getLogger("jax._src.distributed")
    logger.addFilter(_about_no_proxy)
    if seat.address in ("localhost", "::1") or seat.address.startswith("127."):
        # Gloo would listen at the address of this machine's name, which others may reach.
        _jax.make_gloo_tcp_collectives = functools.partial(
            _jax.make_gloo_tcp_collectives, hostname=seat.address
        )
    port = channel.agree("port", _free_port(seat.port + 1) if seat.index == 0 else None)
    where = f"[{seat.address}]:{port}" if ":" in seat.address else f"{seat.address}:{port}"
    try:
        jax.distributed.initialize(
            where,
            seat.count,
            seat.index,
            local_device_ids=seat.gpus,
            cluster_detection_method="deactivate",
            initialization_timeout=_JAX_SECONDS,
            heartbeat_timeout_seconds=int(silence) + _LATER_SECONDS,
            shutdown_timeout_seconds=_JAX_SECONDS,
            coordinator_bind_address=where if own_interface(seat.address) else None,
        )
    except RuntimeError as error:
        message = " ".join(str(error).split())[:300]
        raise DeviceError("hosts-not-joined", host=seat.index, said=message) from error
    finally:
        logger.removeFilter(_about_no_proxy)


def _about_no_proxy(record: logging.LogRecord) -> bool:
    return "proxy" not in record.getMessage()


def _outlive_aborts() -> None:
    """Replaces JAX's abort, when its coordinator is gone, by an error message and an exit code,
    after the channel had time to report the lost host. With a C handler, since Python's handlers
    wait for the main thread."""

    def aborted(_: int) -> None:
        time.sleep(_ABORT_SECONDS)
        _end(HostLost.exit_code, str(fact("host-runtime-lost")))

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
    _HANDLERS.append(handler)
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)


def _leave_jax() -> None:
    """Keeps JAX from waiting for hosts that ended with an error, when Python ends."""
    from jax._src.distributed import global_state

    for name in ("preemption_sync_manager", "client", "service"):
        # Without its last reference it would wait too
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(getattr(global_state, name)))
        setattr(global_state, name, None)


def _free_port(first: int) -> int:
    """The first free port from `first` on. After `_PORTS` tries, any free port."""
    for port in (*range(first, min(first + _PORTS, 65536)), 0):
        with socket.socket() as attempt:
            try:
                attempt.bind(("", port))
            except OSError:
                continue
            return attempt.getsockname()[1]
    return first


def _end(code: int, sentence: str) -> None:
    """Ends the process at once, with `sentence`. Its main thread may wait for a lost host in a
    collective, which no exception and no signal ends. Only tells a person in an interactive
    process, who can interrupt it or start it again."""
    if not _LEAVING.acquire(blocking=not ending.interactive()):
        return  # the person was told already
    with contextlib.suppress(OSError):  # standard error may be closed
        os.write(2, SHOW_CURSOR + b"\n" if os.isatty(2) else b"")
        if sentence:
            os.write(2, f"error: {one_line(sentence, 2000)}\n".encode())
    if not ending.interactive():
        logging.shutdown()
        os._exit(code)
