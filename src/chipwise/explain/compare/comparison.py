"""A comparison as a JSON document, for `chipwise compare --json`, the table and the page.

docs/compare.md describes every field. New fields keep the schema's number. The number rises when a
field changes its meaning or is removed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...base import RecipeError, near, plain
from ...recipe.direction import bare, judged
from ...study.goal import Goal
from ...study.stats import Spread, difference, paired
from ..row import Repeat, Row
from ..row_sources import read
from ..terminal import heading
from .conclusions import conclusions
from .differing import differing, same_device
from .row_figures import (
    FEW,
    SAME_BITS,
    Figure,
    TimeTo,
    cost,
    examples_per_second,
    ratio,
    same_bits,
    times_to,
    wall_seconds,
)

SCHEMA = "chipwise.comparison/7"
_POINTS = 400  # at most, in a curve
_FIRST = ("eval/accuracy", "eval/loss")  # what is compared, where it is there and no other is named


def compare(sources: Sequence[str], **how: Any) -> dict[str, Any]:
    """The document of a comparison of `sources`. *Arguments:* `how`: those of `document`. Raises as
    `row_sources.read` and `document` do."""
    return document(read(sources), **how)


def document(
    rows: Sequence[Row],
    *,
    baseline: str | None = None,
    target: str | None = None,
    metric: str | None = None,
    better: Mapping[str, str] = {},
) -> dict[str, Any]:
    """The whole comparison as plain JSON values.

    *Arguments:*

    - `baseline`: a row's label, by default the first with a speed.
    - `target`: a value of a metric, for the time to it, such as `"eval/accuracy=0.94"`.
    - `metric`: the metric to compare, by default accuracy or loss of evaluation, else
      another of evaluation, else of training.
    - `better`: which way metrics are better, before what the runs say. If nothing says it of the
      metric, or runs disagree, no row is better.

    Raises `RecipeError` for a single row that is no study, a baseline that is not a row or has no
    speed, and a metric that no row has.
    """
    if len(rows) < 2 and not (rows and rows[0].form == "study"):
        raise RecipeError("compare-alone", labels=[row.label for row in rows])
    runs = [r for row in rows for r in row.sound]
    goal = target and Goal.parse(target, better, *_directions(runs, target))
    times = times_to(rows, goal) if goal else [None] * len(rows)
    speeds = {row.label: examples_per_second(row) for row in rows}
    base = _baseline(rows, speeds, baseline)
    one_batch = len({row.batch for row in rows if speeds[row.label]}) == 1
    metric = _metric(rows, metric)
    known = [r.better for r in runs if metric in r.metrics]
    said = judged(metric, better, *known, strict=False) if metric else None
    base_time = times[list(rows).index(base)]
    stated_rows = []
    for row, time in zip(rows, times, strict=True):
        stated = _stated(row) | _figures(row, base, speeds, (time, base_time), one_batch)
        stated_rows.append(
            stated
            | {
                "same_device": None if row is base else same_device(row, base),
                "metric": _final(row, base, metric),
                "repeats": [_repeat(r) for r in row.repeats],
            }
        )
    names = list(dict.fromkeys(row.recipe for row in rows))
    comparison = plain(
        {
            **heading(SCHEMA),
            "recipes": names,
            "baseline": base.label,
            "target": {**asdict(goal), "words": str(goal)} if goal else None,
            "metric": metric,
            "better": said and said["better"],
            "differing": differing(rows),
            "rows": stated_rows,
        }
    )
    return comparison | {"sentences": plain(conclusions(comparison, said))}


def _stated(row: Row) -> dict[str, Any]:
    """The fields that a row states."""
    own = (
        "label form source created recipe parameters batch replicas precision exact data framework "
        "machine versions steps"
    )
    when = {str(r.diverged): r.diverged for r in row.repeats if r.diverged is not None}
    lost = {
        "runs": len(row.repeats) - len(row.sound),
        "of": len(row.repeats),
        "when": list(when.values()),
    }
    return {name: getattr(row, name) for name in (*own.split(), "notes")} | {
        "device": row.where,
        "diverged": lost if when else None,
    }


def _figures(
    row: Row,
    base: Row,
    speeds: dict[str, Figure | None],
    times: tuple[TimeTo | None, TimeTo | None],
    one_batch: bool,
) -> dict[str, Any]:
    """A row's speed and times. Ratios are to the baseline, and `None` for the baseline itself.
    *Arguments:* `times`: the times to the target of the row and of the baseline."""
    speed = speeds[row.label]
    wall = wall_seconds(row)
    time = times[0]
    alike = _length(row) is not None and _length(row) == _length(base)

    def against(mine: Figure | None, other: Figure | None):
        return None if row is base or mine is None or other is None else ratio(mine, other)

    return {
        "examples_per_second": speed,
        "ratio": against(speed, speeds[base.label]),
        "steps_per_second": speed.value / row.batch if speed and row.batch and one_batch else None,
        # whether its interval leaves out the variation between runs
        "within_one_run": sum(bool(r.speeds) for r in row.sound) == 1,
        "wall_seconds": wall,
        "wall_ratio": against(wall, wall_seconds(base)) if alike else None,
        "seconds": _sections(row),
        "cost": cost(row, wall),
        "target": time,
        "target_ratio": against(*(None if t is None else t.training for t in times)),
    }


def _baseline(rows: Sequence[Row], speeds: dict[str, Figure | None], label: str | None) -> Row:
    able = [row for row in rows if speeds[row.label] is not None]
    if label is None:
        return (able or rows)[0]
    given = [row for row in rows if label in row.given]
    named = [row for row in rows if label in (row.label, *(r.name for r in row.repeats))]
    chosen = next(iter(given if len(given) == 1 else named), None)
    if chosen in able:
        return chosen  # type: ignore[return-value]
    if chosen is not None:
        raise RecipeError(
            "baseline-no-speed", label=label, rows=[row.label for row in able] or ["none"]
        )
    if given:
        raise RecipeError(
            "baseline-several",
            "--baseline {label:plain} became {n} rows: {rows:and}. Name one.",
            label=label,
            n=len(given),
            rows=[row.label for row in given],
        )
    labels = [row.label for row in rows]
    text = "--baseline {label:plain}: no such row.{near:near} Rows: {rows:list}."
    raise RecipeError("baseline-unknown", text, label=label, near=near(label, labels), rows=labels)


def _directions(runs: Sequence[Repeat], target: str) -> list[Mapping[str, str]]:
    """The better values of metrics, as each run states them that has the target's metric."""
    metric = bare(target.rpartition("=")[0].strip()) or "accuracy"
    return [r.better for r in runs if metric in map(bare, r.metrics)]


def _length(row: Row) -> int | None:
    """The examples of a row's whole run."""
    return None if row.steps is None or row.batch is None else row.steps * row.batch


def _metric(rows: Sequence[Row], named: str | None) -> str | None:
    """The metric whose final values are compared."""
    seen = dict.fromkeys(name for row in rows for r in row.sound for name in r.metrics)
    if named is None:
        others = sorted(seen, key=lambda name: not name.startswith("eval/"))
        return next((name for name in (*_FIRST, *others) if name in seen), None)
    if seen and named not in seen:
        text = "No run has the metric {metric:plain}.{near:near} Metrics: {metrics:list}."
        raise RecipeError(
            "study-no-metric", text, metric=named, near=near(named, seen), metrics=list(seen)
        )
    return named


def _final(row: Row, base: Row, metric: str | None) -> dict[str, Any] | None:
    """The last value of the metric in each repeat, its spread, and its difference from the
    baseline's. The difference is by pairs if every seed of one is a seed of the other. Runs of the
    same bits are not samples, so they have no interval."""
    mine = _finals(row, metric)
    other = _finals(base, metric)
    if not mine:
        return None
    values = [v for _, v in mine]
    spread = Spread.of(values, metric or "")
    ends = {} if len(mine) >= FEW else {"low": None, "high": None}
    apart = by_pairs = None
    if other and row is not base:
        seeds, others = ({s: v for s, v in finals if s is not None} for finals in (mine, other))
        both = sorted(seeds.keys() & others.keys())
        by_pairs = 1 < len(both) == min(len(mine), len(other))
        if by_pairs:
            apart = paired([seeds[s] for s in both], [others[s] for s in both])
        else:
            apart = difference(values, [v for _, v in other])
        if apart.value == 0 and same_bits(row, base):
            apart = replace(apart, low=None, high=None, verdict=SAME_BITS)
    best = [r.best_at for r in row.sound if r.complete and r.best_at is not None]
    return asdict(spread) | {
        "values": values,
        **ends,
        "difference": apart,
        "by_pairs": by_pairs,
        "best_at": best,
    }


def _finals(row: Row, metric: str | None) -> list[tuple[Any, float]]:
    """Pairs of a repeat's key and its value. The key is the seed, or the folder's name if the seeds
    of a study's row are alike, as in folds. Runs of one fingerprint are one."""
    runs: dict[str, Repeat] = {}
    for r in row.sound:
        runs.setdefault(r.fingerprint or r.name, r)
    alike = len({r.seed for r in runs.values()}) < len(runs) and row.form == "study"
    finals = [r for r in runs.values() if r.complete and metric and metric in r.metrics]
    return [(Path(r.name).name if alike else r.seed, r.metrics[metric or ""]) for r in finals]


def _sections(row: Row) -> dict[str, float]:
    """Wall seconds by section: the geometric mean over repeats."""
    names = dict.fromkeys(name for r in row.sound for name in r.seconds)
    seconds = {name: [r.seconds[name] for r in row.sound if name in r.seconds] for name in names}
    middle = {True: statistics.geometric_mean, False: statistics.fmean}
    return {name: middle[min(values) > 0](values) for name, values in seconds.items()}


def _repeat(repeat: Repeat) -> dict[str, Any]:
    """The fields of a repeat that pictures need."""
    return {
        "name": repeat.name,
        "seed": repeat.seed,
        "fingerprint": repeat.fingerprint,
        "speeds": thinned(repeat.speeds),
        "diverged": repeat.diverged is not None,
        "warming_up": repeat.warming_up,
        "evaluations": thinned(repeat.evaluations),
    }


def thinned(points: Sequence[Any]) -> list[Any]:
    """At most `_POINTS` points, evenly spaced, including the last."""
    every = -(-len(points) // _POINTS) or 1
    return list(points[::-1][::every])[::-1]
