"""`cw.find_lr(recipe)`: a peak learning rate from one short run whose rate grows."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.on import ALL, On
from ..engine.progress import Reporter
from ..errors import DivergedError, RecipeError
from ..recipe.recipe import Recipe, Validated
from ..recipe.schedules import as_schedule
from .curve import FEWEST, NOT_FINITE, TOO_HIGH, Curve, Watch, read
from .lr_sweep import Sweeps, hyperparameter, swept, value_of, with_hyper
from .move.values import peak, rounded

LOW, HIGH, STEPS = 1e-5, 10.0, 100
"""Six decades hold the rates of every optimizer here, and 100 steps are as many as fastai's finder makes."""

MOST = 2000
"""Steps of a sweep: more read no better, and reading takes the square of their number."""

SCHEMA = "chipwise.find_lr/1"
MARKS = ("suggestion", "valley", "steep", "last_stable")


@dataclass(frozen=True)
class Sweep:
    """One sweep: `held`, what was held at which value besides the recipe's own, such as
    `{"momentum": 0.9}`; its `curve`; `stopped`, why it ended before its last step, or None."""

    held: dict[str, float]
    curve: Curve
    stopped: str | None

    def to_json(self) -> dict[str, Any]:
        marks = {name: getattr(self.curve, name) for name in MARKS}
        columns = {name: getattr(self.curve, name).tolist() for name in ("rates", "losses", "smoothed")}
        return {
            "held": self.held, **marks, "stopped": self.stopped, "doubts": list(self.curve.doubts), **columns
        }  # fmt: skip


@dataclass(frozen=True)
class LrSearch:
    """What `find_lr` found.

    *Fields:* `old`, the recipe it was asked about; `sweeps`, one, or one for each value of the second axis;
    `chosen`, the place among them of the one that the suggestion is from; `why`, in words; `devices`, what it
    ran on, and `notes` about that. `rates`, `losses` and `smoothed`, `(n,)` float64, and the marks are those
    of the chosen sweep.
    """

    old: Recipe
    sweeps: tuple[Sweep, ...]
    chosen: int
    why: str
    devices: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def sweep(self) -> Sweep:
        """The chosen one."""
        return self.sweeps[self.chosen]

    @property
    def rates(self) -> np.ndarray:
        return self.sweep.curve.rates

    @property
    def losses(self) -> np.ndarray:
        return self.sweep.curve.losses

    @property
    def smoothed(self) -> np.ndarray:
        return self.sweep.curve.smoothed

    @property
    def suggestion(self) -> float:
        """The peak rate to use, see `curve`."""
        return self.sweep.curve.suggestion

    @property
    def valley(self) -> float:
        return self.sweep.curve.valley

    @property
    def steep(self) -> float:
        return self.sweep.curve.steep

    @property
    def last_stable(self) -> float:
        return self.sweep.curve.last_stable

    @property
    def stopped(self) -> str | None:
        """Why the sweep ended before its last step, or None."""
        return self.sweep.stopped

    @property
    def doubts(self) -> tuple[str, ...]:
        """What makes the marks doubtful, one sentence each."""
        return self.sweep.curve.doubts

    @property
    def own_peak(self) -> float:
        """The highest rate of the recipe as it was."""
        optimizer = self.old.optimizer
        return peak(optimizer.hyper[optimizer.lr_name], self.old.clock)

    @property
    def settings(self) -> dict[str, float]:
        """What to type: the suggested rate, to the two digits that a curve can tell, and the second axis."""
        held = {name: value for name, value in self.sweep.held.items() if value != value_of(self.old, name)}
        return {self.old.optimizer.lr_name: rounded(self.suggestion, 2), **held}

    @property
    def recipe(self) -> Recipe:
        """The recipe with `settings`: the rate becomes its schedule's peak, whose shape stays.

        It is `validated` by the sweep, where that says anything, so that `cw.check` measures from here.
        Raises `RecipeError` for a schedule that is a function of the step, whose peak cannot be set.
        """
        optimizer = self.old.optimizer
        changed: dict[str, Any] = {}
        given = optimizer.settings
        for name, value in self.settings.items():
            if isinstance(given[name], int | float):
                changed[name] = value
                continue
            schedule = as_schedule(given[name], name)
            highest = value
            if name != optimizer.lr_name:  # held at its value where the rate is highest
                highest = value * peak(schedule, self.old.clock) / value_of(self.old, name)
            changed[name] = schedule.with_peak(rounded(highest))
        new = dataclasses.replace(self.old, optimizer=with_hyper(optimizer, changed))
        if not self.sweep.curve.fell:
            return new
        sweep = f"a sweep of {len(self.rates)} steps at batch {new.batch}, not a whole run"
        return dataclasses.replace(new, validated=Validated(source=f"chipwise find-lr: {sweep}"))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; every number is finite."""
        return {
            "schema": SCHEMA,
            "recipe": self.old.describe(),
            "devices": self.devices,
            "notes": list(self.notes),
            "own_peak": self.own_peak,
            "suggestion": self.suggestion,
            "settings": self.settings,
            "why": self.why,
            "chosen": self.chosen,
            "sweeps": [sweep.to_json() for sweep in self.sweeps],
        }


def find_lr(
    recipe: Recipe,
    *,
    low: float = LOW,
    high: float = HIGH,
    steps: int = STEPS,
    second: str | None = None,
    values: Sequence[float] | None = None,
    on: On = ALL,
    progress: str = "auto",
) -> LrSearch:
    """A peak learning rate for `recipe`, from the range test of Smith (2015, arXiv:1506.01186): fresh
    parameters, rates that grow from `low` to `high` with every step, and the loss at each.

    The bits are those of `fit`: the same curve on 1 and on 8 devices. Nothing of the caller's changes, and
    nothing is written.

    *Arguments:*

    - `low`, `high`: the first and the last rate. `steps`: one rate each, from 10 to 2,000.
    - `second`: sweep once for each of several values of `"momentum"` (Adam's is `"b1"`), `"weight_decay"` or
      another number of the optimizer, and suggest a pair, after Smith (2018, arXiv:1803.09820, sections 4.3
      and 4.4).
    - `values`: those; by default some around the recipe's own. Where it follows a schedule, the value is
      that at the highest rate.
    - `on`, `progress`: as in `fit`; the sweep is always exact.

    Raises `RecipeError` for what cannot be swept, `DataError` and `DeviceError` as `fit` does, and
    `DivergedError` when the loss is not finite before any rate could act.
    """
    _check(low, high, steps)
    if second is None and values is not None:
        raise RecipeError(f"values={list(values)} of what? Give second='momentum' or second='weight_decay'.")
    cases: list[dict[str, float]] = [{}]
    if second is not None:
        cases = [{second: value} for value in axis(recipe, second, values)]
    recipes = [swept(recipe, low, high, steps, held) for held in cases]
    sweeps = []
    reporter = Reporter(progress)
    runs = Sweeps(recipes[0], on)
    reporter.say(f"{recipe.name}: rates {low:g} to {high:g}, one a step; the step is compiled first")
    for number, (held, one) in enumerate(zip(cases, recipes, strict=True), 1):
        if held:
            reporter.say(f"sweep {number} of {len(cases)}: {said(held)}")
        with contextlib.ExitStack() as closing:
            closing.callback(reporter.stop)

            def seen(step: int, loss: float) -> None:
                if step == 1:  # of which compilation is a part, but not of the others
                    reporter.start(step, steps)
                reporter.update({"step": step, "train/loss": loss})

            watch = runs.run(one, seen)
        rates = one.optimizer.hyper[one.optimizer.lr_name].table(one.clock).astype(np.float64)
        if not watch.losses:
            raise DivergedError(
                f"The loss of '{recipe.name}' is not finite at the first step, before any rate acts, so no "
                f"rate can help: look at the data and at Task.init and Task.loss, for example with "
                f"JAX_DEBUG_NANS=1."
            )
        sweeps.append(Sweep(held, read(rates, np.asarray(watch.losses)), _stopped(watch, rates)))
    chosen, why = choose(sweeps)
    return LrSearch(recipe, tuple(sweeps), chosen, why, runs.devices, runs.notes)


def check_peak(recipe: Recipe) -> None:
    """Raises `RecipeError` unless the peak of the recipe's rate can be set: of a function of the step not."""
    optimizer = recipe.optimizer
    as_schedule(optimizer.hyper[optimizer.lr_name]).with_peak(1.0)


def choose(sweeps: Sequence[Sweep]) -> tuple[int, str]:
    """The place of the sweep to follow, and the reason in words.

    Smith (2018, sections 4.3 and 4.4): the value whose sweep reaches the lowest loss, and where several come
    as low, the one that stays stable up to the highest rate.
    """
    if len(sweeps) == 1:
        return 0, "the middle of the bottom of the curve, up to the last stable rate"
    lowest = [float(sweep.curve.smoothed.min()) for sweep in sweeps]
    best = int(np.argmin(lowest))
    near = lowest[best] + 0.1 * max(float(sweeps[best].curve.smoothed[0]) - lowest[best], 0.0)
    as_low = [i for i, loss in enumerate(lowest) if loss <= near]
    chosen = max(as_low, key=lambda i: (sweeps[i].curve.last_stable, -lowest[i]))
    names = [said(sweep.held) for sweep in sweeps]
    if chosen == best:
        return chosen, f"{names[chosen]} reaches the lowest loss, {lowest[chosen]:.3g}"
    others = ", ".join(names[i] for i in as_low if i != chosen)
    return chosen, (
        f"{names[chosen]} comes as low as {others} ({lowest[chosen]:.3g}, within a tenth of the fall) "
        f"and stays stable to a higher rate, {sweeps[chosen].curve.last_stable:.3g}"
    )


def said(held: dict[str, float]) -> str:
    """`momentum=0.9`, or nothing."""
    return ", ".join(f"{name}={value:g}" for name, value in held.items())


def _stopped(watch: Watch, rates: np.ndarray) -> str | None:
    if not watch.ended:
        return None
    n = len(watch.losses) + (watch.ended == NOT_FINITE)
    where = f"at step {n} of {len(rates)}, rate {rates[n - 1]:.3g}"
    if watch.ended == NOT_FINITE:
        return f"The loss was no longer finite {where}."
    return f"The average loss rose above {TOO_HIGH:g} x its lowest {where}."


def _check(low: float, high: float, steps: int) -> None:
    for name, value in (("low", low), ("high", high)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-30 < value < 1e30:
            raise RecipeError(f"{name}={value!r}: expected a rate above 0, such as 1e-5.")
    if not low < high:
        raise RecipeError(f"low={low:g} is not below high={high:g}: try low={LOW:g}, high={HIGH:g}.")
    if isinstance(steps, bool) or not isinstance(steps, int) or not FEWEST <= steps <= MOST:
        raise RecipeError(f"steps={steps!r}: expected {FEWEST} to {MOST}, such as {STEPS}.")


def axis(recipe: Recipe, second: str, values: Sequence[float] | None = None) -> list[float]:
    """The values to hold `second` at, ascending and distinct; by default some around the recipe's own.

    Raises `RecipeError` when the optimizer has no such number, or a value is out of range.
    """
    own = value_of(recipe, second)
    schedule = as_schedule(hyperparameter(recipe.optimizer, second), second)
    if own == 0 and peak(schedule, recipe.clock) > 0:
        raise RecipeError(
            f"{second} follows a schedule that is 0 where the rate is highest, so it cannot be scaled to "
            f"another value there: sweep another setting, or give {second} as a number."
        )
    averages = second in ("momentum", "b1", "b2")
    if values is None:
        if averages:  # Smith's 0.8, 0.9, 0.95: averages half and twice as long
            around = [1 - 2 * (1 - own), own, 1 - (1 - own) / 2] if own > 0.5 else [0.0, 0.5, 0.9]
        else:
            around = [own / 3, own, own * 3] if own else [0.0, 1e-5, 1e-4, 1e-3]
        values = [rounded(value, 3) for value in around]
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (averages and value >= 1):
            high = "from 0 to below 1" if averages else "of at least 0"
            raise RecipeError(f"{second}={value!r}: expected numbers {high}.")
    if not values:
        raise RecipeError(f"no values of {second} to sweep: give some, such as {second}={own:g},{own / 2:g}.")
    return sorted({float(value) for value in values})
