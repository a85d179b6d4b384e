"""How much of a GPU a matrix product can occupy: whole tiles on whole waves of multiprocessors."""

from __future__ import annotations

import math
from functools import cache

# Rows, columns, and the share of the peak that a multiprocessor reaches with such tiles: smaller ones load
# more for each multiplication, which matters less where multiplications are slow. Chosen, not measured; tiles
# and waves as in https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/.
_TILES = {
    "tensor": (
        (256, 128, 1.0),
        (128, 128, 0.95),
        (128, 64, 0.85),
        (64, 64, 0.7),
        (64, 32, 0.5),
        (32, 32, 0.35),
    ),
    "vector": ((128, 128, 1.0), (128, 64, 0.97), (64, 64, 0.92), (64, 32, 0.8), (32, 32, 0.65)),
}
# Summands' worth of time to fill and to empty a tile's pipeline.
_FILL = {"tensor": 48, "vector": 8}
_SPLITS = (1, 2, 4, 8, 16, 32, 64)
_SHORTEST = 128  # summands, below which a sum is not split


@cache
def share_of_peak(m: int, n: int, k: int, groups: int, multiprocessors: int, unit: str) -> float:
    """Of `groups` products `(m, k) @ (k, n)`: useful over possible multiplications, with the best of a few
    tile sizes and of ways to split the sum over several multiprocessors. Above 0, below 1.

    *Arguments:* `unit`: "tensor" or "vector", what multiplies.
    """
    best = math.inf
    for rows, columns, quality in _TILES[unit]:
        tiles = groups * math.ceil(m / rows) * math.ceil(n / columns)
        for parts in _SPLITS:
            if parts > 1 and k / parts < _SHORTEST:
                break
            waves = math.ceil(tiles * parts / multiprocessors)
            best = min(best, waves * rows * columns * (k / parts + _FILL[unit]) / quality)
    return groups * m * n * k / (best * multiprocessors)
