"""What the rules do to a setting, be it a number or a schedule: change its values, or stretch its lengths.

A number stays a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from ...errors import RecipeError
from ...recipe.duration import Clock
from ...recipe.schedule import as_schedule
from ...recipe.schedule import rounded as rounded
from ...recipe.schedules import as_given, exponential


def peak(value: Any, clock: Clock) -> float:
    """The highest value of a number or schedule; for a function of the step, over the steps of `clock`."""
    return as_schedule(value).highest(clock)


def mapped(value: Any, change: Callable[[float], float]) -> Any:
    """`value` with `change` applied to each of its values.

    Raises `RecipeError` for a function of the step, whose values cannot be reached.
    """
    return None if value is None else as_given(value, as_schedule(value).mapped(change))


def scaled(value: Any, factor: Fraction | float) -> Any:
    """`value` with each of its values times `factor`, to six digits."""
    return None if value is None else as_given(value, as_schedule(value).scaled(factor))


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
    return None if value is None else as_given(value, as_schedule(value).stretched(length))


def lengths(value: Any) -> list[tuple[str, str]]:
    """The durations in a setting, as (what it is, as written)."""
    return [] if value is None else as_schedule(value).lengths()
