"""Mean and deviation of pixels, from exact sums: the same whatever the order and the cuts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

_PIXELS, _ROWS = 1024, 64  # a block of squares stays in the cache, and its sums in 32 bits


@dataclass
class Moments:
    """Sums over uint8 pixels by channel, as whole numbers of any size.

    *Fields:* `count`, pixels; `sums` and `squares`, of their values and squares, one a channel.
    """

    count: int = 0
    sums: list[int] = field(default_factory=list)
    squares: list[int] = field(default_factory=list)

    def add(self, pixels: np.ndarray, channels: int) -> None:
        """Adds uint8 `(..., channels)`, or such arrays one after another, contiguous."""
        flat = pixels.reshape(-1)
        width = channels * _PIXELS
        whole = flat.size // width * width
        total = np.zeros((2, channels), np.int64)
        # Sums along the rows' direction run in vectors; along 3 channels they would be 10 times slower
        for start in range(0, whole, width * _ROWS):
            block = flat[start : min(whole, start + width * _ROWS)].reshape(-1, width)
            total[0] += block.sum(axis=0, dtype=np.uint32).reshape(-1, channels).sum(axis=0, dtype=np.int64)
            squares = block.astype(np.uint16)
            squares *= squares
            total[1] += squares.sum(axis=0, dtype=np.uint32).reshape(-1, channels).sum(axis=0, dtype=np.int64)
        rest = flat[whole:].reshape(-1, channels).astype(np.int64)
        total[0] += rest.sum(axis=0)
        total[1] += (rest * rest).sum(axis=0)
        self.count += flat.size // channels
        self.sums = [a + b for a, b in zip(self.sums or [0] * channels, total[0].tolist(), strict=True)]
        self.squares = [a + b for a, b in zip(self.squares or [0] * channels, total[1].tolist(), strict=True)]

    @property
    def mean(self) -> list[float]:
        return [s / self.count for s in self.sums]

    @property
    def std(self) -> list[float]:
        """The deviation of the pixels themselves (divided by `count`, not `count - 1`)."""
        n = self.count
        return [math.sqrt((n * q - s * s) / (n * n)) for s, q in zip(self.sums, self.squares, strict=True)]
