"""The gradient noise scale of a run: how far the gradients of a step's blocks differ, beside their
sum.

    B_noise = tr(Σ) / |G|²      Σ: the covariance of an example's gradient, G: their mean

It is the batch at which noise and gradient are equally large. Smaller batches save examples and
cost steps. The method is that of McCandlish et al., 2018 (arXiv:1812.06162, appendix A.1). A step
of n blocks of b examples each gives the mean square of a gradient over b examples, and the square
of one over n b. Unbiased estimates of both follow:

    |G|²  = (n b |G_nb|² - b |G_b|²) / (n b - b)
    tr(Σ) = (|G_b|² - |G_nb|²) / (1 / b - 1 / (n b))

Each is averaged over the rows of a run, before the ratio. Separate programs compute the squares, so
no bit of a training changes. The host adds them exactly, so they are equal on any number of
devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..machine.compilation_cache import compile_on
from .placement import Placement
from .state_digest import Piece

SCALE, SQUARE, TRACE = "train/noise_scale", "noise/gradient_square", "noise/trace"
"""Columns of a row. The scale, in examples, follows from the averages up to that row. The other two
are the estimates from this step alone: |G|², which may be below 0, and tr(Σ)."""

DECAY, WINDOW = 0.9, 100
"""The factor by which a row's weight in the averages decays from row to row, and the number of rows
that count (0.9 ** 100 = 3e-5)."""


class Squared(NamedTuple):
    """The squares that the devices compute in a step."""

    blocks: dict[int, Any]
    """By number of the block: the squares of the parts of its gradient, and the loss's count."""
    total: list[Any]
    """The squares of the sum's parts, on this host's devices."""


class GradientSquares:
    """Computes the squares of gradients on the devices. Only `read` waits for them.

    *Arguments:* `step`: a `Step` or `GroupStep`, whose vectors these are. `jit`: as `jax.jit`.
    """

    def __init__(self, step: Any, placement: Placement, jit: Callable[..., Any]):
        self.step, self.placement, self._jit = step, placement, jit
        self._programs: dict[str, list[Any]] = {}

    def of(self, g: int, vector: Any) -> Any:
        """Starts, for a vector of local group `g`, the squares `(parts,)` and the loss's count
        `()`."""
        return self._run("measured", g, vector)

    def of_sum(self, parts: list[list[Piece]]) -> list[Any]:
        """Starts the squares of a step's summed gradient, which comes from `StateLayout.step`. If
        it is cut, these are the squares of each device's own parts."""
        if parts[0][0].cut:
            return [self._run("square", g, own[0].array) for g, own in enumerate(parts)]
        return [self._run("measured", 0, parts[0][0].array)[0]]

    def _run(self, name: str, g: int, vector: Any) -> Any:
        if name not in self._programs:
            groups = self.placement.local

            def lower(_: int, g: int) -> Any:
                function = getattr(self.step.on(groups[g].index), name)
                return self._jit(function).lower(groups[g].shapes(vector))

            (self._programs[name],) = compile_on(len(groups), 1, lower)
        return self._programs[name][g](vector)

    def read(self, squared: Squared, batch: int) -> dict[str, float]:
        """Returns `SQUARE` and `TRACE` of a step, or nothing if a gradient is not finite. Waits,
        also for all hosts.

        *Arguments:* `batch`: global, in examples.
        """

        def values(array: Any) -> list[float]:
            return np.asarray(array.addressable_data(0), np.float64).reshape(-1).tolist()

        blocks = {
            str(i): [*values(squares), *values(count)]
            for i, (squares, count) in squared.blocks.items()
        }
        sums = [value for part in squared.total for value in values(part)]
        hosts = self.placement.hosts.everyone("squares", [blocks, sums])
        of = [
            own
            for _, own in sorted(
                {int(i): own for made, _ in hosts for i, own in made.items()}.items()
            )
        ]
        cut = self.step.sharded  # otherwise every host has all parts of the sum
        total = math.fsum(value for _, sums in (hosts if cut else hosts[:1]) for value in sums)
        count, squares = (
            math.fsum(own[-1] for own in of),
            math.fsum(v for own in of for v in own[:-1]),
        )
        if not count or not math.isfinite(squares + total):
            return {}
        n = len(of)
        small, large = n * squares / count**2, total / count**2
        return {SQUARE: (n * large - small) / (n - 1), TRACE: (small - large) * batch / (n - 1)}


def scale_of(newest_first: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns `SCALE` after rows, the newest with most weight. Returns nothing unless the average
    of |G|² is above 0 and that of tr(Σ) is at least 0."""
    rows = itertools.islice((row for row in newest_first if row.get(SQUARE) is not None), WINDOW)
    weighted = [(DECAY**age * row[SQUARE], DECAY**age * row[TRACE]) for age, row in enumerate(rows)]
    square, trace = math.fsum(one for one, _ in weighted), math.fsum(one for _, one in weighted)
    return {SCALE: trace / square} if square > 0 <= trace else {}
