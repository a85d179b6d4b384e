"""Frozen parameters: inputs of the step without gradients, sums over replicas or optimizer state."""

from __future__ import annotations

import fnmatch

import jax

from ..errors import RecipeError, near
from ..recipe.freezing import MOVING, is_frozen
from ..recipe.task import Tree


def split(params: Tree, patterns: tuple[str, ...], state: Tree = None) -> tuple[Tree, Tree]:
    """`params` as two trees of one structure, trained and frozen, each `None` where the other has a leaf.

    *Arguments:* `patterns` of paths such as `"backbone/*"`, see `recipe.freezing`; `state` of the task, whose
    statistics may be frozen too.
    Raises `RecipeError` for a pattern that matches no path, or when nothing is left to train.
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
    is_leaf_frozen = [is_frozen(name, patterns) for name in names]
    if all(is_leaf_frozen):
        raise RecipeError("all-frozen", patterns=list(patterns), count=len(names))
    if not any(is_leaf_frozen):
        return params, None
    pairs = list(zip(is_leaf_frozen, leaves, strict=True))
    trained = [None if fixed else leaf for fixed, leaf in pairs]
    frozen = [leaf if fixed else None for fixed, leaf in pairs]
    return jax.tree.unflatten(structure, trained), jax.tree.unflatten(structure, frozen)


def whole_params(params: Tree, frozen: Tree) -> Tree:
    """The inverse of `split`: the parameters as the task made them."""
    if frozen is None:
        return params
    return jax.tree.map(lambda a, b: b if a is None else a, params, frozen, is_leaf=lambda x: x is None)


def still(old: Tree, new: Tree, patterns: tuple[str, ...]) -> Tree:
    """The task's `new` state, with the leaves that `patterns` freeze as in `old`, a tree of equal
    structure."""
    if not patterns:
        return new
    pairs = zip(_names(old), jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    leaves = [before if is_frozen(name, patterns) else after for name, before, after in pairs]
    return jax.tree.unflatten(jax.tree.structure(old), leaves)


def _names(tree: Tree) -> list[str]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
