"""Ends a run whose main thread or device hangs, with a sentence, since nothing else would end it.

A separate thread asks every second whether something has moved: a step was started, the device
ended one, a block was evaluated, the hosts decided something. Another rule applies while the main
thread takes no steps, but reads data, compiles, evaluates or saves, and until the first step after
that has ended, which may compile too. Then a process also moves if it uses a fifth of a processor,
or reads and writes 100 kB/s. Host 0 compares the hosts. If none moves, the one that is behind the
others is stuck.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from ..base import Stuck, ending, fact
from ..base.ending import interactive
from ..base.figures import one_line
from ..base.files import put_inside
from ..machine import spawned
from ..machine.hosts import Hosts, hosts
from ..recipe.user_code import own_line

_PACKAGE = str(Path(__file__).parents[1])
_LOOP = str(Path(__file__).with_name("training_loop.py"))
# Processor seconds a second; waiting threads that look for an end take 0.05 on a slow host
_MOVES = 0.2
_BYTES_AS_SECONDS = 2e-6  # 100 kB/s move too
_ANSWER_SECONDS = 5.0  # for the other hosts' stacks, and for a disk to take them
_BACK_SECONDS = 60.0  # for the main thread to close what a run has opened
_LONGEST = 3  # times the longest step so far is never stuck


@contextlib.contextmanager
def watched(stuck: float | str) -> Iterator[Hosts]:
    """A context of a run, which yields this host's `Hosts`. Ends all hosts if one of them raises an
    exception. Also ends them with `Stuck` if nothing moves for `stuck` seconds, such as "300s", and
    for three times the longest step. `Stuck` says where it hangs, and where the stacks of all
    threads were written. It is never raised for 0 seconds. A program of the user's on one host is
    not ended: its main thread raises `Stuck`, unless it waits for a device or has not left the
    context after `_BACK_SECONDS`."""
    here, seconds = hosts(), float(str(stuck).removesuffix("s"))
    try:
        with here.failing(), contextlib.ExitStack() as closing:
            if seconds:
                watch = _Watch(here, seconds)
                if here.count == 1 and _raises():
                    before = signal.signal(signal.SIGURG, watch.interrupt)
                    closing.callback(signal.signal, signal.SIGURG, before)
                    watch.raises = True
                watch.start()
                closing.callback(watch.join)
                closing.callback(watch.over.set)
            yield here
    except _Hang as hang:
        raise hang.args[0] from None


class _Hang(BaseException):
    """Carries `Stuck` past what catches the exceptions of the user's code."""


def _raises() -> bool:
    """Whether an exception can be raised in this thread, of another program than the command line,
    by SIGURG, which ends no process. Windows does not have it."""
    return (
        not ending.own
        and threading.current_thread() is threading.main_thread()
        and hasattr(signal, "SIGURG")
        and signal.getsignal(signal.SIGURG) is signal.SIG_DFL
    )


class _Watch(threading.Thread):
    """The thread that watches the one which creates it."""

    def __init__(self, here: Hosts, seconds: float):
        super().__init__(name="chipwise-stuck", daemon=True)
        self.here, self.pace, self.channel, self.seconds = here, here.pace, here.channel, seconds
        self.main, self.over = threading.get_ident(), threading.Event()
        self.every = min(1.0, seconds / 10)
        self.raises = False
        self.error: Stuck | None = None  # what `interrupt` raises, from when it is known
        self.pace.step, self.pace.stepping, self.pace.queued = 0, False, ()
        if self.channel is not None:
            self.channel.stack, most = self.stack, self.channel.beat_seconds
            self.channel.beat_seconds = min(most, max(self.every, seconds / 60))

    def run(self) -> None:
        idle = longest = 0.0
        seen, worked, begin = (0, 0, 0), _worked(), 0
        while not self.over.wait(self.every):
            idle += self.every  # not by the clock: a process that was suspended did not wait
            ended, at = self.pace.step - len(self.pace.unready()), self.pace.step + self.pace.calls
            begin = begin if self.pace.stepping else ended
            before, seen = seen, (ended, at, self.pace.beats)
            before_work, worked = worked, _worked()
            steady = ended > begin
            if seen != before:
                longest = max(longest, idle) if steady else longest
            if seen != before or (not steady and worked - before_work > _MOVES * self.every):
                idle = 0.0
            rows = {self.here.index: [self.here.index, ended, at, int(1000 * idle)]}
            if self.channel is not None:
                self.channel.paces |= rows
                rows = dict(self.channel.paces)
            waited = min(row[-1] for row in rows.values()) / 1000
            over = waited > max(self.seconds, _LONGEST * longest) and len(rows) == self.here.count
            debugged = over and any(
                Path(at[0]).name in ("bdb.py", "pdb.py") for at in _stack(self.main)
            )
            if over and not debugged and self.here.first:
                self._end(rows, waited)
                return

    def _devices(self) -> list[str]:
        """The devices that have not ended the oldest of the started steps."""
        shards = [shard for token in self.pace.unready()[:1] for shard in token.addressable_shards]
        return [str(shard.device) for shard in shards if not shard.data.is_ready()]

    def stack(self) -> dict[str, Any]:
        """Describes this host: `doing`, the line of code, and whether it is the user's `own`.
        `text` has the stacks of all threads, and the devices that are not ready. Processes that
        read data print their stacks themselves."""
        asked = not interactive() and hasattr(signal, "SIGUSR1")  # which Windows does not have
        for child in multiprocessing.active_children() if asked else ():
            if isinstance(child, spawned.Process):  # the signal ends processes of the user's own
                os.kill(child.pid or 0, signal.SIGUSR1)
        doing, own = _doing(self.main)
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read(1 << 18).decode(errors="replace")
        text = f"in {doing}, not ready: {self._devices()}, main thread 0x{self.main:016x}\n{stacks}"
        return {"doing": doing, "own": own, "text": text}

    def _end(self, rows: dict[int, list[int]], idle: float) -> None:
        """Ends all hosts, with a sentence about the one that is behind."""
        here = self.here
        told = {0: self.stack()} if self.channel is None else self.channel.stacks(_ANSWER_SECONDS)
        said = {host: told[host] if isinstance(told.get(host), dict) else {} for host in rows}
        least = min(at for _, _, at, _ in rows.values())
        behind = [host for host in rows if rows[host][2] == least]
        behind = [host for host in behind if said[host].get("own")] or behind
        host = max(behind, key=lambda host: rows[host][-1])
        doing = one_line(str(said[host].get("doing", "unknown")), 200)
        facts = {"step": rows[host][1], "idle": idle, "host": host, "host_name": here.names[host]}
        facts |= {"doing": doing, "devices": self._devices() or ["none"], "hosts": here.count}
        nobody = "step-stuck" if here.count == 1 else "hosts-stuck"  # is behind the others
        code = nobody if len(behind) == here.count else "host-stuck"
        error = Stuck(code, **facts, stacks=self._written(rows, said))
        if interactive():
            print(f"warning: {error}", file=sys.stderr)
            return
        if self.raises and not self.pace.unready():
            self.error = error
            signal.pthread_kill(self.main, signal.SIGURG)
            if self.over.wait(_BACK_SECONDS):
                return
            print(f"warning: {fact('stuck-unheard', seconds=_BACK_SECONDS)}", file=sys.stderr)
        # No exception would reach the main thread, which may wait for a device for ever
        here.end(error)

    def interrupt(self, number: int, frame: Any) -> None:
        """Raises the error in the main thread, which a signal alone wakes from a wait."""
        callers = {caller.f_code.co_filename for caller, _ in traceback.walk_stack(frame)}
        if not self.over.is_set():  # without it: in the body of a loop over `cw.training`
            error = cast(Stuck, self.error)
            raise _Hang(error) if _LOOP in callers else error

    def _written(self, rows: dict[int, list[int]], said: dict[int, dict[str, Any]]) -> str:
        """Where the stacks of all hosts were written: in the run folder, or in a temporary one."""

        def write() -> str:
            folder = self.pace.folder or Path(tempfile.mkdtemp(prefix="chipwise-"))
            texts = [
                f"host {host} ({self.here.names[host]}): idle for {idle / 1000:.1f} s after step "
                f"{ended}, "
                f"{said[host].get('text', 'no answer')}"
                for host, ended, _, idle in rows.values()
            ]
            put_inside(path := folder / f"stuck-{self.pace.step}.txt", "\n\n".join(texts).encode())
            return os.path.realpath(path)

        try:  # in a thread, since the disk may hang too
            return ThreadPoolExecutor(1).submit(write).result(_ANSWER_SECONDS)
        except OSError as error:  # also after these seconds
            return f"nowhere ({error.strerror or type(error).__name__})"


def _stack(thread: int) -> list[tuple[str, int, str]]:
    """File, line and function of a thread's frames, the innermost first."""
    frames = traceback.walk_stack(sys._current_frames().get(thread))
    return [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in frames]


def _doing(main: int) -> tuple[str, bool]:
    """Returns the user's line in which the main thread is, or another thread that works for it,
    such as "read (mine.py:12)", and True. Otherwise returns the package's own line, and False."""
    for thread in (main, *sys._current_frames()):
        for i, (file, line, name) in enumerate(stack := _stack(thread)):
            if file.startswith(_PACKAGE):
                break
            at, callers = own_line([(file, line)]), [caller for caller, *_ in stack[i + 1 :]]
            if at and any(caller.startswith(_PACKAGE) or "/jax/" in caller for caller in callers):
                return f"{name} ({at})", True
    own = [at for at in _stack(main) if at[0].startswith(_PACKAGE)]
    return next(
        (f"{name} ({Path(file).name}:{line})" for file, line, name in own), "unknown"
    ), False


def _worked() -> float:
    """The processor seconds of this process so far, plus those for which its main thread waited
    for a processor, plus the bytes that it has read and written, converted to such seconds."""
    moved = waited = 0
    with contextlib.suppress(OSError):  # Linux alone has the files
        found = re.findall(
            r"^(?:[rw]char|read_bytes): (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE
        )
        moved = sum(map(int, found))
        waited = int(Path("/proc/self/schedstat").read_text().split()[1])  # nanoseconds
    return time.process_time() + 1e-9 * waited + _BYTES_AS_SECONDS * moved
