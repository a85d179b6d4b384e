"""A comparison as a JSON document, for `chipwise compare --json`, the table and the page.

docs/compare.md describes every field. Fields may be added under the same number; it is raised when a field
changes its meaning or is removed.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ... import __version__
from ...chips.prices import Price
from ...errors import RecipeError, near
from ...study.stats import Spread, difference, paired
from ...words.facts import Fact, plain
from ..row import KINDS, MEASURED, Repeat, Row, mapping, numbers
from .agreement import SAME_BITS, Agreement, agreement, check_recipe, differing, same_device
from .conclusions import conclusions
from .row_figures import FEW, Figure, Goal, TimeTo, costs, examples_per_second, ratio, times_to, wall_seconds

SCHEMA = "chipwise.comparison/2"
_POINTS = 400  # at most, in a curve


@dataclass(frozen=True)
class _Timed:
    """A row with its figures."""

    row: Row
    speed: Figure | None
    wall: Figure | None
    time: TimeTo | None


def document(
    rows: Sequence[Row],
    *,
    prices: Sequence[Price],
    baseline: str | None = None,
    target: Goal | None = None,
    notes: Sequence[Fact] = (),
) -> dict[str, Any]:
    """The whole comparison as plain JSON values.

    *Arguments:* `prices`: a table of `chips.prices`; `baseline`: a row's label, by default the first with a
    speed; `target`: a value of a metric, for the time to it; `notes`: facts on arguments that gave no row.

    Raises `RecipeError` for fewer than two rows, rows of several recipes, a baseline that is not a row, and a
    target metric that no row has.
    """
    if len(rows) < 2:
        code = "compare-alone-unpublished" if notes else "compare-alone"
        raise RecipeError(code, labels=[row.label for row in rows])
    check_recipe(rows)
    times = times_to(rows, target) if target is not None else [None] * len(rows)
    timed = [
        _Timed(row, examples_per_second(row), wall_seconds(row), time)
        for row, time in zip(rows, times, strict=True)
    ]
    base = _baseline(timed, baseline)
    one_batch = len({t.row.batch for t in timed if t.speed is not None}) == 1
    measured = [row for row in rows if row.kind == MEASURED]
    first = base.row if base.row.kind == MEASURED else next(iter(measured), None)
    agreements = {row.label: agreement(row, first) for row in measured if first and row is not first}
    metric = _metric(rows)
    recipe = next((r for r in rows if r.settings), base.row)
    comparison = plain(
        {
            "schema": SCHEMA,
            "chipwise": __version__,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "recipe": {
                "name": base.row.recipe,
                "parameters": next((r.parameters for r in rows if r.parameters is not None), None),
                "columns": recipe.columns,
            },
            "baseline": base.row.label,
            "target": None if target is None else {**asdict(target), "words": str(target)},
            "metric": metric,
            "notes": notes,
            "labels": {k: [r.label for r in rows if r.kind == k] for k in KINDS},
            "differing": differing(rows),
            "agreement": list(agreements.values()),
            "rows": [
                _stated(t.row)
                | _figures(t, base, prices, one_batch)
                | _same(t.row, base.row, agreements.get(t.row.label))
                | {"metric": _final(t.row, base.row, metric), "repeats": [_repeat(r) for r in t.row.repeats]}
                for t in timed
            ],
            "relative": _relative(rows),
        }
    )
    return comparison | {"sentences": plain(conclusions(comparison))}


def _stated(row: Row) -> dict[str, Any]:
    """The fields that a row states."""
    own = ("label", "kind", "form", "source", "created", "batch", "replicas", "precision", "exact", "data")
    diverged = [r.diverged for r in row.repeats if r.diverged is not None]
    return {name: getattr(row, name) for name in own} | {
        "framework": row.framework,
        "device": row.where,
        "machine": row.machine,
        "versions": row.versions,
        "similar": row.published.similar if row.published else "",
        "steps": row.steps,
        "diverged": {
            "runs": len(diverged),
            "of": len(row.repeats),
            "when": list({str(when): when for when in diverged}.values()),
        }
        if diverged
        else None,
        "notes": row.notes,
    }


def _figures(t: _Timed, base: _Timed, prices: Sequence[Price], one_batch: bool) -> dict[str, Any]:
    """A row's speed, times and dollars; ratios are to the baseline, and `None` for the baseline itself."""
    row = t.row
    money, no_price = costs(row, prices, t.speed, t.wall, t.time)
    trained, base_trained = (None if x.time is None else x.time.training for x in (t, base))

    def beside(mine: Figure | None, other: Figure | None):
        return None if t is base or mine is None or other is None else ratio(mine, other)

    return {
        "examples_per_second": t.speed,
        "ratio": beside(t.speed, base.speed),
        "steps_per_second": t.speed.value / row.batch if t.speed and row.batch and one_batch else None,
        # whether its interval leaves out the variation between runs
        "within_one_run": row.kind == MEASURED and sum(bool(r.speeds) for r in row.sound) == 1,
        "wall_seconds": t.wall,
        "wall_ratio": beside(t.wall, base.wall) if _length(row) == _length(base.row) else None,
        "seconds": _sections(row),
        "target": t.time,
        "target_ratio": beside(trained, base_trained),
        "costs": money,
        "no_price": no_price,
    }


def _same(row: Row, base: Row, beside: Agreement | None) -> dict[str, Any]:
    """Whether a row shares the computation, the device and the bits of the steps with the baseline."""
    bits = beside is not None and beside.status == SAME_BITS and base.kind == MEASURED
    same = beside.same if beside else True if row is base and row.kind == MEASURED else None
    return {
        "same_computation": same,
        "same_device": None if row is base else same_device(row, base),
        "same_steps": bits and row.framework == base.framework,
    }


def _baseline(timed: Sequence[_Timed], label: str | None) -> _Timed:
    able = [t for t in timed if t.speed is not None]
    if label is None:
        return (able or timed)[0]
    given = [t for t in timed if label in t.row.given]
    named = [t for t in timed if label in (t.row.label, *(r.name for r in t.row.repeats))]
    chosen = next(iter(given if len(given) == 1 else named), None)
    if chosen is not None and chosen.speed is None:
        raise RecipeError("baseline-no-speed", label=label, rows=[t.row.label for t in able] or ["none"])
    if chosen is not None:
        return chosen
    if given:
        raise RecipeError("baseline-several", label=label, n=len(given), rows=[t.row.label for t in given])
    labels = [t.row.label for t in timed]
    raise RecipeError("baseline-unknown", label=label, near=near(label, labels), rows=labels)


def _length(row: Row) -> int | None:
    """The examples of a row's whole run."""
    return None if row.steps is None or row.batch is None else row.steps * row.batch


def _metric(rows: Sequence[Row]) -> str | None:
    """The metric whose final value is shown: accuracy, if there is one."""
    seen = dict.fromkeys(k for row in rows for r in row.sound for k in r.metrics if k.startswith("eval/"))
    if "eval/accuracy" in seen or any(row.published and row.published.accuracy for row in rows):
        return "eval/accuracy"
    return next(iter(seen), None)


def _final(row: Row, base: Row, metric: str | None) -> dict[str, Any] | None:
    """The last value of the metric in each repeat, its spread, and its difference from the baseline's; by
    pairs if both have the same seeds."""
    mine, other = _finals(row, metric), _finals(base, metric)
    if not mine:
        return None
    values = [v for _, v in mine]
    s = Spread.of(values, metric or "")
    low, high = (None, None) if len(mine) < FEW else (s.low, s.high)
    apart = by_pairs = None
    if other and row is not base:
        seeds, others = ({s: v for s, v in finals if s is not None} for finals in (mine, other))
        by_pairs = len(mine) > 1 and seeds.keys() == others.keys() and len(seeds) == len(mine) == len(other)
        if by_pairs:
            apart = paired([seeds[s] for s in sorted(seeds)], [others[s] for s in sorted(seeds)])
        else:
            apart = difference(values, [v for _, v in other])
    return asdict(s) | {"values": values, "low": low, "high": high, "difference": apart, "by_pairs": by_pairs}


def _finals(row: Row, metric: str | None) -> list[tuple[int | None, float]]:
    if row.published is not None:
        return [(None, v) for v in row.published.accuracy]
    return [(r.seed, r.metrics[metric]) for r in row.sound if r.complete and metric and metric in r.metrics]


def _sections(row: Row) -> dict[str, float]:
    """Wall seconds by section: the geometric mean over repeats, or predicted by a plan."""
    if row.plan is not None:
        return numbers(mapping(row.plan, "seconds"))
    names = dict.fromkeys(name for r in row.sound for name in r.seconds)
    seconds = {name: [r.seconds[name] for r in row.sound if name in r.seconds] for name in names}
    middle = {True: statistics.geometric_mean, False: statistics.fmean}
    return {name: middle[min(values) > 0](values) for name, values in seconds.items()}


def _repeat(repeat: Repeat) -> dict[str, Any]:
    """The fields of a repeat that pictures need."""
    return {
        "name": repeat.name,
        "seed": repeat.seed,
        "speeds": thinned(repeat.speeds),
        "losses": thinned([(w.last, w.loss) for w in repeat.losses]),
        "diverged": repeat.diverged is not None,
        "warming_up": repeat.warming_up,
        "evaluations": thinned(repeat.evaluations),
    }


def thinned(points: Sequence[Any]) -> list[Any]:
    """At most `_POINTS` points, evenly spaced, including the last."""
    every = -(-len(points) // _POINTS) or 1
    return list(points[::-1][::every])[::-1]


def _relative(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Published ratios by their anchor, fastest first; they are compared only with each other."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        own = row.published
        if own is None or own.relative_low is None:
            continue
        low, high = own.relative_low, own.relative_high or own.relative_low
        stated = {name: getattr(own, name) for name in ("usd_per_hour", "price_note", "date", "note")}
        span = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        groups.setdefault(own.anchor, []).append(
            {"label": row.label, "source": row.source, "span": span, "low": low, "high": high, **stated}
        )
    return [
        {"anchor": anchor, "source": group[0]["source"], "rows": sorted(group, key=lambda r: -r["high"])}
        for anchor, group in groups.items()
    ]
