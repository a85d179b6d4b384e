"""Splits off frozen parameters: inputs of the step without gradients, sums over replicas or
optimizer state."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any

import jax

from ..base import RecipeError, near
from ..models.adapted import Sums
from ..recipe.freezing import MOVING, is_frozen
from ..recipe.low_rank import Adapter, lora
from ..recipe.task import Tree, by_path


def split(
    params: Tree,
    patterns: tuple[str, ...],
    state: Tree = None,
    adapters: lora | None = None,
    key: Any = None,
) -> tuple[Tree, Tree]:
    """Splits `params` into two trees, trained and frozen, each `None` where the other has a leaf.
    If a frozen leaf has an `Adapter`, the `Adapter` is in the first tree. Without `patterns`, or if
    nothing is frozen, the second tree is `None`.

    *Arguments:* `patterns` match paths, such as `"backbone/*"` (see `recipe.freezing`). `state` is
    that of the task, whose statistics may be frozen too. `adapters` are initialized with `key`.

    Raises `RecipeError` for a pattern that matches no path, or when nothing is left to train.
    """
    if not patterns:
        return params, None
    leaves, structure = jax.tree.flatten(params)
    by_name = by_path(params)
    names = list(by_name)
    known = [*names, *(name.removeprefix("batch_stats/") for name in by_path(state))]
    for pattern in patterns:
        if pattern not in MOVING and not fnmatch.filter(known, pattern.removeprefix("!")):
            raise RecipeError(
                "frozen-matches-nothing", pattern=pattern, near=near(pattern, known), names=known
            )
    adapted = {} if adapters is None else adapters.adapters(by_name, key)
    is_leaf_frozen = [name in adapted or is_frozen(name, patterns) for name in names]
    if all(is_leaf_frozen) and not adapted:
        raise RecipeError("all-frozen", patterns=list(patterns), count=len(names))
    if not any(is_leaf_frozen):
        return params, None
    every = list(zip(names, is_leaf_frozen, leaves, strict=True))
    trained = [adapted.get(name) if fixed else leaf for name, fixed, leaf in every]
    frozen = [leaf if fixed else None for _, fixed, leaf in every]
    return jax.tree.unflatten(structure, trained), jax.tree.unflatten(structure, frozen)


def whole_params(params: Tree, frozen: Tree) -> Tree:
    """Joins the trees of `split` to the task's tree of parameters, with adapters merged."""
    if frozen is None:
        return params

    def join(trained: jax.Array | Adapter | None, fixed: jax.Array | None) -> jax.Array | None:
        if isinstance(trained, Adapter):
            return trained.merged(fixed)
        return fixed if trained is None else trained

    return jax.tree.map(join, params, frozen, is_leaf=lambda x: x is None or isinstance(x, Adapter))


def adapted_matrices(params: Tree, frozen: Tree) -> list[jax.Array]:
    """The frozen matrices that have an adapter in `params`."""
    return [fixed for _, fixed in _adapted(params, frozen)]


def parts_of(params: Tree, frozen: Tree, whole: Tree) -> Sums:
    """The merged matrices of `whole`, the joined tree or a cast of it, with the parts of those that
    our layers multiply with."""
    found = []
    for one, fixed, matrix in _adapted(params, frozen, whole):
        parts = one.beside(fixed, matrix.dtype)
        if parts is not None:
            found.append((matrix, parts))
    return found


def _adapted(params: Tree, frozen: Tree, *others: Tree) -> Iterator[tuple]:
    """Each `Adapter` of `params` with the leaves that the other trees have there."""
    if frozen is None:
        return iter(())
    leaves = (
        jax.tree.leaves(tree, is_leaf=lambda x: x is None or isinstance(x, Adapter))
        for tree in (params, frozen, *others)
    )
    return (leaf for leaf in zip(*leaves, strict=True) if isinstance(leaf[0], Adapter))


def still(old: Tree, new: Tree, patterns: tuple[str, ...]) -> Tree:
    """Returns the task's `new` state, with the leaves that `patterns` freeze taken from `old`, a
    tree of equal structure."""
    if not patterns:
        return new
    pairs = zip(by_path(old), jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    leaves = [before if is_frozen(name, patterns) else after for name, before, after in pairs]
    return jax.tree.unflatten(jax.tree.structure(old), leaves)
