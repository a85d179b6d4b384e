"""The same recipe, or a clear word; and what differs between rows of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import RecipeError
from ...words.facts import Fact, fact
from ..rows import MEASURED, Row

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
        named = rows[0]
        sized = next((r for r in rows if r.parameters is not None), named)
        shaped = next((r for r in rows if r.columns), named)
        if row.recipe != named.recipe:
            _refuse("another-recipe", row, named, row.recipe, named.recipe)
        if row.parameters is not None and row.parameters != sized.parameters:
            _refuse("another-size", row, sized, row.parameters, sized.parameters)
        if row.columns and row.columns != shaped.columns:
            has, other = ([f"{k} {v}" for k, v in r.columns.items()] for r in (row, shaped))
            _refuse("another-shape", row, shaped, has, other)


def _refuse(code: str, row: Row, other: Row, has: Any, was: Any) -> None:
    raise RecipeError(code, row=_called(row), has=has, other=_called(other), other_has=was)


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
        found.append(Differing(words, {r.label: v for r in stating if (v := getattr(r, name)) is not None}))
    stored = [row for row in rows if row.settings]
    for name in dict.fromkeys(key for row in stored for key in row.settings):
        # one that is not set differs too
        values = {row.label: row.settings.get(name) for row in stored}
        found.append(Differing(name, values if len({str(v) for v in values.values()}) > 1 else {}))
    measured = [row for row in rows if row.versions]
    for name in dict.fromkeys(key for row in measured for key in row.versions):
        values = {row.label: v for row in measured if (v := row.versions.get(name)) is not None}
        found.append(Differing(f"version of {name}", values))
    return [d for d in found if len({str(v) for v in d.values.values()}) > 1]


def computes_otherwise(row: Row, other: Row) -> list[Fact]:
    """Why the losses of two rows cannot be expected to be the same; nothing, they should be."""
    found = []
    for name in ("batch", "replicas", "precision", "data", "framework"):
        a, b = getattr(row, name), getattr(other, name)
        if a is not None and b is not None and a != b:
            found.append(fact("another-value", name=name, a=a, b=b))
    if changed := changed_settings(row, other):
        found.append(fact("other-settings", settings=changed))
    return found


def changed_settings(row: Row, other: Row) -> list[str]:
    """Names of the recipe's settings that are not the same, where both rows store them."""
    if not row.settings or not other.settings:
        return []
    names = sorted(row.settings.keys() | other.settings.keys())
    return [k for k in names if str(row.settings.get(k)) != str(other.settings.get(k))]
