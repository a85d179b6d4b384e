"""The compiled step where a replica is computed by a group of devices, and what lies on them.

As `Programs`, whose methods it has: a `carry` is a list with one `TrainState` a local group, all equal, each
leaf an array over the group's devices. Every group runs the same programs, compiled for its devices, so
groups may be as many as devices allow; over them, each shard is added in the fixed tree. A group over several
hosts is run by all of them; what leaves the devices, they send each other part by part.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..models.large import spec_at
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from . import reduce
from .group_step import GroupStep
from .layout import merges
from .programs import Programs, meet_at_once
from .state import TrainState, first_maker, first_state, read
from .step import compiler_options


class GroupPrograms(Programs):
    """The step of `recipe` on the groups of `placement`. Arguments and fields as of `Programs`."""

    def _step(self, recipe: Recipe, *, shard_optimizer: bool | None = None, **more: Any) -> GroupStep:
        put = self.placement
        return GroupStep(recipe, self.layout, device=put.lead, mesh=put.local[0].mesh.abstract_mesh, **more)

    # ---- the state

    def first(self, recipe: Recipe, make: Any, alike: Any) -> list[TrainState]:
        """The state before the first step. *Arguments:* `make`, of `maker`; `alike`: see `first_state`."""
        return self._on_all(first_state(recipe, make, alike))

    def maker(self, recipe: Recipe) -> Any:
        """What makes the first state on the first local group, each device its part."""
        over = self._over(self.placement.local[0].mesh)
        return first_maker(recipe, self.of.packed, out_shardings=over)

    def put(self, state: TrainState) -> list[TrainState]:
        """`state`, with parameters as a tree, on every local group: NumPy arrays, or what the run's first
        group holds as `template` says, on other hosts its shapes."""
        read = not isinstance(jax.tree.leaves(state.params)[0], np.ndarray)
        if self.placement.over_hosts:
            held = [jax.tree.map(self._sent, state, self.of.saved_axes)]
        elif read and self.placement.hosts.count > 1:
            held = self._broadcast(state)
        else:
            held = self.placement.put_cut(state, self.of.saved_axes, only=1)
        return self._on_all(jax.jit(self.of.packed)(held[0]))

    def _on_all(self, state: TrainState) -> list[TrainState]:
        """A state of the first local group, there and on the others."""
        others = [jax.device_put(state, self._over(group.mesh)) for group in self.placement.local[1:]]
        return [state, *others]

    def snapshot(self, state: TrainState) -> TrainState:
        """The state of the first local group with parameters as a tree, there: arrays of one's own. Of groups
        over several hosts NumPy arrays on each host; waits, for all hosts."""
        params = self._unpack(state.params)
        if (
            self.placement.lead.platform == "cpu"
        ):  # where an array's memory is read while the next step reuses it
            state = self._copy(state)
        state = dataclasses.replace(state, params=params)
        if not self.placement.over_hosts:
            return state
        gone = {f.name: None for f in dataclasses.fields(state) if getattr(state, f.name) is None}
        return jax.tree.map(self._met, state, dataclasses.replace(self.of.saved_axes, **gone))

    def unpack(self, vector: jax.Array, averaged: bool = False) -> Tree:
        """The trained parameters of the vector, or of its average, over the whole mesh as over a group."""
        of = self.of.updates.whole.widened() if averaged else self.of.updates.whole
        over = self._tree(self.of.axes, self.placement.mesh)
        return jax.jit(of.unpack, out_shardings=over)(vector)

    @property
    def template(self) -> TrainState:
        """What a checkpoint holds, as shapes on the run's first group, where host 0 has all of it."""
        state, mesh = self.of.state, self.placement.local[0].mesh
        if self.placement.over_hosts:
            return state
        return jax.tree.map(
            lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
            state,
            self._tree(self.of.saved_axes, mesh),
        )

    def _broadcast(self, state: TrainState) -> list[TrainState]:
        """What the first group has, on every one, to the bit: added as whole numbers to the others' zeros."""
        local, mesh = self.placement.local, self.placement.mesh

        def one(leaf: jax.Array, axis: int) -> list[jax.Array]:
            spec = spec_at(axis)
            parts = []
            for group in local:
                given = leaf if group.index == 0 else jnp.zeros(leaf.shape, leaf.dtype)
                parts.append(jax.device_put(_as_word(given)[None], group.place(P(None, *spec))))
            held = [s.data for part in parts for s in part.addressable_shards]
            over = NamedSharding(mesh, P(reduce.AXIS, *spec))
            shape = (self.placement.groups, *leaf.shape)
            every = jax.make_array_from_single_device_arrays(shape, over, held)
            total = jax.jit(
                jax.shard_map(
                    lambda x: _of_word(lax.psum(x, reduce.AXIS)[0], leaf.dtype),
                    mesh=mesh,
                    in_specs=over.spec,
                    out_specs=spec,
                    check_vma=False,
                )
            )(every)
            return self.placement.split(total)

        leaves, structure = jax.tree.flatten(state)
        axes = jax.tree.leaves(self.of.saved_axes)
        moved = [one(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)]
        return [jax.tree.unflatten(structure, [leaf[i] for leaf in moved]) for i in range(len(local))]

    def _sent(self, leaf: Any, axis: int) -> jax.Array:
        """Host 0's NumPy array, of other hosts its shape, on this host's one group."""
        put, (group,) = self.placement, self.placement.local
        parts: list[Any] = [None] * self.layout.shards
        if axis < 0:
            return group.put(put.met(leaf if put.hosts.first else None, leaf))
        if put.hosts.first:
            parts = np.split(leaf, self.layout.shards, axis)
        to, held = group.place(spec_at(axis)), []
        shape = jax.ShapeDtypeStruct(to.shard_shape(leaf.shape), leaf.dtype)
        for device, part in zip(group.devices, parts, strict=True):
            part = put.met(part, shape)
            held += [jax.device_put(part, device)] if device in group.here else []
        return jax.make_array_from_single_device_arrays(leaf.shape, to, held)

    def _met(self, leaf: jax.Array, axis: int) -> np.ndarray:
        """What the run's first group holds, on every host."""
        if axis < 0:
            return np.array(jax.device_get(leaf))
        given = leaf.addressable_shards if self.placement.local[0].index == 0 else []
        held = {shard.index[axis].start or 0: shard.data for shard in given}
        shape = jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        starts = range(0, leaf.shape[axis], shape.shape[axis])
        return np.concatenate([self.placement.met(held.get(at), shape) for at in starts], axis)

    @functools.cached_property
    def _unpack(self) -> Any:
        return jax.jit(self.of.unpacked)

    @functools.cached_property
    def _copy(self) -> Any:
        return jax.jit(functools.partial(jax.tree.map, jnp.copy))

    def _over(self, mesh: Any) -> TrainState:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.of.parts)

    def _tree(self, axes: Tree, mesh: Any) -> Tree:
        return jax.tree.map(lambda axis: NamedSharding(mesh, spec_at(axis)), axes)

    # ---- the step

    def data_shapes(self) -> list:
        """As of `Programs`."""
        return [self.of.specs(group.mesh)["data"] for group in self.placement.local]

    def compile(self, carry: list, window: list, data: list, steps_at_once: int | None = 1) -> None:
        """As of `Programs`."""
        layout, of, each = self.layout, self.of, self.layout.replicas_per_device
        options = compiler_options(self.placement.lead.platform, layout.exact)
        starts = range(0, each, of.together)
        self._places = [
            [g.put(np.asarray([g.index * each + i, i], np.int32)) for i in starts]
            for g in self.placement.local
        ]
        jitted = [
            jax.jit(of.replica, compiler_options=options),
            jax.jit(of.update, donate_argnums=0, compiler_options=options),
            jax.jit(of.square, compiler_options=options),
        ]

        def compiled(g: int) -> list[Any]:
            specs = of.specs(self.placement.local[g].mesh)
            vector = specs["vector"]
            total = jax.ShapeDtypeStruct((vector.size,), vector.dtype, sharding=vector.sharding)
            arguments = (*read(carry[g]), window[g]["rows"], data[g], self._places[g][0])
            replica, update, square = jitted
            lowered = [
                replica.lower(*arguments),
                update.lower(carry[g].without("donated"), total, window[g]["hyper"], specs["squares"]),
                square.lower(total) if specs["squares"] is not None else None,
            ]
            return [one and one.compile() for one in lowered]

        groups = range(len(carry))
        with ThreadPoolExecutor(max(1, min(len(groups), os.cpu_count() or 1))) as pool:
            self._replicas, self._updates, self._squares = zip(*pool.map(compiled, groups), strict=True)
        self._at_once = meet_at_once(len(starts), of.updates.size)
        self._pops = merges(len(starts))
        self._add = jax.jit(jnp.add, donate_argnums=0)
        self._reduce = reduce.reducer(self.placement.mesh, layout.exact)
        replica, update = (one.cost_analysis() or {} for one in self.executables)
        self.flops_per_step_per_device = replica.get("flops", 0.0) * len(starts) + update.get("flops", 0.0)
        self.compiled = True

    @property
    def executables(self) -> list[Any]:
        """The replica's program and the update's, of the first local group."""
        return [self._replicas[0], self._updates[0]]

    def step(self, carry: list, window: list, data: list, steps: int = 1) -> tuple[list, jax.Array]:
        """One step. Uses up `carry`. *Returns* the new carry and a token, `()` int32, to wait for."""
        put = self.placement
        vectors = [self._vectors(g, carry[g], window[g], data[g]) for g in range(len(carry))]
        totals = put.split(self._reduce([put.join(parts) for parts in zip(*vectors, strict=True)]))
        after, token = [], None
        for g, (held, total) in enumerate(zip(carry, totals, strict=True)):
            squares = self._squares[g](total) if self._squares[g] is not None else None
            state, done = self._updates[g](held.without("donated"), total, window[g]["hyper"], squares)
            after.append(dataclasses.replace(state, frozen=held.frozen))
            token = done if token is None else token
        assert token is not None
        return after, token


def _as_word(array: jax.Array) -> jax.Array:
    """The bits of each value as a whole number."""
    if array.dtype.kind == "b":  # of which lax knows no bits
        return array.astype(jnp.uint8)
    return lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))


def _of_word(word: jax.Array, dtype: Any) -> jax.Array:
    return word.astype(bool) if np.dtype(dtype).kind == "b" else lax.bitcast_convert_type(word, dtype)
