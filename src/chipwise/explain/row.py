"""Rows, which pages and tables put side by side, whatever their source. Speeds are examples/s of
all devices together. Empty and `None` mean unknown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..base import DataError, Fact, fact
from ..base.figures import known, without_secrets
from ..base.json_types import part
from ..recipe.schedules import as_typed

# Of a recipe: a row's, or a repeat's
_FIELDS = ("name", "batch", "replicas", "precision", "seed")
_REPEATED = ("seed", "fold")  # settings in which the repeats of a row differ

COMMON = (
    *("recipe", "parameters", "batch", "replicas", "precision", "data", "framework"),
    *("exact", "machine", "where"),
)
"""The fields that all repeats of a row share, and that tell rows apart, most important first."""


@dataclass(frozen=True)
class Repeat:
    """One measurement: a record of `chipwise bench`, or a run."""

    name: str  # its file or folder
    seed: int | None = None
    steps: int | None = None  # done
    speeds: tuple[tuple[int, float], ...] = ()  # (step at the end of an interval, examples/s in it)
    evaluations: tuple[Mapping[str, float], ...] = ()  # "step", "seconds" where known, "eval/..."
    metrics: Mapping[str, float] = field(default_factory=dict)  # the last of each
    better: Mapping[str, str] = field(default_factory=dict)  # which way they are, as the run says
    fingerprint: str | None = None  # of the trained parameters
    seconds: Mapping[str, float] = field(default_factory=dict)  # wall, by section
    best_at: int | None = None  # the step of `metrics`, where a run kept its best evaluation
    complete: bool = True
    diverged: Fact | None = None  # when, if it did
    warming_up: bool = False  # its only speed is of the interval that compiled programs warm up in

    @cached_property
    def examples_per_second(self) -> float | None:
        """The median over the repeat's intervals."""
        return float(np.median([speed for _, speed in self.speeds])) if self.speeds else None

    @property
    def wall_seconds(self) -> float | None:
        """The seconds of the whole run. `None` for a benchmark, which stops early, and for an
        unfinished run."""
        return self.seconds.get("total") if self.complete else None


@dataclass(frozen=True)
class Row:
    """A unit of comparison: one run, one benchmark, or several that differ only in the seed."""

    label: str
    form: str  # "record", "run" or "study"
    source: Fact  # where its figures come from
    recipe: str
    parameters: int | None = None  # numbers of the model, not bytes
    columns: Mapping[str, str] = field(default_factory=dict)  # of an example: "uint8[32, 32, 3]"
    batch: int | None = None  # global
    replicas: int | None = None
    precision: str | None = None
    exact: bool | None = None
    data: str | None = None  # "real" or "synthetic"
    framework: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # the rest of `Recipe.describe`, flat
    device: str | None = None  # kind, as JAX or the source names it
    devices: int | None = None  # that it used, of that kind
    simulated: bool = False
    machine: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    created: str | None = None
    repeats: tuple[Repeat, ...] = ()
    notes: tuple[Fact, ...] = ()
    given: tuple[str, ...] = ()  # the argument that named it: its label, its path

    @property
    def sound(self) -> tuple[Repeat, ...]:
        """The repeats that did not diverge."""
        return tuple(r for r in self.repeats if r.diverged is None)

    @property
    def steps(self) -> int | None:
        """The steps of the whole run, if all complete repeats in `sound` did the same number."""
        done = {r.steps for r in self.sound if r.wall_seconds is not None}
        return done.pop() if len(done) == 1 else None

    @property
    def where(self) -> str:
        """The device in words: `8 × TPU v5 lite`, `cpu (8 simulated devices)`."""
        if self.device is None:
            return "device unknown"
        if self.simulated:
            return f"{self.device} ({self.devices} simulated devices)"
        return f"{self.devices} × {self.device}" if (self.devices or 1) > 1 else self.device


def identity(described: Any, path: object) -> dict[str, Any]:
    """Fields of a `Row` from the output of `Recipe.describe`. `path` is its file, for errors.

    The training columns become `columns`. The number of examples is a setting like any other.
    Raises `DataError` if the recipe's name or a batch of at least 1 is missing.
    """
    described = described if isinstance(described, Mapping) else {}
    name = text(described, "name")
    batch = whole(described, "batch")
    if name is None or batch is None or batch < 1:
        wrong = "{path} is damaged: its recipe or its batch is missing. Make it again."
        raise DataError("recipe-unnamed", wrong, path=path)
    train = part(part(described, "task"), "train")
    columns = {k: str(v) for k, v in train.items() if k != "examples"}
    left = {k: v for k, v in described.items() if k not in (*_FIELDS, "packs")}
    left = flat({**left, "source": origin(described)})
    return {
        "recipe": name,
        "batch": batch,
        "columns": columns,
        "replicas": whole(described, "replicas"),
        "precision": text(described, "precision"),
        "settings": {
            k: v
            for k, v in left.items()
            if k.removeprefix("task.train.") not in columns and v is not None
        },
    }


def origin(described: Mapping[str, Any]) -> dict[str, Any]:
    """How the command line made the recipe, as far as that says which model trains: its name or
    file, `--set`, and the weights. Not the data, which may be of a fold or in another folder."""
    source = part(described, "source")
    texts = source.get("set")
    pairs = (str(text).partition("=") for text in (texts if isinstance(texts, list) else ()))
    settings = {name.strip(): value.strip() for name, equals, value in pairs if equals}
    made = {name: source.get(name) for name in ("recipe", "from", "with_optimizer")}
    return {**made, "set": {k: v for k, v in settings.items() if k not in _REPEATED}}


def ran_on(devices: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `Row` from the devices that a run or a record states."""
    simulated = devices.get("simulated") is True
    return {
        "device": text(devices, "kind"),
        "devices": whole(devices, "count"),
        "simulated": simulated,
    }


def divergence(stored: Any) -> Fact | None:
    """When a run diverged, according to its last row or its study. `None` if it did not."""
    if isinstance(stored, Mapping):
        first = whole(stored, "first")
        last = whole(stored, "last")
        if first is not None and last is not None:
            return fact("diverged-between", first=first, last=last)
    return None


# ---- fields of what `chipwise` wrote, as far as they are what it writes


def flat(stored: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Turns `{"a": {"b": 1}}` into `{"a.b": 1}`. A stored schedule becomes the text that a user
    types. Addresses are `shown`."""
    leaves: dict[str, Any] = {}
    for key, value in stored.items():
        if isinstance(value, Mapping) and "schedule" not in value:
            leaves |= flat(value, f"{path}{key}.")
        else:
            leaf = as_typed(value) if isinstance(value, Mapping) else value
            leaves[f"{path}{key}"] = shown(leaf)
    return leaves


def shown(value: Any) -> Any:
    """A stored value without the passwords and signatures of addresses. A number that is not finite
    is a text, since JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return without_secrets(value) if "://" in value else value
    if isinstance(value, Mapping):
        return {k: shown(v) for k, v in value.items()}
    return [shown(v) for v in value] if isinstance(value, list) else value


def text(stored: Mapping[str, Any], name: str) -> str | None:
    value = stored.get(name)
    return value if isinstance(value, str) and value else None


def whole(stored: Mapping[str, Any], name: str) -> int | None:
    """A whole number that any other program reads too."""
    value = stored.get(name)
    return value if type(value) is int and abs(value) < 2**53 else None


def seconds(stored: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for k, v in stored.items() if known(v) and v >= 0}
