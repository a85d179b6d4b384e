"""The programs of a step whose replicas are each computed by a group of devices.

GSPMD partitions the programs. A replica's rows are cut over the group's devices, and so are its
parameters, each along one axis. The resulting vector has a row for each device. The row contains
the device's part of the gradient, and the sums, which are equal in all rows. Layers in
`cw.models.fsdp` gather their parameters before use. Elsewhere the compiler chooses. A device then
adds its own row over groups, and updates it, with the same functions as without groups.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

from ..data.sources import Spec
from ..models.chip_traits import traced_for
from ..models.large import SHARD, WHOLE, AnyMesh, abstract_mesh, in_group, on_each, spec_at
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from . import window
from .layout import Layout
from .replica import ReplicaBatch, ReplicaInput, contribution
from .state import TrainState, axes_of
from .step import Step
from .window import Batch, WindowHyper, WindowRows


class GroupStep(Step):
    """The programs of a recipe's step as pure functions of arrays, for one group of a layout:
    `replica`, `square` and `update`.

    *Arguments:* `mesh` is that of the group, if known. The other arguments are as for `Step`.
    """

    def __init__(
        self, recipe: Recipe, layout: Layout, *, mesh: AbstractMesh | None = None, **more: Any
    ):
        super().__init__(recipe, layout, shard_optimizer=False, **more)
        self.fused = False
        self.mesh = mesh or abstract_mesh(layout.shards)
        self.axes = axes_of(recipe, self.state.params)
        self.frozen_axes = axes_of(recipe, self.state.frozen, some=False)

    # ---- shapes and shardings

    @property
    def parts(self) -> TrainState:
        """The sharding of `carried`, as a `PartitionSpec` for each leaf."""
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
        """The axis along which each leaf of the state is cut, or -1. The parameters are a tree, as
        in checkpoints."""
        parts = jax.tree.map(lambda spec: 0 if spec == P(SHARD) else -1, self.parts)
        return dataclasses.replace(parts, params=self.axes, frozen=self.frozen_axes)

    def specs(self, mesh: AnyMesh | None = None) -> dict[str, Any]:
        """The shapes of the programs' inputs on a group (see `Step.specs`), each with its sharding
        over `mesh`."""
        recipe, n = self.recipe, self.layout.group_batch
        mesh = mesh or self.mesh
        rows = self.layout.replica_batch
        data = {
            k: jax.ShapeDtypeStruct((n // rows, rows, *v.shape[1:]), v.dtype)
            for k, v in window.flat_spec(self.spec, n).items()
        }
        vector = jax.ShapeDtypeStruct((self.layout.shards * self.updates.size,), jnp.float32)
        return {
            "state": jax.tree.map(functools.partial(_shape, mesh), self.carried, self.parts),
            "window": _shapes(mesh, window.window_spec(recipe, n)),
            "data": _shapes(mesh, data, P(None, SHARD)),
            "place": _shapes(mesh, jax.ShapeDtypeStruct((2,), jnp.int32)),
            "vector": _shapes(mesh, vector, P(SHARD)),
            "squares": _shapes(mesh, self.updates.squares),
        }

    def kept_spec(self) -> Spec:
        """The shapes of all examples, as each device keeps them whole for `pick`."""
        return _shapes(self.mesh, super().kept_spec())

    # ---- programs

    def pick(self, step: Array, rows: WindowRows, kept: Batch) -> Batch:
        """Returns the group's examples of a step (see `Step.pick`), with an axis for replicas. Each
        device has its rows of each replica."""
        picked, n = super().pick(step, rows, kept), self.layout.replica_batch
        return self._cut(
            {name: column.reshape(-1, n, *column.shape[1:]) for name, column in picked.items()},
            P(None, SHARD),
        )

    def replica(self, inputs: ReplicaInput) -> Array:
        """Returns the vectors `(shards * n,)` float32 of the replicas from `place` on, one vector
        per device (see `Step.replica`)."""
        updates = self.updates
        inputs = inputs._replace(
            params=self._constrained(updates.whole.unpack(inputs.params), self.axes),
            frozen=self._constrained(inputs.frozen, self.frozen_axes),
        )
        spec = P(SHARD) if self.together == 1 else P(None, SHARD)
        batch = self.take(inputs)
        columns, indices, epochs = self._cut(batch[:3], spec)
        batch = ReplicaBatch(columns, indices, epochs, batch.number)
        with traced_for(self.device), in_group(self.mesh):
            contributed = contribution(self.recipe, inputs, batch)
        grads = updates.gradient.pack(self._constrained(contributed["grads"], self.axes))
        aside = updates.aside.pack({name: contributed[name] for name in ("sums", "state")})

        def joined(grads: Array, aside: Array) -> Array:
            return jnp.concatenate([grads, aside])

        body = on_each(self.mesh, joined, (P(SHARD), P()), P(SHARD))
        return body(self._cut(grads, P(SHARD)), aside)

    def square(self, total: Array) -> Array:
        """The sums of squares of the chunks of all devices, `(shards * chunks,)`, on each
        device."""

        def gathered(total: Array) -> Array:
            return lax.all_gather(self.updates.square(total), SHARD, tiled=True)

        return on_each(self.mesh, gathered, P(SHARD), P())(total)

    def measured(self, vector: Array) -> tuple[Array, Array]:
        """The squares of the gradients of all devices, and the loss's count, on each device (see
        `Step.measured`)."""

        def gathered(vector: Array) -> tuple[Array, Array]:
            squares, count = super(GroupStep, self).measured(vector)
            return lax.all_gather(squares, SHARD, tiled=True), count

        return on_each(self.mesh, gathered, P(SHARD), (P(), P()))(vector)

    def update(
        self,
        state: TrainState,
        total: Array,
        hyper: WindowHyper,
        squares: Array | None,
    ) -> tuple[TrainState, Array]:
        """Returns the state after a step and a token (see `Update`). Each device updates its own
        row. `state` lacks its frozen part."""
        parts = self.parts.without("donated")
        in_specs = parts, P(SHARD), P(), P()
        body = on_each(self.mesh, super().update, in_specs, (parts, P()))
        return body(state, total, hyper, squares)

    def packed(self, state: TrainState) -> TrainState:
        """Converts a state with its parameters as a tree to that of a group."""
        return self._placed(
            dataclasses.replace(state, params=self.updates.whole.pack(state.params)), self.parts
        )

    def unpacked(self, vector: Array) -> Tree:
        """Returns the trained parameters as a tree, from their vector."""
        return self._constrained(self.updates.whole.unpack(vector), self.axes)

    def _constrained(self, tree: Tree, axes: Tree) -> Tree:
        return self._placed(tree, jax.tree.map(spec_at, axes))

    def _cut(self, tree: Tree, spec: P) -> Tree:
        return self._placed(tree, jax.tree.map(lambda _: spec, tree))

    def _placed(self, tree: Tree, specs: Tree) -> Tree:
        return jax.tree.map(
            lambda x, spec: lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec)),
            tree,
            specs,
        )


def _shape(mesh: AnyMesh, leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def _shapes(mesh: AnyMesh, tree: Tree, spec: P = WHOLE) -> Tree:
    return jax.tree.map(lambda leaf: _shape(mesh, leaf, spec), tree)
