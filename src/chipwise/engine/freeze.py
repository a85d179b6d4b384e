"""Frozen parameters: inputs of the step, not differentiated, not summed, unknown to the optimizer."""

from __future__ import annotations

import fnmatch

import jax

from ..errors import RecipeError, near
from ..recipe.task import Tree


def freeze(params: Tree, patterns: tuple[str, ...]) -> tuple[Tree, Tree]:
    """`params` as two trees of one structure, trained and frozen, each `None` where the other has a leaf.

    *Arguments:* `patterns` of paths such as `"backbone/*"`, as of `fnmatch`.
    Raises `RecipeError` for a pattern that no path matches, or when nothing is left to train.
    """
    if not patterns:
        return params, None
    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise RecipeError(
                "frozen-matches-nothing", pattern=pattern, near=near(pattern, names), names=names
            )
    is_frozen = [any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) for name in names]
    if all(is_frozen):
        raise RecipeError("all-frozen", patterns=list(patterns), count=len(names))
    leaves = [leaf for _, leaf in paths]
    trained = [None if frozen else leaf for frozen, leaf in zip(is_frozen, leaves, strict=True)]
    held = [leaf if frozen else None for frozen, leaf in zip(is_frozen, leaves, strict=True)]
    return jax.tree.unflatten(structure, trained), jax.tree.unflatten(structure, held)


def whole_params(params: Tree, frozen: Tree) -> Tree:
    """The inverse of `freeze`: the parameters as the task made them."""
    if frozen is None:
        return params
    return jax.tree.map(lambda a, b: b if a is None else a, params, frozen, is_leaf=lambda x: x is None)
