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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ChipwiseError
from ..words.facts import Fact, fact
from .compiled import Compiled, Request
from .compilers import Compiler

HEAD_START = 30.0
"""Seconds for which a compiler waits for urgent programs of another, on a machine with fewer than `CORES`: on
two cores they would halve each other's speed."""

CORES = 4


class Children:
    """The processes of a plan's compilers. `close` ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events: queue.SimpleQueue[tuple[str, Compiled] | BaseException | None] = queue.SimpleQueue()
        self._under_way = 0
        self._urgent: set[str] = set()
        self._head_start = threading.Event()  # is over
        self._head_start.set()
        self._running: list[subprocess.Popen] = []
        self._starting = threading.Lock()
        self._closed = False

    def ask(self, compiler: Compiler, requests: dict[str, Request]) -> None:
        """Starts to compile `requests`, by key. If none of them is urgent, waits for those that are."""
        if not requests:
            return
        urgent = {key for key, request in requests.items() if request.urgent}
        waits = not urgent and (os.cpu_count() or 1) < CORES
        self._urgent |= urgent
        if urgent:
            self._head_start.clear()
        self._under_way += 1

        def answer() -> None:
            try:
                if waits:
                    self._head_start.wait(HEAD_START)
                with _alone(self._folder, compiler.platform):
                    for pair in self._ask(requests, compiler):
                        self._events.put(pair)
                self._events.put(None)
            except BaseException as error:
                self._events.put(error)

        threading.Thread(target=answer, daemon=True, name=f"compiler-{compiler.platform}").start()

    def answers(self) -> Iterator[tuple[str, Compiled]]:
        """Yields each key with its answer as soon as it is ready."""
        while self._under_way:
            event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                self._under_way -= 1
                continue
            self._urgent.discard(event[0])
            if not self._urgent:
                self._head_start.set()
            yield event

    def close(self) -> None:
        """Kills those that run."""
        with self._starting:
            self._closed = True
        for child in list(self._running):
            child.kill()
            child.wait()

    def _ask(self, requests: dict[str, Request], compiler: Compiler) -> Iterator[tuple[str, Compiled]]:
        """Yields each key with its answer as soon as it is ready. If a child dies, that is the answer for its
        current program, and a new child does the rest; if it had several, each is tried alone to find which
        one."""
        batches = [dict(requests)]
        while batches:
            left, under_way, end = batches.pop(0), set[str](), dict[str, Any]()
            for event in self._child(left, compiler):
                if "exit_code" in event:
                    end = event
                elif event["answer"] is None:
                    under_way.add(event["key"])
                else:
                    under_way.discard(event["key"])
                    del left[event["key"]]
                    yield event["key"], Compiled.from_json(event["answer"])
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

    def _child(self, batch: dict[str, Request], compiler: Compiler) -> Iterator[dict[str, Any]]:
        """Runs a child over `batch` and yields its messages.

        A message is a `key` with its `answer`, `None` when it starts that program; the last one has its
        `exit_code` and the end of its `log`.
        """
        with tempfile.TemporaryDirectory(prefix="chipwise-plan-") as place:
            folder, requests = Path(place), []
            for i, (key, request) in enumerate(batch.items()):
                program = request.program.entry(folder, f"{i}.bin")
                requests.append({**vars(request), "program": program, "key": key})
            (folder / "requests.json").write_text(json.dumps(requests), encoding="utf-8")
            with open(folder / "log", "w+", encoding="utf-8", errors="replace") as log:
                with self._starting:
                    if self._closed:
                        return
                    child = subprocess.Popen(
                        [sys.executable, "-m", "chipwise.planner.compile_child", place],
                        stdin=subprocess.PIPE,  # closes when this process ends, which ends the child
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        env=compiler.environment(),
                        cwd=place,
                    )
                    self._running.append(child)
                with child:
                    try:
                        assert child.stdout is not None
                        # a child that was killed while it wrote leaves half a line
                        whole = (line for line in child.stdout if line.endswith("\n"))
                        yield from map(json.loads, whole)
                        exit_code = child.wait()
                        log.seek(0)
                        yield {"exit_code": exit_code, "log": last_words(log.read())}
                    finally:
                        child.kill()
                        self._running.remove(child)


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
