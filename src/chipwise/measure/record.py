"""One measurement as one JSON file: what was measured, the figures, and on what machine.

    {"schema": "chipwise.record/1", "kind": "feed", "name": "cifar10", "created": "2026-01-15T12:00:00+00:00",
     "measured": {"examples": 50000, "bytes_per_example": 3076, ...},
     "figures": {"examples_per_second.1": {"unit": "examples/s", "median": ..., "quartiles": [..., ...],
                                           "runs": [...]}, ...},
     "machine": {"hash": "0f3a...", "title": "...", "cpu": "...", "cores": 2, ..., "commit": "..."}}

`runs` are the truth; median, quartiles and the machine's hash and title are worked out from the rest again
when the file is read. A field may be added under the same number; one that changes its meaning or goes
raises it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from ..atomic import replace_text
from ..engine.stored import number
from ..errors import DataError
from ..machine.fingerprint import Fingerprint

FORMAT, VERSION = "chipwise.record", 1
SCHEMA = f"{FORMAT}/{VERSION}"
COMMANDS = {
    "feed": "chipwise bench-feed RECIPE --out FILE.json",
    "train": "chipwise bench RECIPE --out FILE.json",
}  # kind to what measures it


@dataclass(frozen=True)
class Series:
    """One figure, measured several times: `runs` in the order they were made, in `unit`.

    Raises `ValueError` for no runs, and for runs that are no finite numbers.
    """

    unit: str
    runs: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.runs or not all(_is_number(run) for run in self.runs):
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
            "quartiles": list(self.quartiles),
            "runs": list(self.runs),
        }


@dataclass(frozen=True)
class Record:
    """A measurement. `measured` says of what and how, in plain JSON values; `figures` by name."""

    kind: str  # "feed" or "train"
    name: str  # of what was measured, such as a recipe or a pack
    created: str  # ISO 8601, UTC
    measured: Mapping[str, Any]
    figures: Mapping[str, Series]
    machine: Fingerprint

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, as they are written."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "name": self.name,
            "created": self.created,
            "measured": dict(self.measured),
            "figures": {name: series.to_json() for name, series in self.figures.items()},
            "machine": self.machine.to_json(),
        }

    @classmethod
    def from_json(cls, stored: Any, source: str = "the record", kind: str | None = None) -> Record:
        """The record in the JSON value `stored`, checked. `source` is what errors call it.

        Raises `DataError` for another schema or version, another `kind` than the one given, and for
        fields that are missing or of another type, naming the first.
        """
        remedy = _commands(kind)
        _check_schema(stored, source, remedy)
        body = _Fields(stored, source, remedy)
        figures = body.take("figures", dict)
        record = cls(
            kind=body.take("kind", str),
            name=body.take("name", str),
            created=body.take("created", str),
            measured=body.take("measured", dict),
            figures={
                name: _series(_Fields(figures[name], source, remedy, f"figures.{name}")) for name in figures
            },
            machine=_machine(_Fields(body.take("machine", dict), source, remedy, "machine")),
        )
        if kind is not None and record.kind != kind:
            raise DataError("record-kind", source=source, kind=record.kind, expected=kind, commands=remedy)
        return record

    def write(self, path: str | os.PathLike, option: str = "--out FILE.json") -> Path:
        """Writes the record as JSON, whole or not at all. Raises `DataError`, naming `option`."""
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        return replace_text(path, text, "the record", option)


def read(path: str | os.PathLike, kind: str | None = None) -> Record:
    """The record in a file; `kind`: of that kind only, such as `"feed"`.

    Raises `DataError`, on one line, for a file that is missing, truncated or no record, of another
    version or kind, or that lacks a field.
    """
    try:
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError("record-missing", path=path, commands=_commands(kind)) from None
    except OSError as error:
        raise DataError("record-unreadable", path=path, reason=error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:  # ValueError also of text that is not UTF-8
        reason = " ".join(str(error).split())[:120]
        raise DataError("record-not-json", path=path, reason=reason, commands=_commands(kind)) from None
    return Record.from_json(stored, str(path), kind)


def _check_schema(stored: Any, source: str, commands: list[str]) -> None:
    schema = stored.get("schema") if isinstance(stored, dict) else None
    match = re.fullmatch(rf"{re.escape(FORMAT)}/([0-9]{{1,9}})", schema) if isinstance(schema, str) else None
    facts = {"source": source, "schema": str(schema)[:60], "expected": SCHEMA}
    if match is None:
        raise DataError("record-other-schema", **facts, commands=commands)
    if int(match[1]) > VERSION:
        raise DataError("record-newer", **facts)
    if int(match[1]) < VERSION:
        raise DataError("record-older", **facts, commands=commands)


def _commands(kind: str | None = None) -> list[str]:
    """What to type for a record of a kind; of any, for `None` and for kinds that have no command."""
    return [COMMANDS[kind]] if kind in COMMANDS else list(COMMANDS.values())


@dataclass(frozen=True)
class _Fields:
    """The fields of one JSON object, taken by name and type. `path` is where it stands in the record."""

    stored: Any
    source: str
    commands: list[str]
    path: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.stored, dict):
            raise self._wrong(self.path, self.stored, "object")

    def take(self, name: str, *types: type) -> Any:
        """The value of `name`, of one of `types`; `float` is any finite number, `NoneType` JSON's null."""
        path = f"{self.path}.{name}".removeprefix(".")
        if name not in self.stored:
            raise DataError("record-field-missing", source=self.source, field=path, commands=self.commands)
        value = self.stored[name]
        # bool is an int to Python, and not to JSON
        sound = float in types if _is_number(value) else False
        if not (sound or (type(value) in types and type(value) is not float)):
            raise self._wrong(path, value, *(_JSON[kind] for kind in types))
        return value

    def runs(self) -> tuple[float, ...]:
        """The values of a series."""
        runs = self.take("runs", list)
        if not runs or not all(_is_number(run) for run in runs):
            field, value = f"{self.path}.runs", json.dumps(runs)[:60]
            facts = {"source": self.source, "field": field, "value": value, "commands": self.commands}
            raise DataError("record-runs", **facts)
        return tuple(runs)

    def _wrong(self, path: str, value: Any, *expected: str) -> DataError:
        facts = {"field": path, "value": json.dumps(value)[:60], "expected": list(expected)}
        return DataError("record-field-type", source=self.source, **facts, commands=self.commands)


_JSON = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}
_JSON[type(None)] = "null"


def _series(body: _Fields) -> Series:
    return Series(body.take("unit", str), body.runs())


def _machine(body: _Fields) -> Fingerprint:
    values = {}
    for name, hint in get_type_hints(Fingerprint).items():
        values[name] = body.take(name, *(get_origin(kind) or kind for kind in _alternatives(hint)))
    versions = _Fields(values["versions"], body.source, body.commands, "machine.versions")
    values["versions"] = {name: versions.take(name, str, type(None)) for name in versions.stored}
    return Fingerprint(**values)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


def _is_number(value: Any) -> bool:
    return number(value) is not None
