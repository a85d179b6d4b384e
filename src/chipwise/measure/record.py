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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..atomic import replace_text
from ..engine.stored import number
from ..errors import DataError
from ..machine.fingerprint import Machine

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
    machine: Machine

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
    def from_json(cls, made: Any, what: str = "The record", kind: str | None = None) -> Record:
        """The record that `made` holds, checked. `what` is how messages call it.

        Raises `DataError` for another schema or version, another `kind` than the one given, and for
        fields that are missing or of another type, naming the first.
        """
        _check_schema(made, what, kind)
        body = _Fields(made, what, kind=kind)
        record = cls(
            kind=body.take("kind", str),
            name=body.take("name", str),
            created=body.take("created", str),
            measured=body.take("measured", dict),
            figures={
                name: _series(_Fields(figure, what, f"figures.{name}.", kind))
                for name, figure in body.take("figures", dict).items()
            },
            machine=_machine(_Fields(body.take("machine", dict), what, "machine.", kind)),
        )
        if kind is not None and record.kind != kind:
            raise DataError(f"{what} is a record of '{record.kind}', expected '{kind}': {_measure(kind)}.")
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
        made = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: {_measure(kind)}.") from None
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error
    except RecursionError:
        raise DataError(
            f"{path} is no record of a measurement (nested too deep): {_measure(kind)}."
        ) from None
    except ValueError as error:  # also of text that is not UTF-8
        told = " ".join(str(error).split())[:120]
        raise DataError(f"{path} is truncated, or no JSON ({told}): {_measure(kind)}.") from error
    return Record.from_json(made, str(path), kind)


def _check_schema(made: Any, what: str, kind: str | None) -> None:
    schema = made.get("schema") if isinstance(made, dict) else None
    found = re.fullmatch(rf"{re.escape(FORMAT)}/([0-9]{{1,9}})", schema) if isinstance(schema, str) else None
    if found is None:
        said = f"its schema is {str(schema)[:60]!r}" if schema is not None else "it has no schema"
        raise DataError(
            f"{what} is no record of a measurement ({said}, expected '{SCHEMA}'): {_measure(kind)}."
        )
    version = int(found[1])
    if version > VERSION:
        raise DataError(
            f"{what} is of schema {schema}, this chipwise reads up to {SCHEMA}: "
            f"pip install --upgrade chipwise."
        )
    if version < VERSION:
        raise DataError(
            f"{what} is of schema {schema}, older than {SCHEMA}: measure again, {_measure(kind)}."
        )


def _measure(kind: str | None = None) -> str:
    """What to type for a record of a kind; of any, for `None` and for kinds that have no command."""
    return f"make one with {COMMANDS.get(kind or '') or ' or '.join(COMMANDS.values())}"


class _Fields:
    """The fields of one JSON object, taken by name and type."""

    def __init__(self, made: Any, what: str, prefix: str = "", kind: str | None = None):
        self.made, self.what, self.prefix, self.kind = made, what, prefix, kind
        if not isinstance(made, dict):
            raise self.wrong("", made, "an object")

    def take(self, name: str, *types: type | None) -> Any:
        """The value of `name`, of one of `types`; `None` among them is JSON's null, `float` any number."""
        if name not in self.made:
            raise DataError(f"{self.what} has no field '{self.prefix}{name}': {_measure(self.kind)}.")
        value = self.made[name]
        if value is None and None in types:
            return None
        if float in types and _is_number(value):
            return value
        # bool is an int to Python, and not to JSON
        plain = tuple(t for t in types if t not in (None, float))
        if plain and isinstance(value, plain) and (bool in types or not isinstance(value, bool)):
            return value
        told = {str: "text", int: "a whole number", float: "a number", dict: "an object", list: "a list"}
        names = [told.get(t, "true or false") if t is not None else "null" for t in types]
        raise self.wrong(name, value, " or ".join(names))

    def wrong(self, name: str, value: Any, expected: str) -> DataError:
        path = f"{self.prefix}{name}".rstrip(".")
        given = json.dumps(value)[:60]
        return DataError(f"{self.what} has {path}={given}, expected {expected}: {_measure(self.kind)}.")


def _series(body: _Fields) -> Series:
    unit, runs = body.take("unit", str), body.take("runs", list)
    if not runs or not all(_is_number(run) for run in runs):
        raise body.wrong("runs", runs, "finite numbers, at least one")
    return Series(unit, tuple(runs))


def _machine(body: _Fields) -> Machine:
    types: dict[str, Sequence[type | None]] = {
        "cpu": (str,),
        "cores": (float,),
        "memory_bytes": (int,),
        "os": (str,),
        "python": (str,),
        "versions": (dict,),
        "accelerator": (str, None),
        "accelerators": (int,),
        "commit": (str, None),
        "dirty": (bool, None),
    }
    values = {field.name: body.take(field.name, *types[field.name]) for field in fields(Machine)}
    versions = _Fields(values["versions"], body.what, "machine.versions.", body.kind)
    values["versions"] = {name: versions.take(name, str, None) for name in versions.made}
    return Machine(**values)


def _is_number(value: Any) -> bool:
    return number(value) is not None
