"""Who reads the examples: threads, or processes for sources that hold on to Python's lock.

Sources with a `fill` are read by as many threads as there are cores: copying, decoding JPEG and reading
files let go of Python's lock, and threads write straight into the batch. Where an example is so small that
threads would mostly hand that lock to each other, one is faster: a few hundred examples, read both ways,
decide (32×32 JPEGs on two cores: 29,000 a second by one thread, 19,000 by two). A stranger's `[i]` need
not be safe in threads, and Python code would only take turns in them: it is called by one thread, or by
processes when asked (`workers="processes:4"`), each with its own copy of the source. They write into
memory that is shared, so a batch is never copied from one process to another.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from ..errors import DataError, RecipeError
from ..machine.limits import usable_cores
from ..recipe.source import one_line
from .buffers import Buffer, Layout, columns, mapped
from .columns import Columns, example_bytes
from .sources import fill, has, spec_of
from .stages import Stages

# Below that, handing out the work costs as much as the work: 300 images of 32×32 pixels, 6 of 224×224
_SMALLEST_PIECE_BYTES = 1 << 20
_HANGING_SECONDS = 5.0  # that a thread may take to end: longer, and its read hangs
_TRIED = 256  # examples
_DEAR_SECONDS = 0.001  # an example that takes so long is worth a thread of its own
_PIECES = 2  # a worker and batch, so that one slow image does not hold up all


class Workers:
    """Fills batches with the examples of `source`.

    *Arguments:* `workers`: `None`; a number; `"threads:N"` or `"processes:N"`. A number alone means threads
    for a source with `spec` and `fill`, else processes.

    *Attributes:* `kind`, `"threads"` or `"processes"`; `count`; `stages`, their seconds by stage.

    Raises `RecipeError` for anything else, `DataError` for a source that cannot be sent to processes.
    """

    def __init__(self, source: Any, workers: int | str | None = None):
        self.source = source
        self.kind, self.count = chosen(source, workers)
        self.stages = Stages()
        self.spec = spec_of(source)
        self._closed = threading.Event()
        self._pool: Threads | ProcessPoolExecutor
        if self.kind == "threads":
            self._pool = Threads(self.count, "chipwise-read")
            if workers is None and self.count > 1 and not self._threads_help():
                self._pool.close(1.0)
                self.count, self._pool = 1, Threads(1, "chipwise-read")
        else:
            self._pool = _processes(source, self.count)

    def __str__(self) -> str:
        many = self.count > 1
        if self.kind == "threads":
            return f"{self.count} thread{'s' * many}"
        return f"{self.count} process{'es' * many}"

    def buffer(self, examples: int) -> Buffer:
        """Memory for a batch that these workers can write to."""
        return Buffer(self.spec, examples, shared=self.kind == "processes")

    def submit(self, indices: np.ndarray, buffer: Buffer) -> Batch:
        """Begins to write the examples at `indices` `(n,)` to the first `n` rows of `buffer`."""
        out = {name: column[: len(indices)] for name, column in buffer.columns().items()}
        pieces = 1
        if self.count > 1:
            size = len(indices) * example_bytes(self.spec)
            pieces = max(1, min(_PIECES * self.count, len(indices), size // _SMALLEST_PIECE_BYTES))
        if self.kind == "processes":  # dear examples, or nobody would have asked for processes
            pieces = min(_PIECES * self.count, len(indices))
        cuts = np.linspace(0, len(indices), pieces + 1).astype(int).tolist()
        futures: list[Future] = []
        for start, stop in itertools.pairwise(cuts):
            rows = indices[start:stop]
            if self.kind == "threads":
                part = {name: column[start:stop] for name, column in out.items()}
                futures.append(self._pool.submit(self._fill, rows, part))
            else:
                assert buffer.path is not None  # made by `buffer`
                place = (buffer.number, buffer.path, buffer.start, buffer.layout, start)
                futures.append(self._pool.submit(_fill_shared, *place, rows))
        return Batch(indices, out, futures, self.stages)

    def close(self) -> None:
        """Ends the workers. What they are reading is given up: at once by processes, by threads after the
        example they are at, or left to itself when that hangs."""
        self._closed.set()
        if isinstance(self._pool, Threads):
            self._pool.close(_HANGING_SECONDS)
            return
        for process in list((self._pool._processes or {}).values()):
            process.terminate()  # no public way before Python 3.14, and a hanging one would never end
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _threads_help(self) -> bool:
        """Whether all threads read faster than one, tried on examples from all over the source."""
        size = example_bytes(self.spec)
        if size >= _SMALLEST_PIECE_BYTES:
            return True
        many = min(len(self.source), _TRIED)
        tried = np.linspace(0, len(self.source) - 1, many).astype(np.int32)
        buffers = [self.buffer(len(tried)) for _ in range(2)]
        began = time.perf_counter()
        fill(self.source, tried[:1], {name: column[:1] for name, column in buffers[0].columns().items()})
        if time.perf_counter() - began > _DEAR_SECONDS:
            return True
        one = several = np.inf
        for _ in range(3):  # in turns: the first to come also waits for the disk
            began = time.perf_counter()
            for buffer in buffers:
                self._fill(tried, buffer.columns())
            one = min(one, time.perf_counter() - began)
            began = time.perf_counter()
            for batch in [
                self.submit(tried, buffer) for buffer in buffers
            ]:  # two at a time, as a stream does
                batch.result()
            several = min(several, time.perf_counter() - began)
        self.stages.clear()
        return several < one

    def _fill(self, indices: np.ndarray, out: Columns) -> None:
        with self.stages.watch():
            fill(self.source, indices, out, self._closed.is_set)


class Batch:
    """Columns that are being filled with the examples at `indices`."""

    def __init__(self, indices: np.ndarray, columns: Columns, futures: list[Future], stages: Stages):
        self.indices = indices
        self._columns, self._futures, self._stages = columns, futures, stages

    def ready(self, seconds: float) -> bool:
        """Whether `result` would not wait; waits for that so long itself."""
        for future in self._futures:
            try:
                future.exception(seconds)
            except TimeoutError:
                return False
        return True

    def result(self) -> Columns:
        """The columns, when they are filled. Raises what a worker raised."""
        for future in self._futures:
            try:
                seconds = future.result()
            except BrokenProcessPool as error:
                raise DataError("reader-died") from error
            if seconds is not None:  # of another process
                self._stages.add(seconds)
        return self._columns


class Threads:
    """`count` daemon threads. Python's own pool waits for its threads when the interpreter ends, even for one
    that hangs in a read."""

    def __init__(self, count: int, name: str):
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._tasks,), name=f"{name}-{i}", daemon=True)
            for i in range(count)
        ]
        self._end = weakref.finalize(self, _dismiss, self._tasks, count)  # also of a pool that nobody closed
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future:
        future: Future = Future()
        self._tasks.put((future, function, arguments))
        return future

    def close(self, seconds: float) -> None:
        """Ends the threads, waiting so long for what they are doing; what has not begun is cancelled."""
        while True:
            try:
                self._tasks.get_nowait()[0].cancel()
            except queue.Empty:
                break
        self._end()
        for thread in self._threads:
            thread.join(seconds)


def _work(tasks: queue.SimpleQueue) -> None:
    while (task := tasks.get()) is not None:
        future, function, arguments = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # for whoever asks for the result
            future.set_exception(error)
        del task, future, function, arguments  # and with them the batch's memory


def _dismiss(tasks: queue.SimpleQueue, count: int) -> None:
    for _ in range(count):
        tasks.put(None)


def chosen(source: Any, workers: int | str | None) -> tuple[str, int]:
    """("threads" or "processes", how many) for a source. See `Workers`."""
    ours = has(source, "fill")
    if workers is None:
        return "threads", usable_cores() if ours else 1
    kind, colon, number = str(workers).rpartition(":")
    kind = kind if colon else ("threads" if ours else "processes")
    if kind not in ("threads", "processes") or not number.isdigit() or not 1 <= int(number) <= 1024:
        raise RecipeError("workers-unknown", workers=str(workers))
    return kind, int(number)


def _processes(source: Any, count: int) -> ProcessPoolExecutor:
    """Fresh processes: forking one that runs JAX can hang, since its threads' locks are copied, locked."""
    try:
        sent = pickle.dumps(source)
    except Exception as error:  # pickle raises what the object's own methods raise
        code = (
            "source-unsendable-ours"
            if type(source).__module__.startswith("chipwise.")
            else "source-unsendable"
        )
        raise DataError(code, source=type(source).__name__, reason=_line(error)) from error
    pool = ProcessPoolExecutor(
        count, multiprocessing.get_context("spawn"), initializer=_start, initargs=(_recipe_files(), sent)
    )
    try:
        problem = pool.submit(_problem).result()
    except BrokenProcessPool as error:
        raise DataError("readers-not-started") from error
    if problem is not None:
        pool.shutdown()
        raise DataError("source-unmakeable", source=type(source).__name__, reason=problem)
    return pool


def _recipe_files() -> dict[str, str]:
    """Modules that were loaded from recipe files, which another process would not find by name."""
    from ..recipe.settings import RECIPE_MODULE  # which imports the recipes, and they the feed

    return {
        name: os.path.abspath(module.__file__)
        for name, module in list(sys.modules.items())
        if name.startswith(RECIPE_MODULE) and module.__file__
    }


_source: Any = None
_trouble: str | None = None  # why there is no source
_maps: dict[int, np.ndarray] = {}  # by the buffer's number


def _start(recipe_files: dict[str, str], sent: bytes) -> None:
    """In a new process: gets the source."""
    global _source, _trouble
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent, which saves first
    threading.Thread(target=_end_with_parent, name="chipwise-parent", daemon=True).start()
    os.environ["JAX_PLATFORMS"] = "cpu"  # should the source use JAX, it must not take the accelerator
    from ..recipe.settings import import_file

    try:
        for name, file in recipe_files.items():
            import_file(name, file)
        _source = pickle.loads(sent)  # what our own parent process made a moment ago
    except Exception as error:  # told to the parent: raised here it would only break the pool
        _trouble = f"{type(error).__name__}: {_line(error)}"


def _problem() -> str | None:
    """In another process: why it cannot read, if it cannot."""
    return _trouble


def _end_with_parent() -> None:
    """A pool's processes wait for work, for ever if their parent was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _fill_shared(
    number: int, path: str, start: int, layout: Layout, first: int, indices: np.ndarray
) -> dict[str, float]:
    """In another process: fills rows `first` and on of the buffer at `path`. *Returns* seconds by stage."""
    if number not in _maps:
        with open(path, "r+b") as file:
            _maps[number] = mapped(file.fileno())
    batch = columns(_maps[number], start, layout)
    stages = Stages()
    try:
        with stages.watch():
            fill(_source, indices, {name: c[first : first + len(indices)] for name, c in batch.items()})
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # one that cannot travel would break the pool
            raise DataError("reader-failed", kind=type(error).__name__, reason=_line(error)) from None
        raise
    return stages.seconds


def _line(error: BaseException) -> str:
    return one_line(error)[:200]
