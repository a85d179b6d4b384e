"""Frozen parameters: inputs of the step, not differentiated, not summed, unknown to the optimizer."""

from __future__ import annotations

import fnmatch

import jax

from ..errors import RecipeError, near
from ..recipe.freezing import MOVING, is_frozen
from ..recipe.task import Tree


def split(params: Tree, patterns: tuple[str, ...], state: Tree = None) -> tuple[Tree, Tree]:
    """`params` as two trees of one structure, trained and frozen, each `None` where the other has a leaf.

    *Arguments:* `patterns` of paths such as `"backbone/*"`, see `recipe.freezing`; `state` of the task, whose
    statistics they may name too.
    Raises `RecipeError` for a pattern that no path matches, or when nothing is left to train.
    """
    if not patterns:
        return params, None
    leaves, structure = jax.tree.flatten(params)
    names = _names(params)
    known = [*names, *(name.removeprefix("batch_stats/") for name in _names(state))]
    for pattern in patterns:
        if pattern not in MOVING and not fnmatch.filter(known, pattern.removeprefix("!")):
            raise RecipeError(
                "frozen-matches-nothing", pattern=pattern, near=near(pattern, known), names=known
            )
    held = [is_frozen(name, patterns) for name in names]
    if all(held):
        raise RecipeError("all-frozen", patterns=list(patterns), count=len(names))
    if not any(held):
        return params, None
    trained = [None if frozen else leaf for frozen, leaf in zip(held, leaves, strict=True)]
    rest = [leaf if frozen else None for frozen, leaf in zip(held, leaves, strict=True)]
    return jax.tree.unflatten(structure, trained), jax.tree.unflatten(structure, rest)


def whole_params(params: Tree, frozen: Tree) -> Tree:
    """The inverse of `split`: the parameters as the task made them."""
    if frozen is None:
        return params
    return jax.tree.map(lambda a, b: b if a is None else a, params, frozen, is_leaf=lambda x: x is None)


def still(old: Tree, new: Tree, patterns: tuple[str, ...]) -> Tree:
    """The task's `new` state with what `patterns` freeze as in `old`, a tree of one structure."""
    if not patterns:
        return new
    pairs = zip(_names(old), jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    kept = [before if is_frozen(name, patterns) else after for name, before, after in pairs]
    return jax.tree.unflatten(jax.tree.structure(old), kept)


def _names(tree: Tree) -> list[str]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
