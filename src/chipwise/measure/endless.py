"""A recipe without an end, for the clock: as many steps as a measurement wants, of a recipe of any length."""

from __future__ import annotations

import dataclasses

from ..recipe.recipe import Recipe

_STEPS = 10**8


def endless(recipe: Recipe) -> Recipe:
    """`recipe`, going on after its last step: the order of the examples continues into further epochs, and
    every hyperparameter holds its last value. Up to there it is the same to the bit."""
    optimizer = recipe.optimizer.held(recipe.clock)
    return dataclasses.replace(recipe, duration=f"{_STEPS}st", optimizer=optimizer)
