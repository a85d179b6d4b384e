"""`cw.find_lr(recipe)` finds a peak learning rate from one short run whose rate grows with every
step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..base import DivergedError, Fact, RecipeError, fact
from ..base.annotations import as_annotated
from ..base.displayed import Displayed
from ..machine.arithmetic import fixed
from ..recipe.recipe import Recipe, Validated
from ..recipe.schedules import Schedule, as_schedule, constant, exponential, rounded
from ..recipe.task import finished
from ..run.on import ALL, On
from ..run.placement import describe
from ..run.progress import Reporter
from ..run.session import Session
from .range_test import FEWEST, TOO_HIGH, RangeCurve, limit, read

LOW, HIGH, STEPS = 1e-5, 10.0, 100
"""The defaults. Six decades include the rates of every optimizer here. fastai's finder also takes
100 steps."""

MOST = 2000
"""The most steps of a test. More steps do not improve the reading, and its time grows with the
square of their number."""

_MEMORY = 0.8
"""The decay of the average that ends a test. It spans about 5 steps."""

SCHEMA = "chipwise.find_lr/3"
MARKS = ("suggestion", "last_stable")


@dataclass(frozen=True)
class LrSearch(Displayed):
    """The result of `find_lr`."""

    old: Recipe
    """The recipe."""
    curve: RangeCurve
    stopped: Fact | None
    """Why the test ended before its last step, or None."""
    devices: dict[str, Any]
    """The devices that ran the test."""
    notes: tuple[Fact, ...] = ()

    suggestion = property(
        lambda self: self.curve.suggestion, doc="The peak rate to use, in the middle."
    )
    last_stable = property(
        lambda self: self.curve.last_stable, doc="The highest rate that still learns."
    )

    @property
    def own_peak(self) -> float:
        """The highest rate of the original recipe."""
        optimizer = self.old.optimizer
        return optimizer.hyper[optimizer.lr_name].highest(self.old.clock)

    @property
    def settings(self) -> dict[str, float]:
        """The setting to use: the suggested rate, to two digits."""
        return {self.old.optimizer.lr_name: rounded(self.suggestion, 2)}

    @property
    def recipe(self) -> Recipe:
        """The recipe with `settings`: the schedule keeps its shape and gets the rate as its peak.

        If the curve is conclusive, the recipe counts as `validated` by the test, for `cw.check`.
        Raises `RecipeError` if the schedule is a function of the step, whose peak cannot be set.
        """
        optimizer = self.old.optimizer
        ((name, rate),) = self.settings.items()
        given = optimizer.settings[name]
        lr = rate if isinstance(given, int | float) else as_schedule(given, name).with_peak(rate)
        new = dataclasses.replace(self.old, optimizer=optimizer.replace(**{name: lr}))
        if not self.curve.fell:
            return new
        source = str(fact("validated-by-find-lr", steps=len(self.curve.rates), batch=new.batch))
        return dataclasses.replace(new, validated=Validated(source=source))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values. Every number is finite."""
        return {
            "schema": SCHEMA,
            "recipe": self.old.describe(),
            "devices": self.devices,
            "notes": [note.json() for note in self.notes],
            "own_peak": self.own_peak,
            "settings": self.settings,
            **{name: getattr(self.curve, name) for name in MARKS},
            "stopped": self.stopped and self.stopped.json(),
            "doubts": [doubt.json() for doubt in self.curve.doubts],
            **{
                name: getattr(self.curve, name).tolist() for name in ("rates", "losses", "smoothed")
            },
        }


@as_annotated
@fixed()
def find_lr(
    recipe: Recipe,
    *,
    low: float = LOW,
    high: float = HIGH,
    steps: int = STEPS,
    on: On = ALL,
    progress: str = "auto",
) -> LrSearch:
    """Finds a peak learning rate for `recipe` with the range test of Smith (2015, arXiv:1506.01186,
    section 3.3): a fresh run whose rate grows from `low` to `high` with every step.

    The curve has the same bits on 1 and on 8 devices. The recipe is not changed, and nothing is
    written.

    *Arguments:*

    - `low`, `high`: the first and the last rate.
    - `steps`: the number of rates, from 10 to 2,000.
    - `on`, `progress`: as in `fit`, but a test is always exact.

    Raises `RecipeError` for settings that cannot be swept, `DataError` and `DeviceError` as `fit`
    does, and `DivergedError` if the very first loss is not finite.
    """
    _check(low, high, steps)
    test = swept(recipe, low, high, steps)
    rates = test.optimizer.hyper[test.optimizer.lr_name].table(test.clock).astype(np.float64)
    with contextlib.ExitStack() as closing:
        reporter = Reporter(progress)
        session = closing.enter_context(Session(test, dataclasses.replace(on, exact=True)))
        closing.callback(reporter.stop)
        reporter.say(fact("range-test-begins", recipe=recipe.name, low=low, high=high))

        losses, stopped = _losses(session, rates.tolist(), reporter)
        if not losses:
            raise DivergedError(
                "loss-not-finite-at-once",
                "The first loss of '{recipe}' is not finite, before any rate acts. Check the data, "
                "Task.init and Task.loss.",
                recipe=recipe.name,
            )
        devices = describe(session.machine, session.layout)
        return LrSearch(
            recipe, read(rates, np.asarray(losses)), stopped, devices, tuple(session.warnings)
        )


def swept(recipe: Recipe, low: float, high: float, steps: int) -> Recipe:
    """`recipe` for `steps` steps with rates from `low` to `high`, evenly spaced on a logarithmic
    axis. Other hyperparameters have their value at the recipe's highest rate."""
    optimizer = recipe.optimizer
    clock = recipe.clock
    rates = optimizer.hyper[optimizer.lr_name].table(clock)
    at = int(np.argmax(rates)) if rates.size else 0
    new: dict[str, Schedule] = {
        name: constant(float(schedule.table(clock, at, at + 1)[0]))
        for name, schedule in optimizer.hyper.items()
    }
    new[optimizer.lr_name] = exponential(low, high / low, decay=f"{max(steps - 1, 1)}st")
    return dataclasses.replace(
        recipe, optimizer=optimizer.replace(**new), duration=f"{steps}st", validated=None
    )


def _losses(
    session: Session, rates: list[float], reporter: Reporter
) -> tuple[list[float], Fact | None]:
    """The loss of each step, and why the test ended before its last one.

    The test ends at the first loss that is not finite, which is left out. It also ends when the
    exponential average of the last steps (bias-corrected) is above 4 times its best value and above
    the first loss. A small loss that fluctuates, as for a task already learned, is not a
    divergence.
    """
    losses: list[float] = []
    total = 0.0
    weight = 0.0
    best = math.inf
    session.begin()
    for step, rate in enumerate(rates, 1):
        session.advance()
        # Of this step
        loss = float(finished({"loss": jax.device_get(session.drain()["loss"])})["loss"])
        about = {"step": step, "steps": len(rates), "lr": rate}
        if not math.isfinite(loss):
            return losses, fact("range-test-not-finite", **about)
        if step == 1:  # it includes compilation; the others do not
            reporter.start(step, len(rates))
        reporter.update({"step": step, "train/loss": loss})
        losses.append(loss)
        total = _MEMORY * total + loss
        weight = _MEMORY * weight + 1
        best = min(best, total / weight)
        if total / weight > max(limit(best), losses[0]):
            return losses, fact("range-test-diverged", **about, times=TOO_HIGH)
    return losses, None


def _check(low: float, high: float, steps: int) -> None:
    for name, value in (("low", low), ("high", high)):
        if type(value) not in (int, float) or not 1e-30 < value < 1e30:
            raise RecipeError("rate-not-above-zero", name=name, value=value)
    if not low < high:
        raise RecipeError("rates-out-of-order", low=low, high=high)
    if type(steps) is not int or not FEWEST <= steps <= MOST:
        raise RecipeError(
            "range-test-steps",
            "steps={steps!r}: expected {fewest} to {most}.",
            steps=steps,
            fewest=FEWEST,
            most=MOST,
        )
