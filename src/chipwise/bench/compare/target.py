"""Time to a named accuracy: read off a run's evaluations, or reckoned from another's steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

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
    """How long a row takes to the target. `seconds` is `None` when it does not get there, and `how` says why.

    *Fields:* `steps` to it, of the median repeat; `reached` of `runs` got there.
    """

    seconds: Figure | None
    steps: int | None
    kind: str  # MEASURED or PREDICTED
    reached: int
    runs: int
    how: str


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
    seen = sorted({k for row in rows for r in row.repeats for e in r.evaluations for k in e if "/" in k})
    if target.metric not in seen:
        there = f"they have {', '.join(seen)}" if seen else "none of them is a run with evaluations"
        raise RecipeError(
            f"--target {target.metric}={target.value:g}: no row has {target.metric}; {there}. "
            f"Train with --eval-every, and compare its run folder too."
        )
    runs = [row for row in rows if any(_steps(r, target) is not None for r in row.repeats)]
    return [_time(row, runs, target) for row in rows]


def _time(row: Row, runs: Sequence[Row], target: Target) -> TimeTo:
    evaluated = [r for r in row.repeats if any(target.metric in e for e in r.evaluations)]
    if not evaluated:
        return _reckoned(row, runs, target)
    steps = sorted(s for r in evaluated if (s := _steps(r, target)) is not None)
    if not steps:
        best = (min if target.downwards else max)(
            e[target.metric] for r in evaluated for e in r.evaluations if target.metric in e
        )
        return TimeTo(None, None, MEASURED, 0, len(evaluated), f"not reached: the best was {best:.4g}")
    middle = steps[(len(steps) - 1) // 2]
    seconds = [t for r in evaluated if (t := _seconds(r, target)) is not None]
    some = "" if len(steps) == len(evaluated) else f"; {len(steps)} of {len(evaluated)} runs reached it"
    if len(seconds) == len(steps):
        figure = repeated(seconds) if len(seconds) > 1 else Figure(seconds[0], None, None, 1, "one run")
        how = f"wall time at the first evaluation beyond it{some}"
        return TimeTo(figure, middle, MEASURED, len(steps), len(evaluated), how)
    made = _from_steps(row, middle, "its own")
    return TimeTo(made.seconds, middle, PREDICTED, len(steps), len(evaluated), made.how + some)


def _reckoned(row: Row, runs: Sequence[Row], target: Target) -> TimeTo:
    """Of a row that was not evaluated: the steps that a run at the same batch took, at this row's speed."""
    if row.kind == PUBLISHED and row.published is not None and row.published.similar:
        return TimeTo(None, None, PREDICTED, 0, 0, "not the same model")
    same = [r for r in runs if r.batch == row.batch and row.replicas in (None, r.replicas)]
    if not same:
        why = (
            f"no run at batch {row.batch} and {row.replicas} replicas reached it"
            if runs
            else "no run reached it"
        )
        return TimeTo(None, None, PREDICTED, 0, 0, why)
    found = sorted(s for r in same[0].repeats if (s := _steps(r, target)) is not None)
    return _from_steps(row, found[(len(found) - 1) // 2], same[0].label)


def _from_steps(row: Row, steps: int, run: str) -> TimeTo:
    speed = examples_per_second(row)
    if speed is None or row.batch is None:
        return TimeTo(None, steps, PREDICTED, 0, 0, "its speed is not known")
    seconds = Figure(
        steps * row.batch / speed.value,
        None if speed.high is None else steps * row.batch / speed.high,
        None if speed.low is None else steps * row.batch / speed.low,
        0,
        speed.how,
    )
    whose = "its own steps" if run == "its own" else f"steps from run {run}"
    return TimeTo(seconds, steps, PREDICTED, 0, 0, f"{whose} ({steps:,}) at its speed; training alone")


def _steps(repeat: Repeat, target: Target) -> int | None:
    return next((int(e["step"]) for e in repeat.evaluations if target.reached(e.get(target.metric))), None)


def _seconds(repeat: Repeat, target: Target) -> float | None:
    return next((e.get("seconds") for e in repeat.evaluations if target.reached(e.get(target.metric))), None)
