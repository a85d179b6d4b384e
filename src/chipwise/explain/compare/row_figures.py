"""A row's speed, wall time and time to a target, with intervals, and ratios with verdicts.

For several repeats the figure is their geometric mean with the 95 % interval of Student's t on
logarithms. Two repeats are too few for an interval, so both values are shown. A single repeat has
the median of its intervals and the range of 95 % of them. That is the spread within one run, which
says nothing about the next.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...base import Fact, RecipeError, fact
from ...chips import Target, cheapest, find, prices_for
from ...chips.prices import load as load_prices
from ...study.goal import Goal
from ...study.stats import HIGHER, LOWER, NO_DIFFERENCE, Difference, Spread, ratio as spread_ratio
from ..row import Row

NO_INTERVAL = "no-interval-known"
SAME_BITS = "same-to-the-bit"
FEW = 3  # independent values; the 95 % interval of two is 13 deviations wide
_QUANTILES = (0.025, 0.975)


@dataclass(frozen=True)
class Figure:
    """A quantity of a row with its interval (`None` if unknown), and how both were computed."""

    value: float
    low: float | None
    high: float | None
    n: int  # independent measurements
    how: Fact
    values: tuple[float, ...]  # of each repeat

    @property
    def spread(self) -> bool:
        """Whether the figure's variation is known."""
        return self.low is not None or len(self.values) > 1

    @property
    def ends(self) -> tuple[float, float]:
        """The interval, or the lowest and highest value if it is unknown."""
        if self.low is None or self.high is None:
            return min(self.values), max(self.values)
        return self.low, self.high


def examples_per_second(row: Row) -> Figure | None:
    """The global speed of a row, or `None` if it has none."""
    values = [v for r in row.sound if (v := r.examples_per_second) is not None]
    if len(values) != 1:
        return repeated(values) if values else None
    speeds = next(r.speeds for r in row.sound if r.speeds)
    if len(speeds) == 1:
        return Figure(values[0], None, None, 1, fact("one-interval"), tuple(values))
    low, high = np.quantile([s for _, s in speeds], _QUANTILES)
    how = fact("median-of-intervals", n=len(speeds))
    return Figure(values[0], float(low), float(high), 1, how, tuple(values))


def wall_seconds(row: Row) -> Figure | None:
    """The seconds of the whole run, with start-up and evaluation. `None` for benchmarks and
    unfinished runs."""
    values = [v for r in row.sound if (v := r.wall_seconds)]
    return repeated(values) if values else None


def cost(row: Row, wall: Figure | None) -> dict[str, Any] | None:
    """The cost of the row's run on rented chips. `usd` is its wall time at their lowest on-demand
    price, `how` the explanation. `None` on a CPU, or for chips without a price."""
    chip = find(row.device) if row.device and not row.simulated else None
    if wall is None or chip is None or chip.kind == "CPU" or not row.devices:
        return None
    chips = max(row.devices // chip.jax_devices_per_chip, 1)
    target = Target(chip.name, chip, chips, row.devices, None)
    price = cheapest(prices_for(target, load_prices()))
    if price is None or price.usd_per_hour is None:
        return None
    how = fact(
        "cost-of-run",
        wall=wall.value,
        usd_per_hour=price.usd_per_hour,
        where=f"{price.cloud} {price.instance}".strip(),
    )
    return {"usd": wall.value / 3600 * price.usd_per_hour, "how": how}


def repeated(values: Sequence[float]) -> Figure:
    """The geometric mean of independent measurements above 0. It has its 95 % interval if there are
    at least `FEW`."""
    if len(values) < FEW:
        how = fact("one-run") if len(values) == 1 else fact("mean-of-too-few", n=len(values))
        middle = values[0] if len(values) == 1 else statistics.geometric_mean(values)
        return Figure(middle, None, None, len(values), how, tuple(values))
    s = Spread.of([math.log(v) for v in values])
    low, high = (None if x is None else math.exp(x) for x in (s.low, s.high))
    return Figure(math.exp(s.mean), low, high, s.n, fact("mean-of-runs", n=s.n), tuple(values))


def ratio(a: Figure, b: Figure) -> Difference:
    """The ratio `a / b` with its interval.

    If either has repeats, it is Welch's interval of the logarithms. Otherwise it comes from the
    ends of both intervals, so that it includes 1 exactly if they overlap. The value replaces an
    unknown end.
    """
    if max(a.n, b.n) > 1:
        return spread_ratio(a.values, b.values)
    value = a.value / b.value
    if not a.spread and not b.spread:
        return Difference(value, None, None, NO_INTERVAL)
    low = a.ends[0] / b.ends[1]
    high = a.ends[1] / b.ends[0]
    verdict = NO_DIFFERENCE if low <= 1 <= high else HIGHER if value > 1 else LOWER
    return Difference(value, low, high, verdict)


def same_bits(row: Row, other: Row) -> bool:
    """Whether all runs of two rows are over, and both rows have the same fingerprints."""
    mine, others = ({r.fingerprint for r in one.repeats} for one in (row, other))
    return mine == others and all(mine)


# ---- time to a named accuracy


@dataclass(frozen=True)
class TimeTo:
    """The time of a row to the goal.

    *Fields:*

    - `training`: seconds of training alone, steps over speed. `None` if the goal is not reached, or
      if a repeat that reached it has no speed.
    - `wall`: seconds since the start of the run, if the runs log them.
    - `steps`: the steps of the median repeat.
    - `reached` and `runs`: how many of the runs reached the goal.
    - `how`: how the time was computed, or why there is none.
    """

    training: Figure | None
    wall: Figure | None
    steps: int | None
    reached: int
    runs: int
    how: Fact


def times_to(rows: Sequence[Row], goal: Goal) -> list[TimeTo]:
    """The time to the goal of each row, from its own evaluations. Raises `RecipeError` if no row
    has the goal's metric."""
    seen = sorted(
        {k for row in rows for r in row.sound for e in r.evaluations for k in e if "/" in k}
    )
    if goal.metric not in seen:
        raise RecipeError(
            "target-not-measured",
            "--target {metric:plain}={value:g}: no row has that metric, only {seen:and}. "
            "Train with "
            "--eval-every.",
            metric=goal.metric,
            value=goal.value,
            seen=seen,
        )
    return [_time(row, goal) for row in rows]


def _time(row: Row, goal: Goal) -> TimeTo:
    values = [e[goal.metric] for r in row.sound for e in r.evaluations if goal.metric in e]
    there = [(r, [e for e in r.evaluations if goal.reached(e.get(goal.metric))]) for r in row.sound]
    reached = [(evaluations[0], r) for r, evaluations in there if evaluations]
    if not reached:
        best = (min if goal.downwards else max)(values, default=None)
        how = fact("not-evaluated") if best is None else fact("target-missed", best=best)
        return TimeTo(None, None, None, 0, sum(bool(r.evaluations) for r in row.sound), how)
    steps = sorted(int(e["step"]) for e, _ in reached)
    trained = [
        e["step"] * row.batch / v for e, r in reached if row.batch and (v := r.examples_per_second)
    ]
    walls = [e["seconds"] for e, _ in reached if "seconds" in e]
    training, wall = (repeated(t) if len(t) == len(reached) else None for t in (trained, walls))
    facts = {
        "steps": steps[(len(steps) - 1) // 2],
        "reached": len(reached),
        "runs": len(row.repeats),
    }
    how = fact("own-steps-of-some" if len(reached) < len(row.repeats) else "own-steps", **facts)
    return TimeTo(training, wall, how=how, **facts)
