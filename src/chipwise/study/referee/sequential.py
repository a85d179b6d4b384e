"""A test that one may examine after every pair: the confidence sequence of a mean of unknown
variance.

For independent normal values the mixture of scale-invariant likelihood ratios is a test martingale,
so it exceeds 1 / error with a probability of at most `error`, whenever one looks (Ville's
inequality). It comes from Wang and Ramdas ("Anytime-valid t-tests and confidence sequences for
Gaussian means with unknown variance", arXiv:2310.03722, the test martingale in a reduced
filtration: a Gaussian mixture in place of Lai's flat one).

Two samples that share nothing and deviate differently have the evidence of t with the degrees of
freedom of the smaller one (Mickey and Brown 1966, "Bounds on the distribution functions of the
Behrens-Fisher statistic", Annals of Mathematical Statistics 37). At any two sizes its expectation
is at most 1: it is convex in the estimated variance, a weighted mean of two that have at least
these degrees. That it errs rarely enough however often one looks is measured, for deviations that
are 0.1 to 10 times as large (`benchmarks/records.md`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

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
    mean, half = statistics.fmean(values), _half(len(values), _variance(values, grain), error)
    return mean - half, mean + half


def unpaired(
    base: Sequence[float], change: Sequence[float], error: float, grain: float = 0.0
) -> tuple[float, float]:
    """The interval of the mean of `change` less that of `base`, for independent samples of any
    sizes. The other arguments are those of `interval`."""
    if min(len(base), len(change)) < 2:
        return -math.inf, math.inf
    mean = statistics.fmean(change) - statistics.fmean(base)
    half = _apart([(len(one), _variance(one, grain)) for one in (base, change)], error)
    return mean - half, mean + half


def _variance(values: Sequence[float], grain: float) -> float:
    n = len(values)
    return statistics.variance(values) + n / (n - 1) * grain**2 / 12


def _half(n: int, variance: float, error: float) -> float:
    """Half the width of the interval of `n` values."""
    return _width(variance / n, n - 1, n / PRIOR, error)


def _apart(sides: Sequence[tuple[int, float]], error: float) -> float:
    """Half the width of the interval of a difference of means. *Arguments:* `sides`: the number and
    the variance of each sample's values."""
    square = sum(variance / n for n, variance in sides)
    # In deviations of one value, the mixture is as wide as that of pairs
    spread = 2 / PRIOR / sum(1 / n for n, _ in sides)
    return _width(square, min(n for n, _ in sides) - 1, spread, error)


def _width(square: float, freedom: int, spread: float, error: float) -> float:
    """Half the width of the interval of a mean or difference, whose standard error has this square
    and these degrees of freedom. At its ends the martingale is 1 / error. The martingale is
    (1 + spread)^(-1/2) ((1 + t^2 / f) / (1 + t^2 / f / (1 + spread)))^((f + 1) / 2) of the value t
    of Student's t and the degrees f, where the mixture's t have the variance `spread`."""
    ratio = math.exp((math.log1p(spread) - 2 * math.log(error)) / (freedom + 1))
    left = 1 - ratio / (1 + spread)
    return math.sqrt(square * freedom * (ratio - 1) / left) if left > 0 else math.inf


def pairs_needed(
    values: Sequence[float], margin: float | None, error: float, grain: float = 0
) -> int | None:
    """The number of values, including these, at which the interval probably excludes 0, or is
    within `margin` of it, if mean and deviation stay as they are. `None` if the interval is still
    too wide at `MOST`, or for fewer than two values."""
    if len(values) < 2:
        return None
    variance = _variance(values, grain)
    return _fewest(lambda n: _half(n, variance, error), statistics.fmean(values), margin)


def runs_needed(
    base: Sequence[float],
    change: Sequence[float],
    margin: float | None,
    error: float,
    grain: float = 0,
) -> int | None:
    """The number of values of each sample that `unpaired` probably needs, as in `pairs_needed`. A
    sample that has more keeps them."""
    if min(len(base), len(change)) < 2:
        return None
    sides = [(len(one), _variance(one, grain)) for one in (base, change)]
    return _fewest(
        lambda n: _apart([(max(n, own), variance) for own, variance in sides], error),
        statistics.fmean(change) - statistics.fmean(base),
        margin,
    )


def _fewest(half: Callable[[int], float], mean: float, margin: float | None) -> int | None:
    """The fewest values with which an interval around `mean` decides, if it is `half` as wide."""
    room = max(abs(mean), 0.0 if margin is None else margin - abs(mean))
    low, high = FEWEST, MOST
    if half(high) > room or room == 0:
        return None
    while low < high:  # the width falls with n
        n = (low + high) // 2
        low, high = (low, n) if half(n) <= room else (n + 1, high)
    return low
