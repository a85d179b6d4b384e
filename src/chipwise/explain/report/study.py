"""A study's story: one row a point with its spread, each seed, and their curves over each other."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from ... import __version__
from ...engine.stored import StoredRun, metrics_of, number, read_run
from ...errors import RunError
from ...study.document import FILE, Point, read
from ...words.facts import fact, say
from ...words.figures import one_line
from .. import study_table as table
from ..rows import divergence
from .settings import command, settings

SCHEMA = "chipwise.report/2"
SOURCES = ("source-study-table", "source-study-differences", "source-study-curves", "source-study-settings")


def study(folder: Path) -> dict[str, Any]:
    """The document of the study in `folder`. Raises `RunError` for a damaged study.json, or none."""
    stored = read(folder)
    if stored is None:
        raise RunError("study-expected", folder=str(folder), file=FILE)
    metric = table.main_metric(stored)
    stories = [_runs(folder, point) for point in stored.points]
    first = next((files for story in stories for _, files in story if files is not None), None)
    points = []
    for point, row, story in zip(stored.points, table.rows(stored), stories, strict=True):
        of = next((files for _, files in story if files is not None), None)
        points.append(
            {
                **row.to_json(),
                "name": one_line(row.name),
                "diverged": {str(seed): str(divergence(when)) for seed, when in row.diverged.items()},
                "values": {str(seed): value for seed, value in row.values.items()},
                "set": {one_line(k): one_line(v) for k, v in point.settings.items()},
                "batch": of and of.recipe.get("batch"),
                "replicas": of and of.recipe.get("replicas"),
                "runs": [run for run, _ in story],
            }
        )
    document = {
        "schema": SCHEMA,
        "chipwise": __version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "kind": "study",
        "run": one_line(folder),
        "name": one_line(stored.recipe),
        "metric": metric and one_line(metric),
        "points": points,
        "settings": settings(first.recipe, first.clock) if first is not None else [],
        "curves": _curves(stories),
        "notes": [note.json() | {"text": one_line(note)} for note in table.notes(stored)],
        "sources": [one.json() | {"about": say(one, "about")} for one in map(fact, SOURCES)],
    }
    return json.loads(json.dumps(document))  # tuples as lists


def _runs(folder: Path, point: Point) -> list[tuple[dict[str, Any], StoredRun | None]]:
    """Each run of a point: what study.json says of it, and its folder where that can be read."""
    runs: list[tuple[dict[str, Any], StoredRun | None]] = []
    for seed, run in point.runs.items():
        try:
            files = read_run(folder / run.run)
        except RunError:  # not begun yet, or gone; the table has what was noted of it
            files = None
        running = files is not None and files.running
        state = (
            "diverged" if run.diverged else "finished" if run.done else "running" if running else "unfinished"
        )
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


def _curves(stories: list) -> dict[str, list[dict[str, Any]]]:
    """Metric to its lines: `point` (its place in the table), `seed`, and [step, value] pairs."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for place, story in enumerate(stories):
        for run, files in story:
            own: dict[str, list[list[float]]] = {}
            for row in files.rows if files is not None else []:
                for name, value in metrics_of(row).items():
                    own.setdefault(one_line(name), []).append([row["step"], value])
            for name, line in own.items():
                curves.setdefault(name, []).append({"point": place, "seed": run["seed"], "points": line})
    return curves
