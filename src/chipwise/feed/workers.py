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
import sys
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from ..devices.limits import usable_cores
from ..errors import DataError, RecipeError
from .buffers import Buffer, Layout, columns, mapped
from .sources import Columns, example_bytes, fill, spec_of
from .stages import Stages

# Below that, handing out the work costs as much as the work: 300 images of 32×32 pixels, 6 of 224×224
_SMALLEST_PIECE_BYTES = 1 << 20
_TRIED = 256  # examples
_DEAR_SECONDS = 0.001  # an example that takes so long is worth a thread of its own
_PIECES = 2  # a worker and batch, so that one slow image does not hold up all


class Workers:
    """Fills batches with the examples of `source`.

    *Arguments:* `workers`: `None`; a number; `"threads:N"` or `"processes:N"`. A number alone means threads
    for a source with `fill`, else processes.

    *Attributes:* `kind`, `"threads"` or `"processes"`; `count`; `stages`, their seconds by stage.

    Raises `RecipeError` for anything else, `DataError` for a source that cannot be sent to processes.
    """

    def __init__(self, source: Any, workers: int | str | None = None):
        self.source = source
        self.kind, self.count = chosen(source, workers)
        self.stages = Stages()
        self.spec = spec_of(source)
        self._pool: ThreadPoolExecutor | ProcessPoolExecutor
        if self.kind == "threads":
            self._pool = ThreadPoolExecutor(self.count, "chipwise-read")
            if workers is None and self.count > 1 and not self._threads_help():
                self._pool.shutdown()
                self.count, self._pool = 1, ThreadPoolExecutor(1, "chipwise-read")
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
                futures.append(
                    self._pool.submit(
                        _fill_shared, buffer.number, buffer.path, buffer.start, buffer.layout, start, rows
                    )
                )
        return Batch(out, futures, self.stages)

    def _threads_help(self) -> bool:
        """Whether all threads read faster than one, tried on examples from all over the source."""
        tried = np.linspace(0, len(self.source) - 1, min(len(self.source), _TRIED)).astype(np.int32)
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
            fill(self.source, indices, out)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class Batch:
    """Columns that are being filled."""

    def __init__(self, columns: Columns, futures: list[Future], stages: Stages):
        self._columns, self._futures, self._stages = columns, futures, stages

    def result(self) -> Columns:
        """The columns, when they are filled. Raises what a worker raised."""
        for future in self._futures:
            try:
                seconds = future.result()
            except BrokenProcessPool as error:
                raise DataError(
                    "A process that reads the data died (out of memory, or killed?): give fewer of them with "
                    "--workers, or none with --workers threads:1."
                ) from error
            if seconds is not None:  # of another process
                self._stages.add(seconds)
        return self._columns


def chosen(source: Any, workers: int | str | None) -> tuple[str, int]:
    """("threads" or "processes", how many) for a source. See `Workers`."""
    ours = hasattr(source, "fill")
    if workers is None:
        return "threads", usable_cores() if ours else 1
    kind, colon, number = str(workers).rpartition(":")
    kind = kind if colon else ("threads" if ours else "processes")
    if kind not in ("threads", "processes") or not number.isdigit() or not 1 <= int(number) <= 1024:
        raise RecipeError(
            f"workers={workers}: expected a number of at least 1, such as 4, threads:4 or processes:4."
        )
    return kind, int(number)


def _processes(source: Any, count: int) -> ProcessPoolExecutor:
    """Fresh processes: forking one that runs JAX can hang, since its threads' locks are copied, locked."""
    try:
        sent = pickle.dumps(source)
    except Exception as error:  # pickle raises what the object's own methods raise
        raise DataError(
            f"The source {type(source).__name__} cannot be sent to other processes ({_line(error)}): define "
            f"its class in a module and open files on first use, or read with --workers threads:1."
        ) from error
    pool = ProcessPoolExecutor(
        count, multiprocessing.get_context("spawn"), initializer=_start, initargs=(_recipe_files(), sent)
    )
    try:
        pool.submit(_ready).result()
    except BrokenProcessPool as error:
        raise DataError(
            "The processes that should read the data did not start: a script that trains needs "
            "`if __name__ == '__main__':` around its calls, as every Python script that starts processes."
        ) from error
    return pool


def _recipe_files() -> dict[str, str]:
    """Modules that were loaded from recipe files, which another process would not find by name."""
    from ..settings import RECIPE_MODULE  # which imports the recipes, and they the feed

    return {
        name: os.path.abspath(module.__file__)
        for name, module in list(sys.modules.items())
        if name.startswith(RECIPE_MODULE) and module.__file__
    }


_source: Any = None
_maps: dict[int, np.ndarray] = {}  # by the buffer's number


def _start(recipe_files: dict[str, str], sent: bytes) -> None:
    """In a new process: gets the source."""
    global _source
    threading.Thread(target=_end_with_parent, name="chipwise-parent", daemon=True).start()
    os.environ["JAX_PLATFORMS"] = "cpu"  # should the source use JAX, it must not take the accelerator
    from ..settings import import_file

    for name, file in recipe_files.items():
        import_file(name, file)
    _source = pickle.loads(sent)  # what our own parent process made a moment ago


def _end_with_parent() -> None:
    """A pool's processes wait for work, for ever if their parent was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _ready() -> None:
    pass


def _fill_shared(
    number: int, path: str, start: int, layout: Layout, first: int, indices: np.ndarray
) -> dict[str, float]:
    """In another process: fills rows `first` and on of the buffer at `path`. *Returns* seconds by stage."""
    if number not in _maps:
        with open(path, "r+b") as file:
            _maps[number] = mapped(file.fileno())
    batch = columns(_maps[number], start, layout)
    stages = Stages()
    with stages.watch():
        fill(_source, indices, {name: c[first : first + len(indices)] for name, c in batch.items()})
    return stages.seconds


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
