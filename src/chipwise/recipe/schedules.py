"""Schedules: small values that become a table of one number per step.

    lr=one_cycle(0.4, warmup="5ep")            lr=piecewise({"0st": 0.1, "40000st": 0.01})
    lr=warmup(cosine(1e-3), "5%")              lr=exponential(0.01, 1 / math.e, decay="2000st", floor=1e-4)
    momentum=one_cycle_momentum(0.95, 0.85, warmup="5ep")          weight_decay=5e-4

Every length is a duration (see `chipwise.recipe.duration`), turned into steps by the
recipe's own clock, so a schedule neither contains nor needs the user's
arithmetic and stretches with the run. Wherever a schedule is accepted, a plain
number means `constant`, and any function of the step, such as an optax
schedule, is accepted too.

The convention, for a run of `total` steps numbered 0 to `total - 1`:

* step 0 has the schedule's start value. A ramp from 0 therefore makes a first
  step of rate 0, as in the DavidNet code and in optax;
* after a warm-up of `w` steps, step `w` has the peak;
* the end value belongs to step `total`, one after the last. The last step that
  runs still moves, by one step of the slope.

Tables are computed on the host in float64 and rounded to float32 once. Linear
parts use only operations that IEEE 754 rounds exactly; cosines and powers go
through the C library one value at a time, because NumPy's vector versions
differ between processors and between places in an array. That is why these are
not optax's schedules, which agree to rounding but run on the chip.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from chipwise.errors import RecipeError, nearest
from chipwise.recipe.duration import Clock, Duration


class Schedule(ABC):
    """One number for each step of a run. Subclasses are frozen dataclasses."""

    @abstractmethod
    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        """The values at `steps`, (n,) float64 whole numbers, as (n,) float64."""

    def table(self, clock: Clock, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The values of steps `start` to `stop - 1`: (stop - start,) float32, on the host.

        `stop` is the run's total when not given. A part of the table has the
        same bits as that part of the whole. Past the end of the run a schedule
        keeps its end value.

        Raises `RecipeError` when the range is empty backwards, when the clock
        lacks a total the schedule needs, and when a value is not finite.
        """
        if stop is None:
            stop = _total(clock, self)
        if not 0 <= start <= stop:
            raise RecipeError(f"steps {start} to {stop} of {self!r}: expected 0 <= start <= stop")
        with np.errstate(over="ignore"):  # an overflow is reported below, with its step
            values = self._values(np.arange(start, stop, dtype=np.float64), clock).astype(np.float32)
        finite = np.isfinite(values)
        if not finite.all():
            at = int(np.argmin(finite))
            raise RecipeError(f"{self!r} is {values[at]} at step {start + at}: expected a finite float32")
        return values

    @abstractmethod
    def with_peak(self, peak: float) -> Schedule:
        """The same shape with its highest value at `peak`: every value is scaled by the same factor.

        What `--set lr=0.2` does to a schedule. Raises `RecipeError` when the
        schedule has no highest value of its own, or it is 0.
        """

    def warnings(self, clock: Clock) -> list[str]:
        """What is probably not meant on this clock, one sentence each; usually empty."""
        return []


@dataclass(frozen=True)
class constant(Schedule):
    """`value` at every step."""

    value: float

    def __post_init__(self) -> None:
        _check_numbers(self, "value")

    def with_peak(self, peak: float) -> Schedule:
        return constant(peak)

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        return np.full_like(steps, self.value)


@dataclass(frozen=True)
class linear(Schedule):
    """A straight line from `start` at step 0 to `end` at step `total`."""

    start: float
    end: float

    def __post_init__(self) -> None:
        _check_numbers(self, "start", "end")

    def with_peak(self, peak: float) -> Schedule:
        return _scaled(self, max(self.start, self.end), peak, "start", "end")

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        return _between(self.start, self.end, np.minimum(steps / max(_total(clock, self), 1), 1.0))


@dataclass(frozen=True)
class cosine(Schedule):
    """Half a cosine from `peak` at step 0 to `end` at step `total`.

    The decay of SGDR, without restarts (Loshchilov & Hutter, 2017,
    https://arxiv.org/abs/1608.03983). Put `warmup` around it for a ramp.
    """

    peak: float
    end: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self, "peak", "end")

    def with_peak(self, peak: float) -> Schedule:
        return _scaled(self, self.peak, peak, "peak", "end")

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        t = np.minimum(steps / max(_total(clock, self), 1), 1.0)
        return _between(self.peak, self.end, _half_cosine(t))


@dataclass(frozen=True)
class one_cycle(Schedule):
    """From `start` up to `peak` over `warmup`, then down to `end` at step `total`.

    `shape` is "linear" (both halves; DavidNet's), "cosine" (both halves; the
    default of PyTorch and fastai) or "linear-cosine" (a straight rise and a
    cosine fall, the usual recipe for ImageNet). With `warmup` of `w` steps the
    peak is at step `w`. A warm-up shorter than a step is one step, so the run
    never starts at its peak; a warm-up of zero is refused, since `linear` and
    `cosine` say that openly. When `w` is the whole run or more, the ramp is cut
    off where the run ends, and `warnings` says so.

    Source: Smith & Topin, 2018, https://arxiv.org/abs/1708.07120.
    """

    peak: float
    warmup: str = "30%"
    start: float = 0.0
    end: float = 0.0
    shape: str = "linear"

    SHAPES: ClassVar[tuple[str, ...]] = ("linear", "cosine", "linear-cosine")

    def __post_init__(self) -> None:
        _check_numbers(self, "peak", "start", "end")
        _check_shape(self)
        _check_warmup(self, "warmup", "linear(peak, end) or cosine(peak, end) start at the peak")

    def with_peak(self, peak: float) -> Schedule:
        return _scaled(self, self.peak, peak, "peak", "start", "end")

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        total, ramp = _total(clock, self), clock.steps(self.warmup)
        up = np.minimum(steps / ramp, 1.0)
        down = np.clip((steps - ramp) / max(total - ramp, 1), 0.0, 1.0)
        if self.shape == "cosine":
            up = _half_cosine(up)
        if self.shape != "linear":
            down = _half_cosine(down)
        rise, fall = _between(self.start, self.peak, up), _between(self.peak, self.end, down)
        return np.where(steps < ramp, rise, fall)

    def warnings(self, clock: Clock) -> list[str]:
        return _late_peak(self, self.warmup, clock)


@dataclass(frozen=True)
class one_cycle_momentum(Schedule):
    """The mirrored half of one-cycle: `high` down to `low` over `warmup`, back to `high` at `total`.

    Give it the warm-up and shape of the learning rate: momentum is lowest where
    the rate is highest. Same convention, same shapes and same source as
    `one_cycle`.
    """

    high: float = 0.95
    low: float = 0.85
    warmup: str = "30%"
    shape: str = "linear"

    SHAPES: ClassVar[tuple[str, ...]] = one_cycle.SHAPES

    def __post_init__(self) -> None:
        _check_numbers(self, "high", "low")
        if not 0 <= self.low <= self.high < 1:
            raise RecipeError(f"{self!r}: expected 0 <= low <= high < 1, such as high=0.95, low=0.85")
        _check_shape(self)
        _check_warmup(self, "warmup", "linear(low, high) starts at the low value")

    def with_peak(self, peak: float) -> Schedule:
        return _scaled(self, self.high, peak, "high", "low")

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        cycle = one_cycle(self.low, self.warmup, self.high, self.high, self.shape)
        return cycle._values(steps, clock)

    def warnings(self, clock: Clock) -> list[str]:
        return _late_peak(self, self.warmup, clock, "low value")


@dataclass(frozen=True)
class exponential(Schedule):
    """`floor + init * decay_rate ** (step / decay)`: multiplied by `decay_rate` every `decay`.

    Continuous, not a staircase. `floor` is added, not a lower clip, so step 0 is
    `floor + init`. With `decay="100%"` the last factor belongs to step `total`,
    which makes it the sweep of a learning-rate finder.
    """

    init: float
    decay_rate: float
    decay: str
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self, "init", "decay_rate", "floor")
        if self.decay_rate <= 0:
            raise RecipeError(f"{self!r}: decay_rate must be above 0, such as 0.96 or 1 / math.e")
        _check_warmup(self, "decay", "constant(value) does not decay")

    def with_peak(self, peak: float) -> Schedule:
        if self.decay_rate > 1:
            raise RecipeError(f"{self!r} grows with the run and has no peak to set: give its init instead")
        return _scaled(self, self.floor + self.init, peak, "init", "floor")

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        power = functools.partial(_power, self.decay_rate)
        return self.floor + self.init * _each(power, steps / clock.steps(self.decay))


@dataclass(frozen=True, repr=False)
class piecewise(Schedule):
    """Constant pieces: `piecewise({"0st": 0.1, "40000st": 0.01, "60000st": 0.001})`.

    Each key is the duration after which its value holds: step `b` is the first
    with the value of boundary `b`. A key of zero (`"0st"`) is mandatory, so
    every step is defined by what is written. Keys may mix units.
    """

    pieces: Any  # given as a mapping; kept as a tuple of pairs, which is frozen and hashable

    def __post_init__(self) -> None:
        given: Iterable = self.pieces.items() if isinstance(self.pieces, Mapping) else self.pieces
        try:
            pairs = tuple((str(key), value) for key, value in given)
        except (TypeError, ValueError):
            pairs = ()
        if not pairs:
            raise RecipeError(
                f"piecewise({self.pieces!r}): expected a dict of durations and values, "
                'such as {"0st": 0.1, "40000st": 0.01}'
            )
        object.__setattr__(self, "pieces", pairs)
        keys = [Duration.parse(key) for key, _ in pairs]
        for key, value in pairs:
            if not _is_number(value):
                raise RecipeError(f"{self!r}: the value at '{key}' is {value!r}, expected a finite number")
        if all(keys):
            raise RecipeError(f'{self!r} says nothing about the first step: add "0st"')
        if sum(not key for key in keys) > 1 or len(set(keys)) < len(keys):
            raise RecipeError(f"{self!r}: two keys are the same duration")

    def __repr__(self) -> str:
        return f"piecewise({dict(self.pieces)!r})"

    def with_peak(self, peak: float) -> Schedule:
        highest = max(value for _, value in self.pieces)
        return piecewise({key: _scale(self, value, highest, peak) for key, value in self.pieces})

    def _boundaries(self, clock: Clock) -> list[tuple[int, float]]:
        found = sorted((clock.steps(key), value) for key, value in self.pieces)
        for (step, _), (after, _) in itertools.pairwise(found):
            if step == after:
                raise RecipeError(f"{self!r}: two keys fall on step {step} of this run; move one or drop it")
        return found

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        at, values = zip(*self._boundaries(clock), strict=True)
        return np.array(values, np.float64)[np.searchsorted(at, steps, side="right") - 1]

    def warnings(self, clock: Clock) -> list[str]:
        if clock.total is None:
            return []
        return [
            f"{self!r}: '{key}' is step {clock.steps(key)}, but the run ends after {clock.total} steps, "
            f"so {value} is never used"
            for key, value in self.pieces
            if clock.steps(key) >= clock.total
        ]


@dataclass(frozen=True)
class warmup(Schedule):
    """A linear ramp from `start` at step 0 into `schedule`, which it joins after `length`.

    The inner schedule is NOT shifted: at step `s` of a ramp of `w` steps the
    value is `start + (inner(s) - start) * s / w`, which for `start=0` is the
    inner value times `s / w`, and from step `w` on it is the inner value. The
    run's length and the inner boundaries keep their meaning; `with_peak` scales
    the inner schedule and leaves `start`. A length below a
    step is one step; zero is refused.
    """

    schedule: Any  # a Schedule, a number or a function of the step
    length: str
    start: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self, "start")
        as_schedule(self.schedule, "warmup's schedule")
        _check_warmup(self, "length", "leave warmup(...) out for none")

    def with_peak(self, peak: float) -> Schedule:
        return dataclasses.replace(self, schedule=as_schedule(self.schedule).with_peak(peak))

    def _values(self, steps: np.ndarray, clock: Clock) -> np.ndarray:
        ramp = clock.steps(self.length)
        inner = as_schedule(self.schedule)._values(steps, clock)
        return np.where(steps < ramp, _between(self.start, inner, np.minimum(steps / ramp, 1.0)), inner)

    def warnings(self, clock: Clock) -> list[str]:
        late = _late_peak(self, self.length, clock, "inner schedule")
        return late + as_schedule(self.schedule).warnings(clock)


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

    _BLOCK: ClassVar[int] = 1024

    def __repr__(self) -> str:
        return f"function({callable_name(self.call)})"

    def with_peak(self, peak: float) -> Schedule:
        raise RecipeError(f"{self!r} is a function, whose peak cannot be set: give another schedule")

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
        if not (_is_number(value, finite=False) or (isinstance(value, jax.Array) and value.shape == ())):
            raise RecipeError(f"{self!r} gave {value!r} at step {step}: expected one number")
        return value

    def _blocks(self, first: int, stop: int) -> np.ndarray:
        block = jax.jit(jax.vmap(self.call))
        origin = first - first % self._BLOCK
        parts = [
            np.asarray(block(jnp.arange(at, at + self._BLOCK, dtype=jnp.int32)), np.float64)
            for at in range(origin, stop, self._BLOCK)
        ]
        return np.concatenate(parts)[first - origin : stop - origin]


def as_schedule(value: Any, name: str = "schedule") -> Schedule:
    """`value` as a schedule: itself, a `constant` for a number, a `function` for a callable.

    Raises `RecipeError`, which calls the value `name`, for anything else.
    """
    if isinstance(value, Schedule):
        return value
    if _is_number(value):
        return constant(float(value))
    if callable(value) and not isinstance(value, type):
        return function(value)
    raise RecipeError(
        f"{name} is {value!r}: expected a finite number, a schedule such as "
        'one_cycle(0.4, warmup="5ep"), or a function of the step'
    )


def callable_name(call: Callable) -> str:
    """A name for `call` that is the same in every process: no memory address in it."""
    if isinstance(call, functools.partial):
        given = [repr(a) for a in call.args] + [f"{k}={v!r}" for k, v in call.keywords.items()]
        return f"partial({', '.join([callable_name(call.func), *given])})"
    named = call if hasattr(call, "__qualname__") else type(call)
    return f"{named.__module__}.{named.__qualname__}"


def _scaled(schedule: Any, highest: float, peak: float, *names: str) -> Any:
    """`schedule` with the fields `names` scaled so that `highest` becomes `peak`."""
    changes = {name: _scale(schedule, getattr(schedule, name), highest, peak) for name in names}
    return dataclasses.replace(schedule, **changes)


def _scale(schedule: Schedule, value: float, highest: float, peak: float) -> float:
    if not _is_number(peak):
        raise RecipeError(f"the new peak of {schedule!r} is {peak!r}, expected a finite number")
    if highest <= 0:
        raise RecipeError(f"{schedule!r} is nowhere above 0, so it has no peak to scale")
    # In decimals as typed: half of 0.1 prints as 0.05 and not as 0.05000000000000001.
    decimal = [Fraction(repr(float(x))) for x in (value, peak, highest)]
    return float(decimal[0] * decimal[1] / decimal[2])


def _total(clock: Clock, schedule: Schedule) -> int:
    if clock.total is None:
        raise RecipeError(f"{schedule!r} needs the run's total steps: give the clock a total")
    return clock.total


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


@functools.cache
def _host() -> Any:
    """A CPU device for user functions, or None (JAX's default) where JAX was started without one."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _is_number(value: Any, finite: bool = True) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    return not finite or math.isfinite(value)


def _check_numbers(schedule: Schedule, *names: str) -> None:
    for name in names:
        value = getattr(schedule, name)
        if not _is_number(value):
            raise RecipeError(f"{schedule!r}: {name} is {value!r}, expected a finite number")


def _check_shape(schedule: Any) -> None:
    if schedule.shape not in schedule.SHAPES:
        hint = nearest(str(schedule.shape), schedule.SHAPES)
        raise RecipeError(f"shape {schedule.shape!r}: expected one of {', '.join(schedule.SHAPES)}.{hint}")


def _check_warmup(schedule: Schedule, name: str, instead: str) -> None:
    duration = Duration.parse(getattr(schedule, name))
    if not duration:
        raise RecipeError(f"{schedule!r}: {name} must be longer than zero ({instead})")
    object.__setattr__(schedule, name, str(duration))


def _late_peak(schedule: Schedule, ramp: str, clock: Clock, goal: str = "peak") -> list[str]:
    if clock.total is None or (steps := clock.steps(ramp)) < clock.total:
        return []
    return [
        f"{schedule!r} never reaches its {goal}: the warm-up '{ramp}' is {steps} "
        f"step{'s' * (steps > 1)} and the run is {clock.total}"
    ]
