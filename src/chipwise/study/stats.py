"""Statistics of repeated measurements: means with intervals, and whether two of them differ.

Intervals are 95 % intervals by Student's t. Those of two independent samples are by Welch (1947,
Biometrika 34, pages 28 to 35), which does not assume equal variances. The intervals hold for
independent, roughly normal values: runs with several seeds, or repetitions of a benchmark.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
NO_DIFFERENCE = "difference-not-shown"
HIGHER = "higher"
LOWER = "lower"
UNKNOWN = "one-run-each"
TWO_ALIKE = "two-alike"
"""Codes of verdicts."""

_SHARE = re.compile(
    r"accuracy|auc|f1|precision|recall|exact_match|hamming|top_?\d"
)  # metrics between 0 and 1


@dataclass(frozen=True)
class Spread:
    """`n` values: their mean, their deviation, and the interval of the mean.

    *Fields:* `deviation` (with n - 1), `low` and `high` are `None` for a single value. The interval
    of a share is clipped to 0 and 1.
    """

    n: int
    mean: float
    deviation: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: Sequence[float], metric: str = "") -> Spread:
        """The spread of `values` of `metric`. Raises `ValueError` if there are none, or one is not
        finite."""
        _check(values)
        n = len(values)
        mean = statistics.fmean(values)
        if n == 1:
            return cls(n, mean, None, None, None)
        deviation = statistics.stdev(values)
        half = _t(n - 1) * deviation / math.sqrt(n)
        low = mean - half
        high = mean + half
        if _SHARE.search(metric) and all(0 <= value <= 1 for value in values):
            low = max(low, 0.0)
            high = min(high, 1.0)
        return cls(n, mean, deviation, low, high)


@dataclass(frozen=True)
class Difference:
    """A difference or ratio `value` with its interval and a verdict."""

    value: float
    low: float | None
    high: float | None
    verdict: str
    """One of these codes.

    - `NO_DIFFERENCE`: the interval has the neutral value, 0 of a difference or 1 of a ratio.
    - `HIGHER` or `LOWER`: it does not.
    - `UNKNOWN`: there is no interval.
    - `TWO_ALIKE`: the two values are equal, which often happens by chance, above all with
      accuracies.
    """


def difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """The mean of `a` minus that of `b`, for independent samples of any sizes.

    Raises `ValueError` if a sample is empty, or a value is not finite.
    """
    _check(a)
    _check(b)
    value = statistics.fmean(a) - statistics.fmean(b)
    parts = [(len(x), statistics.variance(x) / len(x)) for x in (a, b) if len(x) > 1]
    # A sample of one has no spread: the other's is used for both
    if not parts:
        return Difference(value, None, None, UNKNOWN)
    if len(parts) == 1:
        (n, variance), freedom = parts[0], parts[0][0] - 1.0
        error = math.sqrt(variance * (n + 1))
    else:
        total = sum(variance for _, variance in parts)
        error = math.sqrt(total)
        squares = sum(variance**2 / (n - 1) for n, variance in parts)
        freedom = total**2 / squares if squares else 1.0
    return _judged(value, _t(freedom) * error, max(len(a), len(b)))


def paired(a: Sequence[float], b: Sequence[float]) -> Difference:
    """The mean of `a` minus `b` by pairs that share something, such as a seed.

    Raises `ValueError` if the lengths differ or are 0, or a value is not finite.
    """
    pairs = Spread.of([x - y for x, y in zip(a, b, strict=True)])
    if pairs.high is None:
        return Difference(pairs.mean, None, None, UNKNOWN)
    return _judged(pairs.mean, pairs.high - pairs.mean, pairs.n)


def ratio(a: Sequence[float], b: Sequence[float]) -> Difference:
    """The geometric mean of `a` over that of `b`, for independent samples.

    Speeds vary by factors, so this uses logarithms. Raises `ValueError` if a sample is empty, or a
    value is not finite and above 0.
    """
    if any(not (math.isfinite(x) and x > 0) for x in (*a, *b)):
        raise ValueError(f"values {list(a)[:4]} and {list(b)[:4]}: expected finite numbers above 0")
    logs = difference([math.log(x) for x in a], [math.log(x) for x in b])
    low, high = (None if x is None else math.exp(x) for x in (logs.low, logs.high))
    return Difference(math.exp(logs.value), low, high, logs.verdict)


def _judged(value: float, half: float, n: int) -> Difference:
    if n == 2 and half < 1e-9 * abs(value):
        return Difference(value, None, None, TWO_ALIKE)
    low = value - half
    high = value + half
    verdict = NO_DIFFERENCE if low <= 0 <= high else HIGHER if value > 0 else LOWER
    return Difference(value, low, high, verdict)


def _t(freedom: float) -> float:
    """The upper quantile of Student's t for a two-sided interval of `CONFIDENCE`."""
    from scipy.special import stdtrit  # takes a third of a second, so only if needed

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def _check(values: Sequence[float]) -> None:
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f"values {list(values)[:4]}: expected finite numbers, at least one")
