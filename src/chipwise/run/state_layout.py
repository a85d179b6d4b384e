"""Where the training state is: whole on every device, with the optimizer's part sharded, or over
groups.

A `carry` is the state on the devices: a list with one `TrainState` per local group, which steps
replace. A layout creates it, copies it to the host, and updates it with a step's summed gradient.
`hold` chooses among three layouts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from ..models.large import spec_at
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from ..step.blueprint import Blueprint
from ..step.freeze import whole_params
from ..step.group_step import GroupStep
from ..step.reduce import gatherer
from ..step.state import TrainState, first_maker, first_state
from ..step.step import RowRange, Step
from .placement import Placement
from .state_digest import Piece, pieces

Carry = list[TrainState]
Compiled = Mapping[str, Sequence[Any]]
"""The name of each program to its executables, one for each local group."""
Summed = Callable[[list[list[Piece]]], None] | None


class StateLayout:
    """One way to store the state. By default, every group adds the vectors of all replicas, and
    updates the whole state."""

    sharded = False
    """Whether a device lacks a part of the state."""
    template: TrainState
    """The shapes of a checkpoint's arrays, with shardings if they are read to the devices."""
    saved_axes: Tree = None
    """The axis along which each array of `snapshot` is cut over devices, or -1. None if no array is
    cut."""
    _unpack_mesh: Any
    _unpack_average: Any

    def __init__(self, step: Any, made: Blueprint, placement: Placement):
        self.step_of, self.placement = step, placement
        exchange = made.exchanges.get("reduce")
        self._reduce = None if exchange is None else exchange.program(placement.mesh)

    def first(self, recipe: Recipe) -> Carry:
        """The recipe's first state. *Arguments:* `recipe`, maybe with another seed or other
        schedules."""
        raise NotImplementedError

    def put(self, state: TrainState) -> Carry:
        """`state`, with parameters as a tree: NumPy arrays, or arrays as in `template`."""
        raise NotImplementedError

    def snapshot(self, carry: Carry) -> TrainState:
        """A copy of the state, with parameters as a tree, that no step overwrites. Waits, for all
        hosts if the state is sharded over them."""
        raise NotImplementedError

    def parameters(self, carry: Carry) -> tuple[Tree, Tree]:
        """All parameters and the task's state, as arrays like those of `snapshot`. Waits."""
        raise NotImplementedError

    def average(self, carry: Carry) -> tuple[Tree, Tree]:
        """The parameters, averaged if the recipe has an EMA, and the task's state, over the
        mesh."""
        state = self.placement.gather([_evaluated(state) for state in carry])
        averages = None if carry[0].ema is None else self._gathered([state.ema for state in carry])
        tree = (
            self._unpack_mesh(state.params) if averages is None else self._unpack_average(averages)
        )
        return whole_params(tree, state.frozen), state.state

    def _gathered(self, parts: Sequence[Any]) -> Any:
        """A vector over the mesh, whole on every group, from each group's."""
        return self.placement.gather(parts)

    def pieces(self, carry: Carry) -> list[list[Piece]]:
        """The pieces for digests of the state, for each local group, without the metrics."""
        return [
            [
                *pieces("parameters", (state.params, state.frozen)),
                *pieces("state", state.state),
                *pieces("optimizer", (state.optimizer, state.ema, state.scale)),
            ]
            for state in carry
        ]

    def _summed(self, vectors: list) -> Any:
        """The sum of the vectors of all replicas, over the mesh. Empties the list."""
        assert self._reduce is not None
        joined = [self.placement.join(parts) for parts in zip(*vectors, strict=True)]
        vectors.clear()
        return self._reduce(joined)

    def step(
        self, compiled: Compiled, vectors: list, carry: Carry, window: list, summed: Summed = None
    ) -> tuple[Carry, jax.Array]:
        """Returns the carry after a step, and a token `()` int32 to wait for.

        *Arguments:* `vectors`: for each local group, its replicas' vectors or their partial sum.
        The list is emptied when they are added, so that their memory is free during the update.
        `summed` is called with the pieces of their sum.
        """
        if self._reduce is None:  # a single vector
            totals = vectors.pop()
        elif self.placement.count == 1:
            totals = [self._reduce(vectors.pop())]
        else:
            totals = self.placement.split(self._summed(vectors))
        if summed is not None:
            summed([[Piece("gradient", total)] for total in totals])
        square = compiled.get("square")
        after, tokens = [], []
        for g, (before, total) in enumerate(zip(carry, totals, strict=True)):
            squares = None if square is None else square[g](total)
            given = (before.with_frozen(None), total, window[g]["hyper"], squares)
            state, token = compiled["update"][g](*given)
            after.append(state.with_frozen(before.frozen))
            tokens.append(token)
        return after, tokens[0]


def hold(step: Any, made: Blueprint, placement: Placement) -> StateLayout:
    """The layout of the state of `step`."""
    if made.shards > 1:
        return Grouped(step, made, placement)
    return (ShardedOptimizer if step.sharded else Replicated)(step, made, placement)


def drained(carry: Carry) -> tuple[dict[str, Any], Carry]:
    """The metric sums since the last call, on the device, and the carry with sums of zero."""
    return carry[0].sums, [dataclasses.replace(state, sums=_zeros(state.sums)) for state in carry]


@functools.partial(jax.jit, keep_unused=True)  # the unused sums determine the zeros' device
def _zeros(sums):
    return jax.tree.map(jnp.zeros_like, sums)


class Replicated(StateLayout):
    """The whole state on every device."""

    def __init__(self, step: Step, made: Blueprint, placement: Placement):
        super().__init__(step, made, placement)
        self.template = step.state
        self._flat = step.updates.flat
        self._make = first_maker(step.recipe)
        self._unpack_mesh = jax.jit(self._flat.unpack)
        self._unpack_average = jax.jit(self._flat.widened().unpack)

    def first(self, recipe: Recipe) -> Carry:
        return self.put(_made(recipe, self._make, self.placement))

    def put(self, state: TrainState) -> Carry:
        return self.placement.put(_packed(self.step_of, state))

    def snapshot(self, carry: Carry) -> TrainState:
        return _host(self._flat, carry[0])

    def parameters(self, carry: Carry) -> tuple[Tree, Tree]:
        host = _host(self._flat, _evaluated(carry[0]))
        return whole_params(host.params, host.frozen), host.state


def _made(recipe: Recipe, make: Any, placement: Placement) -> TrainState:
    """The first state, on this host's first device."""
    with jax.default_device(placement.lead):
        return first_state(recipe, make, lambda tree: placement.broadcast(tree, tree))


def _packed(step: Step, state: TrainState) -> TrainState:
    packed = step.updates.flat.pack(jax.device_get(state.params), np)
    return dataclasses.replace(state, params=packed, sums=_sums(step, state))


def _sums(step: Step, state: TrainState) -> Any:
    """The metric sums of `state` in the structure for which the step is compiled: JAX sees another
    one if the loss makes a new `finish` function in each trace."""
    return jax.tree.unflatten(jax.tree.structure(step.state.sums), jax.tree.leaves(state.sums))


def _host(flat: Any, state: TrainState) -> TrainState:
    # Copied: on the CPU, `device_get` returns a view of memory that the next step reuses.
    host = jax.tree.map(np.array, jax.device_get(state))
    return dataclasses.replace(host, params=flat.unpack(host.params))


def _evaluated(state: TrainState) -> TrainState:
    """Returns the parts of a state that an evaluation or a replica needs."""
    return dataclasses.replace(state, optimizer=None, ema=None, sums={})


class ShardedOptimizer(Replicated):
    """The optimizer's state and the average sharded over the devices (ZeRO-1: Rajbhandari et al.,
    2020), with the same bits if sums are exact.

    Each device adds and updates its own chunks of the flat vector, or by leaf its own leaves, and
    the parameters are gathered. Where devices do not share these out evenly, their windows overlap
    (`layout.Ranges`):

        scatter   exchange the replicas' vectors and add them in tree order, or in the back end's
                  if sums need not be exact; each device has the sum of its window
        square    the squares of a device's chunks or leaves, for clipping by norm, sent to all
        slice     a device's window of the parameters
        update    optimizer and average, for a device's part
        gather    the parameters, whole on every device

    The traffic is that of an all-reduce. An elementwise update does not depend on where the vector
    is cut, one by leaf not on where a leaf is (`step.leaves`), the norm is always summed in one
    order, and slices and collectives round nothing. So the bits are those of the unsharded update,
    on any number of devices.
    """

    sharded = True

    def __init__(self, step: Step, made: Blueprint, placement: Placement):
        super().__init__(step, made, placement)
        values, squares = step.windows
        # No device has all of the optimizer's state and the average, even at first.
        self._make = first_maker(
            step.recipe, lambda state: dataclasses.replace(state, optimizer=None, ema=None)
        )
        self._begin = [
            jax.jit(functools.partial(self._moments, group=group.index))
            for group in placement.local
        ]
        self._gather, self._gather_squares = (
            gatherer(placement.mesh, one) for one in (values, squares)
        )
        # Slices are not part of the update's program: the compiler would fuse them with its
        # arithmetic, and change the bits.
        self._slice = jax.jit(
            lambda vector, start: lax.dynamic_slice(vector, (start,), (values.part,))
        )
        places = jax.jit(lambda vector: jnp.arange(vector.size, dtype=jnp.int32))
        self._cleared = jax.jit(lambda x, a, b: jnp.where((places(x) >= a) & (places(x) < b), x, 0))

    @functools.cached_property
    def _windows(self) -> list[tuple[jax.Array, Tree]]:
        """On each device, where its window begins, and its part of the update's masks
        (`Update.masks`)."""
        values, masks = self.step_of.windows[0], self.step_of.updates.spread(np)

        def window(start: int) -> tuple[np.int32, Tree]:
            return np.int32(start), {
                n: mask[start : start + values.part] for n, mask in masks.items()
            }

        return [
            jax.device_put(window(values.start(g.index)), g.device) for g in self.placement.local
        ]

    def _moments(self, params: jax.Array, group: int) -> dict[str, Tree]:
        """A device's part of the first optimizer's state and average, from the vector of
        parameters."""
        step, optimizer = self.step_of, self.step_of.recipe.optimizer
        first = optimizer.init(params if optimizer.elementwise else self._flat.unpack(params))
        average = params if step.recipe.ema is not None else None
        part = step.part_of(dataclasses.replace(step.state, optimizer=first, ema=average), group)
        return {"optimizer": part.optimizer, "ema": part.ema}

    def first(self, recipe: Recipe) -> Carry:
        state = _packed(self.step_of, _made(recipe, self._make, self.placement))
        pairs = zip(self.placement.put(state), self._begin, strict=True)
        return [dataclasses.replace(placed, **begin(placed.params)) for placed, begin in pairs]

    def put(self, state: TrainState) -> Carry:
        carry, replicated = (
            [],
            dataclasses.replace(_packed(self.step_of, state), optimizer=None, ema=None),
        )
        for group, placed in zip(self.placement.local, self.placement.put(replicated), strict=True):
            part = self.step_of.part_of(state, group.index)
            optimizer, ema = jax.device_put((part.optimizer, part.ema), group.device)
            carry.append(dataclasses.replace(placed, optimizer=optimizer, ema=ema))
        return carry

    def snapshot(self, carry: Carry) -> TrainState:
        optimizer, ema = self._whole("optimizer", carry), self._whole("ema", carry)
        return _host(self._flat, dataclasses.replace(carry[0], optimizer=optimizer, ema=ema))

    def _whole(self, name: str, carry: Carry) -> Tree:
        """A part of the state as NumPy arrays on every host, `None` if it was freed. Waits for all
        hosts."""
        if getattr(carry[0], name) is None:
            return None
        shapes = getattr(self.step_of.state, name)
        rowed = jax.tree.leaves(jax.eval_shape(lambda tree: self.step_of.rowed(name, tree), shapes))
        local = [jax.tree.leaves(getattr(state, name)) for state in carry]
        cuts = [self.step_of.cuts(group.index)[name] for group in self.placement.local]
        found = []
        for k, (shape, final) in enumerate(zip(rowed, jax.tree.leaves(shapes), strict=True)):
            if cuts[0][k] is None:
                found.append(np.array(jax.device_get(local[0][k])))
                continue
            whole = np.zeros(shape.shape, shape.dtype)
            for leaves, own in zip(local, cuts, strict=True):
                cut, part = own[k], jax.device_get(leaves[k])
                whole[cut.first + cut.own : cut.first + cut.end] = part[cut.own : cut.end]
            if self.placement.hosts.count > 1:
                whole = self.placement.from_one_host(whole, shape)
            found.append(whole.reshape(final.shape))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    def _gathered(self, parts: Sequence[jax.Array]) -> jax.Array:
        """A vector over the mesh, whole on every device, from each device's part."""
        return self._gather(self.placement.join(parts))

    def pieces(self, carry: Carry) -> list[list[Piece]]:
        found = []
        for parts, state, group in zip(
            super().pieces(carry), carry, self.placement.local, strict=True
        ):
            names = [name for name in ("optimizer", "ema") if getattr(state, name) is not None]
            cuts = [cut for name in names for cut in self.step_of.cuts(group.index)[name]]
            first = next(i for i, piece in enumerate(parts) if piece.name == "optimizer")
            for i, cut in enumerate(cuts, first):
                parts[i] = parts[i] if cut is None else self._cut(parts[i], cut)
            found.append(parts)
        return found

    def _cut(self, piece: Piece, cut: RowRange) -> Piece:
        """A device's rows, with zeros instead of those that another device owns."""
        array, row = piece.array, math.prod(piece.array.shape[1:])
        if (cut.own, cut.end) != (0, len(array)):
            array = self._cleared(array, np.int32(cut.own), np.int32(cut.end))
        return Piece(piece.name, array, piece.start + cut.first * row, cut=True)

    def step(
        self, compiled: Compiled, vectors: list, carry: Carry, window: list, summed: Summed = None
    ) -> tuple[Carry, jax.Array]:
        placement, square = self.placement, compiled.get("square")
        scattered, aside = self._summed(vectors)
        sums, asides = placement.split(scattered), placement.split(aside)
        if summed is not None:
            cuts = [self.step_of.cuts(group.index)["ema"][0] for group in placement.local]
            parts, end = zip(sums, asides, cuts, strict=True), self._flat.size
            summed(
                [
                    [self._cut(Piece("gradient", x), cut), Piece("gradient", y, end)]
                    for x, y, cut in parts
                ]
            )
        squares: list[Any] = [None] * len(carry)
        if square is not None:
            own = [square[g](total) for g, total in enumerate(sums)]
            squares = placement.split(self._gather_squares(placement.join(own)))
        after, tokens = [], []
        for g, before in enumerate(carry):
            start, masks = self._windows[g]
            state = dataclasses.replace(
                before, params=self._slice(before.params, start), frozen=None
            )
            given = (state, sums[g], asides[g], window[g]["hyper"], squares[g], masks)
            state, token = compiled["update"][g](*given)
            after.append(state)
            tokens.append(token)
        params = placement.split(self._gathered([state.params for state in after]))
        return [
            dataclasses.replace(state, params=vector, frozen=before.frozen)
            for state, vector, before in zip(after, params, carry, strict=True)
        ], tokens[0]


class Grouped(StateLayout):
    """The state of each group, cut over its devices. All groups have the same state.

    If a group has devices of several hosts, all of these hosts run its programs, and send each
    other the arrays of checkpoints part by part.
    """

    sharded = True

    def __init__(self, step: GroupStep, made: Blueprint, placement: Placement):
        super().__init__(step, made, placement)
        self._make = first_maker(
            step.recipe, step.packed, out_shardings=self._shardings(placement.local[0].mesh)
        )
        self._pack, self._unpack = jax.jit(step.packed), jax.jit(step.unpacked)
        whole, over = step.updates.whole, self._over(step.axes, placement.mesh)
        self._unpack_mesh = jax.jit(whole.unpack, out_shardings=over)
        self._unpack_average = jax.jit(whole.widened().unpack, out_shardings=over)
        self._copy = jax.jit(functools.partial(jax.tree.map, jnp.copy))
        self.saved_axes, self.template = step.saved_axes.without("saved"), step.state
        if not placement.over_hosts:  # on the run's first group, whose devices are all host 0's
            self.template = jax.tree.map(
                lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                step.state,
                self._over(step.saved_axes, placement.local[0].mesh),
            )

    def _shardings(self, mesh: Any) -> TrainState:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.step_of.parts)

    @staticmethod
    def _over(axes: Tree, mesh: Any) -> Tree:
        return jax.tree.map(lambda axis: NamedSharding(mesh, spec_at(axis)), axes)

    def first(self, recipe: Recipe) -> Carry:
        def alike(tree: Tree) -> Tree:
            return self.placement.broadcast(tree, tree)

        return self._on_all(first_state(recipe, self._make, alike))

    def put(self, state: TrainState) -> Carry:
        """See `StateLayout`. On hosts other than the first, an array may be its shape."""
        if self.placement.hosts.count > 1:
            sent = jax.tree.map(self.placement.send_cut, state, self.step_of.saved_axes)
        else:
            (sent,) = self.placement.put_cut(state, self.step_of.saved_axes, only=1)
        return self._on_all(self._pack(sent))

    def _on_all(self, state: TrainState) -> Carry:
        """`state`, which is on the first local group, on all local groups."""
        state = dataclasses.replace(state, sums=_sums(self.step_of, state))
        others = [
            jax.device_put(state, self._shardings(group.mesh)) for group in self.placement.local[1:]
        ]
        return [state, *others]

    def snapshot(self, carry: Carry) -> TrainState:
        """See `StateLayout`. The arrays are on the first local group. If groups have devices of
        several hosts, they are NumPy arrays on each host."""
        return self._copied(carry[0])

    def _copied(self, state: TrainState) -> TrainState:
        params = self._unpack(state.params)
        # Checkpoints read memory that the next step would reuse
        if self.placement.lead.platform == "cpu":
            state = self._copy(state)
        state = dataclasses.replace(state, params=params)
        if not self.placement.over_hosts:
            return state
        names = (f.name for f in dataclasses.fields(state) if getattr(state, f.name) is None)
        missing: dict[str, Any] = dict.fromkeys(names)
        axes = dataclasses.replace(self.step_of.saved_axes, **missing)
        return jax.tree.map(self.placement.receive_cut, state, axes)

    def parameters(self, carry: Carry) -> tuple[Tree, Tree]:
        state = self._copied(dataclasses.replace(carry[0], optimizer=None, ema=None))
        return whole_params(state.params, state.frozen), state.state
