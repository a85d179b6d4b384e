"""The programs of a step whose replicas are each computed by a group of devices.

GSPMD partitions the programs. A replica's rows are cut over the group's devices, and so are its parameters,
each along one axis. The resulting vector has a row for each device: its part of the gradient, and the sums,
which are equal in all rows. Layers in `cw.models.fsdp` gather their parameters before use; elsewhere the
compiler chooses. A device then adds its own row over groups, and updates it, with the same functions as
without groups.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..models.chip_traits import traced_for
from ..models.large import SHARD, in_group, spec_at
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from . import feed
from .layout import Layout
from .placement import WHOLE
from .replica import contribution
from .state import TrainState, axes_of
from .step import Step, stored


class GroupStep(Step):
    """The programs of a recipe's step as pure functions of arrays, for one group of a layout: `replica`,
    `square` and `update`.

    *Arguments:* as of `Step`; `mesh` of the group, if known.
    """

    def __init__(self, recipe: Recipe, layout: Layout, *, mesh: AbstractMesh | None = None, **more: Any):
        super().__init__(recipe, layout, shard_optimizer=False, **more)
        self.fused = False
        self.mesh = mesh or AbstractMesh((layout.shards,), (SHARD,))
        self.axes = axes_of(recipe, self.state.params)
        self.frozen_axes = axes_of(recipe, self.state.frozen, some=False)

    # ---- shapes and shardings

    @property
    def carried(self) -> TrainState:
        """The shapes of the state on a group, with its parameters as a vector."""
        return dataclasses.replace(self.state, params=self.updates.whole.shape)

    @property
    def parts(self) -> TrainState:
        """How `carried` is sharded: a `PartitionSpec` for each leaf."""
        replicated = jax.tree.map(lambda _: P(), self.carried)
        flat = functools.partial(jax.tree.map, lambda leaf: P(SHARD) if self.is_flat(leaf) else P())
        return dataclasses.replace(
            replicated,
            params=P(SHARD),
            frozen=jax.tree.map(spec_at, self.frozen_axes),
            optimizer=flat(self.state.optimizer),
            ema=flat(self.state.ema),
        )

    @property
    def saved_axes(self) -> TrainState:
        """The axis along which each leaf of the state is cut, or -1, with the parameters as a tree, as
        checkpoints have them."""
        parts = jax.tree.map(lambda spec: 0 if spec == P(SHARD) else -1, self.parts)
        return dataclasses.replace(parts, params=self.axes, frozen=self.frozen_axes)

    def is_flat(self, leaf: Any) -> bool:
        """As in `Step`."""
        return leaf.shape == (self.updates.whole.size,)

    def specs(self, mesh: AbstractMesh | Mesh | None = None) -> dict[str, Any]:
        """As in `Step`, for a group, each with its sharding over `mesh`."""
        recipe, n = self.recipe, self.layout.group_batch
        mesh = mesh or self.mesh
        data = stored(self.spec, len(recipe.task.train) if self.resident else n, self.resident)
        spec = P()
        if not self.resident:
            rows, spec = self.layout.replica_batch, P(None, SHARD)
            data = {
                k: jax.ShapeDtypeStruct((n // rows, rows, *v.shape[1:]), v.dtype) for k, v in data.items()
            }
        vector = jax.ShapeDtypeStruct((self.layout.shards * self.updates.size,), jnp.float32)
        return {
            "state": jax.tree.map(functools.partial(_shape, mesh), self.carried, self.parts),
            "window": _shapes(mesh, feed.window_spec(recipe, n)),
            "data": _shapes(mesh, data, spec),
            "place": _shapes(mesh, jax.ShapeDtypeStruct((2,), jnp.int32)),
            "vector": _shapes(mesh, vector, P(SHARD)),
            "squares": _shapes(mesh, self.updates.squares),
        }

    # ---- programs

    def replica(self, params, frozen, state, step, scale, at, data, place) -> jax.Array:
        """As in `Step`: `(shards * n,)`, one vector per device. `params` is the vector of `Update.whole`."""
        updates = self.updates
        params = self._constrained(updates.whole.unpack(params), self.axes)
        frozen = self._constrained(frozen, self.frozen_axes)
        spec = P(SHARD) if self.together == 1 else P(None, SHARD)
        batch, indices, epochs, number = self._taken(step, at, data, place)
        batch, indices, epochs = self._cut((batch, indices, epochs), spec)
        with traced_for(self.device), in_group(self.mesh):
            inputs = (params, frozen, state, step, scale)
            contributed = contribution(self.recipe, inputs, batch, indices, epochs, number, at["seed"])
        grads = updates.gradient.pack(self._constrained(contributed["grads"], self.axes))
        aside = updates.aside.pack({name: contributed[name] for name in ("sums", "state")})

        def joined(grads, aside):
            return jnp.concatenate([grads, aside])

        body = jax.shard_map(
            joined, mesh=self.mesh, in_specs=(P(SHARD), P()), out_specs=P(SHARD), check_vma=False
        )
        return body(self._cut(grads, P(SHARD)), aside)

    def square(self, total: jax.Array) -> jax.Array:
        """The squares of the chunks of all devices, `(shards * chunks,)`, on each device."""

        def gathered(total):
            return lax.all_gather(self.updates.square(total), SHARD, tiled=True)

        body = jax.shard_map(gathered, mesh=self.mesh, in_specs=P(SHARD), out_specs=P(), check_vma=False)
        return body(total)

    def measured(self, vector: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As in `Step`, on each device."""

        def gathered(vector):
            squares, count = super(GroupStep, self).measured(vector)
            return lax.all_gather(squares, SHARD, tiled=True), count

        body = jax.shard_map(
            gathered, mesh=self.mesh, in_specs=P(SHARD), out_specs=(P(), P()), check_vma=False
        )
        return body(vector)

    def update(self, state: TrainState, total: jax.Array, hyper: dict, squares: Any):
        """As in `Update`; each device updates its own row. `state` lacks its frozen part."""
        parts = self.parts.without("donated")
        body = jax.shard_map(
            super().update,
            mesh=self.mesh,
            in_specs=(parts, P(SHARD), P(), P()),
            out_specs=(parts, P()),
            check_vma=False,
        )
        return body(state, total, hyper, squares)

    def packed(self, state: TrainState) -> TrainState:
        """A state, given with its parameters as a tree, as a group holds it."""
        return self._placed(
            dataclasses.replace(state, params=self.updates.whole.pack(state.params)), self.parts
        )

    def unpacked(self, vector: jax.Array) -> Tree:
        """The trained parameters as a tree, from their vector."""
        return self._constrained(self.updates.whole.unpack(vector), self.axes)

    def _constrained(self, tree: Tree, axes: Tree) -> Tree:
        return self._placed(tree, jax.tree.map(spec_at, axes))

    def _cut(self, tree: Tree, spec: P) -> Tree:
        return self._placed(tree, jax.tree.map(lambda _: spec, tree))

    def _placed(self, tree: Tree, specs: Tree) -> Tree:
        return jax.tree.map(
            lambda x, spec: lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec)), tree, specs
        )


def _shape(mesh: AbstractMesh | Mesh, leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def _shapes(mesh: AbstractMesh | Mesh, tree: Tree, spec: P = WHOLE) -> Tree:
    return jax.tree.map(lambda leaf: _shape(mesh, leaf, spec), tree)
