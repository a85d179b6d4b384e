"""Reused memory for batches.

Fresh memory costs a page fault every 4 KiB, which makes copying into it some ten times slower than
copying into memory already in use. So a few buffers are reused. A buffer is free when nothing
refers to its memory: JAX keeps a NumPy array alive until its transfer is over or, on the CPU, where
a device's array may share the host's memory, until that array is gone.
"""

from __future__ import annotations

import gc
import itertools
import math
import mmap
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable

import numpy as np

from .sources import Columns, Spec

ALIGNMENT = 64  # of every column, in bytes: JAX's CPU client then takes the memory without a copy
_POLL_SECONDS = 0.001
_numbers = itertools.count()


class Buffer:
    """Memory for a batch of `examples` of `spec`.

    *Arguments:* `shared`: whether the memory is a file that other processes map by its `path`. The
    file is in memory if the system supports it.
    """

    def __init__(self, spec: Spec, examples: int, shared: bool = False):
        self.layout, size = layout(spec, examples)
        size += ALIGNMENT  # room for alignment
        self.number = next(_numbers)  # a path may be that of an earlier buffer again
        self.path: str | None = None
        if shared:
            handle, self.path = _memory_file()
            self._forget = weakref.finalize(self, _close, handle, self.path)
            os.truncate(handle, size)
            self._owner = mapped(handle)
        else:
            self._owner = np.empty(size, np.uint8)
        self.start = -self._owner.ctypes.data % ALIGNMENT
        self._idle = sys.getrefcount(self._owner)

    @property
    def free(self) -> bool:
        return sys.getrefcount(self._owner) <= self._idle

    def columns(self) -> Columns:
        """New arrays `(examples, ...)` over this memory. The buffer is free when all of them are
        gone."""
        return columns(self._owner, self.start, self.layout)

    def close(self) -> None:
        """Closes the shared file. Its memory is freed with the last array over it."""
        if self.path is not None:
            self._forget()
            self.path = None


def _memory_file() -> tuple[int, str]:
    """An open file and its path. If the system supports it, the file is in memory, so that it ends
    with its last process."""
    if hasattr(os, "memfd_create"):  # Linux: nothing stays behind even if the processes are killed
        handle = os.memfd_create("chipwise-batch")
        return handle, f"/proc/{os.getpid()}/fd/{handle}"
    return tempfile.mkstemp(prefix="chipwise-batch-")


def _close(handle: int, path: str) -> None:
    os.close(handle)
    if not path.startswith("/proc/"):
        os.unlink(path)


def mapped(handle: int) -> np.ndarray:
    """The memory of the open file `handle`, `(bytes,)` uint8, shared with other processes that map
    it."""
    return np.frombuffer(mmap.mmap(handle, 0), np.uint8)


class Pool:
    """`count` buffers, allocated when first needed."""

    def __init__(self, count: int, make: Callable[[], Buffer]):
        self.count = count
        self._make = make
        self._buffers: list[Buffer] = []

    def get(self, closed: threading.Event) -> Buffer | None:
        """Waits for a free buffer and returns it. Returns `None` once `closed` is set."""
        while not closed.is_set():
            for buffer in self._buffers:
                if buffer.free:
                    return buffer
            if len(self._buffers) < self.count:
                self._buffers.append(self._make())
                return self._buffers[-1]
            closed.wait(_POLL_SECONDS)
            # JAX releases memory of its threads at its next call or, as here, when Python collects
            # garbage
            gc.collect(0)
        return None

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.close()


# Column to shape, type and offset in bytes
Layout = dict[str, tuple[tuple[int, ...], np.dtype, int]]


def layout(spec: Spec, examples: int) -> tuple[Layout, int]:
    """The offset of each column of a batch, one after another, and the total bytes."""
    columns = {}
    offset = 0
    for name, s in spec.items():
        shape = (examples, *s.shape)
        dtype = np.dtype(s.dtype)
        columns[name] = (shape, dtype, offset)
        size = math.prod(shape) * dtype.itemsize
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return columns, offset


def columns(memory: np.ndarray, start: int, layout: Layout) -> Columns:
    """The arrays of `layout` over `memory` `(bytes,)` uint8, from byte `start` on."""
    return {
        name: memory[start + offset : start + offset + math.prod(shape) * dtype.itemsize]
        .view(dtype)
        .reshape(shape)
        for name, (shape, dtype, offset) in layout.items()
    }
