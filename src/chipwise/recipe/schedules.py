"""The schedules to write in a recipe, each a small value that becomes a table of one number per
step.

    lr=one_cycle(0.4, warmup="5ep")
    lr=piecewise({"0st": 0.1, "40000st": 0.01})
    lr=warmup(cosine(1e-3), "5%")
    lr=exponential(0.01, 1 / math.e, decay="2000st", floor=1e-4)
    momentum=one_cycle(0.85, "5ep", start=0.95, end=0.95)
    weight_decay=5e-4

Every length is a duration (see `chipwise.recipe.duration`). The recipe's own clock turns it into
steps, so the user does no arithmetic and a schedule stretches with the run. Wherever a schedule is
accepted, a plain number means `constant`, and any function of the step, such as an optax schedule,
is accepted too.

For a run of `total` steps numbered 0 to `total - 1`:

* Step 0 has the start value. A ramp from 0 therefore gives a first step of rate 0, as in DavidNet
  and optax.
* After a warm-up of `w` steps, step `w` has the peak.
* The end value belongs to step `total`, one after the last, so the last step that runs still moves.

Tables are computed on the host in float64 and rounded to float32 once. Linear parts use only
operations that IEEE 754 rounds exactly. Cosines and powers go through the C library one value at a
time, because NumPy's vector versions differ between processors and between places in an array. That
is why these are not optax's schedules, which agree to rounding but run on the chip.

Long because what a schedule is cannot be read without the shapes that it has.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..base import Fact, RecipeError, invalid, unknown
from ..base.annotations import as_annotated
from .duration import Clock, Duration, Length

Change = Callable[[float], float]
Lengthen = Callable[[str], str]
Lengths = list[tuple[str, str]]
"""Durations, each as (name, as written)."""
LONG = "1000000"
"""Long enough to show the factor of a `Lengthen`."""


class Schedule(ABC):
    """One number for each step of a run. Subclasses are frozen dataclasses.

    Most are a formula of numbers and at most one duration, which they name here.
    """

    fits_any_run: ClassVar[bool] = True
    """Whether the schedule ends where the run ends, however long the run is."""
    NUMBERS: ClassVar[tuple[str, ...]] = ()
    """The fields that are values of the schedule."""
    RAMP: ClassVar[str] = ""
    """The field with the duration after which the schedule turns."""
    LATE: ClassVar[str] = ""
    """The code of the fact that a run ends before the duration in `RAMP` does, where that is not
    meant."""
    INSTEAD: ClassVar[tuple[str, ...]] = ()
    """What to type in place of a duration of zero."""

    def __post_init__(self) -> None:
        check_numbers(self, *self.NUMBERS)
        if self.RAMP:
            _check_length(self, self.RAMP, *self.INSTEAD)

    @abstractmethod
    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        """The values at `steps`, (n,) float64 whole numbers, as (n,) float64."""

    def _top(self) -> float | None:
        """The highest of the numbers it was given, or None where only a table can tell."""
        numbers: list[float] = []

        def seen(value: float) -> float:
            numbers.append(value)
            return value

        self._changed(seen, _same)
        return max(numbers)

    def _changed(self, number: Change, length: Lengthen) -> Schedule:
        """This schedule with `number` applied to its values and `length` to its durations."""
        new: dict[str, Any] = {name: number(getattr(self, name)) for name in self.NUMBERS}
        new |= {self.RAMP: length(getattr(self, self.RAMP))} if self.RAMP else {}
        return replace(self, **new)  # type: ignore[type-var]

    def lengths(self) -> Lengths:
        """The durations in it."""
        return [(self.RAMP, getattr(self, self.RAMP))] if self.RAMP else []

    def warnings(self, clock: Clock, setting: str = "schedule") -> list[Fact]:
        """The facts on this clock that are probably not meant, for the schedule called
        `setting`."""
        return late(self, self.LATE, getattr(self, self.RAMP), clock, setting) if self.LATE else []

    def table(self, clock: Clock, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The values of steps `start` to `stop - 1`: (stop - start,) float32, on the host.

        `stop` is the run's total by default. A part of the table has the same bits as that part of
        the whole. Past the end of the run a schedule keeps its end value.

        Raises `RecipeError` when `start` is below 0 or above `stop`, when the clock lacks a total
        that the schedule needs, and when a value is not finite.
        """
        if stop is None:
            stop = self._total(clock)
        if not 0 <= start <= stop:
            raise invalid(
                "schedule-steps", f"the steps of {self!r}", (start, stop), "0 <= start <= stop"
            )
        with np.errstate(over="ignore"):  # an overflow is reported below, with its step
            values = self._values(np.arange(start, stop, dtype=np.float64), clock).astype(
                np.float32
            )
        finite = np.isfinite(values)
        if not finite.all():
            at = int(np.argmin(finite))
            value = float(values[at])
            where = f"{self!r} at step {start + at}"
            raise invalid("schedule-not-finite", where, value, "a finite float32", step=start + at)
        return values

    def highest(self, clock: Clock) -> float:
        """The highest value. For a function of the step, and for what grows, it is the highest over
        the steps of `clock`."""
        if (top := self._top()) is not None:
            return top
        table = self.table(clock)
        return rounded(float(table.max()), 7) if table.size else 0.0

    def with_peak(self, peak: float) -> Schedule:
        """The same shape with its highest value at `peak`. Every value is scaled by the same
        factor.

        `--set lr=0.2` does this to a schedule. Raises `RecipeError` if the highest value is unknown
        or 0.
        """
        if not is_number(peak):
            expected = "a finite number, such as 0.1"
            raise invalid("peak-not-a-number", f"the new peak of {self!r}", peak, expected)
        if isinstance(self, constant):
            return constant(peak)
        top = self._top()
        if top is None:
            raise RecipeError("schedule-without-peak", schedule=repr(self))
        if top <= 0:
            raise RecipeError("schedule-never-above-zero", schedule=repr(self))
        # In decimals as typed: half of 0.1 prints as 0.05 and not as 0.05000000000000001.
        factor = _decimal(peak) / _decimal(top)
        return self.mapped(lambda value: _float(_decimal(value) * factor))

    def mapped(self, change: Change) -> Schedule:
        """This schedule with `change` applied to each of its values.

        Raises `RecipeError` for a function of the step, whose values cannot be reached.
        """
        return self._changed(change, _same)

    def scaled(self, factor: Fraction | float) -> Schedule:
        """This schedule with each of its values times `factor`, to six digits. Raises as `mapped`
        does."""
        return self.mapped(lambda value: rounded(_float(_decimal(value) * Fraction(factor))))

    def stretched(self, length: Lengthen) -> Schedule:
        """This schedule with `length` applied to each of its durations, as written.

        Raises `RecipeError` for a function of the step that `length` would have to stretch.
        """
        return self._changed(_same, length)

    def json(self) -> dict[str, Any]:
        """The name and the settings as JSON values:
        `{"schedule": "cosine", "peak": 0.1, "end": 0.0}`.

        `schedules.from_json` is the inverse, except for a function of the step, where only the name
        is stored. The schedule inside a warm-up is called `of`.
        """
        settings = {
            f.name: plain(getattr(self, f.name))
            for f in fields(self)  # type: ignore[arg-type]
        }
        if "schedule" in settings:
            settings = {"of": settings.pop("schedule")} | settings
        return {"schedule": type(self).__name__} | settings

    def _total(self, clock: Clock) -> int:
        if clock.total is None:
            raise RecipeError("schedule-needs-total", schedule=repr(self))
        return clock.total


@as_annotated
@dataclass(frozen=True)
class constant(Schedule):
    """`value` at every step."""

    value: float

    NUMBERS = ("value",)

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        return np.full_like(steps, self.value)


@as_annotated
@dataclass(frozen=True, repr=False)
class function(Schedule):
    """Any `call(step) -> number`, such as an optax schedule. Usually created by `as_schedule`.

    A function that returns a JAX array is compiled for the host's CPU where there is one. It is
    evaluated in blocks of 1,024 steps that start at multiples of 1,024, so a part of the table has
    the bits of the whole. Its values are float32 and may differ between processors in the last
    place. Any other function is called once a step with a Python int.
    """

    call: Callable[[Any], Any]

    fits_any_run = False
    _BLOCK = 1024

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

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        if not steps.size:
            return steps
        first = int(steps[0])
        stop = int(steps[-1]) + 1
        # optax's one-cycle mixes float32 and bool, which strict promotion refuses.
        with jax.default_device(host_device()), jax.numpy_dtype_promotion("standard"):
            if isinstance(self._one(first), jax.Array):
                try:
                    return self._blocks(first, stop)
                except TypeError:
                    # JAX's errors for Python control flow over the step are TypeErrors
                    pass
            return np.array([float(self._one(step)) for step in range(first, stop)], np.float64)

    def _one(self, step: int) -> Any:
        value = self.call(step)
        if not (
            is_number(value, finite=False) or (isinstance(value, jax.Array) and value.shape == ())
        ):
            raise invalid(
                "function-value", f"{self!r} at step {step}", value, "one number", step=step
            )
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
    """`schedule` as it is on `clock`, whatever clock it is called with. After the end it keeps its
    last value."""

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

    def lengths(self) -> Lengths:
        return self.schedule.lengths()


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
    expected = "a finite number, a schedule such as one_cycle(0.4), or a function of the step"
    raise invalid("not-a-schedule", name, value, expected)


def as_given(value: Any, new: Schedule) -> Any:
    """`new` in the form of the setting `value` that it comes from: a number for a number, and
    `value` itself for a function."""
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
    """`value` to `digits` significant digits, so that a third of 0.4 prints as 0.133333."""
    return float(f"{value:.{digits}g}")


def is_number(value: Any, finite: bool = True) -> bool:
    """Whether `value` is a number of Python or NumPy, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    if isinstance(value, int):  # one of 400 digits is no float
        return not finite or abs(value) <= sys.float_info.max
    return not finite or math.isfinite(value)


def check_numbers(schedule: Schedule, *names: str) -> None:
    """Raises `RecipeError` unless each of these fields is a finite number."""
    for name in names:
        value = getattr(schedule, name)
        if not is_number(value):
            raise RecipeError(
                "schedule-number", schedule=repr(schedule), name=name, value=repr(value)
            )


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


def _float(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:  # a schedule refuses it
        return math.inf


@functools.cache
def host_device() -> Any:
    """A CPU device for user functions, or None (JAX's default) where JAX was started without
    one."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


_SHOWN = 8  # values of a table in a text


@as_annotated
@dataclass(frozen=True)
class linear(Schedule):
    """A straight line from `start` at step 0 to `end` at step `total`."""

    start: float
    end: float

    NUMBERS = ("start", "end")

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        return _between(self.start, self.end, np.minimum(steps / max(self._total(clock), 1), 1.0))


@as_annotated
@dataclass(frozen=True)
class cosine(Schedule):
    """Half a cosine from `peak` at step 0 to `end` at step `total`.

    The decay of SGDR, without restarts (Loshchilov & Hutter, 2017,
    https://arxiv.org/abs/1608.03983). Put `warmup` around it for a ramp.
    """

    peak: float
    end: float = 0.0

    NUMBERS = ("peak", "end")

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        t = np.minimum(steps / max(self._total(clock), 1), 1.0)
        return _between(self.peak, self.end, _half_cosine(t))


@as_annotated
@dataclass(frozen=True)
class one_cycle(Schedule):
    """A rise from `start` to `peak` over `warmup`, then a fall to `end` at step `total`.

    `shape` is "linear" (both halves, as in DavidNet), "cosine" (both halves, the default of PyTorch
    and fastai) or "linear-cosine" (a straight rise and a cosine fall, the usual recipe for
    ImageNet). With `warmup` of `w` steps the peak is at step `w`. A warm-up shorter than a step is
    one step, so the run never starts at its peak. A warm-up of zero is refused, since `linear` and
    `cosine` say that openly. When `w` is the whole run or more, the ramp is cut off where the run
    ends, and `warnings` reports it.

    A momentum that is lowest where the rate is highest:
    `one_cycle(0.85, "30%", start=0.95, end=0.95)`.

    Source: Smith & Topin, 2018, https://arxiv.org/abs/1708.07120.
    """

    peak: float
    warmup: Length = "30%"
    start: float = 0.0
    end: float = 0.0
    shape: str = "linear"

    NUMBERS = ("peak", "start", "end")
    RAMP = "warmup"
    LATE = "peak-never-reached"
    INSTEAD = ("linear(peak, end)", "cosine(peak, end)")
    SHAPES = ("linear", "cosine", "linear-cosine")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape not in self.SHAPES:
            raise unknown("shape-unknown", "shape", self.shape, self.SHAPES)

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        total = self._total(clock)
        ramp = clock.steps(self.warmup)
        up = np.minimum(steps / ramp, 1.0)
        down = np.clip((steps - ramp) / max(total - ramp, 1), 0.0, 1.0)
        if self.shape == "cosine":
            up = _half_cosine(up)
        if self.shape != "linear":
            down = _half_cosine(down)
        rise = _between(self.start, self.peak, up)
        fall = _between(self.peak, self.end, down)
        return np.where(steps < ramp, rise, fall)


@as_annotated
@dataclass(frozen=True)
class exponential(Schedule):
    """`floor + init * decay_rate ** (step / decay)`: multiplied by `decay_rate` every `decay`.

    Continuous, not a staircase. `floor` is added, not a lower clip, so step 0 is `floor + init`.
    With `decay="100%"` the last factor belongs to step `total`, which makes it the sweep of a
    learning-rate finder.
    """

    init: float
    decay_rate: float
    decay: Length
    floor: float = 0.0

    fits_any_run = False
    NUMBERS = ("init", "floor")
    RAMP = "decay"
    INSTEAD = ("constant(value)",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "decay_rate")
        if self.decay_rate <= 0:
            expected = "above 0, such as 0.96 or 1 / math.e"
            raise invalid("decay-rate-range", "decay_rate", self.decay_rate, expected)

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        power = functools.partial(_power, self.decay_rate)
        return self.floor + self.init * _each(power, steps / clock.steps(self.decay))

    def _top(self) -> float | None:
        return self.floor + self.init if self.decay_rate <= 1 else None


@as_annotated
@dataclass(frozen=True, repr=False)
class piecewise(Schedule):
    """Constant pieces: `piecewise({"0st": 0.1, "40000st": 0.01, "60000st": 0.001})`.

    Each key is the duration after which its value holds: step `b` is the first with the value of
    boundary `b`. A key of zero (`"0st"`) is mandatory, so every step is defined by what is written.
    Keys may mix units.
    """

    pieces: Any  # given as a mapping; kept as a tuple of pairs, which is frozen and hashable

    def __post_init__(self) -> None:
        given = self.pieces.items() if isinstance(self.pieces, Mapping) else self.pieces
        try:
            pairs = tuple((str(key), value) for key, value in given)
        except (TypeError, ValueError):
            pairs = ()
        if not pairs:
            expected = "durations and values, such as {'0st': 0.1, '40000st': 0.01}"
            raise invalid("pieces-expected", "piecewise", self.pieces, expected)
        object.__setattr__(self, "pieces", pairs)
        keys = [Duration.parse(key) for key, _ in pairs]
        for key, value in pairs:
            if not is_number(value):
                raise RecipeError(
                    "schedule-number", schedule=repr(self), name=key, value=repr(value)
                )
        if all(keys):
            raise RecipeError("first-piece-missing", schedule=repr(self))
        if sum(not key for key in keys) > 1 or len(set(keys)) < len(keys):
            raise RecipeError("pieces-twice", schedule=repr(self))

    def __repr__(self) -> str:
        return f"piecewise({dict(self.pieces)!r})"

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        pieces = sorted((clock.steps(key), value) for key, value in self.pieces)
        for (step, _), (after, _) in itertools.pairwise(pieces):
            if step == after:
                raise RecipeError("pieces-on-one-step", schedule=repr(self), step=step)
        at, values = zip(*pieces, strict=True)
        return np.array(values, np.float64)[np.searchsorted(at, steps, side="right") - 1]

    def _changed(self, number: Change, length: Lengthen) -> Schedule:
        return piecewise([(length(key), number(value)) for key, value in self.pieces])

    def lengths(self) -> Lengths:
        return [("boundaries", ", ".join(key for key, _ in self.pieces if Duration.parse(key)))]

    def warnings(self, clock: Clock, setting: str = "schedule") -> list[Fact]:
        if clock.total is None:
            return []
        about = {"setting": setting, "schedule": repr(self), "total": clock.total}
        return [
            Fact(
                "piece-never-used", about | {"piece": key, "step": clock.steps(key), "value": value}
            )
            for key, value in self.pieces
            if clock.steps(key) >= clock.total
        ]


@as_annotated
@dataclass(frozen=True, repr=False)
class tabulated(Schedule):
    """`values`, one for `each` step or each epoch, and then the last one.

    For schedules without a formula here, such as a scheduler of PyTorch. `cw.torch.optimizer`
    creates it.
    """

    values: Any  # given as any sequence of numbers; kept as a tuple
    each: str = "step"

    fits_any_run = False

    def __post_init__(self) -> None:
        listed = isinstance(self.values, Iterable) and not isinstance(
            self.values, str | bytes | Mapping
        )
        object.__setattr__(self, "values", tuple(self.values) if listed else ())
        if (
            not self.values
            or not all(map(is_number, self.values))
            or self.each not in ("step", "epoch")
        ):
            expected = "finite numbers, one for each='step' or each='epoch'"
            raise invalid("table-expected", "a table", self, expected)

    def __repr__(self) -> str:
        return f"tabulated(values={_shortened(self.values)}, each={self.each!r})"

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        at = np.floor(steps * clock.batch / clock.examples) if self.each == "epoch" else steps
        return np.array(self.values, np.float64)[
            np.minimum(at.astype(np.int64), len(self.values) - 1)
        ]

    def _changed(self, number: Change, length: Lengthen) -> Schedule:
        unit = {"step": "st", "epoch": "ep"}[self.each]
        old, new = (Duration.parse(text).value for text in (LONG + unit, length(LONG + unit)))
        count = max(math.floor(len(self.values) * new / old + Fraction(1, 2)), 1)
        values = [self.values[min(i * old // new, len(self.values) - 1)] for i in range(count)]
        return tabulated([number(value) for value in values], self.each)

    def lengths(self) -> Lengths:
        return [("table", f"{len(self.values)} {self.each}s")]

    def warnings(self, clock: Clock, setting: str = "schedule") -> list[Fact]:
        length = len(self.values) if self.each == "step" else clock.steps(f"{len(self.values)}ep")
        if clock.total is None or clock.total <= length:
            return []
        about = {"setting": setting, "schedule": repr(self), "steps": length, "total": clock.total}
        return [Fact("table-too-short", about)]


@as_annotated
@dataclass(frozen=True)
class warmup(Schedule):
    """A linear ramp from `start` at step 0 into `schedule`, which it joins after `length`.

    The inner schedule is NOT shifted. At step `s` of a ramp of `w` steps the value is
    `start + (inner(s) - start) * s / w`. For `start=0` that is the inner value times `s / w`. From
    step `w` on it is the inner value. The run's length and the inner boundaries keep their meaning.
    A length below a step is one step, and zero is refused.
    """

    schedule: Any  # a Schedule, a number or a function of the step
    length: Length
    start: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, "start")
        _check_length(self, "length", repr(as_schedule(self.schedule, "warmup's schedule")))

    @property
    def _inner(self) -> Schedule:
        return as_schedule(self.schedule)

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        ramp = clock.steps(self.length)
        inner = self._inner._values(steps, clock)
        return np.where(
            steps < ramp, _between(self.start, inner, np.minimum(steps / ramp, 1.0)), inner
        )

    def _top(self) -> float | None:
        return self._inner._top()

    def _changed(self, number: Change, length: Lengthen) -> Schedule:
        inner = as_given(self.schedule, self._inner._changed(number, length))
        return warmup(inner, length(self.length), number(self.start))

    def lengths(self) -> Lengths:
        return [("warmup", self.length), *self._inner.lengths()]

    def warnings(self, clock: Clock, setting: str = "schedule") -> list[Fact]:
        inner = self._inner.warnings(clock, setting)
        return late(self, "warmup-never-ends", self.length, clock, setting) + inner


SCHEDULES: dict[str, type[Schedule]] = {
    kind.__name__: kind
    for kind in (constant, linear, cosine, one_cycle, exponential, piecewise, warmup, tabulated)
}
"""The schedules that one can type, by name."""


def from_json(value: Any) -> Schedule:
    """The schedule that `value` describes, a number or the result of `Schedule.json`. Executes
    nothing.

    Raises `RecipeError` for a function of the step, because only its name is known, and for
    anything else.
    """
    if is_number(value):
        return constant(float(value))
    if not isinstance(value, Mapping) or "schedule" not in value:
        raise RecipeError("stored-schedule-expected", value=repr(value))
    name = value["schedule"]
    settings = {k: v for k, v in value.items() if k != "schedule"}
    if name == function.__name__:
        raise RecipeError("function-stored", name=str(settings.get("call")))
    if "of" in settings:
        inner = settings.pop("of")
        settings["schedule"] = inner if is_number(inner) else from_json(inner)
    try:
        return SCHEDULES[name](**settings)
    except (KeyError, TypeError):
        raise RecipeError("stored-schedule-expected", value=repr(value)) from None


def as_typed(value: Any) -> str:
    """A stored setting as text: a schedule as it is typed, the rest as it prints."""
    if not isinstance(value, Mapping) or "schedule" not in value:
        return str(value)
    settings = {("schedule" if k == "of" else k): v for k, v in value.items() if k != "schedule"}
    texts = {
        k: as_typed(v) if isinstance(v, Mapping) else _shortened(v) for k, v in settings.items()
    }
    if value["schedule"] == function.__name__:
        shown = str(settings.get("call"))
    elif value["schedule"] == piecewise.__name__:
        shown = ", ".join(texts.values())
    else:
        shown = ", ".join(f"{k}={text}" for k, text in texts.items())
    return f"{value['schedule']}({shown})"


def _shortened(value: Any) -> str:
    """`repr`. If there are many numbers, it shows only the first and the last."""
    if not isinstance(value, tuple | list):
        return repr(value)
    if len(value) <= _SHOWN:
        return repr(list(value))
    return f"[{value[0]!r}, ... {len(value):,} values ..., {value[-1]!r}]"


def _between(a: float, b: float | np.ndarray, t: np.ndarray) -> np.ndarray:
    """From `a` (t=0) to `b` (t=1). Clipped: a + (b - a) * t can pass b by a rounding."""
    return np.clip(a + (b - a) * t, np.minimum(a, b), np.maximum(a, b))


def _half_cosine(t: np.ndarray) -> np.ndarray:
    """0 at t=0 and 1 at t=1, flat at both ends."""
    return (1.0 - _each(math.cos, math.pi * t)) / 2.0


def _each(call: Callable[[float], float], x: np.ndarray) -> np.ndarray:
    # About 0.1 microseconds a value, so 0.1 s for a run of a million steps.
    return np.fromiter(map(call, x.tolist()), np.float64, count=x.size)


def _power(base: float, exponent: float) -> float:
    try:
        return math.pow(base, exponent)
    except OverflowError:  # table() names the step
        return math.inf


def _check_length(schedule: Schedule, name: str, *instead: str) -> None:
    duration = Duration.parse(getattr(schedule, name))
    if not duration:
        expected = f"above zero, or {' or '.join(instead)}"
        raise invalid("length-zero", f"{name} of {schedule!r}", "0", expected, name=name)
    object.__setattr__(schedule, name, str(duration))
