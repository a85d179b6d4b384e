"""The processes of compilers, and what they answer.

One process for each kind of chip, if need be one after another: when one dies at a program, the next one does
the rest. A lock in the cache folder allows one for each kind of chip on this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import ChipwiseError
from ..words.facts import Fact, fact
from .compiled import Compiled, Request
from .compilers import Compiler

HEAD_START = 30.0
"""Seconds for which all else waits for urgent programs, on a machine with fewer than `CORES`: two compilers
on two cores would halve each other's speed."""

CORES = 4


class Children:
    """The processes of a plan's compilers. `close` ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events: queue.SimpleQueue[tuple[str, Compiled] | BaseException | None] = queue.SimpleQueue()
        self._under_way = 0
        self._urgent: set[str] = set()
        self._prepared: dict[str, Child] = {}  # by platform
        self._running: list[Child] = []
        self._starting = threading.Lock()
        self._closed = False

    def prepare(self, compiler: Compiler) -> None:
        """Starts the process of a compiler, which takes a second, before its programs are known."""
        self._prepared[compiler.platform] = self._start(compiler)

    def ask(self, batch: Sequence[tuple[Compiler, dict[str, Request]]]) -> None:
        """Starts to compile the requests, by key, for each compiler."""
        for compiler, requests in batch:
            if requests:
                self._urgent |= {key for key, request in requests.items() if request.urgent}
                self._under_way += 1
                name = f"compiler-{compiler.platform}"
                threading.Thread(target=self._run, args=(compiler, requests), daemon=True, name=name).start()

    def _run(self, compiler: Compiler, requests: dict[str, Request]) -> None:
        try:
            with _alone(self._folder, compiler.platform):
                for pair in self._ask(requests, compiler):
                    self._events.put(pair)
            self._events.put(None)
        except BaseException as error:
            self._events.put(error)

    def urgent(self) -> Iterator[tuple[str, Compiled]]:
        """Yields answers, as `answers` does, until none is urgent, but for at most `HEAD_START` seconds; on a
        machine with many cores none, since there nothing has to wait."""
        end = time.monotonic() + (HEAD_START if (os.cpu_count() or 1) < CORES else 0)
        while self._urgent and (left := end - time.monotonic()) > 0:
            try:
                yield from self._answer(self._events.get(timeout=left))
            except queue.Empty:
                return

    def answers(self) -> Iterator[tuple[str, Compiled]]:
        """Yields each key with its answer as soon as it is ready."""
        while self._under_way:
            yield from self._answer(self._events.get())

    def _answer(self, event: tuple[str, Compiled] | BaseException | None) -> Iterator[tuple[str, Compiled]]:
        if isinstance(event, BaseException):
            raise event
        if event is None:
            self._under_way -= 1
            return
        self._urgent.discard(event[0])
        yield event

    def close(self) -> None:
        """Kills those that run."""
        with self._starting:
            self._closed = True
        for child in list(self._running):
            child.kill()  # what it has open, its thread closes
        for child in list(self._prepared.values()):
            child.close()

    def _start(self, compiler: Compiler) -> Child:
        with self._starting:
            child = Child(compiler)
            self._running.append(child)
            if self._closed:
                child.kill()
            return child

    def _ask(self, requests: dict[str, Request], compiler: Compiler) -> Iterator[tuple[str, Compiled]]:
        """Yields each key with its answer as soon as it is ready. If a child dies, that is the answer for its
        current program, and a new child does the rest; if it had several, each is tried alone to find which
        one."""
        batches = [dict(requests)]
        while batches:
            left, under_way, end = batches.pop(0), set[str](), dict[str, Any]()
            if self._closed:
                return
            child = self._prepared.pop(compiler.platform, None) or self._start(compiler)
            with contextlib.closing(child):
                for event in child.compile(left):
                    if "exit_code" in event:
                        end = event
                    elif event["answer"] is None:
                        under_way.add(event["key"])
                    else:
                        under_way.discard(event["key"])
                        del left[event["key"]]
                        yield event["key"], Compiled.from_json(event["answer"])
                        if not left:
                            break  # it takes a second to end
            self._running.remove(child)
            if self._closed:
                return
            if left and not under_way:
                raise ChipwiseError("compiler-not-started", chips=CHIPS[compiler.platform], **end)
            alone = {key: left.pop(key) for key in under_way}
            if len(alone) == 1:
                for key, request in alone.items():
                    yield key, Compiled(request.name, _died(request.name, **end))
            else:
                batches += [{key: request} for key, request in alone.items()]
            batches += [left] if left else []


class Child:
    """A process of `compile_child`."""

    def __init__(self, compiler: Compiler) -> None:
        self._open = stack = contextlib.ExitStack()
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="chipwise-plan-"))
        self._folder = Path(place)
        log = stack.enter_context((self._folder / "log").open("w+", encoding="utf-8", errors="replace"))
        process = subprocess.Popen(
            [sys.executable, "-m", "chipwise.planner.compile_child", place],
            stdin=subprocess.PIPE,  # closes when this process ends, which ends the child
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=compiler.environment(),
            cwd=place,
            process_group=0,  # Ctrl-C is for this process, which ends the child
        )
        self._log, self._process = log, stack.enter_context(process)

    def compile(self, batch: dict[str, Request]) -> Iterator[dict[str, Any]]:
        """Yields the child's messages while it compiles `batch`, by key.

        A message is a `key` with its `answer`, `None` when it starts that program; the last one has its
        `exit_code` and the end of its `log`.
        """
        requests = []
        for i, (key, request) in enumerate(batch.items()):
            program = request.program.entry(self._folder, f"{i}.bin")
            requests.append({**vars(request), "program": program, "key": key})
        (self._folder / "requests.json").write_text(json.dumps(requests), encoding="utf-8")
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # of a child that has ended, whose exit code says so
            os.write(self._process.stdin.fileno(), b"begin\n")
        # a child that was killed while it wrote leaves half a line
        whole = (line for line in self._process.stdout if line.endswith("\n"))
        yield from map(json.loads, whole)
        exit_code = self._process.wait()
        self._log.seek(0)
        yield {"exit_code": exit_code, "log": last_words(self._log.read())}

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kills it, and removes its folder."""
        self.kill()
        self._open.close()


@contextlib.contextmanager
def _alone(folder: Path, platform: str) -> Iterator[None]:
    """Waits for a compiler's lock and holds it. The operating system releases it when the process ends."""
    import fcntl  # Windows lacks it, and the compilers too

    with open(folder / f"compiler-{platform}.lock", "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(fact("compiler-waited-for", chips=CHIPS[platform]), file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


CHIPS = {"tpu": "TPU", "cuda": "GPU"}


def _died(name: str, exit_code: int, log: str) -> Fact:
    """A fact: how a child died at the program `name`, with its last output."""
    facts = {"program": name, "log": log, "signal": ""}
    if exit_code >= 0:
        return fact("compiler-ended", exit_code=exit_code, **facts)
    code = "compiler-killed" if exit_code == -signal.SIGKILL else "compiler-crashed"
    return fact(code, **{**facts, "signal": signal.Signals(-exit_code).name})


def last_words(log: str) -> str:
    """The reason that a process logged before it died, else the last line that is not a stack trace."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    fatal = [line.partition("] ")[2] for line in lines if _FATAL.match(line)]
    candidates = fatal or [line for line in lines if not _STACK.match(line)] or lines
    return candidates[-1][:400] if candidates else ""


_FATAL = re.compile(r"F\d{4} .*\] ")  # the format of a failed check in the compiler's C++
_STACK = re.compile(r"@ |PC: |\*\*\*|#\d+ |0x|File \"|\[address")
