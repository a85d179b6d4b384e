"""The largest batch that fits a target, by bisection over what the compiler or the model says of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..recipe.recipe import Recipe


def largest_batch(recipe: Recipe, fits: Callable[[Recipe], tuple[bool, float]], limit: int) -> int | None:
    """The largest global batch, a multiple of the replicas and at most `limit`, for which `fits`.

    *Arguments:* `fits` returns whether a recipe's step fits, and the share of the memory that it needs.
    Memory grows almost linearly with the batch, so each try aims at where the share should be 1; eight
    tries suffice to within a fortieth, and all of them are remembered by the compiler's cache.

    *Returns* `None` when not even one example a replica fits.
    """
    unit = recipe.replicas
    most = limit // unit
    known: dict[int, tuple[bool, float]] = {}

    def ask(n: int) -> bool:
        if n not in known:
            known[n] = fits(dataclasses.replace(recipe, batch=n * unit))
        return known[n][0]

    good, bad = 0, most + 1
    guess = min(most, recipe.batch // unit)
    while bad - good > max(1, good // 40):
        if ask(guess):
            good = max(good, guess)
        else:
            bad = min(bad, guess)
        share = known[guess][1]
        aim = int(guess / share * 0.98) if share > 0 else 2 * guess
        guess = min(max(aim, good + 1), bad - 1)
        if len(known) > 8:
            guess = (good + bad) // 2
        if guess in known or guess <= good:
            guess = (good + bad) // 2
        if guess <= good:
            break
    return good * unit or None
