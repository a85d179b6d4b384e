"""The same recipe, or a clear word; and what differs between rows of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import RecipeError
from .row import MEASURED, PREDICTED, PUBLISHED, Row

_COMMON = {
    "batch": "batch (global)",
    "replicas": "replicas",
    "precision": "precision",
    "exact": "exact",
    "data": "data",
    "framework": "framework",
    "machine": "machine",
    "where": "device",
}


@dataclass(frozen=True)
class Differing:
    """A setting that is not the same in all rows that state it: `values` by label, `None` not set."""

    setting: str
    values: dict[str, Any]


def check_recipe(rows: Sequence[Row]) -> None:
    """Raises `RecipeError` for rows of two recipes: of another name, model size or shape of the data."""
    for row in rows[1:]:
        # whoever states it first is who the row is held against
        first = rows[0]
        if row.recipe != first.recipe:
            raise _other(row, first, f"recipe {row.recipe}", f"of {first.recipe}")
        sized = next((r for r in rows if r.parameters is not None), None)
        if sized is not None and row.parameters not in (None, sized.parameters):
            was = f"{sized.parameters:,} parameters"
            raise _other(row, sized, f"a model of {row.parameters:,} parameters", f"has {was}")
        shaped = next((r for r in rows if r.columns), None)
        if shaped is not None and row.columns and row.columns != shaped.columns:
            said = ", ".join(f"{k} {v}" for k, v in row.columns.items())
            was = ", ".join(f"{k} {v}" for k, v in shaped.columns.items())
            raise _other(row, shaped, f"examples of {said}", f"has {was}")


def _other(row: Row, first: Row, has: str, was: str) -> RecipeError:
    return RecipeError(
        f"{_called(row)} is of {has}, {_called(first)} {was}: their speeds say nothing about each other. "
        f"Leave one out, or measure the same recipe on both."
    )


def _called(row: Row) -> str:
    """Its label; of runs that a label of settings stands for, a folder too."""
    return f"{row.label} ({row.repeats[0].name})" if row.form == "study" else row.label


def same_device(row: Row, other: Row) -> bool:
    """Whether two measured rows are known to have run on as many devices of one kind; of CPUs, which all
    have one name, on one kind of machine."""
    if row.device is None or row.kind != MEASURED or other.kind != MEASURED or row.where != other.where:
        return False
    cpu = row.simulated or row.device.lower().startswith("cpu")
    return not cpu or (row.machine is not None and row.machine == other.machine)


def differing(rows: Sequence[Row]) -> list[Differing]:
    """What differs, the weightiest first. Settings of the recipe only among rows that store it."""
    found = []
    for name, words in _COMMON.items():
        stating = [row for row in rows if name != "where" or row.device is not None]
        values = {row.label: v for row in stating if (v := getattr(row, name)) is not None}
        if _several(values.values()):
            found.append(Differing(words, values))
    stored = [row for row in rows if row.settings]
    for name in dict.fromkeys(key for row in stored for key in row.settings):
        values = {row.label: row.settings.get(name) for row in stored}
        if len({str(v) for v in values.values()}) > 1:
            found.append(Differing(name, values))
    measured = [row for row in rows if row.versions]
    for name in dict.fromkeys(key for row in measured for key in row.versions):
        values = {row.label: row.versions.get(name) for row in measured}
        if _several(values.values()):
            found.append(Differing(f"version of {name}", values))
    return found


def _several(values) -> bool:
    return len({str(v) for v in values if v is not None}) > 1


def computes_otherwise(row: Row, other: Row) -> list[str]:
    """Why the losses of two rows cannot be expected to be the same, in words; nothing, they should be."""
    found = []
    for name in ("batch", "replicas", "precision", "data", "framework"):
        a, b = getattr(row, name), getattr(other, name)
        if a is not None and b is not None and a != b:
            found.append(f"another {name} ({a}, {b})")
    if changed := changed_settings(row, other):
        found.append(f"another {', '.join(changed[:3])}" + (", ..." if len(changed) > 3 else ""))
    if PUBLISHED in (row.kind, other.kind) or PREDICTED in (row.kind, other.kind):
        found.append("no losses")
    return found


def changed_settings(row: Row, other: Row) -> list[str]:
    """Names of the recipe's settings that are not the same, where both rows store them."""
    if not row.settings or not other.settings:
        return []
    names = sorted(row.settings.keys() | other.settings.keys())
    return [k for k in names if str(row.settings.get(k)) != str(other.settings.get(k))]
