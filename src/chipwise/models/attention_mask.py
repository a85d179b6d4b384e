"""What attention's implementations share: the keys that a query sees."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..base import RecipeError, invalid

SAVED = "context"
"""The name of the values that attention computes and its kernels keep for their gradient. See
`cw.models.remat`. cuDNN's kernel is a primitive without names: see `saveable`."""


class Mask(NamedTuple):
    """The keys that a query sees. *Fields:* `causal`: no later ones. `window`: only those less than
    `window` away."""

    causal: bool = False
    window: int | None = None


MOST_PAIRS = 1 << 26
"""Pairs of blocks of a program: 512 MB of numbers, and three million positions that see all."""


def visited(t: int, s: int, mask: Mask, block: int = 1) -> float:
    """The share of all pairs of positions that are in square blocks with a visible pair."""
    first, last = _rows(t, s, mask, block)
    return int(np.sum(last - first + 1)) / (len(first) * math.ceil(s / block))


def pairs(t: int, s: int, mask: Mask, block: int) -> np.ndarray:
    """The blocks `(of queries, of keys)` with a visible pair, row by row: `(n, 2)` int32. Raises
    `RecipeError` for more than `MOST_PAIRS`."""
    first, last = _rows(t, s, mask, block)
    counts = last - first + 1
    total = int(np.sum(counts))
    if total > MOST_PAIRS:
        raise _too_long(t, s)
    row = np.repeat(np.arange(len(first)), counts)
    before = np.cumsum(counts) - counts - first
    return np.stack([row, np.arange(total) - before[row]], axis=1).astype(np.int32)


def _rows(t: int, s: int, mask: Mask, block: int) -> tuple[np.ndarray, np.ndarray]:
    """For each block of queries, the first and the last block of keys with a visible pair."""
    if math.ceil(t / block) > MOST_PAIRS:
        raise _too_long(t, s)
    begin = np.arange(0, t, block)
    end = np.minimum(begin + block, t) - 1
    behind = np.zeros_like(begin) if mask.window is None else begin - mask.window + 1
    ahead = np.full_like(begin, s - 1) if mask.window is None else end + mask.window - 1
    ahead = np.minimum(ahead, end if mask.causal else s - 1)
    return np.maximum(behind, 0) // block, np.minimum(ahead, s - 1) // block


def _too_long(t: int, s: int) -> RecipeError:
    expected = "fewer, or a window: see cw.models.attention"
    what = "the lengths of queries and keys"
    return invalid("attention-too-long", what, (t, s), expected, most=MOST_PAIRS)
