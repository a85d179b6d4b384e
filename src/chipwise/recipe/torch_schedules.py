"""PyTorch's learning-rate schedulers as schedules: the values that `torch.optim.lr_scheduler` really sets.

They end at the lengths that are written into them, not where the run ends, and a scheduler that is stepped
once an epoch holds its value for the epoch. Where PyTorch counts differs too: its one-cycle peaks one step
before `pct_start * total_steps` and ends on the last step. The formulas are those of PyTorch 2.13,
`torch/optim/lr_scheduler.py`. Made by `cw.torch.optimizer`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..errors import RecipeError, near
from ..words.facts import Fact
from .duration import Clock, Duration
from .schedule import Change, Lengthen, Schedule, check_numbers, is_number

_LENGTHS = ("total", "every", "until", "milestones")
_RATES = ("start", "end", "eta_min")
KINDS = {
    "OneCycleLR": ("start", "end", "total", "pct_start", "shape", "three_phase"),
    "CosineAnnealingLR": ("eta_min", "until"),
    "StepLR": ("every", "gamma"),
    "MultiStepLR": ("milestones", "gamma"),
    "LinearLR": ("start_factor", "end_factor", "until"),
    "SequentialLR": ("milestones", "schedulers"),
}


@dataclass(frozen=True, repr=False)
class torch_scheduler(Schedule):
    """What the PyTorch scheduler `kind` sets, from `base`.

    *Arguments:* `kind`: its class's name; `base`: the rate (or momentum) that it was given, for `OneCycleLR`
    its peak; `settings`: its own numbers; its lengths are durations, all in steps ("100st") where it is
    stepped once a step, all in epochs ("30ep") where it is stepped once an epoch, and several are joined by
    commas.
    Of `SequentialLR` the `schedulers` are numbered from "0".
    """

    kind: str
    base: float
    settings: Any  # given as a mapping; kept as a tuple of pairs, which is frozen and hashable

    fits_any_run: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RecipeError("torch-scheduler-unknown", kind=self.kind, known=list(KINDS))
        check_numbers(self, "base")
        pairs = self.settings.items() if isinstance(self.settings, Mapping) else self.settings
        given = {str(name): _thawed(name, value) for name, value in pairs}
        for name in KINDS[self.kind]:
            if name not in given:
                raise RecipeError("torch-scheduler-lacks", kind=self.kind, name=name, near=near(name, given))
        object.__setattr__(self, "settings", tuple(given.items()))
        units = {d.unit for d in self._durations()}
        if len(units) > 1 or not units <= {"st", "ep"}:
            raise RecipeError(
                "torch-scheduler-units", kind=self.kind, lengths=[str(d) for d in self._durations()]
            )

    def __repr__(self) -> str:
        kind, settings = self.kind, dict(self.settings)
        return f"torch_scheduler(kind={kind!r}, base={self.base!r}, settings={settings!r})"

    def _durations(self) -> list[Duration]:
        """Of the schedule and of those in it."""
        durations = []
        for name, value in self.settings:
            if name in _LENGTHS and value:
                durations += [Duration.parse(part) for part in str(value).split(", ")]
            if name == "schedulers":
                durations += [d for _, inner in value for d in inner._durations()]
        return durations

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        by_epoch = any(d.unit == "ep" for d in self._durations())
        times = np.floor(steps * clock.batch / clock.examples) if by_epoch else steps
        known: dict[int, float] = {}
        values = []
        for time in map(int, times.tolist()):
            if time not in known:
                known[time] = self._at(time)
            values.append(known[time])
        return np.array(values, np.float64)

    def _at(self, time: int) -> float:
        """After so many calls of PyTorch's `step()`."""
        given = {n: _counts(v) if n in _LENGTHS else v for n, v in self.settings}
        return _FORMULAS[self.kind](self.base, time, given)

    def _top(self) -> float | None:
        given = dict(self.settings)
        if self.kind == "SequentialLR":
            return max(inner._top() for _, inner in given["schedulers"])
        factors = [given[name] for name in ("start_factor", "end_factor") if name in given] or [1.0]
        return max(self.base * max(factors), *(given.get(name, 0.0) for name in _RATES))

    def _changed(self, number: Change, length: Lengthen) -> Schedule:
        def new(name: str, value: Any) -> Any:
            if name == "schedulers":
                return tuple((i, inner._changed(number, length)) for i, inner in value)
            if name in _LENGTHS and value:
                return ", ".join(length(part) for part in str(value).split(", "))
            return number(value) if name in _RATES else value

        return replace(self, base=number(self.base), settings=tuple((n, new(n, v)) for n, v in self.settings))

    def lengths(self) -> list[tuple[str, str]]:
        lengths = [(name, str(value)) for name, value in self.settings if name in _LENGTHS and value]
        for name, value in self.settings:
            if name == "schedulers":
                lengths += [pair for _, inner in value for pair in inner.lengths()]
        return lengths

    def warnings(self, clock: Clock, setting: str = "schedule") -> list[Fact]:
        return []


def _thawed(name: Any, value: Any) -> Any:
    """A setting as it was, or as JSON gives it back."""
    if name != "schedulers":
        if not (is_number(value) or isinstance(value, bool | str)):
            raise RecipeError("torch-scheduler-setting", name=str(name), value=repr(value))
        return value
    inner = value.items() if isinstance(value, Mapping) else value
    return tuple(
        (
            str(i),
            torch_scheduler(one["kind"], one["base"], one["settings"]) if isinstance(one, Mapping) else one,
        )
        for i, one in inner
    )


def _counts(value: Any) -> list[int]:
    """Durations as numbers of calls of `step()`."""
    return [round(Duration.parse(part).value) for part in str(value).split(", ")] if value else []


def _one_cycle(base: float, time: int, given: dict[str, Any]) -> float:
    (total,), pct = given["total"], given["pct_start"]
    rates = [given["start"], base, given["end"]]
    ends = [float(pct * total) - 1, total - 1]
    if given["three_phase"]:
        rates = [given["start"], base, given["start"], given["end"]]
        ends = [float(pct * total) - 1, float(2 * pct * total) - 2, total - 1]
    time, begin = min(time, total - 1), 0.0
    for i, end in enumerate(ends):
        if time <= end or i == len(ends) - 1:
            share = (time - begin) / (end - begin) if end > begin else 1.0
            if given["shape"] == "cos":
                return rates[i + 1] + (rates[i] - rates[i + 1]) / 2.0 * (math.cos(math.pi * share) + 1)
            return (rates[i + 1] - rates[i]) * share + rates[i]
        begin = end
    raise AssertionError("unreachable")


def _cosine(base: float, time: int, given: dict[str, Any]) -> float:
    (until,), low = given["until"], given["eta_min"]
    return low + (base - low) * (1 + math.cos(math.pi * time / until)) / 2


def _linear(base: float, time: int, given: dict[str, Any]) -> float:
    (until,), start, end = given["until"], given["start_factor"], given["end_factor"]
    return base * (start + (end - start) * min(time, until) / until)


def _sequential(base: float, time: int, given: dict[str, Any]) -> float:
    at = bisect.bisect_right(given["milestones"], time)
    return given["schedulers"][at][1]._at(time - ([0, *given["milestones"]][at]))


_FORMULAS: dict[str, Callable[[float, int, dict[str, Any]], float]] = {
    "OneCycleLR": _one_cycle,
    "CosineAnnealingLR": _cosine,
    "StepLR": lambda base, time, given: base * given["gamma"] ** (time // given["every"][0]),
    "MultiStepLR": lambda base, time, given: (
        base * given["gamma"] ** bisect.bisect_right(sorted(given["milestones"]), time)
    ),
    "LinearLR": _linear,
    "SequentialLR": _sequential,
}
