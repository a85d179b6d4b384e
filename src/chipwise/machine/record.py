"""A measurement as a JSON file: the subject, the figures, and the machine.

    {"schema": "chipwise.record/1", "kind": "train", "name": "digits",
     "created": "2026-01-15T12:00:00+00:00", "measured": {"batch": 48, "replicas": 1, ...},
     "figures": {"examples_per_second": {"unit": "examples/s", "median": ...,
                                         "quartiles": [..., ...], "runs": [...]}, ...},
     "machine": {"hash": "0f3a...", "title": "...", "cpu": "...", "cores": 2, ..., "commit": "..."}}

Median, quartiles, and the machine's hash and title are recomputed from the other fields when the
file is read. New fields do not change the schema's number. Removed fields and new meanings do.
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

from ..base import DataError
from ..base.figures import known
from ..base.files import read_regular, replace_file, to_write
from ..base.json_types import Misfit, typed
from .fingerprint import Fingerprint, this_machine

SCHEMA = "chipwise.record/1"


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
    """A measurement: its subject and settings in `measured`, as plain JSON values, and `figures` by
    name."""

    kind: str  # "train", or another of a benchmark's own
    name: str  # of the subject, such as a recipe
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
        """A record of this machine and this moment. *Arguments:* `devices` of JAX."""
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(kind, name, created, measured, figures, this_machine(devices))

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        figures = {name: series.to_json() for name, series in self.figures.items()}
        return {
            "schema": SCHEMA,
            **vars(self),
            "figures": figures,
            "machine": self.machine.to_json(),
        }

    @classmethod
    def from_json(cls, stored: Any, source: str = "the record") -> Record:
        """The record in the JSON value `stored`, checked. *Arguments:* `source`, its name in
        errors.

        Raises `DataError` for another schema or version, and for the first field that is missing or
        of another type.
        """
        schema = stored.get("schema") if isinstance(stored, dict) else None
        if schema != SCHEMA:
            raise DataError(
                "record-other-schema", source=source, schema=str(schema)[:60], expected=SCHEMA
            )
        try:
            return typed(cls, stored)
        except Misfit as error:
            raise DataError(f"record-{error.code}", source=source, **error.facts) from None

    def write(self, path: str | os.PathLike) -> Path:
        """Writes the record as JSON, atomically. Raises `DataError`, which names the option
        --out."""
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        return replace_file(to_write(path, "--out"), text, "record-unwritable", option="--out")


def read(path: str | os.PathLike) -> Record:
    """The record in a file.

    Raises `DataError` for a file that is missing, truncated, not a record, of another version, or
    that lacks a field.
    """
    try:
        stored = json.loads(read_regular(path))
    except FileNotFoundError:
        raise DataError("record-missing", path=path) from None
    except OSError as error:
        raise DataError("record-unreadable", path=path, reason=error) from error
    except (ValueError, RecursionError) as error:  # ValueError also of text that is not UTF-8
        raise DataError(
            "record-not-json", path=path, reason=" ".join(str(error).split())[:120]
        ) from None
    return Record.from_json(stored, str(path))
