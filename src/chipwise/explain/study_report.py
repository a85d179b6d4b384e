"""A study: a row a point with its spread, held against the first by pairs of a seed, as a table and as the
document of its report, with each run and their curves over each other."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from .. import __version__
from ..engine.stored import StoredRun, metrics_of, number, read_run
from ..errors import RecipeError, RunError, near
from ..study.stats import CONFIDENCE, Difference, Spread, paired
from ..study.study_file import FILE, Point, Study, read
from ..words.facts import Fact, fact, plain, say
from ..words.figures import known, one_line
from .report.stored_settings import command, settings
from .row import divergence
from .terminal import table

SCHEMA = "chipwise.report/4"
SOURCES = ("source-study-table", "source-study-differences", "source-study-curves", "source-study-settings")
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


# ---- the report


def document(folder: Path) -> dict[str, Any]:
    """The document of the study in `folder`. Raises `RunError` for a damaged study.json, or none."""
    stored = read(folder)
    if stored is None:
        raise RunError(
            "study-expected",
            "{folder} is not a study (no {file}). Name a folder that train --seeds or sweep made.",
            folder=str(folder), file=FILE,
        )  # fmt: skip
    metric = main_metric(stored)
    folders = [_runs(folder, point) for point in stored.points]
    first = next((files for runs in folders for _, files in runs if files is not None), None)
    points = []
    for point, row, runs in zip(stored.points, rows(stored), folders, strict=True):
        of = next((files for _, files in runs if files is not None), None)
        points.append(
            {
                **row.to_json(),
                "name": one_line(row.name),
                "diverged": {str(seed): str(divergence(when) or "") for seed, when in row.diverged.items()},
                "set": {one_line(k): one_line(v) for k, v in point.settings.items()},
                "batch": of and of.recipe.get("batch"),
                "replicas": of and of.recipe.get("replicas"),
                "runs": [run for run, _ in runs],
            }
        )
    answer = {
        "schema": SCHEMA,
        "chipwise": __version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "kind": "study",
        "run": one_line(folder),
        "name": one_line(stored.recipe),
        "metric": metric and one_line(metric),
        "points": points,
        "settings": settings(first.recipe, first.clock) if first is not None else [],
        "curves": _curves(folders),
        "notes": [note.json() | {"text": one_line(note)} for note in notes(stored)],
        "sources": [one.json() | {"about": say(one, "about")} for one in map(fact, SOURCES)],
    }
    return json.loads(json.dumps(answer))  # tuples as lists


def _runs(folder: Path, point: Point) -> list[tuple[dict[str, Any], StoredRun | None]]:
    """Each run of a point: what study.json says of it, and its folder where that can be read."""
    runs: list[tuple[dict[str, Any], StoredRun | None]] = []
    for seed, run in point.runs.items():
        try:
            files = read_run(folder / run.run)
        except RunError:  # not begun yet, or gone; the table has what was noted of it
            files = None
        ended = "diverged" if run.diverged else "finished" if run.done else "unfinished"
        state = "running" if ended == "unfinished" and files is not None and files.running else ended
        about = {
            "seed": seed,
            "run": one_line(run.run),
            "state": state if files is not None or run.ended else "not begun",
            "steps": number(run.steps),
            "seconds": number(run.seconds),
            "fingerprint": run.fingerprint and one_line(run.fingerprint),
            "command": command("chipwise", "report", str(folder / run.run)),
        }
        runs.append((about, files))
    return runs


def _curves(folders: list) -> dict[str, list[dict[str, Any]]]:
    """Metric to its lines: `point` (its place in the table), `seed`, and [step, value] pairs."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for place, runs in enumerate(folders):
        for run, files in runs:
            own: dict[str, list[list[float]]] = {}
            for row in files.rows if files is not None else []:
                for name, value in metrics_of(row).items():
                    own.setdefault(one_line(name), []).append([row["step"], value])
            for name, line in own.items():
                curves.setdefault(name, []).append({"point": place, "seed": run["seed"], "points": line})
    return curves
