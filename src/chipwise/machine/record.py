"""A measurement as a JSON file: the subject, the figures, and the machine.

    {"schema": "chipwise.record/1", "kind": "feed", "name": "cifar10", "created": "2026-01-15T12:00:00+00:00",
     "measured": {"examples": 50000, "bytes_per_example": 3076, ...},
     "figures": {"examples_per_second.1": {"unit": "examples/s", "median": ..., "quartiles": [..., ...],
                                           "runs": [...]}, ...},
     "machine": {"hash": "0f3a...", "title": "...", "cpu": "...", "cores": 2, ..., "commit": "..."}}

Median, quartiles, and the machine's hash and title are recomputed from the other fields when the file is
read. New fields do not change the schema's number; removed fields and new meanings do.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..atomic import Misfit, read_regular, replace_text, typed
from ..errors import DataError
from ..words.figures import known
from .fingerprint import Fingerprint, this_machine

SCHEMA = "chipwise.record/1"
COMMANDS = {
    "feed": "chipwise bench RECIPE --feed-only --out FILE.json",
    "train": "chipwise bench RECIPE --out FILE.json",
}  # kind to command


@dataclass(frozen=True)
class Series:
    """A figure that was measured several times: `runs` in chronological order, in `unit`.

    Raises `ValueError` without runs, and for runs that are not finite numbers.
    """

    unit: str
    runs: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.runs or not all(known(run) for run in self.runs):
            raise ValueError(f"runs {list(self.runs)[:4]}: expected finite numbers, at least one")

    @property
    def median(self) -> float:
        return float(np.median(self.runs))

    @property
    def quartiles(self) -> tuple[float, float]:
        low, high = np.quantile(self.runs, (0.25, 0.75))
        return float(low), float(high)

    def to_json(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "median": self.median,
            "quartiles": [*self.quartiles],
            "runs": [*self.runs],
        }


@dataclass(frozen=True)
class Record:
    """A measurement: its subject and settings in `measured`, as plain JSON values, and `figures` by name."""

    kind: str  # "feed" or "train"
    name: str  # of the subject, such as a recipe or a packed folder
    created: str  # ISO 8601, UTC
    measured: Mapping[str, Any]
    figures: Mapping[str, Series]
    machine: Fingerprint

    @classmethod
    def now(
        cls,
        kind: str,
        name: str,
        measured: Mapping[str, Any],
        figures: Mapping[str, Series],
        devices: Sequence[Any] = (),
    ) -> Record:
        """A record made now on this machine. *Arguments:* `devices` of JAX."""
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(kind, name, created, measured, figures, this_machine(devices))

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        figures = {name: series.to_json() for name, series in self.figures.items()}
        return {"schema": SCHEMA, **vars(self), "figures": figures, "machine": self.machine.to_json()}

    @classmethod
    def from_json(cls, stored: Any, source: str = "the record", kind: str | None = None) -> Record:
        """The record in the JSON value `stored`, checked. *Arguments:* `source`, its name in errors; `kind`,
        the expected one.

        Raises `DataError` for another schema, version or kind, and for the first field that is missing or of
        another type.
        """
        schema = stored.get("schema") if isinstance(stored, dict) else None
        facts = {"source": source, "commands": _commands(kind)}
        if schema != SCHEMA:
            raise DataError("record-other-schema", **facts, schema=str(schema)[:60], expected=SCHEMA)
        try:
            record = typed(cls, stored)
        except Misfit as error:
            raise DataError(f"record-{error.code}", **facts, **error.facts) from None
        if kind is not None and record.kind != kind:
            raise DataError("record-kind", **facts, kind=record.kind, expected=kind)
        return record

    def write(self, path: str | os.PathLike, option: str = "--out") -> Path:
        """Writes the record as JSON, atomically. Raises `DataError`, which names `option`."""
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        return replace_text(path, text, "record-unwritable", option=option)


def read(path: str | os.PathLike, kind: str | None = None) -> Record:
    """The record in a file. *Arguments:* `kind`, the expected one, such as `"feed"`.

    Raises `DataError` for a file that is missing, truncated, not a record, of another version or kind, or
    that lacks a field.
    """
    try:
        stored = json.loads(read_regular(path))
    except FileNotFoundError:
        raise DataError("record-missing", path=path, commands=_commands(kind)) from None
    except OSError as error:
        raise DataError("record-unreadable", path=path, reason=error) from error
    except (ValueError, RecursionError) as error:  # ValueError also of text that is not UTF-8
        reason = " ".join(str(error).split())[:120]
        raise DataError("record-not-json", path=path, reason=reason, commands=_commands(kind)) from None
    return Record.from_json(stored, str(path), kind)


def _commands(kind: str | None = None) -> list[str]:
    """The commands that make a record of a kind; all commands for `None` and for kinds without a command."""
    return [COMMANDS[kind]] if kind in COMMANDS else list(COMMANDS.values())
