"""Reads examples with threads, or with processes for sources that hold the GIL.

Sources with `fill` are read by one thread per core: copying, decoding JPEG and reading files
release the GIL, and threads write into the batch. For small, quick examples the threads would
mostly compete for the GIL, so one thread is faster (32×32 JPEGs on two cores: 29,000 a second by
one thread, 19,000 by two). Other sources' `[i]` may not be thread-safe, and Python code does not
run in parallel in threads. It is called by one thread, or by processes on request
(`workers="processes:4"`), each with its own copy of the source. Processes write into shared memory,
so a batch is never copied between them.
"""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import os
import pickle
import queue
import re
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base import DataError, RecipeError
from ..base.ending import requests
from ..base.figures import counted, one_line
from ..machine.limits import usable_cores
from ..machine.plugins import call_hidden
from ..machine.spawned import Spawned, safe_path
from ..recipe.recipe_file import RECIPE_MODULE, import_file
from ..recipe.source import kind_of, spec_of
from .buffers import Buffer, Layout, columns, mapped
from .sources import Columns, example_bytes, fill, has
from .stages import Stages

# Below that, distributing the work costs as much as the work: 300 images of 32×32 pixels, 6 of
# 224×224
_SMALLEST_PIECE_BYTES = 1 << 20
_HANGING_SECONDS = 5.0  # seconds for a thread to end; after that its read hangs
_TRIED = 9  # examples
# Examples at least this large or slow get threads
_LARGE_BYTES = 1 << 14
_DEAR_SECONDS = 2e-4
_PIECES = 2  # pieces per worker and batch, so that one slow image does not delay all


class Workers:
    """Fills batches with the examples of `source`.

    *Arguments:* `workers`: `None`, a number, `"threads:N"` or `"processes:N"`. A number means
    threads for a source with `spec` and `fill`, else processes.

    *Attributes:* `count`: the number of workers. `stages`: their seconds by stage.

    Raises `RecipeError` for other values, and `DataError` for a source that cannot be sent to
    processes.
    """

    def __init__(self, source: Any, workers: int | str | None = None):
        self.source = source
        kind, self.count = chosen(source, workers)
        self.stages = Stages()
        self.spec = spec_of(source)
        self._readers: Threads | Processes
        if kind == "processes":
            self._readers = Processes(source, self.count)
            return
        self._readers = Threads(source, self.count, self.stages)
        if workers is None and self.count > 1 and not self._worth_threads():
            self._readers.close(1.0)
            self.count, self._readers = 1, Threads(source, 1, self.stages)

    def __str__(self) -> str:
        return str(self._readers)

    def buffer(self, examples: int) -> Buffer:
        """Memory for a batch that these workers can write to."""
        return Buffer(self.spec, examples, shared=self._readers.shared)

    def submit(self, indices: np.ndarray, buffer: Buffer) -> Batch:
        """Starts writing the examples at `indices` `(n,)` to the first `n` rows of `buffer`."""
        out = {name: column[: len(indices)] for name, column in buffer.columns().items()}
        pieces = self._readers.pieces(len(indices), len(indices) * example_bytes(self.spec))
        cuts = np.linspace(0, len(indices), pieces + 1).astype(int).tolist()
        futures = [
            self._readers.read(
                indices[start:stop], start, buffer, {name: c[start:stop] for name, c in out.items()}
            )
            for start, stop in itertools.pairwise(cuts)
        ]
        return Batch(indices, out, futures, self.stages)

    def close(self) -> None:
        """Ends the workers and drops their work. Processes end at once, threads after the current
        example. A hanging thread is abandoned."""
        self._readers.close()

    def _worth_threads(self) -> bool:
        """Whether examples are large or slow to read, from a small sample spread over the
        source."""
        if example_bytes(self.spec) >= _LARGE_BYTES:
            return True
        tried = np.linspace(0, len(self.source) - 1, _TRIED).astype(np.int32)
        seconds = []
        for row in range(_TRIED):
            out = {name: column[:1] for name, column in self.buffer(1).columns().items()}
            began = time.perf_counter()
            fill(self.source, tried[row : row + 1], out)
            seconds.append(time.perf_counter() - began)
        return sorted(seconds)[_TRIED // 2] > _DEAR_SECONDS


@dataclass(eq=False)
class Batch:
    """A batch being filled with the examples at `indices`. Each of the `futures` is a piece."""

    indices: np.ndarray
    columns: Columns
    futures: list[Future]
    stages: Stages

    def ready(self, seconds: float) -> bool:
        """Whether `result` would return at once. Waits at most `seconds` for each piece of the
        batch."""
        for future in self.futures:
            try:
                future.exception(seconds)
            except TimeoutError:
                return False
        return True

    def result(self) -> Columns:
        """Waits for the columns and returns them. Raises a worker's error."""
        for future in self.futures:
            try:
                seconds = future.result()
            except BrokenProcessPool as error:
                raise DataError("reader-died") from error
            if seconds is not None:  # of another process
                self.stages.add(seconds)
        return self.columns


class Threads:
    """`count` daemon threads. Python's own pool would wait for a hanging thread when the
    interpreter ends."""

    shared = False

    def __init__(self, source: Any, count: int, stages: Stages):
        self.source = source
        self.count = count
        self.stages = stages
        self._closed = threading.Event()
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._threads = [
            threading.Thread(
                target=_work, args=(self._tasks,), name=f"chipwise-read-{i}", daemon=True
            )
            for i in range(count)
        ]
        self._end = weakref.finalize(self, _dismiss, self._tasks, count)  # also if not closed
        for thread in self._threads:
            thread.start()

    def __str__(self) -> str:
        return counted(self.count, "thread")

    def pieces(self, examples: int, nbytes: int) -> int:
        """The number of pieces of a batch."""
        return max(
            1,
            min(_PIECES * self.count, examples, nbytes // _SMALLEST_PIECE_BYTES) * (self.count > 1),
        )

    def read(self, indices: np.ndarray, start: int, buffer: Buffer, out: Columns) -> Future:
        """Starts writing the examples at `indices` to `out`."""
        future: Future = Future()
        arguments = (self.source, self.stages, self._closed, indices, out)
        self._tasks.put((future, _fill, arguments))
        return future

    def close(self, seconds: float | None = None) -> None:
        """Cancels pending work, and waits at most `seconds` for the running work of each thread.
        `None` means `_HANGING_SECONDS`."""
        self._closed.set()
        while True:
            try:
                self._tasks.get_nowait()[0].cancel()
            except queue.Empty:
                break
        self._end()
        for thread in self._threads:
            thread.join(_HANGING_SECONDS if seconds is None else seconds)


def _fill(
    source: Any, stages: Stages, closed: threading.Event, indices: np.ndarray, out: Columns
) -> None:
    with stages.watch():
        fill(source, indices, out, closed.is_set)


def _work(tasks: queue.SimpleQueue) -> None:
    while (task := tasks.get()) is not None:
        future, function, arguments = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # raised by `result`
            future.set_exception(error)
        del task, future, function, arguments  # and with them the batch's memory


def _dismiss(tasks: queue.SimpleQueue, count: int) -> None:
    for _ in range(count):
        tasks.put(None)


class Processes:
    """`count` processes that read. They are spawned, because a fork of a process with JAX's threads
    can deadlock.

    Raises `DataError` for a source that cannot be pickled or unpickled there.
    """

    shared = True  # they write to buffers that other processes can map

    def __init__(self, source: Any, count: int):
        self.count = count
        self._buffers: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()
        kind = kind_of(source)
        try:
            sent = pickle.dumps(source)
        except Exception as error:  # pickle raises any exception of the object's methods
            ours = kind.__module__.startswith("chipwise.")
            code = "source-unsendable-ours" if ours else "source-unsendable"
            raise DataError(code, source=kind.__name__, reason=one_line(error)[:200]) from error
        with safe_path():  # its locks start a process too
            self.pool = ProcessPoolExecutor(
                count,
                Spawned(),
                initializer=call_hidden,
                initargs=(__name__, _start.__name__, _recipe_files(), sent),
            )
        try:
            problem = self.pool.submit(_problem).result()
        except BrokenProcessPool as error:
            raise DataError("readers-not-started") from error
        if problem is not None:
            self.pool.shutdown()
            raise DataError("source-unmakeable", source=kind.__name__, reason=problem)

    def __str__(self) -> str:
        return f"{self.count} process{'es' * (self.count > 1)}"

    def pieces(self, examples: int, nbytes: int) -> int:
        """The number of pieces of a batch. Examples read by processes are slow, so a piece may have
        any size."""
        return min(_PIECES * self.count, examples)

    def read(self, indices: np.ndarray, start: int, buffer: Buffer, out: Columns) -> Future:
        """Starts writing the examples at `indices` to the rows of `buffer` from `start` on."""
        self._buffers[buffer.number] = buffer
        known = [ref() for ref in self._buffers.valuerefs()]  # a list: streams add at once
        oldest = min(b.number for b in known if b is not None and b.path is not None)
        place = (buffer.number, buffer.path, buffer.start, buffer.layout, start)
        return self.pool.submit(_fill_shared, oldest, *place, indices)

    def close(self) -> None:
        for process in list((self.pool._processes or {}).values()):
            # No public way before Python 3.14; a hanging process would never end
            process.terminate()
        self.pool.shutdown(wait=True, cancel_futures=True)


def _recipe_files() -> dict[str, str]:
    """Modules loaded from recipe files, which another process cannot import by name."""
    return {
        name: os.path.abspath(module.__file__)
        for name, module in list(sys.modules.items())
        if name.startswith(RECIPE_MODULE) and module.__file__
    }


_source: Any = None
_trouble: str | None = None  # the error, if there is no source
_maps: dict[int, np.ndarray] = {}  # by the buffer's number


def _start(recipe_files: dict[str, str], sent: bytes) -> None:
    """Runs in a new process: receives the source."""
    global _source, _trouble
    # Prints where it is, for a parent that waits for it in vain
    if hasattr(signal, "SIGUSR1"):  # not on Windows
        faulthandler.register(signal.SIGUSR1)
    # The parent handles the terminal's Ctrl-C and its end, and saves first
    for number in {*requests()} - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="chipwise-parent", daemon=True).start()
    os.environ["JAX_PLATFORMS"] = "cpu"  # if the source uses JAX, it must not take the accelerator
    try:
        for name, file in recipe_files.items():
            import_file(name, file)
        _source = pickle.loads(sent)  # what our own parent process made a moment ago
    except Exception as error:  # reported to the parent; raised here it would break the pool
        _trouble = f"{type(error).__name__}: {one_line(error)[:200]}"


def _problem() -> str | None:
    """The error of this process if it cannot read. Runs in another process."""
    return _trouble


def _end_with_parent() -> None:
    """Ends this process if the parent was killed. Otherwise it would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _fill_shared(
    oldest: int,
    number: int,
    path: str | None,
    start: int,
    layout: Layout,
    first: int,
    indices: np.ndarray,
) -> dict[str, float]:
    """Fills rows of the buffer at `path` from `first` on, and frees the memory of buffers before
    number `oldest`. Runs in another process. *Returns* seconds by stage."""
    for closed in [known for known in _maps if known < oldest]:
        del _maps[closed]
    if number not in _maps:
        assert path is not None  # of a shared buffer
        with open(path, "r+b") as file:
            _maps[number] = mapped(file.fileno())
    batch = columns(_maps[number], start, layout)
    stages = Stages()
    try:
        with stages.watch():
            fill(
                _source,
                indices,
                {name: c[first : first + len(indices)] for name, c in batch.items()},
            )
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an exception that cannot be pickled would break the pool
            wrong = "A process that reads the data failed ({kind}): {reason}"
            raise DataError(
                "reader-failed", wrong, kind=type(error).__name__, reason=one_line(error)[:200]
            ) from None
        raise
    return stages.seconds


def chosen(source: Any, workers: int | str | None) -> tuple[str, int]:
    """("threads" or "processes", count) for a source. See `Workers`."""
    ours = has(source, "fill")
    if workers is None:
        return "threads", usable_cores() if ours else 1
    kind, colon, number = str(workers).rpartition(":")
    kind = kind if colon else ("threads" if ours else "processes")
    if (
        kind not in ("threads", "processes")
        or not re.fullmatch("[0-9]{1,4}", number)
        or not 1 <= int(number) <= 1024
    ):
        raise RecipeError("workers-unknown", workers=str(workers))
    return kind, int(number)
