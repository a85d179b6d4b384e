"""A recipe without an end, for the clock: as many steps as a measurement wants, of a recipe of any length."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..recipe.duration import Clock
from ..recipe.optimizers import Optimizer, Tree
from ..recipe.recipe import Recipe
from ..recipe.schedules import Schedule

_STEPS = 10**8


def endless(recipe: Recipe) -> Recipe:
    """`recipe`, going on after its last step: the order of the examples continues into further epochs, and
    every hyperparameter holds its last value. Up to there it is the same to the bit."""
    held = _Held(recipe.optimizer, recipe.clock)
    return dataclasses.replace(recipe, duration=f"{_STEPS}st", optimizer=held)


@dataclass(frozen=True)
class _Held(Optimizer):
    """`of` on its own `clock`, whatever clock it is asked for."""

    of: Optimizer
    clock: Clock

    @property
    def hyper(self) -> dict[str, Schedule]:
        return self.of.hyper

    @property
    def lr_name(self) -> str:
        return self.of.lr_name

    @property
    def elementwise(self) -> bool:
        return self.of.elementwise

    def describe(self) -> dict[str, Any]:
        return self.of.describe()

    def init(self, params: Tree) -> Tree:
        return self.of.init(params)

    def update(self, grads: Tree, opt_state: Tree, params: Tree, hyper: dict[str, Any]) -> tuple[Tree, Tree]:
        return self.of.update(grads, opt_state, params, hyper)

    def _transform(self, hyper: dict[str, Any], params: Tree) -> Any:
        return self.of._transform(hyper, params)

    def tables(self, clock: Clock, start: int = 0, stop: int | None = None) -> dict[str, np.ndarray]:
        total = self.clock.total or 0
        stop = (clock.total or 0) if stop is None else stop
        first = min(start, total - 1)
        own = self.of.tables(self.clock, first, max(first + 1, min(stop, total)))
        steps = np.minimum(np.arange(start, stop), total - 1) - first
        return {name: np.asarray(values)[steps] for name, values in own.items()}
