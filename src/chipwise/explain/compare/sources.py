"""What the arguments of `chipwise compare` name, as rows.

- `FILE.json`: a record of `chipwise bench`, or a document of `chipwise plan --json`, a row a target.
- `DIR`: a run folder; a study, a row a point; a folder of records, the repeats of one row; or of runs.
- `published` or `published:WORDS`: rows of the bundled table for the recipe of the others.
- `LABEL=...`: any of these by another name.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...chips.catalogue import find
from ...chips.targets import Target, names, parse
from ...engine.stored import number
from ...errors import DataError, DeviceError, RecipeError, RunError
from ...measure import record
from ...planner.plans import SCHEMA as PLAN
from ..published import Published, rows_for
from .identity import identity
from .row import MEASURED, PREDICTED, PUBLISHED, Repeat, Row, Window
from .runs import folder_of_runs, run_row, study_rows

_PUBLISHED = re.compile(r"published(?::(.*))?", re.DOTALL)


def read(arguments: Sequence[str]) -> list[Row]:
    """The rows that the arguments name, in their order, each with a label of its own.

    Raises `DataError` and `RunError` for files and folders that cannot be used, `RecipeError` for
    published rows that are not there.
    """
    made: list[list[Row]] = []
    for label, text in (_labelled(a) for a in arguments):
        rows = [] if _PUBLISHED.fullmatch(text) else _read(Path(text))
        made.append(_named(rows, label, text))
    recipe = next((rows[0].recipe for rows in made if rows), None)
    for k, (label, text) in enumerate(_labelled(a) for a in arguments):
        if (found := _PUBLISHED.fullmatch(text)) is not None:
            made[k] = _named(_published(recipe, (found[1] or "").strip()), label, text)
    return _distinct([row for rows in made for row in rows])


def unpublished(arguments: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """What to say of a plain `published` that brought no rows."""
    asked = any(_PUBLISHED.fullmatch(text) for _, text in map(_labelled, arguments))
    if not asked or not rows or any(row.kind == PUBLISHED for row in rows):
        return []
    return [f"Nobody published figures of {rows[0].recipe}: they are of {', '.join(_recipes())}."]


def _labelled(argument: str) -> tuple[str | None, str]:
    """`LABEL=PATH` in its parts; a path may itself hold `=`, as a point's folder does."""
    label, equals, text = argument.partition("=")
    if equals and label.strip() and text and not Path(argument).exists():
        return label.strip(), text
    return None, argument


def _named(rows: list[Row], label: str | None, text: str) -> list[Row]:
    rows = [replace(row, given=tuple(filter(None, (label, text)))) for row in rows]
    if label is None:
        return rows
    return [row.named(label if len(rows) == 1 else f"{label} {row.label}") for row in rows]


def _distinct(rows: list[Row]) -> list[Row]:
    """Equal labels numbered: `bench`, `bench (2)`."""
    seen: set[str] = set()
    made = []
    for row in rows:
        numbered = (f"{row.label} ({n})" for n in itertools.count(2))
        label = row.label if row.label not in seen else next(name for name in numbered if name not in seen)
        seen.add(label)
        made.append(row if label == row.label else row.named(label))
    return made


def _read(path: Path) -> list[Row]:
    if not path.exists():
        raise DataError(
            f"{path} does not exist: expected a record (chipwise bench RECIPE --out FILE.json), a run or "
            f"study folder, a plan (chipwise plan RECIPE --json > FILE.json) or published."
        )
    if path.is_dir():
        return _folder(path)
    document = _json(path)
    schema = document.get("schema") if isinstance(document, dict) else None
    if isinstance(schema, str) and schema.startswith(f"{PLAN.partition('/')[0]}/"):
        return _plans(document, path)
    return [_record_row(record.read(path, "train"), path)]


def _json(path: Path) -> Any:
    """What a file holds; `None` for what is no JSON, of which `record.read` says why."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _folder(path: Path) -> list[Row]:
    if (path / "study.json").exists():
        return study_rows(path)
    if (path / "recipe.json").exists():
        return [run_row(path)]
    files = sorted(path.glob("*.json"))
    if files:
        return [_repeats([_record_row(record.read(file, "train"), file) for file in files], path)]
    runs = sorted(p.parent for p in path.glob("*/recipe.json"))
    if runs:
        return folder_of_runs(path, runs)
    raise RunError(
        f"{path} holds no run (recipe.json), no study (study.json) and no records (*.json): name a folder "
        f"that chipwise train --run, chipwise sweep or chipwise bench --out made."
    )


# ---- records


def _record_row(made: record.Record, path: Path) -> Row:
    """Raises `DataError` for a record that lacks the speed, or the batch it was measured at."""
    measured = checked(made.measured, str(path))
    speeds = made.figures.get("examples_per_second")
    if speeds is None or min(speeds.runs) <= 0:
        raise DataError(f"{path} has no figure examples_per_second above 0: {_AGAIN}.")
    recipe, devices = _object(measured, "recipe"), _object(measured, "devices")
    stated = {k: measured[k] for k in ("batch", "replicas", "precision") if k in measured}
    known = identity({**recipe, **stated, "name": made.name}, str(path))
    each, start = measured.get("steps_per_interval", 1), measured.get("warmup_steps", 0)
    losses = [number(x) for x in measured.get("first_losses", ())]
    finite = losses[: losses.index(None)] if None in losses else losses
    notes = [f"its loss is not finite at step {len(finite) + 1}"] if len(finite) < len(losses) else []
    if measured.get("data_note"):
        notes.append(f"data: {measured['data_note']}")
    shares = {"wait_data_share": "waiting for data", "share_of_peak": "of the device's peak"}
    notes += [f"{measured[k]:.0%} {words}" for k, words in shares.items() if k in measured]
    kind = _text(devices, "kind")
    count = _whole(devices, "count")
    return Row(
        label=path.stem,
        kind=MEASURED,
        form="record",
        source=f"record {path} of {made.created[:10]}",
        created=made.created,
        parameters=measured.get("parameters"),
        exact=measured.get("exact"),
        data=measured.get("data") or None,
        framework=measured.get("framework") or None,
        device=kind,
        devices=count,
        simulated=devices.get("simulated") is True,
        machine=made.machine.title,
        versions={k: v for k, v in {"python": made.machine.python, **made.machine.versions}.items() if v},
        repeats=(
            Repeat(
                name=str(path),
                seed=_whole(recipe, "seed"),
                steps=measured.get("timed_steps"),
                speeds=tuple((start + each * (k + 1), run) for k, run in enumerate(speeds.runs)),
                losses=tuple(Window(k + 1, k + 1, x) for k, x in enumerate(finite) if x is not None),
                seconds={
                    k: v for k, x in measured.get("seconds", {}).items() if (v := number(x)) is not None
                },
                complete=False,
            ),
        ),
        notes=tuple(notes),
        **known,
    )


_AGAIN = "measure again with chipwise bench RECIPE --out FILE.json"
_TEXT, _FLAG, _OBJECT = "text", "true or false", "an object"
_WHOLE, _COUNT, _NUMBER = "a whole number from 0 on", "a whole number from 1 on", "a number"
_LOSSES = "a list of numbers"
_FIELDS = {  # of what a record measured, those that a comparison uses
    "framework": _TEXT, "recipe": _OBJECT, "data": _TEXT, "data_note": _TEXT, "batch": _COUNT,
    "replicas": _COUNT, "precision": _TEXT, "exact": _FLAG, "devices": _OBJECT, "parameters": _WHOLE,
    "warmup_steps": _WHOLE, "timed_steps": _WHOLE, "steps_per_interval": _COUNT, "seconds": _OBJECT,
    "first_losses": _LOSSES, "wait_data_share": _NUMBER, "share_of_peak": _NUMBER,
}  # fmt: skip


def checked(measured: Mapping[str, Any], what: str) -> dict[str, Any]:
    """What a training record measured, the fields that are there and not null.

    Raises `DataError` for one that is of another type than docs/bench.md says.
    """
    for name, expected in _FIELDS.items():
        value = measured.get(name)
        if value is not None and not _is(value, expected):
            given = json.dumps(value)[:60]
            raise DataError(f"{what} has measured.{name}={given}, expected {expected}: {_AGAIN}.")
    return {name: value for name, value in measured.items() if value is not None}


def _is(value: Any, expected: str) -> bool:
    if expected in (_WHOLE, _COUNT):
        return type(value) is int and value >= (expected == _COUNT)
    if expected == _NUMBER:
        return number(value) is not None
    if expected == _LOSSES:  # null, and the NaN that Python writes, are losses that were not finite
        return isinstance(value, list) and all(x is None or type(x) in (int, float) for x in value)
    return isinstance(value, {_TEXT: str, _FLAG: bool, _OBJECT: dict}[expected])


def _repeats(rows: list[Row], folder: Path) -> Row:
    """Records of one folder as one row. Raises `DataError` when they are not of one recipe and machine."""
    first = rows[0]
    for row in rows[1:]:
        for what in (
            "recipe",
            "batch",
            "replicas",
            "precision",
            "exact",
            "data",
            "framework",
            "machine",
            "where",
        ):
            a, b = getattr(first, what), getattr(row, what)
            if a != b:
                raise DataError(
                    f"{folder} holds records of another {what} ({first.label}.json: {a}, {row.label}.json: "
                    f"{b}), which are no repeats of one measurement: name the files one by one."
                )
    return replace(
        first,
        label=folder.name or str(folder),
        source=f"{len(rows)} records in {folder}, the first of {(first.created or '')[:10]}",
        repeats=tuple(r for row in rows for r in row.repeats),
        notes=tuple(dict.fromkeys(note for row in rows for note in row.notes)),
    )


# ---- plans


def _plans(document: Mapping[str, Any], path: Path) -> list[Row]:
    """A row a target. Raises `DataError` for a document of another version, or with no plan in it."""
    if document["schema"] != PLAN:
        raise DataError(f"{path} is of schema {document['schema']}, expected {PLAN}: {_PLAN_AGAIN}.")
    recipe, plans = _object(document, "recipe"), document.get("plans")
    name, batch = _text(recipe, "name"), _whole(recipe, "batch")
    good = isinstance(plans, list) and all(isinstance(p, dict) and _text(p, "target") for p in plans)
    if not good or not plans or name is None or batch is None:
        raise DataError(f"{path} is a damaged plan document: {_PLAN_AGAIN}.")
    day = str(document.get("created"))[:10]
    rows = []
    for p in plans:
        chip = find(p["chip"]) if isinstance(p.get("chip"), str) else None
        method = _text(p, "method") or "method unknown"
        notes = [f"cannot run there: {p['problem']}"] if p.get("problem") is not None else []
        rows.append(
            Row(
                label=p["target"],
                kind=PREDICTED,
                form="plan",
                source=f"plan {path} of {day}, {method}",
                created=_text(document, "created"),
                recipe=name,
                parameters=_whole(recipe, "parameters"),
                batch=_whole(p, "batch") or batch,
                replicas=_whole(p, "replicas"),
                precision=_text(p, "precision"),
                framework="chipwise",
                device=chip.name if chip else _text(p, "chip"),
                devices=_whole(p, "devices"),
                target=p["target"],
                plan=p,
                notes=tuple(notes),
            )
        )
    return rows


_PLAN_AGAIN = "make it again with chipwise plan RECIPE --json > FILE.json"


# ---- published


def _published(recipe: str | None, words: str) -> list[Row]:
    """Rows of the bundled table, none for a recipe of which there are none.

    Raises `RecipeError` when `words` leave none, and when they leave several recipes.
    """
    found = rows_for(recipe, words)
    recipes = list(dict.fromkeys(row.recipe for row in found))
    if len(recipes) > 1:
        raise RecipeError(
            f"published: of which recipe? Name a record, run or plan of it too, or type "
            f"published:{recipes[0]}; there are {', '.join(recipes)}."
        )
    if not found and words:
        of = f" of {recipe}" if recipe else ""
        there = rows_for(recipe) if recipe else ()
        # one that a shell takes without quotes
        typed = next((row.target for row in there if row.target), None)
        hint = (
            f"published lists all {len(there)}{f', published:{typed} fewer' if typed else ''}"
            if there
            else f"there are figures of {', '.join(_recipes())}"
        )
        raise RecipeError(f"No published figure{of} matches '{words}': {hint}.")
    return [_published_row(row) for row in found]


def _recipes() -> list[str]:
    return sorted({row.recipe for row in rows_for(None)})


def _published_row(row: Published) -> Row:
    said = [f"similar, not the same: {row.similar}"] if row.similar else []
    return Row(
        label=row.label,
        kind=PUBLISHED,
        form="published",
        source=f"{row.source}, {row.date}",
        created=row.date,
        recipe=row.recipe,
        batch=row.batch,
        replicas=row.replicas,
        precision=row.precision,
        framework=row.framework,
        device=row.device,
        devices=1,
        target=row.target,
        published=row,
        notes=(*said, *([row.note] if row.note else [])),
    )


# ---- what a measured row ran on


def target_of(row: Row) -> Target | None:
    """The chips of a row as one rents them; `None` for CPUs and for what the catalogue does not know."""
    if row.target:
        try:
            return parse(row.target)
        except DeviceError:  # a plan of a catalogue that is not this one
            return None
    chip = find(row.device) if row.device else None
    if chip is None or chip.kind == "CPU" or row.simulated or not row.devices:
        return None
    if chip.kind == "GPU":
        try:
            return parse(f"{chip.names[0]}:{row.devices}")
        except DeviceError:  # a number of them that no machine has
            return None
    slices = (parse(name) for name in names() if name.startswith(f"{chip.names[0]}-"))
    return next((t for t in slices if t.devices == row.devices), None)


# ---- fields of what `chipwise` wrote, as far as they are what it writes


def _object(made: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = made.get(name)
    return dict(value) if isinstance(value, Mapping) else {}


def _text(made: Mapping[str, Any], name: str) -> str | None:
    value = made.get(name)
    return value if isinstance(value, str) and value else None


def _whole(made: Mapping[str, Any], name: str) -> int | None:
    value = made.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _numbers(made: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for k, x in made.items() if (v := number(x)) is not None}
