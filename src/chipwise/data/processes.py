"""Processes that read examples, for sources that hold on to Python's lock.

Each has its own copy of the source. They write into memory that is shared, so a batch is never copied from
one process to another.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from ..errors import DataError
from ..words.figures import one_line
from .buffers import Buffer, Layout, columns, mapped
from .columns import Columns
from .sources import fill
from .stages import Stages

_PIECES = 2  # a process and batch, so that one slow image does not hold up all


class Processes:
    """`count` processes. Fresh ones: forking one that runs JAX can hang, since its threads' locks are copied,
    locked.

    Raises `DataError` for a source that cannot be sent to them, or be made there.
    """

    shared = True  # they write to buffers that other processes can map

    def __init__(self, source: Any, count: int):
        self.count = count
        kind = type(source)
        try:
            sent = pickle.dumps(source)
        except Exception as error:  # pickle raises what the object's own methods raise
            ours = kind.__module__.startswith("chipwise.")
            code = "source-unsendable-ours" if ours else "source-unsendable"
            raise DataError(code, source=kind.__name__, reason=_line(error)) from error
        self.pool = ProcessPoolExecutor(
            count, multiprocessing.get_context("spawn"), initializer=_start, initargs=(_recipe_files(), sent)
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
        """Into how many a batch is cut: these examples are dear, or nobody would have asked for processes."""
        return min(_PIECES * self.count, examples)

    def read(self, indices: np.ndarray, start: int, buffer: Buffer, out: Columns) -> Future:
        """Begins to write the examples at `indices` to rows `start` and on of `buffer`."""
        place = (buffer.number, buffer.path, buffer.start, buffer.layout, start)
        return self.pool.submit(_fill_shared, *place, indices)

    def close(self) -> None:
        for process in list((self.pool._processes or {}).values()):
            process.terminate()  # no public way before Python 3.14, and a hanging one would never end
        self.pool.shutdown(wait=True, cancel_futures=True)


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
    number: int, path: str | None, start: int, layout: Layout, first: int, indices: np.ndarray
) -> dict[str, float]:
    """In another process: fills rows `first` and on of the buffer at `path`. *Returns* seconds by stage."""
    if number not in _maps:
        assert path is not None  # of a shared buffer
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
