"""Run folders and studies as rows."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base import DataError, Fact, RunError, fact
from ..base.figures import known
from ..base.json_types import part
from ..machine.fingerprint import stated as machine_of
from ..run.folder.run_reader import StoredRun, metrics_of, read_run, settings_in, stored_recipe
from ..study.study_file import Study, read as read_study
from .report.time_spent import intervals
from .row import Repeat, Row, divergence, identity, origin, ran_on, seconds, text, whole

_ROUNDING = 0.01  # seconds


def run_row(folder: Path, diverged: Any = None) -> Row:
    """The row of one run folder. `diverged`: when the run diverged, according to its study. The
    run's last row takes precedence.

    Raises `RunError` if the folder is no run, is damaged, or has no metrics yet.
    """
    run = read_run(folder)
    stored = run.recipe
    rows = run.rows
    result = run.result or {}
    when = divergence((rows[-1].get("diverged") if rows else None) or diverged)
    if not rows and when is None:
        text = "{folder} has no metrics yet. Resume training with --run {folder}."
        raise RunError("run-no-metrics", text, folder=folder)
    if damaged := [problem for problem in run.problems if problem.code == "result-damaged"]:
        path = folder / "result.json"
        reason = damaged[0]["reason"]
        text = "{path} is damaged ({reason}). Delete it and resume with --run {folder}."
        raise RunError("run-result-damaged", text, path=path, folder=folder, reason=reason)
    # Of a run that is not over, what its last process noted as it began
    where = result or next(reversed(run.starts), {})
    fields = identity(stored, folder)
    devices = part(where, "devices")
    notes: list[Fact] = []
    if when is not None:
        notes.append(fact("run-diverged-when", when=when))
    elif not result:
        notes.append(fact("run-unfinished", steps=rows[-1]["step"]))
    notes += run.problems
    source = stored.get("source")
    synthetic = isinstance(source, Mapping) and bool(source.get("synthetic"))
    if synthetic:  # the data is a field of its own
        fields["recipe"] = fields["recipe"].removesuffix("-synthetic")
    title, versions = machine_of(where.get("machine"))
    return Row(
        label=folder.name or str(folder),
        form="run",
        framework="chipwise",
        source=fact("source-run", folder=str(folder)),
        machine=title,
        versions=versions,
        data=("synthetic" if synthetic else "real") if isinstance(source, Mapping) else None,
        exact=devices["exact"] if isinstance(devices.get("exact"), bool) else None,
        parameters=whole(devices, "parameters"),
        notes=tuple(notes),
        repeats=(_repeat(run, when),),
        **ran_on(devices),
        **fields,
    )


def study_rows(folder: Path) -> list[Row]:
    """The rows of a study folder, one for each point, with its seeds as repeats.

    Raises `RunError` if study.json is damaged, `DataError` if none of its runs has metrics yet.
    """
    points = (read_study(folder) or Study(folder, "", None)).points
    varied = {k for p in points for k in p.settings if len({q.settings.get(k) for q in points}) > 1}
    rows = []
    for p in points:
        label = ", ".join(f"{k}={v}" for k, v in p.settings.items() if k in varied) or folder.name
        runs = {folder / run.run: run.diverged for run in p.runs.values()}
        rows += _together(runs, label, "source-study", folder)
    if not rows:
        text = "The runs of {folder} have no metrics yet. Type its chipwise sweep command again."
        raise DataError("study-no-metrics", text, folder=folder)
    return rows


def folder_of_runs(folder: Path, runs: Sequence[Path]) -> list[Row]:
    """The rows of a folder of runs. Runs that differ only in the seed form one row.

    Raises `RunError` if no run has metrics yet.
    """
    groups: dict[str, list[Path]] = {}
    for run in runs:
        stored = stored_recipe(run)
        settings = {k: v for k, v in settings_in(stored).items() if k != "seed"}
        model = [settings, origin(stored), stored.get("read")]
        groups.setdefault(json.dumps(model, sort_keys=True), []).append(run)
    rows = []
    for members in groups.values():
        label = folder.name if len(groups) == 1 else members[0].name
        rows += _together(dict.fromkeys(members), label, "source-runs", folder)
    if not rows:
        raise RunError("runs-no-metrics", folder=folder, runs=len(runs))
    return rows


def _together(folders: Mapping[Path, Any], label: str, code: str, within: Path) -> list[Row]:
    """Joins runs that differ in the seed into one row, or one for each number of parameters.
    Returns no row if no run has metrics. *Arguments:* `folders`: each run's divergence, by folder.
    `code`: that of the rows' source, the folder `within`."""
    sizes: dict[int | None, list[Row]] = defaultdict(list)
    notes = []
    for folder, diverged in folders.items():
        try:
            row = run_row(folder, diverged)
            sizes[row.parameters].append(row)
        except RunError as error:
            notes.append(fact("run-left-out", why=str(error)))
    if len(sizes) == 2 and None in sizes:  # unknown, as of runs that are not over
        sizes = {None: [row for rows in sizes.values() for row in rows]}
    joined = []
    for rows in sizes.values():
        name = label if len(sizes) == 1 else rows[0].label
        source = fact(code, folder=str(within), label=name)
        joined.append(_joined(rows, notes, label=name, source=source))
    return joined


def _joined(rows: Sequence[Row], left_out: Sequence[Fact], **named: Any) -> Row:
    """One row of runs. *Arguments:* `left_out`: notes of other runs. `named`: fields of the row."""
    notes = [*left_out]
    first = next((row for row in rows if row.device is not None), rows[0])
    for row in rows:
        name = Path(row.repeats[0].name).name
        notes += [fact("note-of-run", run=name, note=note) for note in row.notes]
        if row.device is not None and (row.where, row.exact) != (first.where, first.exact):
            notes.append(fact("run-elsewhere", run=name, device=row.where, first=first.where))
    repeats = tuple(r for row in rows for r in row.repeats)
    return replace(first, form="study", repeats=repeats, notes=tuple(notes), **named)


def _repeat(run: StoredRun, diverged: Fact | None) -> Repeat:
    rows = run.rows
    result = run.result or {}
    timed = intervals(run)
    steady = [i for i in timed if not i.warmup]
    evaluations = []
    metrics: dict[str, float] = {}
    for row in rows:
        step = row["step"]
        metrics_here = metrics_of(row)
        metrics |= metrics_here
        if scores := {k: v for k, v in metrics_here.items() if k.startswith("eval/")}:
            wall = {"seconds": s} if known(s := row.get("seconds")) and s > 0 else {}
            evaluations.append({"step": step, **scores, **wall})
    if (kept := run.kept) is not None:
        metrics |= next((e for e in evaluations if e["step"] == kept.step), {})
        metrics.pop("step", None)
        metrics.pop("seconds", None)
    sections = seconds(part(result, "seconds"))
    logged = max((s for row in rows if known(s := row.get("seconds"))), default=0.0)
    # Resumed: these are of its last process alone
    if logged > sections.get("total", 0.0) + _ROUNDING:
        sections = {"total": logged} if result else {}
    return Repeat(
        name=str(run.path),
        seed=whole(run.recipe, "seed"),
        steps=rows[-1]["step"] if rows else None,
        speeds=tuple((i.last, i.speed) for i in steady or timed),
        evaluations=tuple(evaluations),
        metrics=metrics,
        better=run.better,
        seconds=sections,
        complete=bool(result),
        diverged=diverged,
        best_at=None if kept is None else kept.step,
        warming_up=not steady,
        fingerprint=text(result, "fingerprint"),
    )
