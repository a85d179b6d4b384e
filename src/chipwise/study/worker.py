"""A process that trains runs of a study, one after another, on the CPU.

It reads lines of JSON from standard input, first how all runs are made and trained, then one run a line, and
answers each run with a line: `{"diverged": null}` or when, or `{"error": "RunError", "said": "..."}`. When
its input ends, because the study was stopped or killed, the run at hand saves itself and it leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from ..engine.on import On
from ..errors import ChipwiseError
from . import one
from .compiled import one_compilation
from .origin import Origin


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what a recipe prints must not stand between the answers
    lines = _lines()
    first = next(lines, None)
    if first is None:
        return
    about = json.loads(first)
    options = {**about["options"], "on": On(**about["options"]["on"])}
    origin = Origin(**{**about["origin"], "set": tuple(about["origin"]["set"])})
    with one_compilation():
        for line in lines:
            job = json.loads(line)
            run = one.Job(job["settings"], job["seed"], Path(job["folder"]))
            try:
                answer = {"diverged": one.train(run, origin, options, "none")}
            except ChipwiseError as error:
                answer = {"error": type(error).__name__, "said": str(error)}
            with contextlib.suppress(BrokenPipeError):  # nobody is left to be told
                os.write(answers, f"{json.dumps(answer)}\n".encode())


def _lines() -> Iterator[str]:
    """The lines of standard input. While one is being worked on, the input's end is a SIGTERM."""
    read: queue.Queue[str | None] = queue.Queue()
    ended, busy = threading.Event(), threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            read.put(line)
        ended.set()
        read.put(None)
        if busy.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=listen, daemon=True).start()
    while (line := read.get()) is not None:
        busy.set()  # before the question: if the input ends after it, `listen` sees this
        if ended.is_set():
            return
        yield line
        busy.clear()


if __name__ == "__main__":
    main()
