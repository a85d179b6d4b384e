"""A study as a table: a row a point with its spread, held against the first by pairs of a seed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ..errors import RecipeError, near
from ..study.stats import CONFIDENCE, Difference, Spread, paired
from ..study.study_file import Point, Study
from ..words.facts import Fact, fact, plain
from ..words.figures import known
from .row import divergence
from .terminal import table

MAIN = ("eval/accuracy", "eval/loss", "train/loss")  # the first of these that a study has
_FEW = 3  # seeds, from which on an interval says something: of 2 it is 12.7 deviations of the mean wide
_MANY = 3  # comparisons, from which on chance is worth a word


@dataclass(frozen=True)
class PointRow:
    """A point of a study.

    *Fields:* `seeds` of its runs; `values`: the metric by seed; `spread` of them, `None` when there are none;
    `diverged`: by seed, when; `examples_per_second` (global): mean over its runs; `difference` from the first
    point, by pairs of the same seed, `None` for the first itself and where no seed is shared.
    """

    name: str
    seeds: list[int]
    values: dict[int, float]
    spread: Spread | None
    diverged: dict[int, Any]
    examples_per_second: float | None
    difference: Difference | None

    def to_json(self) -> dict[str, Any]:
        return plain(self)


def main_metric(study: Study) -> str | None:
    """The metric by which points are judged unless one is named; `None` before the first run is done."""
    names = _metrics(study)
    return next((name for name in MAIN if name in names), None)


def rows(study: Study, metric: str | None = None) -> list[PointRow]:
    """One row a point, in the study's order. Raises `RecipeError` for a metric that no run has."""
    names = _metrics(study)
    metric = metric or main_metric(study)
    if names and metric is not None and metric not in names:
        facts = {"metric": metric, "near": near(metric, names), "metrics": names}
        raise RecipeError(
            "study-no-metric",
            "No run of {folder} has the metric {metric:plain}.{near:near} Metrics: {metrics:list}.",
            folder=study.folder, **facts,
        )  # fmt: skip
    values = [_values(point, metric) for point in study.points]
    study_rows: list[PointRow] = []
    for point, own in zip(study.points, values, strict=True):
        speeds = [run.examples_per_second for run in point.runs.values() if run.examples_per_second]
        shared = [seed for seed in own if seed in values[0]] if study_rows else []
        pairs = [own[seed] for seed in shared], [values[0][seed] for seed in shared]
        made = PointRow(
            name=point.name, seeds=list(point.runs), values=own,
            spread=Spread.of(list(own.values()), metric or "") if own else None,
            diverged={seed: run.diverged for seed, run in point.runs.items() if run.diverged},
            examples_per_second=statistics.fmean(speeds) if speeds else None,
            difference=paired(*pairs) if shared else None,
        )  # fmt: skip
        study_rows.append(made)
    return study_rows


def render(points: Sequence[Mapping[str, Any]], metric: str | None) -> Table:
    """`rows` as JSON values, to be printed by rich."""
    several, cells = len(points) > 1, []
    for i, point in enumerate(points):
        spread, speed, values = point["spread"], point["examples_per_second"], point["values"]
        each = {s: f"{values[s]:.5g}" if s in values else "-" for s in map(str, point["seeds"])}
        each |= dict.fromkeys(point["diverged"], "diverged")
        within = spread and spread["low"] is not None
        apart = ": ".join(against(point["difference"])) if point["difference"] else "no seed in common"
        row = [
            point["name"], len(values), f"{spread['mean']:.5g}" if spread else "-",
            f"{spread['low']:.5g} to {spread['high']:.5g}" if within else "-",
            f"{spread['deviation']:.2g}" if within else "-",
            ", ".join(f"{seed}: {value}" for seed, value in each.items()), f"{speed:,.0f}" if speed else "-",
        ]  # fmt: skip
        cells.append([*row, *([apart if i else ""] if several else [])])
    last = ["against the first, by pairs"] * several
    numbers = ["n", f"mean {metric}", "95 % interval", "deviation"]
    words = ("setting", "each seed", *last)
    return table(["setting", *numbers, "each seed", "examples/s", *last], cells, left=words, fold=words)


def against(difference: Mapping[str, Any]) -> tuple[str, str]:
    """`+0.003 (-0.001 to +0.007)` and `no difference shown`."""
    value, low, high = (difference[name] for name in ("value", "low", "high"))
    interval = f" ({low:+.2g} to {high:+.2g})" if low is not None else ""
    return f"{value:+.2g}{interval}", str(fact(difference["verdict"]))


def notes(study: Study, metric: str | None = None) -> list[Fact]:
    """What must be said beside the table."""
    points = rows(study, metric)
    beside = [
        fact("seed-diverged", point=row.name, seed=seed, when=str(divergence(when) or ""))
        for row in points
        for seed, when in row.diverged.items()
    ]
    if 0 < min((len(row.values) for row in points if row.values), default=0) < _FEW:
        beside.append(fact("few-seeds", enough=_FEW))
    compared = sum(row.difference is not None and row.difference.low is not None for row in points)
    if compared >= _MANY:
        beside.append(fact("many-comparisons", n=compared, chance=1 - CONFIDENCE**compared))
    return beside


def _metrics(study: Study) -> list[str]:
    """Names of the metrics that are single numbers, in the order of the runs' results."""
    of = [run.metrics for point in study.points for run in point.runs.values() if run.done]
    return list(dict.fromkeys(name for metrics in of for name, value in metrics.items() if known(value)))


def _values(point: Point, metric: str | None) -> dict[int, float]:
    values = {seed: run.metrics.get(metric or "") for seed, run in point.runs.items() if run.done}
    return {seed: value for seed, value in values.items() if known(value)}
