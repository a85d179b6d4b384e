"""Examples/s with what they vary by, and ratios that say when they show nothing.

Of several repeats the figure is their geometric mean with the 95 % interval of Student's t on logarithms. Of
two, which are too few for one, both values are shown. Of a single one it is the median of its intervals, with
the range that 95 of 100 of them lie in: the spread within one run, which says nothing about the next. A
prediction has its own interval, a published figure the range that its source states, or none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...planner.plans import Range
from ...study.stats import HIGHER, LOWER, NO_DIFFERENCE, Difference, Spread
from ...study.stats import ratio as spread_ratio
from .row import PREDICTED, PUBLISHED, Row, as_range

NO_INTERVAL = "no interval known"
FEW = 3  # independent values: of two, the interval of 95 % is 13 deviations wide
TOO_FEW = "too few for an interval"
_QUANTILES = (0.025, 0.975)


@dataclass(frozen=True)
class Figure:
    """A quantity of a row with its interval (`None`: not known), and how both were found."""

    value: float
    low: float | None
    high: float | None
    n: int  # independent measurements behind it; 0 where it was not measured here
    how: str
    values: tuple[float, ...] = ()  # of each repeat

    @property
    def spread(self) -> bool:
        """Whether anything is known of how it varies."""
        return self.low is not None or len(self.values) > 1

    @property
    def ends(self) -> tuple[float, float]:
        """Its interval; the lowest and highest of too few values; twice the value where nothing is known."""
        if self.low is None or self.high is None:
            return min(self.values, default=self.value), max(self.values, default=self.value)
        return self.low, self.high


def examples_per_second(row: Row) -> Figure | None:
    """Global speed of a row; `None` when it has none, or only a ratio to a machine of which none is known."""
    if row.published is not None:
        own = row.published
        if own.examples_per_second is None:
            return None
        said = "no interval given" if own.low is None else "and the range that the source states"
        return Figure(own.examples_per_second, own.low, own.high, 0, f"published, {said}")
    if row.kind == PREDICTED:
        return predicted(row.predicted)
    values = [v for r in row.sound if (v := r.examples_per_second) is not None]
    if len(values) > 1:
        return repeated(values)
    if not values:
        return None
    (speeds,) = (r.speeds for r in row.sound if r.speeds)
    if len(speeds) == 1:
        return Figure(values[0], None, None, 1, "one interval of one run", tuple(values))
    low, high = np.quantile([s for _, s in speeds], _QUANTILES)
    said = f"median of {len(speeds)} intervals of one run, and where 95 % of them lie"
    return Figure(values[0], float(low), float(high), 1, said, tuple(values))


def wall_seconds(row: Row) -> Figure | None:
    """Of the whole run, start-up and evaluation included; `None` for benchmarks, and for runs not over."""
    if row.plan is not None:
        found = row.plan.get("wall_seconds")
        return predicted(as_range(found))
    values = [v for r in row.sound if (v := r.wall_seconds)]
    return repeated(values) if values else None


def predicted(found: Range | None) -> Figure | None:
    if found is None:
        return None
    return Figure(
        found.value, found.low, found.high, 0, "predicted; nine of ten measurements should lie within"
    )


def repeated(values: Sequence[float]) -> Figure:
    """The geometric mean of independent measurements above 0 with its 95 % interval, from `FEW` on."""
    if len(values) < FEW:
        said = "one run" if len(values) == 1 else f"geometric mean of {len(values)} runs, {TOO_FEW}"
        middle = values[0] if len(values) == 1 else statistics.geometric_mean(values)
        return Figure(middle, None, None, len(values), said, tuple(values))
    s = Spread.of([math.log(v) for v in values])
    low, high = (None if x is None else math.exp(x) for x in (s.low, s.high))
    said = f"geometric mean of {s.n} runs and its 95 % interval"
    return Figure(math.exp(s.mean), low, high, s.n, said, tuple(values))


def ratio(a: Figure, b: Figure) -> Difference:
    """How many times as high `a` is as `b`.

    By Welch's interval of the logarithms where either has repeats. Otherwise by the ends of both intervals,
    which shows no difference exactly when they overlap; an end that is not known counts as none.
    """
    if a.n and b.n and max(a.n, b.n) > 1:
        return spread_ratio(a.values, b.values)
    value = a.value / b.value
    if not a.spread and not b.spread:
        return Difference(value, None, None, NO_INTERVAL)
    (low, high), (least, most) = a.ends, b.ends
    low, high = low / most, high / least
    if low <= 1 <= high:
        return Difference(value, low, high, NO_DIFFERENCE)
    return Difference(value, low, high, HIGHER if value > 1 else LOWER)


def within_one_run(row: Row) -> bool:
    """Whether the interval of its speed leaves out what differs from one run to the next."""
    return row.kind not in (PREDICTED, PUBLISHED) and sum(bool(r.speeds) for r in row.sound) == 1
