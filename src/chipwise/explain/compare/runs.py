"""Run folders and studies as rows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...engine.run_folder import stored_recipe
from ...engine.stored import metrics_of, number, read_result, read_rows
from ...errors import DataError, RecipeError, RunError
from ...machine.fingerprint import stated as machine_of
from ...study.document import read as read_study
from ...words.figures import counted
from .identity import identity
from .row import MEASURED, Repeat, Row, Window

_ROUNDING = 0.01  # seconds

_LONG = 60  # characters: a label of more settings is no name


def run_row(folder: Path, diverged: str | None = None) -> Row:
    """The row of one run folder. `diverged`: when, as its study says; its last row says so too.

    Raises `RunError` when it is none, is damaged, or has no metrics yet.
    """
    stored = stored_recipe(folder)
    rows, damaged = read_rows(folder)
    if rows and isinstance(rows[-1].get("diverged"), str):
        diverged = rows[-1]["diverged"] or diverged
    if not rows and not diverged:
        raise RunError(
            f"{folder} has no metrics yet (metrics.jsonl is missing or empty): train on with --run {folder}."
        )
    made, wrong = read_result(folder)
    if wrong:
        raise RunError(
            f"{folder / 'result.json'} is damaged ({wrong}): delete it and train on with --run {folder}, "
            f"which writes it again."
        )
    result = made or {}
    known = identity(stored, str(folder))
    devices = result.get("devices") if isinstance(result.get("devices"), Mapping) else {}
    assert isinstance(devices, Mapping)
    notes = []
    if diverged:
        notes.append(_diverged(diverged))
    elif not result:
        done = rows[-1]["step"]
        notes.append(
            f"unfinished: {done:,} steps done, no result.json, so its device and wall time are unknown"
        )
    if damaged:
        notes.append(f"{counted(len(damaged), 'damaged line')} of metrics.jsonl left out")
    source = stored.get("source")
    made_up = isinstance(source, Mapping) and bool(source.get("synthetic"))
    if made_up:  # the data is a field of its own
        known["recipe"] = known["recipe"].removesuffix("-synthetic")
    parameters = devices.get("parameters")
    title, versions = machine_of(result.get("machine"))
    return Row(
        label=folder.name or str(folder),
        kind=MEASURED,
        form="run",
        source=f"run folder {folder}",
        framework="chipwise",
        data=("synthetic" if made_up else "real") if isinstance(source, Mapping) else None,
        exact=devices["exact"] if isinstance(devices.get("exact"), bool) else None,
        parameters=parameters if isinstance(parameters, int) else None,
        device=devices["kind"] if isinstance(devices.get("kind"), str) else None,
        devices=devices["count"] if isinstance(devices.get("count"), int) else None,
        simulated=devices.get("simulated") is True,
        machine=title,
        versions=versions,
        repeats=(_repeat(folder, stored, rows, result, diverged or ""),),
        notes=tuple(notes),
        **known,
    )


def study_rows(folder: Path) -> list[Row]:
    """A row a point of a study folder, with its seeds as repeats.

    Raises `RunError` when study.json is damaged, `DataError` when no run of it has metrics yet.
    """
    study = read_study(folder)
    points = [(p.settings, list(p.runs.values())) for p in study.points] if study else []
    rows = []
    varied = {k for s, _ in points for k in s if len({str(other.get(k)) for other, _ in points}) > 1}
    for settings, runs in points:
        label = ", ".join(f"{k}={v}" for k, v in settings.items() if k in varied) or folder.name
        found = {folder / run.run: run.diverged for run in runs}
        rows += _together(found, label, f"study {folder}, {label}")
    if not rows:
        raise DataError(f"{folder} is a study of which no run has metrics yet: run chipwise sweep on.")
    return rows


def folder_of_runs(folder: Path, runs: Sequence[Path]) -> list[Row]:
    """A row for runs that differ in the seed alone, of a folder that holds runs.

    Raises `RecipeError` for runs of several recipes, `RunError` when none has metrics yet.
    """
    groups: dict[str, list[Path]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run in runs:
        stored = stored_recipe(run)
        shared = {k: v for k, v in stored.items() if k not in ("seed", "source")}
        key = json.dumps(shared, sort_keys=True)
        groups.setdefault(key, []).append(run)
        settings[key] = identity(shared, str(run))
    recipes = {settings[key]["recipe"]: members[0] for key, members in reversed(groups.items())}
    if len(recipes) > 1:
        told = ", ".join(f"{run.name} is of {name}" for name, run in recipes.items())
        raise RecipeError(
            f"{folder} holds runs of several recipes ({told}): their speeds say nothing about each other. "
            f"Name the run folders of one of them."
        )
    said = {
        key: {k: s[k] for k in ("batch", "replicas", "precision")} | s["settings"]
        for key, s in settings.items()
    }
    names = [
        k
        for k in dict.fromkeys(itertools.chain(*said.values()))
        if len({str(s.get(k)) for s in said.values()}) > 1
    ]
    rows = []
    for key, members in groups.items():
        label = ", ".join(f"{name}={said[key].get(name)}" for name in names) or folder.name
        if len(label) > _LONG:
            label = members[0].name
        rows += _together(dict.fromkeys(members), label, f"runs of {folder}, {label}")
    if not rows:
        raise RunError(f"{folder}: none of its {len(runs)} runs has metrics yet.")
    return rows


def _together(folders: Mapping[Path, str | None], label: str, source: str) -> list[Row]:
    """Runs that differ in the seed as one row, with when they diverged; none that has metrics, no row."""
    rows, notes = [], []
    for folder, diverged in folders.items():
        try:
            rows.append(run_row(folder, diverged))
        except RunError as error:
            notes.append(f"left out: {error}")
    if not rows:
        return []
    first = next((row for row in rows if row.device is not None), rows[0])
    for row in rows:
        notes += [f"{Path(row.repeats[0].name).name}: {note}" for note in row.notes]
        if row.device is not None and (row.where, row.exact) != (first.where, first.exact):
            notes.append(f"{Path(row.repeats[0].name).name} ran on {row.where}, not {first.where}")
    repeats = tuple(r for row in rows for r in row.repeats)
    return [replace(first, label=label, form="study", source=source, repeats=repeats, notes=tuple(notes))]


def _diverged(when: str) -> str:
    """On one line, of which no file can make many."""
    return f"diverged, so it counts nowhere: {' '.join(when.split())[:160]}"


def _repeat(
    folder: Path,
    stored: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any],
    diverged: str,
) -> Repeat:
    speeds, losses, evaluations = [], [], []
    metrics: dict[str, float] = {}
    before = 0
    for row in rows:
        step = row["step"]
        found = metrics_of(row)
        metrics |= found
        if (speed := number(row.get("examples_per_second"))) is not None and speed > 0:
            speeds.append((step, speed))
        if "train/loss" in found and step > before:
            losses.append(Window(before + 1, step, found["train/loss"]))
            before = step
        seen = {k: v for k, v in found.items() if k.startswith("eval/")}
        if seen:
            seconds = number(row.get("seconds"))
            evaluations.append({"step": step, **seen} | ({"seconds": seconds} if seconds else {}))
    # The first interval of a process is warm-up. Its summary says how many came after, so where a run was
    # resumed to its end, one more is known
    said = result.get("speed")
    after = said.get("intervals") if isinstance(said, Mapping) else None
    warm = {0, len(speeds) - 1 - after} if isinstance(after, int) else {0}
    steady = [speed for k, speed in enumerate(speeds) if k not in warm]
    stated = result.get("seconds") if isinstance(result.get("seconds"), Mapping) else {}
    assert isinstance(stated, Mapping)
    sections = {k: v for k in stated if (v := number(stated[k])) is not None}
    logged = max((number(row.get("seconds")) or 0.0 for row in rows), default=0.0)
    if logged > sections.get("total", 0.0) + _ROUNDING:  # resumed: these are of its last process alone
        sections = {"total": logged} if result else {}
    return Repeat(
        name=str(folder),
        seed=stored["seed"] if isinstance(stored.get("seed"), int) else None,
        steps=rows[-1]["step"] if rows else None,
        speeds=tuple(steady or speeds),
        losses=tuple(losses),
        evaluations=tuple(evaluations),
        metrics=metrics,
        seconds=sections,
        complete=bool(result),
        diverged=diverged,
        warming_up=not steady,
    )
