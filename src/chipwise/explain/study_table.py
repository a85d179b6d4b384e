"""What a study found: a row a point with its spread, held against the first by pairs of a seed."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from ..errors import RecipeError, near
from ..study.document import Point, Study
from ..study.stats import CONFIDENCE, Difference, Spread, paired
from ..words.facts import Fact, fact
from ..words.figures import known, printable
from .rows import divergence

MAIN = ("eval/accuracy", "eval/loss", "train/loss")  # the first of these that a study has
_FEW = 3  # seeds, from which on an interval says something: of 2 it is 12.7 deviations of the mean wide
_MANY = 3  # comparisons, from which on chance is worth a word


@dataclass(frozen=True)
class Row:
    """A point of a study.

    *Fields:* `values`: the metric by seed; `spread` of them, `None` when there are none; `diverged`: by
    seed, when; `examples_per_second` (global): mean over its runs; `difference` from the first point, by
    pairs of the same seed, `None` for the first itself and where no seed is shared.
    """

    name: str
    values: dict[int, float]
    spread: Spread | None
    diverged: dict[int, Any]
    examples_per_second: float | None
    difference: Difference | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def main_metric(study: Study) -> str | None:
    """The metric by which points are judged unless one is named; `None` before the first run is done."""
    names = _metrics(study)
    return next((name for name in MAIN if name in names), None)


def rows(study: Study, metric: str | None = None) -> list[Row]:
    """One row a point, in the study's order. Raises `RecipeError` for a metric that no run has."""
    names = _metrics(study)
    metric = metric or main_metric(study)
    if names and metric is not None and metric not in names:
        facts = {"metric": metric, "near": near(metric, names), "metrics": names}
        raise RecipeError("study-no-metric", folder=study.folder, **facts)
    values = [_values(point, metric) for point in study.points]
    study_rows: list[Row] = []
    for point, own in zip(study.points, values, strict=True):
        speeds = [run.examples_per_second for run in point.runs.values() if run.examples_per_second]
        shared = [seed for seed in own if seed in values[0]] if study_rows else []
        pairs = [own[seed] for seed in shared], [values[0][seed] for seed in shared]
        study_rows.append(
            Row(
                name=point.name,
                values=own,
                spread=Spread.of(list(own.values())) if own else None,
                diverged={seed: run.diverged for seed, run in point.runs.items() if run.diverged},
                examples_per_second=statistics.fmean(speeds) if speeds else None,
                difference=paired(*pairs) if shared else None,
            )
        )
    return study_rows


def render(study: Study, metric: str | None = None) -> Table:
    """`rows` to be printed by rich."""
    metric = metric or main_metric(study)
    points = rows(study, metric)
    table = Table(box=None, pad_edge=False)
    table.add_column("setting", overflow="fold")
    table.add_column("n", justify="right")
    for title in (f"mean {metric}", "95 % interval", "deviation"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("each seed", overflow="fold")
    table.add_column("examples/s", justify="right", no_wrap=True)
    if len(points) > 1:
        table.add_column("against the first, by pairs", overflow="fold")
    for i, (point, row) in enumerate(zip(study.points, points, strict=True)):
        s, speed = row.spread, row.examples_per_second
        cells = [
            row.name,
            str(len(row.values)),
            f"{s.mean:.5g}" if s else "-",
            f"{s.low:.5g} to {s.high:.5g}" if s and s.low is not None else "-",
            f"{s.deviation:.2g}" if s and s.deviation is not None else "-",
            ", ".join(_each(row, seed) for seed in point.runs),
            f"{speed:,.0f}" if speed else "-",
            *([_against(row.difference) if i else ""] if len(points) > 1 else []),
        ]
        table.add_row(*(Text(printable(cell)) for cell in cells))  # text of the recipe's is not markup
    return table


def notes(study: Study, metric: str | None = None) -> list[Fact]:
    """What must be said beside the table."""
    points = rows(study, metric)
    beside = [
        fact("seed-diverged", point=row.name, seed=seed, when=str(divergence(when)))
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


def _each(row: Row, seed: int) -> str:
    value = "diverged" if seed in row.diverged else f"{row.values[seed]:.5g}" if seed in row.values else "-"
    return f"{seed}: {value}"


def _against(difference: Difference | None) -> str:
    if difference is None:
        return "no seed in common"
    verdict = fact(difference.verdict)
    if difference.low is None or difference.high is None:
        return f"{difference.value:+.2g} ({verdict})"
    return f"{difference.value:+.2g} ({difference.low:+.2g} to {difference.high:+.2g}): {verdict}"
