"""What the rules do to a setting, be it a number or a schedule: change its values, or stretch its lengths."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from ...errors import RecipeError
from ...recipe.duration import Clock, Duration
from ...recipe.schedules import (
    Schedule,
    as_schedule,
    constant,
    cosine,
    exponential,
    function,
    linear,
    one_cycle,
    one_cycle_momentum,
    piecewise,
    warmup,
)

_VALUES: dict[type, tuple[str, ...]] = {
    constant: ("value",),
    linear: ("start", "end"),
    cosine: ("peak", "end"),
    one_cycle: ("peak", "start", "end"),
    one_cycle_momentum: ("high", "low"),
    exponential: ("init", "floor"),
    warmup: ("start",),
}
_LENGTHS: dict[type, str] = {
    one_cycle: "warmup",
    one_cycle_momentum: "warmup",
    exponential: "decay",
    warmup: "length",
}


def peak(value: Any, clock: Clock) -> float:
    """The highest value of a number or schedule; for a function of the step, over the steps of `clock`."""
    if not isinstance(value, Schedule):
        value = as_schedule(value)
    if isinstance(value, warmup):
        return peak(value.schedule, clock)
    if isinstance(value, piecewise):
        return max(number for _, number in value.pieces)
    if isinstance(value, exponential) and value.decay_rate <= 1:
        return value.floor + value.init
    if isinstance(value, function | exponential):
        table = value.table(clock)
        return rounded(float(table.max()), 7) if table.size else 0.0
    return max(getattr(value, name) for name in _VALUES[type(value)])


def mapped(value: Any, change: Callable[[float], float]) -> Any:
    """`value` with `change` applied to each of its values; a number stays a number.

    Raises `RecipeError` for a function of the step, whose values cannot be reached.
    """
    if value is None:
        return None
    if not isinstance(value, Schedule):
        if isinstance(as_schedule(value), function):
            raise _unreachable(as_schedule(value), "values")
        return change(float(value))
    if isinstance(value, function):
        raise _unreachable(value, "values")
    if isinstance(value, piecewise):
        return piecewise({key: change(number) for key, number in value.pieces})
    changes: dict[str, Any] = {name: change(getattr(value, name)) for name in _VALUES[type(value)]}
    if isinstance(value, warmup):
        changes["schedule"] = mapped(value.schedule, change)
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]


def scaled(value: Any, factor: Fraction | float) -> Any:
    """`value` with each of its values times `factor`, to six digits."""
    return mapped(value, lambda number: rounded(float(Fraction(repr(float(number))) * Fraction(factor))))


def to_the_power(value: Any, exponent: Fraction | float) -> Any:
    """A decay a step, such as Adam's `b1` or an EMA's, for steps that are `exponent` times as large.

    The distance to 1, which is what matters of 0.999, keeps four digits. Raises `RecipeError` for an
    exponential schedule, which would not stay one.
    """
    if isinstance(value, exponential):
        raise RecipeError(f"{value!r} is the decay of an average: give a number, or another schedule.")

    def change(decay: float) -> float:
        return 0.0 if decay <= 0 else rounded(1 - rounded(-math.expm1(exponent * math.log(decay)), 4), 12)

    return mapped(value, change)


def stretched(value: Any, length: Callable[[str], str]) -> Any:
    """`value` with `length` applied to the durations in it.

    Raises `RecipeError` for a function of the step that `length` would have to stretch.
    """
    schedule = value if isinstance(value, Schedule) else None if value is None else as_schedule(value)
    if isinstance(schedule, function) and length(_LONG) != _LONG:
        raise _unreachable(schedule, "lengths")
    if not isinstance(value, Schedule):
        return value
    if isinstance(value, piecewise):
        return piecewise([(length(key), number) for key, number in value.pieces])
    changes: dict[str, Any] = {}
    if (name := _LENGTHS.get(type(value))) is not None:
        changes[name] = length(getattr(value, name))
    if isinstance(value, warmup):
        changes["schedule"] = stretched(value.schedule, length)
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]


def lengths(value: Any) -> list[tuple[str, str]]:
    """The durations in a setting, as (what it is, as written)."""
    if isinstance(value, piecewise):
        return [("boundaries", ", ".join(key for key, _ in value.pieces if Duration.parse(key)))]
    inner = lengths(value.schedule) if isinstance(value, warmup) else []
    if (name := _LENGTHS.get(type(value))) is not None:
        return [("warmup" if name == "length" else name, getattr(value, name)), *inner]
    return inner


def rounded(value: float, digits: int = 6) -> float:
    """To so many significant digits, so that a third of 0.4 prints as 0.133333."""
    return float(f"{value:.{digits}g}")


_LONG = "1000000st"


def _unreachable(schedule: Schedule, what: str) -> RecipeError:
    return RecipeError(
        f"{schedule!r} is a function of the step, whose {what} cannot be changed: write it as a schedule, "
        'such as one_cycle(0.4, warmup="5ep")'
    )
