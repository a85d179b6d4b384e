"""Models larger than a device: `cw.models.fsdp`, a layer with parameters sharded over several
devices.

A recipe with `shards` computes each replica on a group of devices (`step.group_step`). Programs for
a group are traced inside `in_group`. Elsewhere a layer is called directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec as P

from ..base import invalid
from ..base.annotations import as_annotated
from . import wide

SHARD = "shard"
"""The axis of a mesh, and the name in a `PartitionSpec`, over which one replica's parameters are
spread."""
WHOLE = P()
"""The `PartitionSpec` of an array that every device of a group has whole."""


AnyMesh = Mesh | AbstractMesh


class _ShardGroup(NamedTuple):
    """The devices to trace for. If `rows`, the first axis of arrays is the examples, and it is cut
    over the devices. Otherwise the program is mapped over examples, and the mapped axis is cut."""

    mesh: AbstractMesh
    rows: bool


_GROUP: Any = jax.make_user_context(None)


def abstract_mesh(shards: int) -> AbstractMesh:
    """The mesh of a group of `shards` devices, which need not be present."""
    # The compiler partitions a group's programs. From JAX 0.12 on, a mesh without devices leaves
    # that to the program unless it says so, and `fsdp` would have to cut its arguments itself.
    return AbstractMesh((shards,), (SHARD,), axis_types=(AxisType.Auto,))


def in_group(mesh: AbstractMesh, rows: bool = True) -> AbstractContextManager[Any]:
    """A context in which programs are traced for a group of devices. For a mesh of one device it
    does nothing."""
    return _GROUP(_ShardGroup(mesh, rows)) if mesh.size > 1 else nullcontext()


def grouped() -> bool:
    """Whether the program being traced is one of a group's."""
    return _GROUP.value is not None


def on_each(
    mesh: AnyMesh, function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Returns a function of whole arrays that calls `function` on each device of `mesh` with the
    device's parts.

    *Arguments:* `in_specs` and `out_specs` have the `PartitionSpec`s of arguments and results."""
    # Unchecked, since JAX does not see that a sum of gathered parts is equal on every device
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def axis_of(shape: tuple[int, ...], shards: int) -> int:
    """The largest axis that `shards` divides, the last one of equal axes, or -1 if there is
    none."""
    return max(
        ((n, axis) for axis, n in enumerate(shape) if n and n % shards == 0), default=(0, -1)
    )[1]


def spec_at(axis: int) -> P:
    """The `PartitionSpec` of an array that is cut along `axis`, or of a whole array for -1."""
    return P(*[None] * axis, SHARD) if axis >= 0 else P()


def axes(
    params: Any,
    shards: int,
    sharding: Callable[[str], P | None] | None = None,
    *,
    some: bool = True,
) -> Any:
    """The axis along which each leaf is cut into `shards` parts, -1 for a leaf without one. Such a
    leaf is stored in parts too, but whole where it is used.

    *Arguments:* `params`: arrays or shapes. `sharding`: the task's function from a path to a
    `PartitionSpec` of the axis `"shard"`, or to None for the default, the largest axis that
    `shards` divides. `some`: a leaf must be cut.

    Raises `RecipeError` for a specification that does not fit, or when no leaf can be cut.
    """

    def chosen(path: Any, leaf: Any) -> int:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shape = tuple(leaf.shape)
        spec = None if sharding is None else sharding(name)
        if spec is None:
            return axis_of(shape, shards)
        if not isinstance(spec, P):
            expected = "a PartitionSpec such as P(None, 'shard'), or None for the largest axis"
            raise invalid("sharding-answer", f"Task.sharding of {name}", spec, expected, path=name)
        cut = [axis for axis, names in enumerate(spec) if names not in (None, ())]
        if len(cut) > 1 or any(spec[axis] not in (SHARD, (SHARD,)) for axis in cut):
            expected = "the one axis 'shard', once, such as P(None, 'shard')"
            raise invalid("sharding-names", f"Task.sharding of {name}", spec, expected, path=name)
        if cut and (cut[0] >= len(shape) or shape[cut[0]] % shards):
            expected = f"an axis of {shape} that shards={shards} divides, or None"
            raise invalid(
                "sharding-indivisible", f"Task.sharding of {name}", spec, expected, path=name
            )
        return cut[0] if cut else -1

    chosen_axes = jax.tree_util.tree_map_with_path(chosen, params)
    leaves = jax.tree.leaves(chosen_axes)
    if some and shards > 1 and leaves and max(leaves) < 0:
        largest = max((tuple(leaf.shape) for leaf in jax.tree.leaves(params)), key=len)
        expected = f"a divisor of some axis of the {len(leaves)} parameters, such as {largest}"
        raise invalid("shards-fit-nothing", "shards", shards, expected)
    return chosen_axes


@as_annotated
def fsdp(function: Callable[..., Any], params: Any, *rows: Any) -> Any:
    """`function(params, *rows)`. With `Recipe(shards=M)` it is fully sharded over a group of M
    devices.

    Each device has a part of every parameter and of the rows. It gathers the parameters, computes
    its rows, and frees the parameters. Gradients are added over the devices (in float32) and
    scattered to the parts (Zhao et al., 2023, arXiv:2304.11277). If each layer is in `fsdp`, inside
    `cw.models.remat` and a loop over layers, a device never has more than one whole layer.

    *Arguments:* `function`: a pure function of the whole `params` and some rows, without other
    arrays, that treats each row independently. `params`: a tree of arrays, each cut along its
    largest axis that M divides. `rows`: trees of arrays `(batch, ...)`.

    *Returns* the result of `function`: arrays `(batch, ...)`, and numbers `()` that are sums over
    rows.
    """
    group = _GROUP.value
    if group is None:
        return function(params, *rows)
    if group.rows:
        return _over(group, function, params, rows)

    @jax.custom_batching.custom_vmap
    def alone(params, *rows):
        with _GROUP(None):
            return function(params, *rows)

    @alone.def_vmap
    def mapped(size, batched, params, *rows):
        of_params, *of_rows = jax.tree.map(
            lambda one: 0 if one else None, list(batched), is_leaf=lambda x: x is False
        )
        outputs = _over(group, jax.vmap(function, (of_params, *of_rows)), params, rows)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return alone(params, *rows)


def _over(group: _ShardGroup, function: Callable[..., Any], params: Any, rows: tuple) -> Any:
    """Runs `function` on each device of `group` with its rows."""
    axes = jax.tree.map(lambda leaf: axis_of(leaf.shape, group.mesh.shape[SHARD]), params)
    cut = P(group.mesh.axis_names)
    structure = None
    single = []

    def body(params, *rows):
        nonlocal structure, single
        with _GROUP(None):
            outputs = function(jax.tree.map(_whole, params, axes), *rows)
        leaves, structure = jax.tree.flatten(outputs)
        single = [leaf.ndim == 0 for leaf in leaves]
        return [leaf[None] if alone else leaf for leaf, alone in zip(leaves, single, strict=True)]

    specs = (jax.tree.map(spec_at, axes), *[cut for _ in rows])
    gathered = on_each(group.mesh, body, specs, cut)(params, *rows)
    whole = [jnp.sum(leaf) if alone else leaf for leaf, alone in zip(gathered, single, strict=True)]
    return jax.tree.unflatten(structure, whole)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _whole(part: jax.Array, axis: int) -> jax.Array:
    return part if axis < 0 else lax.all_gather(part, SHARD, axis=axis, tiled=True)


def _whole_forward(part, axis):
    return _whole(part, axis), None


def _whole_backward(axis, _, gradient):
    if axis < 0:
        return (gradient,)  # which `shard_map` adds
    added = lax.psum_scatter(
        gradient.astype(wide(gradient.dtype)), SHARD, scatter_dimension=axis, tiled=True
    )
    return (added.astype(gradient.dtype),)


_whole.defvjp(_whole_forward, _whole_backward)
