"""One row of a comparison, wherever it comes from. Speeds are examples/s of all devices together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...engine.stored import number
from ...planner.plans import Range
from ..published import Published

MEASURED, PREDICTED, PUBLISHED = "measured", "predicted", "published"


@dataclass(frozen=True)
class Window:
    """The mean loss of steps `first` to `last`, both counted, from 1."""

    first: int
    last: int
    loss: float


@dataclass(frozen=True)
class Repeat:
    """One measurement: a record of `chipwise bench`, or a run. Empty is unknown."""

    name: str  # its file or folder
    seed: int | None = None
    steps: int | None = None  # done
    speeds: tuple[tuple[int, float], ...] = ()  # (step at the end of an interval, examples/s in it)
    losses: tuple[Window, ...] = ()
    evaluations: tuple[Mapping[str, float], ...] = ()  # "step", "seconds" where known, "eval/..."
    metrics: Mapping[str, float] = field(default_factory=dict)  # the last of each
    seconds: Mapping[str, float] = field(default_factory=dict)  # wall, by section
    complete: bool = True
    diverged: str = ""  # when, if it did: "The training loss became nan between steps 105 and 130"
    warming_up: bool = False  # its only speed is of the interval that compiled programs warm up in

    @cached_property
    def examples_per_second(self) -> float | None:
        """The median over its intervals."""
        return float(np.median([speed for _, speed in self.speeds])) if self.speeds else None

    @property
    def wall_seconds(self) -> float | None:
        """Of the whole run; `None` for a benchmark, which stops early, and for a run that is not over."""
        return self.seconds.get("total") if self.complete else None


@dataclass(frozen=True)
class Row:
    """What is compared: measured, predicted or published. `None` and empty are unknown."""

    label: str
    kind: str  # MEASURED, PREDICTED or PUBLISHED
    form: str  # "record", "run", "study", "plan" or "published"
    source: str  # where its figures come from, in words
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
    target: str = ""  # the same as `chips.targets.parse` reads it; "" for what it does not know
    machine: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    created: str | None = None
    repeats: tuple[Repeat, ...] = ()
    plan: Mapping[str, Any] | None = None  # of a plan document, checked where it is used
    published: Published | None = None
    notes: tuple[str, ...] = ()
    given: tuple[str, ...] = ()  # the argument that named it: its label, its path

    @property
    def sound(self) -> tuple[Repeat, ...]:
        """The repeats that speak for it: those that did not diverge."""
        return tuple(r for r in self.repeats if not r.diverged)

    @property
    def predicted(self) -> Range | None:
        """Examples/s of a plan."""
        return as_range((self.plan or {}).get("examples_per_second"))

    @property
    def steps(self) -> int | None:
        """Steps of the whole run, where it is one: done by all repeats, or planned."""
        if self.plan is not None:
            return self.plan["steps"] if isinstance(self.plan.get("steps"), int) else None
        done = {r.steps for r in self.sound if r.wall_seconds is not None}
        return done.pop() if len(done) == 1 else None

    @property
    def where(self) -> str:
        """The device in words: `8 × TPU v5 lite`, `cpu (8 simulated)`."""
        if self.device is None:
            return "device unknown"
        if self.simulated:
            return f"{self.device} ({self.devices} simulated devices)"
        return f"{self.devices} × {self.device}" if (self.devices or 1) > 1 else self.device

    def named(self, label: str) -> Row:
        return replace(self, label=label)


def as_range(found: Any) -> Range | None:
    """A range of a plan document above 0; an unknown end is its value. `None` where it is none."""
    if not isinstance(found, Mapping) or (value := number(found.get("value"))) is None or value <= 0:
        return None
    low, high = number(found.get("low")), number(found.get("high"))
    low, high = value if low is None else low, value if high is None else high
    return Range(value, low, high) if 0 < low <= value <= high else None
