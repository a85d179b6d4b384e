"""A row's speed, wall time, time to a target and dollars, with intervals; and ratios with verdicts.

For several repeats the figure is their geometric mean with the 95 % interval of Student's t on logarithms.
Two repeats are too few for an interval, so both values are shown. A single one has the median of its
intervals and the range of 95 % of them: the spread within one run, which says nothing about the next. A
prediction has its own interval, a published figure the range that its source states, or none.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...chips.prices import Price, cheapest, prices_for
from ...errors import RecipeError
from ...planner.plans import Range
from ...recipe.metrics import lower_is_better
from ...study.stats import HIGHER, LOWER, NO_DIFFERENCE, Difference, Spread
from ...study.stats import ratio as spread_ratio
from ...words.facts import Fact, fact
from ..row import MEASURED, PREDICTED, PUBLISHED, Repeat, Row, as_range, mapping, numbers

NO_INTERVAL = "no-interval-known"
FEW = 3  # independent values; the 95 % interval of two is 13 deviations wide
_QUANTILES = (0.025, 0.975)


@dataclass(frozen=True)
class Figure:
    """A quantity of a row with its interval (`None` if unknown), and how both were computed."""

    value: float
    low: float | None
    high: float | None
    n: int  # independent measurements; 0 if it was not measured here
    how: Fact
    values: tuple[float, ...] = ()  # of each repeat

    @property
    def spread(self) -> bool:
        """Whether its variation is known."""
        return self.low is not None or len(self.values) > 1

    @property
    def range(self) -> Range:
        """Its interval; the lowest and highest of too few values; the value twice if nothing is known."""
        if self.low is None or self.high is None:
            low, high = min(self.values, default=self.value), max(self.values, default=self.value)
            return Range(self.value, low, high)
        return Range(self.value, self.low, self.high)


def examples_per_second(row: Row) -> Figure | None:
    """The global speed of a row; `None` if it has none, or only a ratio to a machine of unknown speed."""
    if (own := row.published) is not None:
        how = fact("published-alone" if own.low is None else "published-range")
        speed = own.examples_per_second
        return None if speed is None else Figure(speed, own.low, own.high, 0, how)
    if row.kind == PREDICTED:
        return _predicted(row.predicted)
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
    """The seconds of the whole run, with start-up and evaluation; `None` for benchmarks and unfinished
    runs."""
    if row.plan is not None:
        return _predicted(as_range(row.plan.get("wall_seconds")))
    values = [v for r in row.sound if (v := r.wall_seconds)]
    return repeated(values) if values else None


def _predicted(span: Range | None) -> Figure | None:
    return None if span is None else Figure(span.value, span.low, span.high, 0, fact("predicted-interval"))


def repeated(values: Sequence[float]) -> Figure:
    """The geometric mean of independent measurements above 0 with its 95 % interval, from `FEW` on."""
    if len(values) < FEW:
        how = fact("one-run") if len(values) == 1 else fact("mean-of-too-few", n=len(values))
        middle = values[0] if len(values) == 1 else statistics.geometric_mean(values)
        return Figure(middle, None, None, len(values), how, tuple(values))
    s = Spread.of([math.log(v) for v in values])
    low, high = (None if x is None else math.exp(x) for x in (s.low, s.high))
    return Figure(math.exp(s.mean), low, high, s.n, fact("mean-of-runs", n=s.n), tuple(values))


def ratio(a: Figure, b: Figure) -> Difference:
    """The ratio `a / b` with its interval.

    If either has repeats, it is Welch's interval of the logarithms. Otherwise it comes from the ends of both
    intervals, so that it includes 1 exactly if they overlap; an unknown end counts as the value.
    """
    if a.n and b.n and max(a.n, b.n) > 1:
        return spread_ratio(a.values, b.values)
    value = a.value / b.value
    if not a.spread and not b.spread:
        return Difference(value, None, None, NO_INTERVAL)
    low, high = a.range.low / b.range.high, a.range.high / b.range.low
    verdict = NO_DIFFERENCE if low <= 1 <= high else HIGHER if value > 1 else LOWER
    return Difference(value, low, high, verdict)


# ---- time to a named accuracy


@dataclass(frozen=True)
class Goal:
    """A value of a metric for a run to reach."""

    metric: str  # "eval/accuracy"
    value: float

    @property
    def downwards(self) -> bool:
        return lower_is_better(self.metric)

    def __str__(self) -> str:
        return f"{self.metric} {'≤' if self.downwards else '≥'} {self.value:g}"

    def reached(self, value: float | None) -> bool:
        return value is not None and (value <= self.value if self.downwards else value >= self.value)


@dataclass(frozen=True)
class TimeTo:
    """The time of a row to the target; `None` if it is not reached, and `how` says why.

    *Fields:* `training`: seconds of training alone, steps over speed, for every row; `wall`: seconds since
    the start of the run, which runs log and plans predict; `steps`: of the median repeat; `reached` of `runs`
    reached it.
    """

    training: Figure | None
    wall: Figure | None
    steps: int | None
    kind: str  # MEASURED if from its own runs, else PREDICTED
    reached: int
    runs: int
    how: Fact

    @property
    def paid(self) -> Figure | None:
        """The time to pay for: the wall time, or training alone if that is unknown."""
        return self.wall or self.training

    @property
    def basis(self) -> str:
        """Which time `paid` is."""
        return "wall time" if self.wall else "training alone" if self.training else ""


def parse(text: str) -> Goal:
    """Parses `0.94` (of `eval/accuracy`) or `eval/loss=0.3`, for any metric. Raises `RecipeError`."""
    metric, equals, value = text.rpartition("=")
    name = metric.strip() if equals else "eval/accuracy"
    if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value.strip()) or not name:
        raise RecipeError("target-unreadable", given=text)
    return Goal(name if "/" in name else f"eval/{name}", float(value))


def times_to(rows: Sequence[Row], target: Goal) -> list[TimeTo]:
    """The time to the target of each row. Raises `RecipeError` if no row has the metric."""
    seen = sorted({k for row in rows for r in row.sound for e in r.evaluations for k in e if "/" in k})
    if target.metric not in seen:
        raise RecipeError("target-not-measured", metric=target.metric, value=target.value, seen=seen)
    runs = [row for row in rows if _steps(row, target)]
    return [_time(row, runs, target) for row in rows]


def _time(row: Row, runs: Sequence[Row], target: Goal) -> TimeTo:
    values = [e[target.metric] for r in row.sound for e in r.evaluations if target.metric in e]
    if not values:
        return _reckoned(row, runs, target)
    reached = [(e, r) for r in row.sound if (e := _first(r, target)) is not None]
    if not reached:
        best = (min if target.downwards else max)(values)
        tried = sum(any(target.metric in e for e in r.evaluations) for r in row.sound)
        return _never(fact("target-missed", best=best), MEASURED, tried)
    middle = _steps(row, target)[(len(reached) - 1) // 2]
    trained = [e["step"] * row.batch / v for e, r in reached if row.batch and (v := r.examples_per_second)]
    walls = [e["seconds"] for e, _ in reached if "seconds" in e]
    training, wall = (repeated(t) if len(t) == len(reached) else None for t in (trained, walls))
    some = len(reached) < len(row.repeats)
    facts = {"steps": middle, "reached": len(reached), "runs": len(row.repeats)}
    how = fact("own-steps-of-some" if some else "own-steps", **facts)
    return TimeTo(training, wall, middle, MEASURED, len(reached), len(row.repeats), how)


def _reckoned(row: Row, runs: Sequence[Row], target: Goal) -> TimeTo:
    """For a row without evaluations: the steps of a run at the same batch, at this row's speed."""
    if row.kind == PUBLISHED and row.published is not None and row.published.similar:
        return _never(fact("another-model"))
    if row.repeats and not row.sound:
        return _never(fact("all-diverged"), MEASURED)
    if row.form in ("run", "study"):
        return _never(fact("not-evaluated"), MEASURED)
    same = [r for r in runs if r.batch == row.batch and row.replicas in (None, r.replicas)]
    if not same:
        code = "no-run-at-batch" if runs else "no-run-reached"
        return _never(fact(code, batch=row.batch, replicas=row.replicas))
    counts = _steps(same[0], target)
    steps = counts[(len(counts) - 1) // 2]
    speed = examples_per_second(row)
    if speed is None or row.batch is None:
        return _never(fact("no-speed"))
    examples = steps * row.batch
    low, high = (None if v is None else examples / v for v in (speed.high, speed.low))
    training = Figure(examples / speed.value, low, high, 0, speed.how)
    how = fact("steps-of-another", label=same[0].label, steps=steps)
    return TimeTo(training, _planned_wall(row, training, steps), steps, PREDICTED, 0, 0, how)


def _planned_wall(row: Row, training: Figure, steps: int) -> Figure | None:
    """The wall time with a plan's start, compilation and evaluations; `None` if these are unknown."""
    known = numbers(mapping(row.plan or {}, "seconds"))
    if not row.steps or not {"start", "compile"} <= known.keys():
        return None
    more = known["start"] + known["compile"] + known.get("evaluate", 0.0) * min(steps / row.steps, 1.0)
    low, high = (None if t is None else t + more for t in (training.low, training.high))
    return Figure(training.value + more, low, high, 0, training.how)


def _never(why: Fact, kind: str = PREDICTED, runs: int = 0) -> TimeTo:
    return TimeTo(None, None, None, kind, 0, runs, why)


def _first(repeat: Repeat, target: Goal):
    """The first evaluation at or beyond the target, or `None`."""
    return next((e for e in repeat.evaluations if target.reached(e.get(target.metric))), None)


def _steps(row: Row, target: Goal) -> list[int]:
    """The steps to the target of each repeat that reached it, ascending."""
    return sorted(int(e["step"]) for r in row.sound if (e := _first(r, target)) is not None)


# ---- dollars, at dated prices


def costs(
    row: Row, table: Sequence[Price], speed: Figure | None, wall: Figure | None, target: TimeTo | None
) -> tuple[list[dict[str, Any]], Fact | None]:
    """Dollars at the cheapest on-demand and spot price of the row's chips, or at a published row's own price;
    or the reason why there are none.

    They are of a million examples, of the run and to the target, each with its interval, or `None` if the
    time is unknown; `target_basis` is "wall time", "training alone" if the wall time is unknown, or "".
    """
    own, on = row.published, row.rented
    if own is not None and own.usd_per_hour is not None:
        price = Price(
            chip=own.device, chips=1, cloud="", instance=own.device, region="", usd_per_hour=own.usd_per_hour,
            spot_usd_per_hour=None, spot_region="", includes=own.price_note, source=own.source, date=own.date,
            note=str(fact("price-of-its-source")),
        )  # fmt: skip
        return [_money(price, False, speed, wall, target)], None
    if (row.device or "").lower().startswith("cpu") or (on is not None and on.chip.kind == "CPU"):
        return [], fact("no-price-of-a-cpu")
    if on is None:
        return [], fact("device-not-priced", device=row.where)
    prices = prices_for(on, table)
    cheap = [(one, spot) for spot in (False, True) if (one := cheapest(prices, spot)) is not None]
    money = [_money(one, spot, speed, wall, target) for one, spot in cheap]
    return money, None if money else fact("no-price-of", target=on.name)


def _money(
    price: Price, spot: bool, speed: Figure | None, wall: Figure | None, target: TimeTo | None
) -> dict[str, Any]:
    hourly = (price.spot_usd_per_hour if spot else price.usd_per_hour) or 0.0
    paid = None if target is None else target.paid
    run, to_target = (None if t is None else t.range.times(hourly / 3600) for t in (wall, paid))
    return {
        "spot": spot,
        "usd_per_hour": hourly,
        "per_million_examples": None if speed is None else speed.range.inverse(1e6 * hourly / 3600),
        "run": run,
        "target": to_target,
        "target_basis": "" if target is None else target.basis,
        "region": price.spot_region if spot else price.region,
    } | {name: getattr(price, name) for name in ("cloud", "instance", "includes", "date", "source", "note")}
