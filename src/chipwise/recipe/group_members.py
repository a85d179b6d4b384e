"""The group of each parameter, by patterns for paths."""

from __future__ import annotations

import fnmatch

import jax
import jax.numpy as jnp
import numpy as np

from ..base import unknown
from .task import Tree, by_path


def group_members(params: Tree, patterns: tuple[str, ...]) -> Tree:
    """For each leaf of `params`, the index of the first of `patterns` that fits its path, -1 for
    none. It is a number `()`, or `(rows, 1, ...)` where a pattern such as `"blocks/stack/*#3"` is
    of one row.

    Raises `RecipeError` for a pattern that fits no path.
    """
    leaves = by_path(params)
    names = list(leaves)
    shapes = [jnp.shape(leaf) for leaf in leaves.values()]
    numbers = [np.full((), -1) for _ in names]
    for i, pattern in reversed(list(enumerate(patterns))):  # the first that fits is written last
        path, mark, number = pattern.rpartition("#")
        row = int(number) if mark and number.isdecimal() else None
        path = pattern if row is None else path
        fits = [k for k, name in enumerate(names) if fnmatch.fnmatchcase(name, path)]
        if row is not None:
            fits = [k for k in fits if row < (shapes[k] or (0,))[0]]
        if not fits:
            raise unknown("group-matches-nothing", "trained parameter of a group", pattern, names)
        for k in fits:
            if row is None:
                numbers[k] = np.full((), i)
            else:
                first, *rest = shapes[k]
                numbers[k] = np.array(np.broadcast_to(numbers[k], (first, *[1] * len(rest))))
                numbers[k][row] = i
    return jax.tree.unflatten(jax.tree.structure(params), numbers)
