"""What attention's implementations share: the keys that a query sees."""

from __future__ import annotations

import math
from typing import NamedTuple

SAVED = "context"
"""The name of the values that attention computes and its kernels keep for their gradient. See
`cw.models.remat`. cuDNN's kernel is a primitive without names: see `saveable`."""


class Mask(NamedTuple):
    """The keys that a query sees. *Fields:* `causal`: no later ones. `window`: only those less than
    `window` away."""

    causal: bool = False
    window: int | None = None


def visited(t: int, s: int, mask: Mask, block: int = 1) -> float:
    """The share of all pairs of positions that are in square blocks with a visible pair."""
    return len(pairs(t, s, mask, block)) / (math.ceil(t / block) * math.ceil(s / block))


def pairs(t: int, s: int, mask: Mask, block: int) -> list[tuple[int, int]]:
    """The blocks `(of queries, of keys)` with a visible pair, row by row."""
    visible = []
    for i in range(math.ceil(t / block)):
        first = i * block
        last = min((i + 1) * block, t) - 1
        behind = 0 if mask.window is None else max(0, first - mask.window + 1)
        ahead = s - 1 if mask.window is None else min(s - 1, last + mask.window - 1)
        if mask.causal:
            ahead = min(ahead, last)
        visible += [(i, j) for j in range(behind // block, ahead // block + 1)]
    return visible
