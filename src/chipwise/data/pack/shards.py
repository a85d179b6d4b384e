"""Parts of a shard: `.npy` files, the record table, and exact sums over pixels."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from ...base import DataError
from ...base.files import open_inside
from ..manifest import header, sha256
from ..sources import Columns

# The squares of a block fit in the cache, and its sums in 32 bits
_PIXELS = 1024
_ROWS = 64


class NpyFile:
    """A `.npy` file of `items` entries, each `shape` of `dtype`. `finish` writes their number to
    the header."""

    def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, ...]):
        self.path = path
        self.dtype = dtype
        self.shape = shape
        self.items = 0
        self.handle = open_inside(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        _write(self.handle, header(dtype, (0, *shape)))

    def write(self, block: np.ndarray) -> None:
        _write(self.handle, block.reshape(-1).view(np.uint8).data)
        self.items += len(block)

    def finish(self) -> dict[str, Any]:
        """Completes the file. *Returns* its entry for the manifest."""
        os.lseek(self.handle, 0, os.SEEK_SET)
        _write(self.handle, header(self.dtype, (self.items, *self.shape)))
        os.fsync(self.handle)
        nbytes = os.fstat(self.handle).st_size
        self.close()
        return {"name": self.path.name, "bytes": nbytes, "sha256": sha256(self.path)}

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1


def _write(handle: int, data) -> None:
    view = memoryview(data)
    while view:  # a write may be partial, before the disk is full or above 2 GiB
        view = view[os.write(handle, view) :]


def record_lines(
    dtype: np.dtype, names: Sequence[str], rows: Columns, ends: np.ndarray | None
) -> np.ndarray:
    """The lines of the record table, `(n,)` of `dtype`, except the ends of images in their shard.

    `rows`: column to `(n, ...)`. With `ends` `(n,)`, `image` is all encoded images' bytes, and each
    image ends at its entry of `ends`.
    """
    lines = np.zeros(len(names), dtype)
    encoded = [name.encode("utf-8", "surrogateescape") for name in names]
    width = dtype["name"].itemsize
    if max(map(len, encoded)) > width:
        wrong = "The name {name!r} is longer than name_bytes={width}."
        raise DataError("pack-name-long", wrong, name=max(names, key=len)[:200], width=width)
    lines["name"] = encoded
    sums = [0] * len(names)
    for column, values in rows.items():
        data = values.reshape(-1).view(np.uint8).data
        each = values[:1].nbytes
        cuts = np.arange(len(names) + 1) * each
        if ends is not None and column == "image":
            cuts[1:] = ends
        for row, (begin, end) in enumerate(itertools.pairwise(cuts.tolist())):
            sums[row] = crc32(data[begin:end], sums[row])
    lines["crc32"] = sums
    return lines


def added(totals: list[int], more: list[int]) -> list[int]:
    """The sums of two lists. An empty first one is zeros."""
    return [a + b for a, b in zip(totals or [0] * len(more), more, strict=True)]


@dataclass
class Moments:
    """Sums over uint8 pixels by channel, as integers of any size."""

    count: int = 0
    """The number of pixels."""
    sums: list[int] = field(default_factory=list)
    """The sums of their values, one per channel."""
    squares: list[int] = field(default_factory=list)
    """The sums of the squares of their values, one per channel."""

    def add(self, pixels: np.ndarray, channels: int) -> None:
        """Adds uint8 pixels `(..., channels)`, contiguous, or the concatenation of such arrays."""
        flat = pixels.reshape(-1)
        width = channels * _PIXELS
        whole = flat.size // width * width
        total = np.zeros((2, channels), np.int64)
        # Sums along rows are vectorised; along 3 channels they would be 10 times slower
        for start in range(0, whole, width * _ROWS):
            block = flat[start : min(whole, start + width * _ROWS)].reshape(-1, width)
            total[0] += (
                block.sum(axis=0, dtype=np.uint32).reshape(-1, channels).sum(axis=0, dtype=np.int64)
            )
            squares = block.astype(np.uint16)
            squares *= squares
            total[1] += (
                squares.sum(axis=0, dtype=np.uint32)
                .reshape(-1, channels)
                .sum(axis=0, dtype=np.int64)
            )
        rest = flat[whole:].reshape(-1, channels).astype(np.int64)
        total[0] += rest.sum(axis=0)
        total[1] += (rest * rest).sum(axis=0)
        self.count += flat.size // channels
        self.sums = added(self.sums, total[0].tolist())
        self.squares = added(self.squares, total[1].tolist())

    @property
    def mean(self) -> list[float]:
        return [s / self.count for s in self.sums]

    @property
    def std(self) -> list[float]:
        """The standard deviation of the pixels (divided by `count`, not `count - 1`)."""
        n = self.count
        return [
            math.sqrt((n * q - s * s) / (n * n))
            for s, q in zip(self.sums, self.squares, strict=True)
        ]
