"""A comparison as one JSON document: what `chipwise compare --json` prints, and the table and the page show.

docs/compare.md describes every field. A field may be added under the same number; one that changes its
meaning or goes raises it.
"""

from __future__ import annotations

import datetime
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ... import __version__
from ...chips.prices import Price
from ...engine.stored import number
from ...errors import RecipeError, nearest
from ...study.stats import Spread, difference, paired
from ...words.figures import listed
from .agreement import SAME_BITS, Agreement, agreement
from .differences import check_recipe, differing, same_device
from .money import costs
from .row import MEASURED, PREDICTED, PUBLISHED, Repeat, Row
from .sentences import sentences
from .speed import FEW, Figure, examples_per_second, ratio, wall_seconds, within_one_run
from .target import Target, TimeTo, times_to

SCHEMA = "chipwise.comparison/1"
_POINTS = 400  # of a curve, at most
_SHARE = re.compile(r"accuracy|f1|precision|recall|exact_match|hamming|top_?\d")  # metrics from 0 to 1


def document(
    rows: Sequence[Row],
    *,
    prices: Sequence[Price],
    baseline: str | None = None,
    target: Target | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The whole comparison as plain JSON values.

    *Arguments:* `prices`, a table of `chips.prices`; `baseline`, a row's label, by default the first with a
    speed; `target`, a value of a metric to be timed; `notes`, what to say of arguments that gave no row.

    Raises `RecipeError` for fewer than two rows, rows of several recipes, a baseline that is no row, and a
    target that no row ever measured.
    """
    if len(rows) < 2:
        alone = " ".join((*notes, rows[0].label if rows else "Nothing"))
        more = "" if notes else ", or published"
        raise RecipeError(f"{alone} is alone: name a second record, run, study or plan{more}.")
    check_recipe(rows)
    base = _baseline(rows, baseline)
    speeds = [examples_per_second(row) for row in rows]
    walls = [wall_seconds(row) for row in rows]
    times = times_to(rows, target) if target is not None else [None] * len(rows)
    at = rows.index(base)
    one_batch = len({row.batch for row, speed in zip(rows, speeds, strict=True) if speed is not None}) == 1
    agreements = _agreements(rows, base)
    same = {a.label: a.same for a in agreements}
    bits = {a.label for a in agreements if a.status == SAME_BITS}
    metric = _metric(rows)
    made_rows = []
    for row, speed, wall, time in zip(rows, speeds, walls, times, strict=True):
        money, no_price = costs(row, prices, speed, wall, time)
        made_rows.append(
            _stated(row)
            | {
                "examples_per_second": speed and asdict(speed),
                "ratio": _ratio(row, base, speed, speeds[at]),
                "steps_per_second": speed.value / row.batch if speed and row.batch and one_batch else None,
                "same_computation": True if row is base and row.kind == MEASURED else same.get(row.label),
                "same_device": None if row is base else same_device(row, base),
                "same_steps": row.label in bits and base.kind == MEASURED and row.framework == base.framework,
                "within_one_run": within_one_run(row),
                "wall_seconds": wall and asdict(wall),
                "wall_ratio": _ratio(row, base, wall, walls[at]) if _length(row) == _length(base) else None,
                "seconds": _sections(row),
                "target": time and asdict(time),
                "target_ratio": _target_ratio(row, base, time, times[at]),
                "costs": [m.to_json() for m in money],
                "no_price": no_price,
                "metric": _final(row, base, metric),
                "repeats": [_repeat(r) for r in row.repeats],
            }
        )
    recipe = next((r for r in rows if r.settings), base)
    made: dict[str, Any] = {
        "schema": SCHEMA,
        "chipwise": __version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "recipe": {
            "name": base.recipe,
            "parameters": next((r.parameters for r in rows if r.parameters is not None), None),
            "columns": dict(recipe.columns),
        },
        "baseline": base.label,
        "target": None if target is None else {**asdict(target), "words": str(target)},
        "metric": metric,
        "notes": list(notes),
        "labels": {k: [r.label for r in rows if r.kind == k] for k in (MEASURED, PREDICTED, PUBLISHED)},
        "differing": [asdict(d) for d in differing(rows)],
        "agreement": [asdict(a) for a in agreements],
        "rows": made_rows,
        "relative": _relative(rows),
    }
    made = json.loads(json.dumps(made))  # tuples as lists
    return made | {"sentences": sentences(made)}


def _stated(row: Row) -> dict[str, Any]:
    """What a row says of itself."""
    return {
        "label": row.label,
        "kind": row.kind,
        "form": row.form,
        "source": row.source,
        "created": row.created,
        "batch": row.batch,
        "replicas": row.replicas,
        "precision": row.precision,
        "exact": row.exact,
        "data": row.data,
        "framework": row.framework,
        "device": row.where,
        "machine": row.machine,
        "versions": dict(row.versions),
        "similar": row.published.similar if row.published else "",
        "steps": row.steps,
        "diverged": _diverged(row),
        "notes": list(row.notes),
    }


def _diverged(row: Row) -> dict[str, Any] | None:
    """How many of its runs did, of how many, and when."""
    found = [" ".join(r.diverged.split())[:160] for r in row.repeats if r.diverged]
    if not found:
        return None
    when = dict.fromkeys(said[at:] if (at := said.find("between steps")) >= 0 else said for said in found)
    words = f"{len(found)} of {len(row.repeats)} diverged {', '.join(when)}"
    return {"runs": len(found), "of": len(row.repeats), "words": words}


def _ratio(row: Row, base: Row, mine: Figure | None, other: Figure | None) -> dict[str, Any] | None:
    """How many times the baseline's; `None` for the baseline itself, and where either is not known."""
    return None if row is base or mine is None or other is None else asdict(ratio(mine, other))


def _target_ratio(row: Row, base: Row, mine: TimeTo | None, other: TimeTo | None) -> dict[str, Any] | None:
    """Of training alone, which every row has."""
    if mine is None or other is None:
        return None
    return _ratio(row, base, mine.training, other.training)


def _baseline(rows: Sequence[Row], label: str | None) -> Row:
    able = [row for row in rows if examples_per_second(row) is not None]
    if label is None:
        return (able or rows)[0]
    for row in rows:
        meant_alone = label in row.given and sum(label in r.given for r in rows) == 1
        if meant_alone or label in (row.label, *(r.name for r in row.repeats)):
            if row not in able:
                raise RecipeError(
                    f"--baseline {label}: it has no speed in examples/s. Rows that have one: "
                    f"{', '.join(r.label for r in able) or 'none'}."
                )
            return row
    meant = [row for row in rows if label in row.given]
    if len(meant) > 1:
        raise RecipeError(
            f"--baseline {label}: it became {len(meant)} rows: {listed([r.label for r in meant])}. Name one."
        )
    labels = [row.label for row in rows]
    raise RecipeError(f"--baseline {label}: no such row.{nearest(label, labels)} Rows: {', '.join(labels)}.")


def _agreements(rows: Sequence[Row], base: Row) -> list[Agreement]:
    """Of every measured row with the baseline, or with the first measured one where that is not."""
    measured = [row for row in rows if row.kind == MEASURED]
    first = base if base.kind == MEASURED else next(iter(measured), None)
    return [agreement(row, first) for row in measured if first is not None and row is not first]


def _length(row: Row) -> int | None:
    """Examples that its whole run trains on."""
    return None if row.steps is None or row.batch is None else row.steps * row.batch


def _metric(rows: Sequence[Row]) -> str | None:
    """The metric whose final value is shown: accuracy where there is one."""
    seen = dict.fromkeys(k for row in rows for r in row.sound for k in r.metrics if k.startswith("eval/"))
    if "eval/accuracy" in seen or any(row.published and row.published.accuracy for row in rows):
        return "eval/accuracy"
    return next(iter(seen), None)


def _final(row: Row, base: Row, metric: str | None) -> dict[str, Any] | None:
    """The last value of the metric in each repeat, its spread, and its difference to the baseline's: by pairs
    where both have the same seeds."""
    if metric is None:
        return None
    mine, other = _finals(row, metric), _finals(base, metric)
    if not mine:
        return None
    made: dict[str, Any] = {"values": [v for _, v in mine], **asdict(Spread.of([v for _, v in mine]))}
    if len(mine) < FEW:
        made["low"] = made["high"] = None
    elif _SHARE.search(metric) and all(0 <= v <= 1 for v in made["values"]):
        made |= {"low": max(made["low"], 0.0), "high": min(made["high"], 1.0)}  # nothing is beyond
    made["difference"] = made["by_pairs"] = None
    if other and row is not base:
        seeds = {s: v for s, v in mine if s is not None}
        others = {s: v for s, v in other if s is not None}
        by_pairs = len(mine) > 1 and seeds.keys() == others.keys() and len(seeds) == len(mine) == len(other)
        if by_pairs:
            found = paired([seeds[s] for s in sorted(seeds)], [others[s] for s in sorted(seeds)])
        else:
            found = difference([v for _, v in mine], [v for _, v in other])
        made |= {"difference": asdict(found), "by_pairs": by_pairs}
    return made


def _finals(row: Row, metric: str) -> list[tuple[int | None, float]]:
    if row.published is not None:
        return [(None, v) for v in row.published.accuracy]
    return [(r.seed, r.metrics[metric]) for r in row.sound if r.complete and metric in r.metrics]


def _sections(row: Row) -> dict[str, float]:
    """Wall seconds by section, as the total over repeats: the geometric mean. Predicted ones of a plan."""
    if row.plan is not None:
        found = row.plan.get("seconds")
        known = found.items() if isinstance(found, dict) else ()
        return {k: float(seconds) for k, v in known if (seconds := number(v)) is not None}
    names = dict.fromkeys(name for r in row.sound for name in r.seconds)
    return {name: _middle([r.seconds[name] for r in row.sound if name in r.seconds]) for name in names}


def _middle(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values) if min(values) > 0 else statistics.fmean(values)


def _repeat(repeat: Repeat) -> dict[str, Any]:
    """What the pictures draw of it."""
    return {
        "name": repeat.name,
        "seed": repeat.seed,
        "speeds": thinned(repeat.speeds),
        "losses": thinned([(w.last, w.loss) for w in repeat.losses]),
        "diverged": bool(repeat.diverged),
        "warming_up": repeat.warming_up,
        "evaluations": [dict(e) for e in thinned(repeat.evaluations)],
    }


def thinned(points: Sequence[Any]) -> list[Any]:
    """At most `_POINTS` of them, evenly, the last one included."""
    every = -(-len(points) // _POINTS) or 1
    return list(points[::-1][::every])[::-1]


def _relative(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Published ratios by their anchor: with one another, and with nothing else."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.published is not None and row.published.relative_low is not None:
            groups.setdefault(row.published.anchor, []).append(row)
    return [
        {
            "anchor": anchor,
            "source": members[0].source,
            "rows": [
                {
                    "label": row.label,
                    "span": _span(row.published.relative_low, row.published.relative_high),
                    "low": row.published.relative_low,
                    "high": row.published.relative_high,
                    "usd_per_hour": row.published.usd_per_hour,
                    "price_note": row.published.price_note,
                    "date": row.published.date,
                    "note": row.published.note,
                }
                for row in sorted(members, key=_relative_speed, reverse=True)
                if row.published is not None
            ],
        }
        for anchor, members in groups.items()
    ]


def _relative_speed(row: Row) -> float:
    return (row.published.relative_high if row.published else None) or 0.0


def _span(low: float | None, high: float | None) -> str:
    """`50`, `8 to 9`."""
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
