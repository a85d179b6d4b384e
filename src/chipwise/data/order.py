"""The order of the training examples, a pure function of seed, epoch and position. Also the few
examples that are read where reading all takes too long.

The training stream is continuous. Position `p` (the number of examples seen before) is in epoch
`p // examples`. Every epoch is a permutation of all examples. A batch may span two epochs. Nothing
is dropped, and resuming needs only the step.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, examples: int) -> np.ndarray:
    """The order of one epoch, `(examples,)` int32.

    Sorts raw Philox words: NumPy guarantees that a bit generator's words never change, but not the
    algorithm of `Generator.permutation` (NEP 19).
    """
    words = np.random.Philox(key=[seed % 2**64, epoch]).random_raw(examples)
    # 4 times as fast as a stable sort, and the same unless two words are equal
    order = np.argsort(words)
    ordered = words[order]
    if (ordered[1:] == ordered[:-1]).any():
        order = np.argsort(words, kind="stable")
    order = order.astype(np.int32)
    order.flags.writeable = False
    return order


def indices(seed: int, start: int, stop: int, examples: int) -> np.ndarray:
    """The examples at positions `start` to `stop - 1`, `(stop - start,)` int32."""
    parts = []
    while start < stop:
        epoch, offset = divmod(start, examples)
        taken = min(stop - start, examples - offset)
        parts.append(permutation(seed, epoch, examples)[offset : offset + taken])
        start += taken
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def weighted(seed: int, epoch: int, weights: np.ndarray) -> np.ndarray:
    """The examples at the places `(n,)` of one epoch, int32, in proportion to `weights` `(n,)`
    float64.

    Places are points at equal distances along the sum of all weights, starting at a random point
    (systematic sampling). So every example comes its expected number of times, rounded up or down.
    Equal weights give each example its own place.
    """
    ends = np.cumsum(weights)
    (word,) = (
        np.random.Philox(key=[seed % 2**64, epoch], counter=[0, 0, 0, 1]).random_raw(1).tolist()
    )
    points = (np.arange(len(weights)) + (word >> 11) * 2.0**-53) / len(weights) * ends[-1]
    rows = np.searchsorted(ends, points, side="right")
    return np.minimum(rows, np.flatnonzero(weights)[-1]).astype(np.int32)


def spread(n: int, most: int) -> np.ndarray:
    """At most `most` of `n` rows, evenly spread. They are the same in every process that compares
    them."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).astype(np.int64))
