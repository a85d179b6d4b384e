"""How a recipe's parameters lie over the devices of a group: along which axis each is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ..errors import RecipeError
from ..models.large import SHARD, axis_of

Tree = Any


def axes(
    params: Tree,
    shards: int,
    sharding: Callable[[str], PartitionSpec | None] | None = None,
    *,
    some: bool = True,
) -> Tree:
    """For each leaf the axis along which it is cut into `shards` parts, -1 for one that has none: such a leaf
    is kept in parts too, but whole where it is used.

    *Arguments:* `params`, arrays or shapes; `sharding`: of the task, path to a `PartitionSpec` of the axis
    `"shard"`, or to None for the default, the largest axis that `shards` divides; `some`: a leaf must be cut.

    Raises `RecipeError` for a specification that does not fit, or when no leaf can be cut.
    """

    def chosen(path: Any, leaf: Any) -> int:
        name, shape = jax.tree_util.keystr(path, simple=True, separator="/"), tuple(leaf.shape)
        spec = None if sharding is None else sharding(name)
        if spec is None:
            return axis_of(shape, shards)
        facts = {"path": name, "spec": str(spec), "shape": list(shape), "shards": shards}
        if not isinstance(spec, PartitionSpec):
            raise RecipeError("sharding-answer", **facts)
        cut = [axis for axis, names in enumerate(spec) if names not in (None, ())]
        if len(cut) > 1 or any(spec[axis] not in (SHARD, (SHARD,)) for axis in cut):
            raise RecipeError("sharding-names", **facts)
        if cut and (cut[0] >= len(shape) or shape[cut[0]] % shards):
            raise RecipeError("sharding-indivisible", **facts)
        return cut[0] if cut else -1

    chosen_axes = jax.tree_util.tree_map_with_path(chosen, params)
    leaves = jax.tree.leaves(chosen_axes)
    if some and shards > 1 and leaves and max(leaves) < 0:
        largest = max((tuple(leaf.shape) for leaf in jax.tree.leaves(params)), key=len)
        raise RecipeError("shards-fit-nothing", shards=shards, shape=list(largest), count=len(leaves))
    return chosen_axes
