"""A study's story: one row a point with its spread, each seed, and their curves over each other."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ... import __version__
from ...engine.stored import metrics_of, number
from ...errors import RunError
from ...study.document import FILE, Point, read
from ...words.figures import counted
from .. import study_table as table
from .folder import RunFiles
from .pictures import ACROSS, NARROW, Strip, strip
from .schedule import settings
from .words import beside, command, figure, plain

SCHEMA = "chipwise.report/1"
COLOURS = 6  # of points, one after another
DRAWN = 6  # metrics


def study(folder: Path) -> dict[str, Any]:
    """The document of the study in `folder`. Raises `RunError` for a damaged study.json, or none."""
    found = read(folder)
    if found is None:
        raise RunError(
            f"{folder} is no study (no {FILE}): expected what chipwise train --seeds or sweep made."
        )
    metric = table.main_metric(found)
    stories = [_runs(folder, point) for point in found.points]
    first = next((files for story in stories for _, files in story if files is not None), None)
    points = []
    for point, row, story in zip(found.points, table.rows(found), stories, strict=True):
        of = next((files for _, files in story if files is not None), None)
        points.append(
            {
                **row.to_json(),
                "name": plain(row.name),
                "diverged": {str(seed): plain(when) for seed, when in row.diverged.items()},
                "values": {str(seed): value for seed, value in row.values.items()},
                "set": {plain(k): plain(v) for k, v in point.settings.items()},
                "batch": of and of.recipe.get("batch"),
                "replicas": of and of.recipe.get("replicas"),
                "runs": [run for run, _ in story],
            }
        )
    made = {
        "schema": SCHEMA,
        "chipwise": __version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "kind": "study",
        "run": plain(folder),
        "name": plain(found.recipe),
        "metric": metric and plain(metric),
        "points": points,
        "settings": settings(first.recipe, first.clock) if first is not None else [],
        "curves": _curves(stories),
        "notes": [plain(note) for note in table.notes(found)],
        "sources": [
            [
                "table",
                "study.json, which has each finished run's result; the interval is of 95 %, by Student's t",
            ],
            ["differences", "from the first point, by pairs of the same seed"],
            ["curves", "each run's metrics.jsonl"],
            ["settings", "recipe.json of the first run; the points change of it what the table says"],
        ],
    }
    return json.loads(json.dumps(made))  # tuples as lists


def _runs(folder: Path, point: Point) -> list[tuple[dict[str, Any], RunFiles | None]]:
    """Each run of a point: what study.json says of it, and its folder where that can be read."""
    made: list[tuple[dict[str, Any], RunFiles | None]] = []
    for seed, run in point.runs.items():
        try:
            files = RunFiles.read(folder / run.run)
        except RunError:  # not begun yet, or gone; the table has what was noted of it
            files = None
        running = files is not None and files.holder is not None
        state = (
            "diverged" if run.diverged else "finished" if run.done else "running" if running else "unfinished"
        )
        told = {
            "seed": seed,
            "run": plain(run.run),
            "state": state if files is not None or run.ended else "not begun",
            "steps": number(run.steps),
            "seconds": number(run.seconds),
            "fingerprint": run.fingerprint and plain(run.fingerprint),
            "command": command("chipwise", "report", str(folder / run.run)),
        }
        made.append((told, files))
    return made


def _curves(stories: list) -> dict[str, list[dict[str, Any]]]:
    """Metric to its lines: `point` (its place in the table), `seed`, and [step, value] pairs."""
    made: dict[str, list[dict[str, Any]]] = {}
    for place, story in enumerate(stories):
        for run, files in story:
            own: dict[str, list[list[float]]] = {}
            for row in files.rows if files is not None else []:
                for name, value in metrics_of(row).items():
                    own.setdefault(plain(name), []).append([row["step"], value])
            for name, line in own.items():
                made.setdefault(name, []).append({"point": place, "seed": run["seed"], "points": line})
    return made


# ---- the page


def panels(document: Mapping[str, Any], panel: Callable[..., dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Each metric over the steps, a thin line a seed in its point's colour. `panel` as in `page`."""
    names = sorted(
        document["curves"], key=lambda name: (name != document["metric"], not name.startswith("eval/"))
    )
    found = []
    for name in names[:DRAWN]:
        lines, told = [], set()
        for line in document["curves"][name]:
            place = line["point"]
            words = "" if place in told else document["points"][place]["name"]
            told.add(place)
            lines.append((words, f"seed{place % COLOURS}", [tuple(p) for p in line["points"]]))
        made = panel(f"{name} over steps", lines, log="loss" in name)
        if made is not None:
            found.append(made)
    return found


def strips(document: Mapping[str, Any]) -> list[tuple[str, Strip]]:
    """The spread of the main metric over seeds, in both sizes; empty where no run is done."""
    rows = [
        (p["name"], f"seed{place % COLOURS}", list(p["values"].values()), p["spread"])
        for place, p in enumerate(document["points"])
    ]
    sizes = (("wide", ACROSS), ("narrow", NARROW[0]))
    return [(size, made) for size, width in sizes if (made := strip(rows, width)) is not None]


# ---- the terminal


def text(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What to print, in order."""
    from .text import table as plain_table

    yield Text(f"{document['name']}: {title(document)}", style="bold")
    yield document["run"]
    yield ""
    yield Text(document["metric"] or "No run is done yet", style="bold underline")
    yield _points(document)
    for note in document["notes"]:
        yield Text(f"note: {note}", style="yellow")
    yield Text("\nThe runs", style="bold underline")
    for point in document["points"]:
        for run in point["runs"]:
            yield f"{run['state']:<11} {run['command']}"
    yield Text("\nWhere the figures come from", style="bold underline")
    yield plain_table([(what, f"{how}.") for what, how in document["sources"]], "dim")


def _points(document: Mapping[str, Any]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("setting", overflow="fold")
    for name in ("mean", "95 % interval"):
        made.add_column(name, justify="right", no_wrap=True)
    for name in ("each seed", "speed", "against the first"):
        made.add_column(name, overflow="fold")
    for point in document["points"]:
        spread, difference = point["spread"] or {}, point["difference"]
        known = spread.get("low") is not None
        interval = f"{figure(spread['low'])} to {figure(spread['high'])}" if known else "-"
        cells = [
            point["name"],
            figure(spread["mean"]) if spread else "-",
            interval,
            ", ".join(f"{seed}: {figure(value)}" for seed, value in point["values"].items()),
            speed(point) if point["examples_per_second"] else "-",
            " ".join(against(difference)) if difference is not None else "",
        ]
        made.add_row(*(Text(cell) for cell in cells))
    return made


def title(document: Mapping[str, Any]) -> str:
    """`2 settings, 3 seeds each`."""
    many = {len(point["runs"]) for point in document["points"]} or {0}
    seeds = counted(max(many), "seed") if len(many) == 1 else f"{min(many)} to {max(many)} seeds"
    return f"{counted(len(document['points']), 'setting')}, {seeds}{' each' * (len(document['points']) > 1)}"


def speed(point: Mapping[str, Any]) -> str:
    """`38,790 examples/s at batch 64, 8 replicas`."""
    return f"{point['examples_per_second']:,.0f} examples/s at {beside(point['batch'], point['replicas'])}"


def against(difference: Mapping[str, Any]) -> tuple[str, str]:
    """`+0.003 (-0.001 to +0.007)` and `no difference shown`."""
    value, low, high = (difference[name] for name in ("value", "low", "high"))
    return f"{value:+.2g}" + (f" ({low:+.2g} to {high:+.2g})" if low is not None else ""), difference[
        "verdict"
    ]
