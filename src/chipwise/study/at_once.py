"""Several runs side by side on the CPU, each in one of several processes.

A small model's step is mostly waiting: for Python to start the next program, for one thread of many. Another
process fills that time. Each does what it would do alone, with the same programs and the same size of the
thread pool (`devices.threads`), so a run's bits do not depend on its neighbours.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import jax

from .. import errors
from ..errors import DeviceError, RecipeError, RunError
from ..machine.detect import detect
from .one import Job
from .origin import Origin

_LOOK_SECONDS = 0.2  # between looks at whether to stop


def check(n: int, origin: Origin, options: dict[str, Any]) -> None:
    """Raises `RecipeError` or `DeviceError` unless `n` runs of `origin` can be trained side by side."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise RecipeError(f"--at-once {n}: expected at least 1 run.")
    if n == 1:
        return
    if not isinstance(origin.recipe, str):
        raise RecipeError("at_once needs a recipe that other processes can make: give path.py:name.")
    machine = detect(options["on"].devices, options["on"].platform)
    if machine.platform != "cpu":
        raise DeviceError(
            f"--at-once {n} on {machine.kind}: one process holds the whole device, so its runs go one at a "
            f"time. Leave --at-once out, or train on the CPU with --devices cpu."
        )


def train(
    jobs: Sequence[Job],
    n: int,
    origin: Origin,
    options: dict[str, Any],
    environment: dict[str, str],
    stop: Callable[[], bool],
) -> Iterator[tuple[Job, str | None]]:
    """Trains `jobs`, at most `n` side by side, and yields each as it ends, with when it diverged or `None`.

    *Arguments:* `environment`: variables for the processes. Ends early when `stop()` comes true, with all
    saved. Raises the error of a run that failed, once the others are saved.
    """
    waiting, asked = list(jobs), False
    with contextlib.ExitStack() as closing:
        selector = closing.enter_context(selectors.DefaultSelector())
        workers: list[_Worker] = []
        for _ in range(min(n, len(waiting))):
            workers.append(_Worker(origin, options, environment))
            closing.callback(workers[-1].close)
            selector.register(workers[-1].answers, selectors.EVENT_READ, workers[-1])
            workers[-1].begin(waiting.pop(0))
        closing.callback(_stop, workers)  # all of them, before the first is waited for
        while selector.get_map():
            if stop() and not asked:
                asked = True
                _stop(workers)
            for key, _ in selector.select(_LOOK_SECONDS):
                worker = key.data
                job, answer = worker.ended()
                if waiting and not asked and "diverged" in answer:
                    worker.begin(waiting.pop(0))
                else:
                    selector.unregister(key.fileobj)
                if "diverged" in answer:
                    yield job, answer["diverged"]
                elif not (asked and answer["error"] == "Stopped"):
                    raise getattr(errors, answer["error"])(f"{job.name}: {answer['said']}")


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.stop()


class _Worker:
    """A process of `worker.py`, and the run it is at."""

    def __init__(self, origin: Origin, options: dict[str, Any], environment: dict[str, str]):
        cpus = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(len(jax.devices("cpu")))}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "chipwise.study.worker"],
            env={**os.environ, **environment, **cpus},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C comes to the study, which asks its workers to stop
        )
        assert self._process.stdout is not None
        self.answers = self._process.stdout
        self._job: Job | None = None
        self._asked = False
        self._tell({"origin": asdict(origin), "options": {**options, "on": options["on"].json()}})

    def begin(self, job: Job) -> None:
        self._job = job
        self._tell({"settings": job.settings, "seed": job.seed, "folder": str(job.folder)})

    def ended(self) -> tuple[Job, dict[str, Any]]:
        """The run that was begun, and the answer to it. Waits for that."""
        line, job = self.answers.readline(), self._job
        assert job is not None
        self._job = None
        if line:
            return job, json.loads(line)
        code = self._process.wait()
        if self._asked:  # before it had begun, with nothing to save
            return job, {"error": "Stopped", "said": ""}
        raise RunError(
            f"The process of {job.name} ended with code {code} before the run did. Give the same command "
            f"again to go on, without --at-once if it was for lack of memory."
        )

    def stop(self) -> None:
        """Asks the process to end, and the run at hand to save itself before."""
        assert self._process.stdin is not None
        self._asked = True
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> None:
        """Waits until the process has ended."""
        self.stop()
        self.answers.read()  # lest it waits to be heard
        self._process.wait()
        self.answers.close()

    def _tell(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its answer will show
            print(json.dumps(what), file=self._process.stdin, flush=True)
