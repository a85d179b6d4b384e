"""A sweep: a fresh run of a recipe whose learning rate grows with every step, and its loss at each.

The rate is an input of the step (`train.optim`), so a sweep is the step that trains, compiled once; further
sweeps, at another momentum or weight decay, run the same programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..engine.on import ALL, On
from ..engine.placement import describe
from ..engine.session import Session
from ..errors import RecipeError, near
from ..recipe.optimizers import Optimizer
from ..recipe.recipe import Recipe
from ..recipe.schedule import rounded
from ..recipe.schedules import Schedule, as_schedule, constant, exponential, piecewise
from .range_test import NOT_FINITE, Losses

BEHIND = 8
"""Steps by which the host reads losses late, so that the device never waits to be asked. What is swept after
a divergence, until it is read of, is thrown away: the number changes no curve."""


def tested(
    recipe: Recipe, low: float, high: float, steps: int, held: dict[str, float] | None = None
) -> Recipe:
    """`recipe` for `steps` steps with rates from `low` to `high`, evenly spaced on a logarithmic axis.

    Its other hyperparameters keep the value that they have where the recipe's rate is highest, or that of
    `held`. Each is an input of the step even where it is 0, so that all sweeps share the same programs.

    Raises `RecipeError` when `held` names what is no number of the optimizer.
    """
    optimizer, at = recipe.optimizer, _peak_step(recipe)
    for name in held or {}:
        hyperparameter(optimizer, name)
    values = {name: _at(schedule, recipe, at) for name, schedule in optimizer.hyper.items()} | (held or {})
    # A constant momentum or decay of exactly 0 would be left out of the program.
    new: dict[str, Schedule] = {
        name: constant(value) if value else piecewise({"0st": 0.0}) for name, value in values.items()
    }
    new[optimizer.lr_name] = exponential(low, high / low, decay=f"{max(steps - 1, 1)}st")
    return dataclasses.replace(
        recipe, optimizer=optimizer.replace(**new), duration=f"{steps}st", validated=None
    )


def value_of(recipe: Recipe, name: str) -> float:
    """A hyperparameter where the recipe's rate is highest, to the seven digits of float32.

    Raises `RecipeError` as `hyperparameter` does.
    """
    schedule = as_schedule(hyperparameter(recipe.optimizer, name), name)
    return rounded(_at(schedule, recipe, _peak_step(recipe)), 7)


def hyperparameter(optimizer: Optimizer, name: str) -> Any:
    """The setting `name` of an optimizer, a number or schedule, which a sweep may hold at other values.

    Raises `RecipeError` when it has none, or when it is the rate.
    """
    given = optimizer.settings
    known: list[str] = [n for n in ("momentum", "weight_decay", "b1", "b2") if n in given]
    known += [n for n in optimizer.hyper if n not in known and n != optimizer.lr_name]
    if name not in known:
        kind = optimizer.describe()["optimizer"]
        hint = "b1" if name == "momentum" and "b1" in known else near(name, known)  # Adam's momentum
        raise RecipeError("no-second-setting", optimizer=kind, name=name, hint=hint, known=known)
    return given[name]


def _peak_step(recipe: Recipe) -> int:
    """The first step at which the recipe's rate is highest."""
    table = recipe.optimizer.hyper[recipe.optimizer.lr_name].table(recipe.clock)
    return int(np.argmax(table)) if table.size else 0


def _at(schedule: Schedule, recipe: Recipe, step: int) -> float:
    return float(schedule.table(recipe.clock, step, step + 1)[0])


class RangeTests:
    """Runs sweeps of recipes that differ in hyperparameters alone, on the devices at hand.

        losses = RangeTests(one).run(one)

    *Arguments:* as of `fit`; `recipe` is one of `tested`. *Fields:* `devices`, what they run on;
    `notes` about that.
    """

    def __init__(self, recipe: Recipe, on: On = ALL):
        self._session = Session(recipe, dataclasses.replace(on, exact=True))
        self.devices = describe(self._session.machine, self._session.layout)
        self.notes = tuple(self._session.layout_warnings)

    def run(self, recipe: Recipe, seen: Callable[[int, float], None] = lambda step, loss: None) -> Losses:
        """What a fresh run of `recipe` comes to, up to its end or to where it diverges.

        *Arguments:* `seen` is called with the number of each step whose loss was read, from 1, and that loss.
        """
        session, losses = self._session, Losses()
        waiting: deque[Any] = deque()

        def taken() -> bool:
            loss = _loss(waiting.popleft())
            going = losses.take(loss)
            seen(len(losses.finite) + (losses.ended == NOT_FINITE), loss)
            return going

        with contextlib.closing(session):
            session.begin(recipe=recipe)
            while session.step < session.total:
                session.advance()
                waiting.append(session.drain()["loss"])
                if len(waiting) > BEHIND and not taken():
                    return losses
            while waiting and taken():
                pass
        return losses


def _loss(s: Any) -> float:
    """The mean over one step's examples. Waits for that step."""
    total, count = jax.device_get((s.total, s.count))
    with np.errstate(all="ignore"):
        return float(np.float64(total) / np.float64(count))
