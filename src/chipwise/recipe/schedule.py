"""What a schedule is: a small value that becomes a table of one number per step, and two that need no shape.

The convention, for a run of `total` steps numbered 0 to `total - 1`:

* step 0 has the schedule's start value. A ramp from 0 therefore makes a first
  step of rate 0, as in the DavidNet code and in optax;
* after a warm-up of `w` steps, step `w` has the peak;
* the end value belongs to step `total`, one after the last. The last step that
  runs still moves, by one step of the slope.

Tables are computed on the host in float64 and rounded to float32 once.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import RecipeError
from ..words.facts import Fact
from .duration import Clock

Change = Callable[[float], float]
Lengthen = Callable[[str], str]
LONG = "1000000"
"""Long enough to show the factor of a `Lengthen`."""


class Schedule(ABC):
    """One number for each step of a run. Subclasses are frozen dataclasses."""

    fits_any_run: ClassVar[bool] = True
    """Whether it ends where the run ends, however long that is."""

    @abstractmethod
    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        """The values at `steps`, (n,) float64 whole numbers, as (n,) float64."""

    @abstractmethod
    def _top(self) -> float | None:
        """The highest of the numbers it was given; None where only a table can tell."""

    @abstractmethod
    def _changed(self, number: Change, length: Lengthen) -> Schedule:
        """This schedule with `number` applied to its values and `length` to its durations."""

    @abstractmethod
    def lengths(self) -> list[tuple[str, str]]:
        """The durations in it, as (what it is, as written)."""

    @abstractmethod
    def warnings(self, clock: Clock, setting: str = "schedule") -> list[Fact]:
        """What is probably not meant on this clock, of the schedule that is called `setting`."""

    def table(self, clock: Clock, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The values of steps `start` to `stop - 1`: (stop - start,) float32, on the host.

        `stop` is the run's total when not given. A part of the table has the
        same bits as that part of the whole. Past the end of the run a schedule
        keeps its end value.

        Raises `RecipeError` when the range is empty backwards, when the clock
        lacks a total the schedule needs, and when a value is not finite.
        """
        if stop is None:
            stop = self._total(clock)
        if not 0 <= start <= stop:
            raise RecipeError("schedule-steps", schedule=repr(self), start=start, stop=stop)
        with np.errstate(over="ignore"):  # an overflow is reported below, with its step
            values = self._values(np.arange(start, stop, dtype=np.float64), clock).astype(np.float32)
        finite = np.isfinite(values)
        if not finite.all():
            at = int(np.argmin(finite))
            raise RecipeError(
                "schedule-not-finite", schedule=repr(self), value=float(values[at]), step=start + at
            )
        return values

    def highest(self, clock: Clock) -> float:
        """The highest value; of a function of the step and of what grows, over the steps of `clock`."""
        if (top := self._top()) is not None:
            return top
        table = self.table(clock)
        return rounded(float(table.max()), 7) if table.size else 0.0

    def with_peak(self, peak: float) -> Schedule:
        """The same shape with its highest value at `peak`: every value is scaled by the same factor.

        This is what `--set lr=0.2` does to a schedule. Raises `RecipeError` if the highest value is unknown
        or 0.
        """
        if not is_number(peak):
            raise RecipeError("peak-not-a-number", schedule=repr(self), peak=repr(peak))
        if isinstance(self, constant):
            return constant(peak)
        top = self._top()
        if top is None:
            raise RecipeError("schedule-without-peak", schedule=repr(self))
        if top <= 0:
            raise RecipeError("schedule-never-above-zero", schedule=repr(self))
        # In decimals as typed: half of 0.1 prints as 0.05 and not as 0.05000000000000001.
        factor = _decimal(peak) / _decimal(top)
        return self.mapped(lambda value: float(_decimal(value) * factor))

    def mapped(self, change: Change) -> Schedule:
        """This schedule with `change` applied to each of its values.

        Raises `RecipeError` for a function of the step, whose values cannot be reached.
        """
        return self._changed(change, _same)

    def scaled(self, factor: Fraction | float) -> Schedule:
        """This schedule with each of its values times `factor`, to six digits. Raises as `mapped` does."""
        return self.mapped(lambda value: rounded(float(_decimal(value) * Fraction(factor))))

    def stretched(self, length: Lengthen) -> Schedule:
        """This schedule with `length` applied to each of its durations, as written.

        Raises `RecipeError` for a function of the step that `length` would have to stretch.
        """
        return self._changed(_same, length)

    def json(self) -> dict[str, Any]:
        """Its name and its settings as JSON values: `{"schedule": "cosine", "peak": 0.1, "end": 0.0}`.

        `schedules.from_json` is the inverse, except for a function of the step, of which only the name is
        kept. The schedule inside a warm-up is called `of`.
        """
        settings = {f.name: plain(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]
        if "schedule" in settings:
            settings = {"of": settings.pop("schedule")} | settings
        return {"schedule": type(self).__name__} | settings

    def _total(self, clock: Clock) -> int:
        if clock.total is None:
            raise RecipeError("schedule-needs-total", schedule=repr(self))
        return clock.total


class Curve(Schedule):
    """A schedule of numbers and at most one duration, all of them fields, that ends where the run ends."""

    NUMBERS: ClassVar[tuple[str, ...]]
    RAMP: ClassVar[str] = ""
    """The field that is a duration, after which the schedule turns."""
    LATE: ClassVar[str] = ""
    """The code that says that a run ends before it does."""

    def __post_init__(self) -> None:
        check_numbers(self, *self.NUMBERS)

    def _top(self) -> float | None:
        return max(getattr(self, name) for name in self.NUMBERS)

    def _changed(self, number: Change, length: Lengthen) -> Schedule:
        return changed(self, number, length, self.NUMBERS, self.RAMP)

    def lengths(self) -> list[tuple[str, str]]:
        return [(self.RAMP, getattr(self, self.RAMP))] if self.RAMP else []

    def warnings(self, clock: Clock, setting: str = "schedule") -> list[Fact]:
        return late(self, self.LATE, getattr(self, self.RAMP), clock, setting) if self.RAMP else []


@dataclass(frozen=True)
class constant(Curve):
    """`value` at every step."""

    value: float

    NUMBERS: ClassVar[tuple[str, ...]] = ("value",)

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        return np.full_like(steps, self.value)


@dataclass(frozen=True, repr=False)
class function(Schedule):
    """Any `call(step) -> number`, such as an optax schedule. Usually made by `as_schedule`.

    A function that answers with a JAX array is compiled for the host's CPU where
    there is one and evaluated in blocks of 1,024 steps that start at multiples
    of 1,024, so a part of the table has the bits of the whole; its values are
    float32 and may differ between processors in the last place. Any other
    function is called once a step with a Python int.
    """

    call: Callable[[Any], Any]

    fits_any_run: ClassVar[bool] = False
    _BLOCK: ClassVar[int] = 1024

    def __repr__(self) -> str:
        return f"function({callable_name(self.call)})"

    def _top(self) -> float | None:
        return None

    def _changed(self, number: Change, length: Lengthen) -> Schedule:
        if number is not _same:
            raise RecipeError("function-values", schedule=repr(self))
        if length(f"{LONG}st") != f"{LONG}st":
            raise RecipeError("function-lengths", schedule=repr(self))
        return self

    def lengths(self) -> list[tuple[str, str]]:
        return []

    def warnings(self, clock: Clock, setting: str = "schedule") -> list[Fact]:
        return []

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        if not steps.size:
            return steps
        first, stop = int(steps[0]), int(steps[-1]) + 1
        # optax's one-cycle mixes float32 and bool, which strict promotion refuses.
        with jax.default_device(_host()), jax.numpy_dtype_promotion("standard"):
            if isinstance(self._one(first), jax.Array):
                try:
                    return self._blocks(first, stop)
                except TypeError:  # JAX's errors for Python control flow over the step are TypeErrors
                    pass
            return np.array([float(self._one(step)) for step in range(first, stop)], np.float64)

    def _one(self, step: int) -> Any:
        value = self.call(step)
        if not (is_number(value, finite=False) or (isinstance(value, jax.Array) and value.shape == ())):
            raise RecipeError("function-value", schedule=repr(self), value=repr(value), step=step)
        return value

    def _blocks(self, first: int, stop: int) -> np.ndarray:
        block = jax.jit(jax.vmap(self.call))
        origin = first - first % self._BLOCK
        parts = [
            np.asarray(block(jnp.arange(at, at + self._BLOCK, dtype=jnp.int32)), np.float64)
            for at in range(origin, stop, self._BLOCK)
        ]
        return np.concatenate(parts)[first - origin : stop - origin]


@dataclass(frozen=True)
class held(Schedule):
    """`schedule` as it is on `clock`, whatever clock it is asked for, and after the end its last value."""

    schedule: Schedule
    clock: Clock

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        last = max((self.clock.total or 0) - 1, 0)
        own, places = np.unique(np.minimum(steps, last), return_inverse=True)
        return self.schedule._values(own, self.clock)[places]

    def _top(self) -> float | None:
        return self.schedule._top()

    def _changed(self, number: Change, length: Lengthen) -> Schedule:
        return held(self.schedule._changed(number, length), self.clock)

    def lengths(self) -> list[tuple[str, str]]:
        return self.schedule.lengths()

    def warnings(self, clock: Clock, setting: str = "schedule") -> list[Fact]:
        return []


def as_schedule(value: Any, name: str = "schedule") -> Schedule:
    """`value` as a schedule: itself, a `constant` for a number, a `function` for a callable.

    Raises `RecipeError`, which calls the value `name`, for anything else.
    """
    if isinstance(value, Schedule):
        return value
    if is_number(value):
        return constant(float(value))
    if callable(value) and not isinstance(value, type):
        return function(value)
    raise RecipeError("not-a-schedule", name=name, value=repr(value))


def as_given(value: Any, new: Schedule) -> Any:
    """`new`, made from the setting `value`: a number where that was one."""
    if isinstance(value, Schedule):
        return new
    return new.value if isinstance(new, constant) else value


def plain(value: Any) -> Any:
    """A setting as a JSON value: a schedule by its `json()`, a function by its name."""
    if isinstance(value, Schedule):
        return value.json()
    if isinstance(value, Clock):
        return asdict(value)
    if isinstance(value, tuple):  # the pieces of a piecewise schedule, or the values of a table
        pieces = all(isinstance(one, tuple) for one in value)
        return {key: plain(number) for key, number in value} if pieces else list(map(plain, value))
    if isinstance(value, np.generic):
        return value.item()
    return callable_name(value) if callable(value) else value


def callable_name(call: Callable) -> str:
    """A name for `call` that is the same in every process: no memory address in it."""
    if isinstance(call, functools.partial):
        given = [repr(a) for a in call.args] + [f"{k}={v!r}" for k, v in call.keywords.items()]
        return f"partial({', '.join([callable_name(call.func), *given])})"
    named = call if hasattr(call, "__qualname__") else type(call)
    return f"{named.__module__}.{named.__qualname__}"


def rounded(value: float, digits: int = 6) -> float:
    """To so many significant digits, so that a third of 0.4 prints as 0.133333."""
    return float(f"{value:.{digits}g}")


def is_number(value: Any, finite: bool = True) -> bool:
    """Whether `value` is a number of Python or NumPy, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    return not finite or math.isfinite(value)


def check_numbers(schedule: Schedule, *names: str) -> None:
    """Raises `RecipeError` unless each of these fields is a finite number."""
    for name in names:
        value = getattr(schedule, name)
        if not is_number(value):
            raise RecipeError("schedule-number", schedule=repr(schedule), name=name, value=repr(value))


def changed(schedule: Any, number: Change, length: Lengthen, numbers: tuple[str, ...], ramp: str) -> Any:
    """`schedule` with `number` applied to the fields `numbers` and `length` to the field `ramp`."""
    new: dict[str, Any] = {name: number(getattr(schedule, name)) for name in numbers}
    return replace(schedule, **new | ({ramp: length(getattr(schedule, ramp))} if ramp else {}))


def late(schedule: Schedule, code: str, ramp: str, clock: Clock, setting: str) -> list[Fact]:
    """The fact `code` when the run ends before the `ramp` of `schedule` does."""
    if clock.total is None or (steps := clock.steps(ramp)) < clock.total:
        return []
    about = {"setting": setting, "schedule": repr(schedule), "ramp": ramp}
    return [Fact(code, about | {"steps": steps, "total": clock.total})]


def _same(value: Any) -> Any:
    return value


def _decimal(value: float) -> Fraction:
    return Fraction(repr(float(value)))


@functools.cache
def _host() -> Any:
    """A CPU device for user functions, or None (JAX's default) where JAX was started without one."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
