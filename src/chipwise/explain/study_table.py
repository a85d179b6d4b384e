"""What a study found: a row a point with its spread, held against the first by pairs of a seed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from ..engine.stored import number
from ..errors import RecipeError, nearest
from ..study.document import Point, Study
from ..study.stats import CONFIDENCE, Difference, Spread, paired
from ..words.figures import printable

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
    diverged: dict[int, str]
    examples_per_second: float | None
    difference: Difference | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def main_metric(study: Study) -> str | None:
    """The metric by which points are judged unless one is named; `None` before the first run is done."""
    known = _metrics(study)
    return next((name for name in MAIN if name in known), None)


def rows(study: Study, metric: str | None = None) -> list[Row]:
    """One row a point, in the study's order. Raises `RecipeError` for a metric that no run has."""
    known = _metrics(study)
    if metric is None:
        metric = main_metric(study)
    elif known and metric not in known:
        raise RecipeError(
            f"No run of {study.folder} has the metric {metric}.{nearest(metric, known)} "
            f"Metrics: {', '.join(known)}."
        )
    values = [_values(point, metric) for point in study.points]
    return [
        Row(
            name=point.name,
            values=own,
            spread=Spread.of(list(own.values())) if own else None,
            diverged={seed: run.diverged for seed, run in point.runs.items() if run.diverged},
            examples_per_second=_speed(point),
            difference=_paired(own, values[0]) if i else None,
        )
        for i, (point, own) in enumerate(zip(study.points, values, strict=True))
    ]


def render(study: Study, metric: str | None = None) -> Table:
    """`rows` to be printed by rich."""
    metric = metric or main_metric(study)
    found = rows(study, metric)
    table = Table(box=None, pad_edge=False)
    table.add_column("setting", overflow="fold")
    table.add_column("n", justify="right")
    for title in (f"mean {metric}", "95 % interval", "deviation"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("each seed", overflow="fold")
    table.add_column("examples/s", justify="right", no_wrap=True)
    if len(found) > 1:
        table.add_column("against the first, by pairs", overflow="fold")
    for i, (point, row) in enumerate(zip(study.points, found, strict=True)):
        s = row.spread
        interval = f"{s.low:.5g} to {s.high:.5g}" if s and s.low is not None else "-"
        cells = [row.name, str(len(row.values)), f"{s.mean:.5g}" if s else "-", interval]
        cells.append(f"{s.deviation:.2g}" if s and s.deviation is not None else "-")
        cells.append(", ".join(_each(row, seed) for seed in point.runs))
        cells.append(f"{row.examples_per_second:,.0f}" if row.examples_per_second else "-")
        if len(found) > 1:
            cells.append(_against(row.difference) if i else "")
        table.add_row(*(Text(printable(cell)) for cell in cells))  # text of the recipe's is not markup
    return table


def notes(study: Study, metric: str | None = None) -> list[str]:
    """What must be said beside the table, one sentence or two each."""
    found = rows(study, metric)
    said = [
        printable(f"{row.name}, seed {seed} diverged: {when}.")
        for row in found
        for seed, when in row.diverged.items()
    ]
    least = min((len(row.values) for row in found if row.values), default=0)
    if 0 < least < _FEW:
        said.append(
            f"An interval from 2 seeds is 12.7 standard errors to either side, and one seed has none: "
            f"take --seeds {_FEW} or more before you believe a difference."
        )
    compared = [row for row in found if row.difference is not None and row.difference.low is not None]
    if len(compared) >= _MANY:
        chance = 1 - CONFIDENCE ** len(compared)
        said.append(
            f"{len(compared)} comparisons of 95 % each: with no difference at all up to {chance:.0%} of "
            f"such tables show one somewhere. Train the best again with new seeds."
        )
    return said


def _metrics(study: Study) -> list[str]:
    """Names of the metrics that are single numbers, in the order of the runs' results."""
    of = [run.metrics for point in study.points for run in point.runs.values() if run.done]
    return list(dict.fromkeys(name for metrics in of for name, v in metrics.items() if number(v) is not None))


def _values(point: Point, metric: str | None) -> dict[int, float]:
    if metric is None:
        return {}
    found = {seed: number(run.metrics.get(metric)) for seed, run in point.runs.items() if run.done}
    return {seed: value for seed, value in found.items() if value is not None}


def _speed(point: Point) -> float | None:
    speeds = [run.examples_per_second for run in point.runs.values() if run.examples_per_second]
    return statistics.fmean(speeds) if speeds else None


def _paired(own: dict[int, float], first: dict[int, float]) -> Difference | None:
    shared: Sequence[int] = [seed for seed in own if seed in first]
    return paired([own[s] for s in shared], [first[s] for s in shared]) if shared else None


def _each(row: Row, seed: int) -> str:
    if seed in row.diverged:
        return f"{seed}: diverged"
    return f"{seed}: {row.values[seed]:.5g}" if seed in row.values else f"{seed}: -"


def _against(difference: Difference | None) -> str:
    if difference is None:
        return "no seed in common"
    if difference.low is None or difference.high is None:
        return f"{difference.value:+.2g} ({difference.verdict})"
    return f"{difference.value:+.2g} ({difference.low:+.2g} to {difference.high:+.2g}): {difference.verdict}"
