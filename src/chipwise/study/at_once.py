"""Trains runs that share compiled programs, one after another or several at once on the CPU.

The seed and the values of schedules are inputs of the compiled programs, so runs that differ only in these
share programs. JAX's compilation cache, in a folder that exists while the study runs, passes them on between
runs and processes.

A small model's step is mostly waiting: for Python to start the next program, or for the slowest thread.
Another process can use that time. Each process uses the same programs and the same size of the thread pool
(`machine.threads`) as a single one, so a run's bits do not depend on the other runs.

A worker is this file run as a program. It reads lines of JSON: first how runs are made and trained, then one
run per line, and it answers each with a line. When its input ends, because the study was stopped or killed,
it saves the current run.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from ..engine.on import On
from ..engine.progress import Reporter
from ..engine.signals import StopRequest
from ..errors import ChipwiseError, DeviceError, RecipeError, RunError, Stopped
from ..machine import kept
from ..machine.detect import detect, setting
from ..words.facts import fact
from .runs import Job, Origin

_LOOK_SECONDS = 0.2  # seconds between checks for a request to stop


@contextlib.contextmanager
def one_compilation() -> Iterator[dict[str, str]]:
    """A context in which no program is compiled twice.

    *Yields* the environment variables with which other processes share the cache. An existing cache is kept.
    """
    kept.key_by_processor()
    kept.write_whole()
    names = ["jax_compilation_cache_dir", *kept.SETTINGS]
    if setting("jax_compilation_cache_dir"):
        yield {name.upper(): str(setting(name)) for name in names}
        return
    with tempfile.TemporaryDirectory(prefix="chipwise-compiled-") as folder:
        cache = {"jax_compilation_cache_dir": folder, **kept.SETTINGS}
        before = {name: setting(name) for name in cache}
        _set(cache)
        try:
            yield {name.upper(): str(value) for name, value in cache.items()}
        finally:
            _set(before)


def _set(values: dict[str, Any]) -> None:
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX reads these settings once, at the first compilation


def check(n: int, origin: Origin, on: On) -> None:
    """Raises `RecipeError` or `DeviceError` unless `n` runs of `origin` can be trained at once."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise RecipeError("at-once-too-few", given=n)
    if n == 1:
        return
    if not isinstance(origin.recipe, str):
        raise RecipeError("at-once-needs-name")
    machine = detect(on.devices, on.platform)
    if machine.platform != "cpu":
        raise DeviceError("at-once-on-accelerator", given=n, device=machine.kind)


def train(
    jobs: Sequence[Job],
    n: int,
    origin: Origin,
    options: dict[str, Any],
    stop: StopRequest,
    reporter: Reporter,
) -> Generator[tuple[Job, dict[str, Any] | None]]:
    """Trains `jobs`, at most `n` at once, and yields each when it ends, with its divergence or `None`.

    After a request to stop, it saves all runs and ends early. Raises the error of a run that failed, after
    the others are saved.
    """
    with one_compilation() as environment:
        if n > 1:
            yield from _several(jobs, n, origin, options, environment, stop, reporter)
            return
        for job in jobs:
            if stop:
                return
            reporter.say(fact("run-begins", run=job.name), style="bold")
            yield job, job.train(origin, options, reporter.kind)


def _several(
    jobs: Sequence[Job],
    n: int,
    origin: Origin,
    options: dict[str, Any],
    environment: dict[str, str],
    stop: StopRequest,
    reporter: Reporter,
) -> Generator[tuple[Job, dict[str, Any] | None]]:
    """`train` with processes. *Arguments:* `environment`: variables for them."""
    waiting, asked = list(jobs), False
    with contextlib.ExitStack() as closing:
        selector = closing.enter_context(selectors.DefaultSelector())
        workers: list[_Worker] = []
        for _ in range(min(n, len(waiting))):
            workers.append(_Worker(origin, options, environment))
            closing.callback(workers[-1].close)
            selector.register(workers[-1].answers, selectors.EVENT_READ, workers[-1])
            workers[-1].begin(waiting.pop(0))
        closing.callback(_stop, workers)  # all of them, before it waits for the first
        while selector.get_map():
            if stop and not asked:
                asked = True
                _stop(workers)
            for key, _ in selector.select(_LOOK_SECONDS):
                worker = key.data
                job, diverged, error = worker.ended()
                if waiting and not asked and error is None:
                    worker.begin(waiting.pop(0))
                else:
                    selector.unregister(key.fileobj)
                if error is None:
                    yield job, diverged
                elif not (asked and isinstance(error, Stopped)):
                    reporter.warn(fact("run-failed", run=job.name))
                    raise error


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.stop()


class _Worker:
    """A process that trains runs, and its current run."""

    def __init__(self, origin: Origin, options: dict[str, Any], environment: dict[str, str]):
        cpus = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(len(jax.devices("cpu")))}
        cpus["CHIPWISE_HOSTS"] = "1"  # a single host, however the study was started
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "chipwise.study.at_once"],
            env={**os.environ, **environment, **cpus},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C goes to the study, which asks its workers to stop
        )
        assert self._process.stdout is not None
        self.answers = self._process.stdout
        self._job: Job | None = None
        self._asked = False
        self._tell({"origin": asdict(origin), "options": {**options, "on": options["on"].json()}})

    def begin(self, job: Job) -> None:
        self._job = job
        self._tell({"settings": job.settings, "seed": job.seed, "folder": str(job.folder)})

    def ended(self) -> tuple[Job, dict[str, Any] | None, ChipwiseError | None]:
        """The run that was started, its divergence, and its error. Waits for its end."""
        line, job = self.answers.readline(), self._job
        assert job is not None
        self._job = None
        if line:
            answer = json.loads(line)
            error = answer["error"]
            # Safe: the pipe is written only by our own process
            return job, answer["diverged"], None if error is None else pickle.loads(bytes.fromhex(error))
        code = self._process.wait()
        if self._asked:  # before it started, so there is nothing to save
            return job, None, Stopped("stopped-early")
        raise RunError("worker-ended", run=job.name, exit_code=code)

    def stop(self) -> None:
        """Asks the process to save the current run and end."""
        assert self._process.stdin is not None
        self._asked = True
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> None:
        """Waits until the process has ended."""
        self.stop()
        self.answers.read()  # or it may block on writing
        self._process.wait()
        self.answers.close()

    def _tell(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; its answer shows why
            print(json.dumps(what), file=self._process.stdin, flush=True)


# ---- the worker process


def work() -> None:
    """Trains the runs named on standard input, and answers each with a line on standard output."""
    answers = os.dup(1)
    os.dup2(2, 1)  # output of a recipe must not mix with the answers
    lines = _lines()
    first = next(lines, None)
    if first is None:
        return
    about = json.loads(first)
    origin = Origin(**{**about["origin"], "set": tuple(about["origin"]["set"])})
    options = {**about["options"], "on": On(**about["options"]["on"])}
    with one_compilation():
        for line in lines:
            job = json.loads(line)
            answer: dict[str, Any] = {"diverged": None, "error": None}
            try:
                run = Job(job["settings"], job["seed"], Path(job["folder"]))
                answer["diverged"] = run.train(origin, options, "none")
            except ChipwiseError as error:
                answer["error"] = pickle.dumps(error).hex()
            with contextlib.suppress(BrokenPipeError):  # the study has ended
                os.write(answers, f"{json.dumps(answer)}\n".encode())


def _lines() -> Iterator[str]:
    """The lines of standard input. If the input ends during a run, the process gets a SIGTERM."""
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
        busy.set()  # set before the run starts, so that `listen` sees it
        if ended.is_set():
            return
        yield line
        busy.clear()


if __name__ == "__main__":
    work()
