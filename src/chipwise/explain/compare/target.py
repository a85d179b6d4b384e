"""Time to a named accuracy, the same kind of time for every row: training alone, steps over speed.

The steps are those that a row's own runs took, or a run of the same batch and replicas where it has none; the
speed is the row's own. What start-up, compilation and evaluation add is the wall time: known of runs, which
log it, and predicted by plans.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...engine.stored import number
from ...errors import RecipeError
from .row import MEASURED, PREDICTED, PUBLISHED, Repeat, Row
from .speed import Figure, examples_per_second, repeated

_LOWER = ("loss", "perplexity", "error")  # metrics that training makes smaller


@dataclass(frozen=True)
class Target:
    """A value of a metric that a run is to reach."""

    metric: str  # "eval/accuracy"
    value: float

    @property
    def downwards(self) -> bool:
        return self.metric.endswith(_LOWER)

    def __str__(self) -> str:
        return f"{self.metric} {'≤' if self.downwards else '≥'} {self.value:g}"

    def reached(self, value: float | None) -> bool:
        return value is not None and (value <= self.value if self.downwards else value >= self.value)


@dataclass(frozen=True)
class TimeTo:
    """How long a row takes to the target. `training` and `wall` are `None` when it does not get there, and
    `how` says why.

    *Fields:* `training`, seconds of training alone; `wall`, seconds since the run began, where known;
    `steps` to it, of the median repeat; `reached` of `runs` got there.
    """

    training: Figure | None
    wall: Figure | None
    steps: int | None
    kind: str  # MEASURED where its own runs took the steps, else PREDICTED
    reached: int
    runs: int
    how: str

    @property
    def paid(self) -> Figure | None:
        """What one pays for: the wall time, or training alone where no more is known."""
        return self.wall or self.training

    @property
    def basis(self) -> str:
        """What `paid` is."""
        return "wall time" if self.wall else "training alone"


def parse(text: str) -> Target:
    """`0.94` is of `eval/accuracy`; `eval/loss=0.3`, of any metric. Raises `RecipeError`."""
    metric, equals, value = text.rpartition("=")
    name = metric.strip() if equals else "eval/accuracy"
    if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value.strip()) or not name:
        raise RecipeError(
            f"--target {text}: expected a number such as 0.94, or a metric such as eval/loss=0.3."
        )
    return Target(name if "/" in name else f"eval/{name}", float(value))


def times_to(rows: Sequence[Row], target: Target) -> list[TimeTo]:
    """One a row. Raises `RecipeError` when no row has ever seen the metric."""
    seen = sorted({k for row in rows for r in row.sound for e in r.evaluations for k in e if "/" in k})
    if target.metric not in seen:
        there = f"they have {', '.join(seen)}" if seen else "none of them is a run with evaluations"
        raise RecipeError(
            f"--target {target.metric}={target.value:g}: no row has {target.metric}; {there}. "
            f"Train with --eval-every, and compare its run folder too."
        )
    runs = [row for row in rows if any(_steps(r, target) is not None for r in row.sound)]
    return [_time(row, runs, target) for row in rows]


def _time(row: Row, runs: Sequence[Row], target: Target) -> TimeTo:
    evaluated = [r for r in row.sound if any(target.metric in e for e in r.evaluations)]
    if not evaluated:
        return _reckoned(row, runs, target)
    found = [(s, r) for r in evaluated if (s := _steps(r, target)) is not None]
    if not found:
        best = (min if target.downwards else max)(
            e[target.metric] for r in evaluated for e in r.evaluations if target.metric in e
        )
        return _never(f"not reached: the best was {best:.4g}", MEASURED, len(evaluated))
    steps = sorted(s for s, _ in found)
    middle = steps[(len(steps) - 1) // 2]
    trained = [s * row.batch / v for s, r in found if row.batch and (v := r.examples_per_second)]
    walls = [t for _, r in found if (t := _seconds(r, target)) is not None]
    some = "" if len(found) == len(row.repeats) else f"; {len(found)} of {len(row.repeats)} runs reached it"
    return TimeTo(
        repeated(trained) if len(trained) == len(found) else None,
        repeated(walls) if len(walls) == len(found) else None,
        middle,
        MEASURED,
        len(found),
        len(row.repeats),
        f"{'its own' if len(found) == 1 else 'their own'} steps ({middle:,}) at the first evaluation beyond "
        f"it{some}",
    )


def _reckoned(row: Row, runs: Sequence[Row], target: Target) -> TimeTo:
    """Of a row that was not evaluated: the steps that a run at the same batch took, at this row's speed."""
    if row.kind == PUBLISHED and row.published is not None and row.published.similar:
        return _never("not the same model")
    if row.repeats and not row.sound:
        return _never("diverged", MEASURED)
    if row.form in ("run", "study"):
        return _never("not evaluated yet", MEASURED)
    same = [r for r in runs if r.batch == row.batch and row.replicas in (None, r.replicas)]
    if not same:
        why = (
            f"no run at batch {row.batch} and {row.replicas} replicas reached it"
            if runs
            else "no run reached it"
        )
        return _never(why)
    found = sorted(s for r in same[0].sound if (s := _steps(r, target)) is not None)
    steps = found[(len(found) - 1) // 2]
    speed = examples_per_second(row)
    if speed is None or row.batch is None:
        return _never("its speed is not known")
    training = Figure(
        steps * row.batch / speed.value,
        None if speed.high is None else steps * row.batch / speed.high,
        None if speed.low is None else steps * row.batch / speed.low,
        0,
        speed.how,
    )
    how = f"steps from run {same[0].label} ({steps:,}) at its speed"
    return TimeTo(training, _planned_wall(row, training, steps), steps, PREDICTED, 0, 0, how)


def _planned_wall(row: Row, training: Figure, steps: int) -> Figure | None:
    """With a plan's start, compilation and evaluations up to there; `None` where it does not know them."""
    if row.plan is None or not isinstance(seconds := row.plan.get("seconds"), Mapping):
        return None
    start, compile_, evaluate = (number(seconds.get(k)) for k in ("start", "compile", "evaluate"))
    if start is None or compile_ is None or not row.steps:
        return None
    more = start + compile_ + (evaluate or 0.0) * min(steps / row.steps, 1.0)
    low, high = (None if t is None else t + more for t in (training.low, training.high))
    return Figure(training.value + more, low, high, 0, training.how)


def _never(why: str, kind: str = PREDICTED, runs: int = 0) -> TimeTo:
    return TimeTo(None, None, None, kind, 0, runs, why)


def _steps(repeat: Repeat, target: Target) -> int | None:
    return next((int(e["step"]) for e in repeat.evaluations if target.reached(e.get(target.metric))), None)


def _seconds(repeat: Repeat, target: Target) -> float | None:
    return next((e.get("seconds") for e in repeat.evaluations if target.reached(e.get(target.metric))), None)
