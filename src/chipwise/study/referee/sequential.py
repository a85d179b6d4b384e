"""A test that one may examine after every pair: the confidence sequence of a mean of unknown
variance.

For independent normal values the mixture of scale-invariant likelihood ratios is a test martingale,
so it exceeds 1 / error with a probability of at most `error`, whenever one looks (Ville's
inequality). It comes from Wang and Ramdas ("Anytime-valid t-tests and confidence sequences for
Gaussian means with unknown variance", arXiv:2310.03722, the test martingale in a reduced
filtration: a Gaussian mixture in place of Lai's flat one).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

PRIOR = 0.25
"""The inverse variance of the standardized effects that the mixture assumes: about two deviations
and below. Any value keeps the error. Small values find large effects sooner."""

FEWEST = 4
"""The fewest pairs with a finite interval, at an error of 5 %."""

MOST = 100_000
"""The highest number of pairs that is predicted."""


def interval(values: Sequence[float], error: float, grain: float = 0.0) -> tuple[float, float]:
    """The interval that encloses the true mean at all times at once, except with a probability of
    `error`. It contains the means at which the martingale is below 1 / error. It is infinite while
    there are too few values. Values in steps of `grain` may be alike by chance, so the variance of
    a step, grain^2 / 12, is added to theirs."""
    if len(values) < 2:
        return -math.inf, math.inf
    mean, half = statistics.fmean(values), _half(len(values), _squares(values, grain), error)
    return mean - half, mean + half


def _squares(values: Sequence[float], grain: float) -> float:
    return statistics.variance(values) * (len(values) - 1) + len(values) * grain**2 / 12


def _half(n: int, squares: float, error: float) -> float:
    """Half the width of the interval of `n` values, where `squares` is the sum of squared
    deviations from their mean. At its ends the martingale is 1 / error. The martingale is
    sqrt(PRIOR / (n + PRIOR)) (V / (V - S^2 / (n + PRIOR)))^(n / 2) with the sum S and the squares V
    of the values less a mean."""
    kept = math.exp((2 * math.log(error) + math.log(PRIOR / (n + PRIOR))) / n)
    share = kept - PRIOR / (n + PRIOR)
    return math.sqrt(squares * (1 - kept) / (n * share)) if share > 0 else math.inf


def pairs_needed(
    values: Sequence[float], margin: float | None, error: float, grain: float = 0
) -> int | None:
    """The number of values, including these, at which the interval probably excludes 0, or is
    within `margin` of it, if mean and deviation stay as they are. `None` if the interval is still
    too wide at `MOST`, or for fewer than two values."""
    if len(values) < 2:
        return None
    mean, variance = statistics.fmean(values), _squares(values, grain) / (len(values) - 1)
    room = max(abs(mean), 0.0 if margin is None else margin - abs(mean))
    low, high = FEWEST, MOST
    if _half(high, variance * (high - 1), error) > room or room == 0:
        return None
    while low < high:  # the width falls with n
        n = (low + high) // 2
        low, high = (low, n) if _half(n, variance * (n - 1), error) <= room else (n + 1, high)
    return low
