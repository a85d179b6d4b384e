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
import queue
import threading
import time
import weakref
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from ..errors import DataError, RecipeError
from ..machine.limits import usable_cores
from ..recipe.source import spec_of
from ..words.figures import counted
from .buffers import Buffer
from .columns import Columns, example_bytes
from .processes import Processes
from .sources import fill, has
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

    *Attributes:* `count`; `stages`, their seconds by stage.

    Raises `RecipeError` for anything else, `DataError` for a source that cannot be sent to processes.
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
        if workers is None and self.count > 1 and not self._threads_help():
            self._readers.close(1.0)
            self.count, self._readers = 1, Threads(source, 1, self.stages)

    def __str__(self) -> str:
        return str(self._readers)

    def buffer(self, examples: int) -> Buffer:
        """Memory for a batch that these workers can write to."""
        return Buffer(self.spec, examples, shared=self._readers.shared)

    def submit(self, indices: np.ndarray, buffer: Buffer) -> Batch:
        """Begins to write the examples at `indices` `(n,)` to the first `n` rows of `buffer`."""
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
        """Ends the workers. What they are reading is given up: at once by processes, by threads after the
        example they are at, or left to itself when that hangs."""
        self._readers.close()

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
                fill(self.source, tried, buffer.columns())
            one = min(one, time.perf_counter() - began)
            began = time.perf_counter()
            # Two at a time, as a stream does
            for batch in [self.submit(tried, buffer) for buffer in buffers]:
                batch.result()
            several = min(several, time.perf_counter() - began)
        self.stages.clear()
        return several < one


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

    shared = False

    def __init__(self, source: Any, count: int, stages: Stages):
        self.source, self.count, self.stages = source, count, stages
        self._closed = threading.Event()
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._tasks,), name=f"chipwise-read-{i}", daemon=True)
            for i in range(count)
        ]
        self._end = weakref.finalize(self, _dismiss, self._tasks, count)  # also of a pool that nobody closed
        for thread in self._threads:
            thread.start()

    def __str__(self) -> str:
        return counted(self.count, "thread")

    def pieces(self, examples: int, nbytes: int) -> int:
        """Into how many a batch is cut."""
        return max(1, min(_PIECES * self.count, examples, nbytes // _SMALLEST_PIECE_BYTES) * (self.count > 1))

    def read(self, indices: np.ndarray, start: int, buffer: Buffer, out: Columns) -> Future:
        """Begins to write the examples at `indices` to `out`."""
        future: Future = Future()
        arguments = (self.source, self.stages, self._closed, indices, out)
        self._tasks.put((future, _fill, arguments))
        return future

    def close(self, seconds: float | None = None) -> None:
        """Waits so long for what the threads are doing; what has not begun is cancelled."""
        self._closed.set()
        while True:
            try:
                self._tasks.get_nowait()[0].cancel()
            except queue.Empty:
                break
        self._end()
        for thread in self._threads:
            thread.join(_HANGING_SECONDS if seconds is None else seconds)


def _fill(source: Any, stages: Stages, closed: threading.Event, indices: np.ndarray, out: Columns) -> None:
    with stages.watch():
        fill(source, indices, out, closed.is_set)


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
