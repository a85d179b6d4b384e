"""Reads the arguments of `chipwise compare` as rows.

- `FILE.json`: a record of `chipwise bench`.
- `DIR`: a run folder, a study (a row for each point), a folder of records (the repeats of one row),
  or a folder of runs.
- `LABEL=...`: any of these by another name.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..base import DataError, RunError, fact
from ..base.figures import known
from ..base.json_types import Misfit, typed
from ..machine import record
from .row import COMMON, Repeat, Row, identity, ran_on, seconds, whole
from .run_rows import folder_of_runs, run_row, study_rows


def read(arguments: Sequence[str]) -> list[Row]:
    """The rows that the arguments name, in their order, each with its own label.

    Raises `DataError` and `RunError` for files and folders that cannot be used.
    """
    seen: set[str] = set()
    distinct = []
    for label, path in map(_labelled, arguments):
        try:
            rows = _read(Path(path))
        except RecursionError:
            text = (
                "{path} has values nested hundreds deep, which chipwise never writes. Leave it out."
            )
            raise DataError("source-nested", text, path=path) from None
        for row in rows:
            name = (
                row.label if label is None else label if len(rows) == 1 else f"{label} {row.label}"
            )
            names = itertools.chain([name], (f"{name} ({n})" for n in itertools.count(2)))
            name = next(n for n in names if n not in seen)  # equal labels numbered
            seen.add(name)
            distinct.append(replace(row, label=name, given=tuple(filter(None, (label, path)))))
    return distinct


def _labelled(argument: str) -> tuple[str | None, str]:
    """Splits `LABEL=PATH`. A path may itself contain `=`, as a point's folder does."""
    label, equals, path = argument.partition("=")
    if equals and label.strip() and path and not Path(argument).exists():
        return label.strip(), path
    return None, argument


def _read(path: Path) -> list[Row]:
    if not path.exists():
        text = "{path} does not exist. Name a record, a run or a study."
        raise DataError("source-missing", text, path=path)
    return _folder(path) if path.is_dir() else [_record(record.read(path), path)]


def _folder(path: Path) -> list[Row]:
    if (path / "study.json").exists():
        return study_rows(path)
    if (path / "recipe.json").exists():
        return [run_row(path)]
    if files := sorted(path.glob("*.json")):
        return [_repeats([_record(record.read(file), file) for file in files], path)]
    if runs := sorted(p.parent for p in path.glob("*/recipe.json")):
        return folder_of_runs(path, runs)
    text = "{folder} has no run (recipe.json), no study (study.json) and no record (*.json)."
    raise RunError("folder-holds-nothing", text, folder=path)


# ---- records


@dataclass(frozen=True)
class _Measured:
    """The fields of a training record that a comparison uses. docs/bench.md describes them."""

    recipe: Mapping[str, Any] = field(default_factory=dict)
    set: list = field(default_factory=list)
    devices: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, Any] = field(default_factory=dict)
    batch: int | None = None
    replicas: int | None = None
    precision: str | None = None
    exact: bool | None = None
    data: str | None = None
    data_note: str | None = None
    framework: str | None = None
    parameters: int | None = None
    steps_per_interval: int = 1
    warmup_steps: int = 0
    timed_steps: int | None = None
    first_losses: list = field(default_factory=list)
    wait_data_share: float | None = None
    share_of_peak: float | None = None


def _record(stored: record.Record, path: Path) -> Row:
    """The row of a record. Raises `DataError` if the record has no speed, or a field of another
    type."""
    try:
        given = {name: value for name, value in stored.measured.items() if value is not None}
        measured: _Measured = typed(_Measured, given, "measured")
    except Misfit as error:
        text = "{path}: {field}={value}, expected {expected:or}. Measure again with chipwise bench."
        raise DataError("record-measured-type", text, path=path, **error.facts) from None
    speeds = stored.figures.get("examples_per_second")
    if speeds is None or min(speeds.runs) <= 0:
        text = "{path} has no examples_per_second above 0. Measure again with chipwise bench."
        raise DataError("record-no-speed", text, path=path)
    own = {
        name: v
        for name in ("batch", "replicas", "precision")
        if (v := getattr(measured, name)) is not None
    }
    # null, and the NaN that Python writes, are losses that were not finite
    lost = [step for step, loss in enumerate(measured.first_losses, 1) if not known(loss)]
    notes = [fact("loss-not-finite-at", step=lost[0])] if lost else []
    if measured.data_note:
        notes.append(fact("data-note", words=measured.data_note))
    if measured.wait_data_share is not None:
        notes.append(fact("share-waiting", share=measured.wait_data_share))
    if measured.share_of_peak is not None:
        notes.append(fact("share-of-peak", share=measured.share_of_peak))
    start = measured.warmup_steps
    each = measured.steps_per_interval
    repeat = Repeat(
        name=str(path),
        seed=whole(measured.recipe, "seed"),
        steps=measured.timed_steps,
        speeds=tuple((start + each * (k + 1), run) for k, run in enumerate(speeds.runs)),
        seconds=seconds(measured.seconds),
        complete=False,
    )
    versions = {"python": stored.machine.python, **stored.machine.versions}
    return Row(
        label=path.stem,
        form="record",
        created=stored.created,
        source=fact("source-record", path=str(path), day=stored.created[:10]),
        parameters=measured.parameters,
        exact=measured.exact,
        data=measured.data or None,
        framework=measured.framework or None,
        machine=stored.machine.title,
        versions={k: v for k, v in versions.items() if v},
        repeats=(repeat,),
        notes=tuple(notes),
        **ran_on(measured.devices),
        **identity(
            {**measured.recipe, **own, "name": stored.name, "source": {"set": measured.set}}, path
        ),
    )


def _shared(row: Row) -> dict[str, Any]:
    """What the repeats of a row share: all but the seed and the duration."""
    own = {name: getattr(row, name) for name in COMMON}
    settings = {k: v for k, v in row.settings.items() if k.rpartition(".")[2] != "duration"}
    return {**own, **row.columns, **settings, **own}  # in this order, and a column hides no field


def _repeats(rows: list[Row], folder: Path) -> Row:
    """Records of one folder as one row. Raises `DataError` if their recipes or machines differ."""
    first = rows[0]
    shared = _shared(first)
    for row in rows[1:]:
        others = _shared(row)
        for name in dict.fromkeys([*shared, *others]):
            a = shared.get(name)
            b = others.get(name)
            if a == b:
                continue
            raise DataError(
                "records-differ",
                "{folder}: {file} and {other} differ in {what} ({a}, {b}), so they are no "
                "repeats. Name "
                "the files.",
                folder=folder,
                what="device" if name == "where" else name,
                a=a,
                b=b,
                file=f"{first.label}.json",
                other=f"{row.label}.json",
            )
    return replace(
        first,
        label=folder.name or str(folder),
        source=fact(
            "source-records", records=len(rows), folder=str(folder), day=(first.created or "")[:10]
        ),
        repeats=tuple(r for row in rows for r in row.repeats),
        notes=tuple({str(note): note for row in rows for note in row.notes}.values()),
    )
