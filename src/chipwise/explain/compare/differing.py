"""Lists the differences between rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..row import COMMON, Row

_WORDS = {"batch": "batch (global)", "where": "device"}
_ORIGIN = "source."


@dataclass(frozen=True)
class Differing:
    """A setting that differs between the rows that state it."""

    setting: str
    values: dict[str, Any]
    """Values by label. `None` means not set."""


def differing(rows: Sequence[Row]) -> list[Differing]:
    """The differences, most important first. Recipe settings are compared only between rows that
    store them. Where a recipe comes from is no difference of its own if it sets one that is."""
    settings = []
    for name in COMMON:
        stating = [row for row in rows if name != "where" or row.device is not None]
        values = {row.label: v for row in stating if (v := getattr(row, name)) is not None}
        settings.append(Differing(name, values))
    stored = [row for row in rows if row.settings]  # a setting that one row lacks differs too
    for part in ("columns", "settings"):
        for name in dict.fromkeys(key for row in stored for key in getattr(row, part)):
            stating = [r for r in stored if name != "source.recipe" or name in r.settings]
            values = {row.label: getattr(row, part).get(name) for row in stating}
            settings.append(Differing(name, values))
    for name in dict.fromkeys(key for row in rows for key in row.versions):
        values = {row.label: row.versions[name] for row in rows if name in row.versions}
        settings.append(Differing(f"version of {name}", values))
    settings = [d for d in settings if len({str(v) for v in d.values.values()}) > 1]
    own = {d.setting.rpartition(".")[2] for d in settings if not d.setting.startswith(_ORIGIN)}
    return [
        Differing(_WORDS.get(d.setting, d.setting), d.values)
        for d in settings
        if not (d.setting.startswith(_ORIGIN) and d.setting.rpartition(".")[2] in own)
    ]


def same_device(row: Row, other: Row) -> bool:
    """Whether two rows are known to have run on the same number of devices of one kind. CPUs all
    have one name, so their machines must be alike too."""
    if row.device is None or row.where != other.where:
        return False
    cpu = row.simulated or row.device.lower().startswith("cpu")
    return not cpu or (row.machine is not None and row.machine == other.machine)
