"""Where the training state lives: whole on every device, with the optimizer's part sharded, or over groups.

A `carry` is the state on the devices: a list with one `TrainState` per local group, which steps replace. A
holding makes it, copies it to the host, and moves it by a step's summed gradient; `hold` chooses among three.
"""

from __future__ import annotations

import dataclasses
import functools
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
from .blueprint import Blueprint, Program
from .freeze import whole_params
from .group_step import GroupStep
from .layout import windows
from .placement import Group, Placement
from .state import TrainState, first_maker, first_state
from .state_digest import Piece, pieces
from .step import Step

Carry = list[TrainState]
Compiled = Mapping[str, Sequence[Any]]
"""The name of each program to its executables, one for each local group."""
Summed = Callable[[list[list[Piece]]], None] | None


class Holding:
    """One way to hold the state; by default, every group adds the vectors of all replicas, and updates all.

    *Fields:* `sharded`: whether a device lacks a part of it; `template`, the shapes of a checkpoint's arrays,
    with shardings if they are read to the devices; `saved_axes`, the axis along which each array of
    `snapshot` is cut over devices, or -1; None if none is.
    """

    sharded = False
    template: TrainState
    saved_axes: Tree = None
    _unpack_mesh: Any
    _unpack_average: Any

    def __init__(self, step: Any, made: Blueprint[Program], placement: Placement):
        self.step_of, self.placement = step, placement
        exchange = made.exchanges.get("reduce")
        self._reduce = None if exchange is None else exchange.program(placement.mesh)

    def first(self, recipe: Recipe) -> Carry:
        """The recipe's first state. *Arguments:* `recipe`, maybe with another seed or other schedules."""
        raise NotImplementedError

    def put(self, state: TrainState) -> Carry:
        """`state`, with parameters as a tree: NumPy arrays, or arrays as in `template`."""
        raise NotImplementedError

    def snapshot(self, carry: Carry) -> TrainState:
        """A copy of the state, with parameters as a tree, that no step overwrites. Waits, for all hosts if
        the state is sharded over them."""
        raise NotImplementedError

    def parameters(self, carry: Carry) -> tuple[Tree, Tree]:
        """All parameters and the task's state, as arrays like those of `snapshot`. Waits."""
        raise NotImplementedError

    def average(self, carry: Carry) -> tuple[Tree, Tree]:
        """The parameters, averaged if the recipe has an EMA, and the task's state, over the mesh."""
        state = self.placement.gather([_evaluated(state) for state in carry])
        averages = None if carry[0].ema is None else self._gathered([state.ema for state in carry])
        tree = self._unpack_mesh(state.params) if averages is None else self._unpack_average(averages)
        return whole_params(tree, state.frozen), state.state

    def _gathered(self, parts: Sequence[Any]) -> Any:
        """A vector over the mesh, whole on every group, from each group's."""
        return self.placement.gather(parts)

    def pieces(self, carry: Carry) -> list[list[Piece]]:
        """What digests of the state are made of, for each local group: parts that are not metrics."""
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
        """The carry after a step, and a token `()` int32 to wait for.

        *Arguments:* `vectors`: for each local group, its replicas' vectors or their partial sum; the list is
        emptied when they are added, so that their memory is free during the update; `summed` is called with
        the pieces of their sum.
        """
        if self._reduce is None:  # a single vector
            totals = vectors.pop()
        elif self.placement.count == 1:
            totals = [self._reduce(vectors.pop())]
        else:
            totals = self.placement.split(self._summed(vectors))
        if summed is not None:
            summed([[Piece("gradient", total)] for total in totals])
        square, measure = compiled.get("square"), compiled.get("measure")
        after, tokens = [], []
        for g, (before, total) in enumerate(zip(carry, totals, strict=True)):
            hyper, squares, ratios = window[g]["hyper"], None, None
            if square is not None:
                squares = square[g](total)
            given = (before.without("donated"), total, hyper, squares)
            if measure is not None:
                ratios = compiled["ratios"][g](measure[g](*given), before.step, hyper)
            state, token = compiled["update"][g](*given, ratios)
            after.append(dataclasses.replace(state, frozen=before.frozen))
            tokens.append(token)
        return after, tokens[0]


def hold(step: Any, made: Blueprint[Program], placement: Placement) -> Holding:
    """The holding for the state of `step`."""
    if made.shards > 1:
        return Grouped(step, made, placement)
    return (ShardedOptimizer if step.sharded else Replicated)(step, made, placement)


def drained(carry: Carry) -> tuple[dict[str, Any], Carry]:
    """The metric sums since the last call, on the device, and the carry with sums of zero."""
    return carry[0].sums, [dataclasses.replace(state, sums=_zeros(state.sums)) for state in carry]


@functools.partial(jax.jit, keep_unused=True)  # the unused sums determine the zeros' device
def _zeros(sums):
    return jax.tree.map(jnp.zeros_like, sums)


class Replicated(Holding):
    """The whole state on every device."""

    def __init__(self, step: Step, made: Blueprint[Program], placement: Placement):
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
    packed = step.updates.flat.pack_host(jax.device_get(state.params))
    return dataclasses.replace(state, params=packed, sums=_sums(step, state))


def _sums(step: Step, state: TrainState) -> Any:
    """The metric sums of `state` in the structure for which the step is compiled: JAX sees another one if the
    loss makes a new `finish` function in each trace."""
    return jax.tree.unflatten(jax.tree.structure(step.state.sums), jax.tree.leaves(state.sums))


def _host(flat: Any, state: TrainState) -> TrainState:
    # Copied: on the CPU, `device_get` returns a view of memory that the next step reuses.
    host = jax.tree.map(np.array, jax.device_get(state))
    return dataclasses.replace(host, params=flat.unpack(host.params))


def _evaluated(state: TrainState) -> TrainState:
    """What an evaluation or a replica needs of a state."""
    return dataclasses.replace(state, optimizer=None, ema=None, sums={})


class ShardedOptimizer(Replicated):
    """The optimizer's state and the average sharded over the devices (ZeRO-1: Rajbhandari et al., 2020), with
    the same bits if sums are exact.

    Each device adds and updates its own chunks of the flat vector, and the parameters are gathered. Where the
    devices do not divide the chunks, several update some of them, to the same bits (`layout.windows`):

        scatter   exchange the replicas' vectors and add them in tree order, or in the back end's if sums need
                  not be exact; each device has the sum of its chunks
        square    the squares of a device's chunks, for clipping by norm, sent to all devices
        slice     a device's chunks of the parameters
        measure   the lengths of a device's rows, for norms of layers, sent to all devices
        ratios    of all rows, and the slice of a device's
        update    optimizer and average, for a device's chunks
        gather    the parameters, whole on every device

    The traffic is that of an all-reduce. An elementwise update does not depend on where the vector is cut,
    the norm is always summed chunk by chunk, and slices and collectives round nothing. So the bits are those
    of the unsharded update, on any number of devices.
    """

    sharded = True

    def __init__(self, step: Step, made: Blueprint[Program], placement: Placement):
        super().__init__(step, made, placement)
        flat = self._flat
        self.part, self._firsts = step.part, windows(flat.chunks, placement.groups)[1]
        # No device has all of the optimizer's state and the average, even at first.
        self._make = first_maker(step.recipe, moments=False)
        self._init = jax.jit(step.recipe.optimizer.init)
        self._gather = made.exchanges["gather"].program(placement.mesh)
        # Slices are not part of the update's program: the compiler would fuse them with its arithmetic, and
        # change the bits.
        self._slice = jax.jit(lambda vector, start: lax.dynamic_slice(vector, (start,), (self.part,)))
        self._cleared = jax.jit(lambda vector, n: jnp.where(jnp.arange(vector.size) < n, 0, vector))
        row, rows = flat.row, self.part // flat.row
        self._slice_rows = jax.jit(lambda by_row, start: lax.dynamic_slice(by_row, (start // row,), (rows,)))

    @functools.cached_property
    def _starts(self) -> list[jax.Array]:
        """Where each device's chunks begin, on that device."""
        return [jax.device_put(np.int32(self._start(g)), g.device) for g in self.placement.local]

    def _start(self, group: Group) -> int:
        return self._firsts[group.index] * self._flat.chunk

    @functools.cached_property
    def _masks(self) -> list[Tree]:
        """Each device's part of the update's masks (`Update.masks`)."""
        masks = self.step_of.updates.host_masks()
        return [
            jax.device_put({name: self._part(mask, group) for name, mask in masks.items()}, group.device)
            for group in self.placement.local
        ]

    def _part(self, leaf: Any, group: Group) -> Any:
        """A device's part of a NumPy array, if it has one value for each value of the parameter vector."""
        start = self._start(group)
        return leaf[start : start + self.part] if self.step_of.is_flat(leaf) else leaf

    def first(self, recipe: Recipe) -> Carry:
        state, carry = _packed(self.step_of, _made(recipe, self._make, self.placement)), []
        for placed, start in zip(self.placement.put(state), self._starts, strict=True):
            part = self._slice(placed.params, start)
            average = jnp.copy(part) if recipe.ema is not None else None  # the update overwrites both
            carry.append(dataclasses.replace(placed, optimizer=self._init(part), ema=average))
        return carry

    def put(self, state: TrainState) -> Carry:
        carry, replicated = [], dataclasses.replace(_packed(self.step_of, state), optimizer=None, ema=None)
        for group, placed in zip(self.placement.local, self.placement.put(replicated), strict=True):
            parts = jax.tree.map(functools.partial(self._part, group=group), (state.optimizer, state.ema))
            optimizer, ema = jax.device_put(parts, group.device)
            carry.append(dataclasses.replace(placed, optimizer=optimizer, ema=ema))
        return carry

    def snapshot(self, carry: Carry) -> TrainState:
        optimizer, ema = self._whole("optimizer", carry), self._whole("ema", carry)
        return _host(self._flat, dataclasses.replace(carry[0], optimizer=optimizer, ema=ema))

    def _whole(self, part: str, carry: Carry) -> Tree:
        """A part of the state as NumPy arrays on every host, `None` if it was freed. Waits for all hosts."""

        def gathered(shape: jax.ShapeDtypeStruct, *leaves: jax.Array) -> np.ndarray:
            if not self.step_of.is_flat(shape):
                return np.array(jax.device_get(leaves[0]))
            return np.array(self.placement.split(self._gather(self.placement.join(leaves)))[0])

        parts = [getattr(state, part) for state in carry]
        if parts[0] is None:
            return None
        return jax.tree.map(gathered, getattr(self.step_of.state, part), *parts)

    def _gathered(self, parts: Sequence[jax.Array]) -> jax.Array:
        """A vector over the mesh, whole on every device, from each device's part."""
        return self._gather(self.placement.join(parts))

    def pieces(self, carry: Carry) -> list[list[Piece]]:
        def own(piece: Piece, group: Group) -> Piece:
            flat = piece.name == "optimizer" and piece.array.shape == (self.part,)
            return self._cut(piece, group) if flat else piece

        pairs = zip(super().pieces(carry), self.placement.local, strict=True)
        return [[own(piece, group) for piece in parts] for parts, group in pairs]

    def _cut(self, piece: Piece, group: Group) -> Piece:
        """A device's part of a vector, with zeros instead of what an earlier device has too."""
        start, array = self._start(group), piece.array
        if again := max(0, min(group.index * self.part, self._flat.size) - start):
            array = self._cleared(array, np.int32(again))
        return Piece(piece.name, array, piece.start + start, cut=True)

    def step(
        self, compiled: Compiled, vectors: list, carry: Carry, window: list, summed: Summed = None
    ) -> tuple[Carry, jax.Array]:
        placement, square, measure = self.placement, compiled.get("square"), compiled.get("measure")
        scattered, aside = self._summed(vectors)
        sums, asides = placement.split(scattered), placement.split(aside)
        if summed is not None:
            parts = zip(sums, asides, placement.local, strict=True)
            end = self._flat.size
            summed([[self._cut(Piece("gradient", x), g), Piece("gradient", y, end)] for x, y, g in parts])
        squares: list[Any] = [None] * len(carry)
        if square is not None:
            squares = placement.split(self._gathered([square[g](total) for g, total in enumerate(sums)]))
        inputs = []
        for g, before in enumerate(carry):
            part = self._slice(before.params, self._starts[g])
            state = dataclasses.replace(before, params=part, frozen=None)
            inputs.append((state, sums[g], asides[g], window[g]["hyper"], squares[g], self._masks[g]))
        ratios: list[Any] = [None] * len(carry)
        if measure is not None:
            lengths = self._gathered([measure[g](*given) for g, given in enumerate(inputs)])
            for g, own in enumerate(placement.split(lengths)):
                by_row = compiled["ratios"][g](own, carry[g].step, window[g]["hyper"])
                ratios[g] = self._slice_rows(by_row, self._starts[g])
        after, tokens = [], []
        for update, given, own in zip(compiled["update"], inputs, ratios, strict=True):
            state, token = update(*given, own)
            after.append(state)
            tokens.append(token)
        params = placement.split(self._gathered([state.params for state in after]))
        return [
            dataclasses.replace(state, params=vector, frozen=before.frozen)
            for state, vector, before in zip(after, params, carry, strict=True)
        ], tokens[0]


class Grouped(Holding):
    """Each group's state cut over its devices; all groups have the same.

    If a group has devices of several hosts, all of these hosts run its programs, and send each other the
    arrays of checkpoints part by part.
    """

    sharded = True

    def __init__(self, step: GroupStep, made: Blueprint[Program], placement: Placement):
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
        """As in `Holding`; on hosts other than the first, an array may be its shape."""
        if self.placement.hosts.count > 1:
            sent = jax.tree.map(self.placement.send_cut, state, self.step_of.saved_axes)
        else:
            (sent,) = self.placement.put_cut(state, self.step_of.saved_axes, only=1)
        return self._on_all(self._pack(sent))

    def _on_all(self, state: TrainState) -> Carry:
        """`state`, which is on the first local group, on all local groups."""
        state = dataclasses.replace(state, sums=_sums(self.step_of, state))
        others = [jax.device_put(state, self._shardings(group.mesh)) for group in self.placement.local[1:]]
        return [state, *others]

    def snapshot(self, carry: Carry) -> TrainState:
        """As in `Holding`: arrays on the first local group. If groups have devices of several hosts, NumPy
        arrays on each host."""
        return self._copied(carry[0])

    def _copied(self, state: TrainState) -> TrainState:
        params = self._unpack(state.params)
        if self.placement.lead.platform == "cpu":  # checkpoints read memory that the next step would reuse
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
