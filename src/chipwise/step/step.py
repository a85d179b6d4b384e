"""The one step that `fit` runs, a benchmark times and a plan compiles.

A step is several programs. None touches the host:

    pick      a device's examples of the step, if it keeps all of them        on each device
    replica   one replica's gradient, sums and state, as one flat vector      on each device
    reduce    the sum of all replicas' vectors in the order of a fixed tree   across devices
    square    the squares of the gradient's chunks, to clip or scale the loss on each device
    update    optimizer, averages, state                                      on each device
    gather    the parameters, if the optimizer's state is sharded             across devices
    measured  a block's squares, at steps that measure the noise              on each device

A recipe with one block has a single program, `step`, in place of `replica` to `update`. A CPU or
GPU that is the only device may run `steps`, which are many.

All but `reduce` and `gather` are compiled for a single device, and a device with several replicas
runs the same program several times. Values of several replicas meet only in additions, whose order
is fixed. This is why results do not depend on the number of devices.

With `exact=False` the back end chooses the order of additions over devices. Any number of devices
that divides the replicas then shares the blocks, which are cut further if they must be.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..data.sources import Spec, spec_of
from ..models.chip_traits import traced_for
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from . import window
from .layout import Layout, Ranges, tree_sum
from .leaves import OwnLeaves
from .program_digest import mark
from .replica import ReplicaBatch, ReplicaInput, contribution
from .state import TrainState, abstract_state
from .update import Update, shards_optimizer
from .window import Batch, Window, WindowHyper, WindowRows


class RowRange(NamedTuple):
    """The rows `first` to `after` of an array, which a device has, and the range `own` to `end`
    among these, counted from `first`, that no other device owns."""

    first: int
    after: int
    own: int
    end: int


class Step:
    """The programs of a recipe's step as pure functions of arrays, for one device of a layout.

    *Arguments:*

    - `state`: `abstract_state(recipe)`, if known.
    - `device`: the device for which kernels are chosen, by default that of `models.chip_traits`.
    - `shard_optimizer`: requires or forbids to shard the optimizer's state. By default
      `update.shards_optimizer` decides.

    *Fields:*

    - `calls`: the calls of `replica` on a device in a step. Each computes `together` replicas.
    - `fused`: whether `replica_and_update` replaces all programs, since there is only one block and
      so one device.
    - `updates`: the update and the layout of its vector.
    - `sharded`: whether the optimizer's state is sharded over the devices (see `run.state_layout`).
    """

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout,
        *,
        state: TrainState | None = None,
        device: jax.Device | None = None,
        shard_optimizer: bool | None = None,
    ):
        self.recipe, self.layout, self.device = recipe, layout, device
        self.spec = spec_of(recipe.task.train)
        self.together, self.calls = layout.together, layout.blocks_per_device
        self.fused = layout.blocks == 1
        self.state = abstract_state(recipe) if state is None else state
        self.updates = Update(recipe, self.state)
        self.sharded = shards_optimizer(self.updates, self.state, layout.devices, shard_optimizer)
        self.group = 0
        if self.sharded:
            owns = [self.windows[0].own(group) for group in range(layout.devices)]
            self.group = max(
                range(layout.devices), key=lambda group: owns[group][1] - owns[group][0]
            )

    @functools.cached_property
    def traced(self) -> jax.stages.Wrapped:
        """`replica`, jitted, so that all callers share one trace."""
        # A program for each call, and not one for all replicas: there, a compiler fuses the
        # operations of each replica with those around them, uses fused multiply-adds or not, and
        # orders the terms of a reduction accordingly. On the CPU the gradients on 1 and on 2
        # devices then differed in the last place after a single step.
        return jax.jit(self.replica)

    def pick(self, step: Array, rows: WindowRows, kept: Batch) -> Batch:
        """Returns the device's examples of a step, which are `data` of the other programs.

        *Arguments:* `kept` has all examples as `window.flat` columns."""
        # Never inside `replica`, or streamed data would give other bits: the compiler would fuse
        # the gather with the loss's first operations, and contract or order these in another way.
        return window.pick(
            kept, lax.dynamic_index_in_dim(rows["indices"], step - rows["start"], keepdims=False)
        )

    def replica(self, inputs: ReplicaInput) -> Array:
        """Returns the vector of the replicas from `place` on, `(n,)` float32 (see
        `Update.vector`)."""
        inputs = inputs._replace(params=self.updates.flat.unpack(inputs.params))
        batch = self.take(inputs)
        with traced_for(self.device):
            contributed = contribution(self.recipe, inputs, batch)
        return self.updates.vector(contributed)

    def in_turn(
        self, inputs: ReplicaInput, calls: Array, resident: bool = False
    ) -> Array | list[Array]:
        """Returns the sum of the vectors of all blocks of a device in tree order, `(n,)`. It runs
        `replica` in a loop, so that the host makes a single call: on the CPU, starting a small
        net's program costs more than running it. If devices add differently, since the layout is
        not `aligned`, it returns the list of all vectors, and computes only the device's own.
        """
        each = self.each_in_turn(inputs, calls, resident)
        return tree_sum(each, jnp.add) if self.layout.aligned else each

    def each_in_turn(
        self, inputs: ReplicaInput, calls: Array, resident: bool = False
    ) -> list[Array]:
        """Returns the vectors of all blocks of a device, `(n,)` each.

        *Arguments:* `inputs` has at least two rows of `place`. `calls` is `()` int32, the number of
        the rows to compute. If `resident`, `data` is all examples.
        """
        # The body of the loop is compiled by itself, so picking before it changes no bits
        if resident:
            data = self.pick(inputs.step, inputs.rows, inputs.data)
            inputs = inputs._replace(data=data)
        places = inputs.place
        # The number of turns is an input, and a single block is padded to the size of two.
        # Otherwise the compiler would see that the loop has a single turn, inline its body and
        # optimize it differently.
        if self.calls == 1:
            padding = self.layout.group_batch
            indices = jnp.pad(inputs.rows["indices"], ((0, 0), (0, padding)))
            inputs = inputs._replace(
                rows={**inputs.rows, "indices": indices},
                data={
                    name: jnp.pad(column, [(0, padding)] + [(0, 0)] * (column.ndim - 1))
                    for name, column in inputs.data.items()
                },
            )

        def turn(i: Array, vectors: Array) -> Array:
            place = lax.dynamic_index_in_dim(places, i, keepdims=False)
            vector = self.traced(inputs._replace(place=place))
            return lax.dynamic_update_slice(vectors, vector[None], (i, jnp.int32(0)))

        vectors = jnp.zeros((places.shape[0], self.updates.size), jnp.float32)
        vectors = lax.fori_loop(jnp.int32(0), calls, turn, vectors)
        return [vectors[i] for i in range(self.calls)]

    def in_a_row(
        self,
        state: TrainState,
        frozen: Tree,
        window: Window,
        kept: Batch,
        place: Array,
        calls: Array,
        steps: Array,
    ) -> tuple[TrainState, Array]:
        """Runs `steps` steps, `()` int32, on the only device, so that the host makes one call for
        all. Each part of a step is computed as by itself.

        *Arguments:* `kept` has all examples. `place` and `calls` are those of `in_turn`, or the
        place of the only block and 1. `frozen` is not part of `state`, since it is not overwritten.
        """
        once = jnp.minimum(calls, jnp.int32(1))

        def alone(function: Callable[..., Any], first: Any, *inputs: Any) -> Any:
            """Calls a function in a loop of one turn, whose body is compiled by itself. Its inputs
            are values that change. Otherwise the compiler would move what depends on them alone out
            of the body, away from the operations with which it fuses them."""

            def turn(_: Array, carry: Any) -> Any:
                return function(*carry), *jax.tree.map(jnp.zeros_like, carry[1:])

            return lax.fori_loop(jnp.int32(0), once, turn, (first, *inputs))[0]

        def whole(carry: tuple[TrainState, Array], batch: Batch) -> tuple[TrainState, Array]:
            return self.replica_and_update(carry[0], frozen, window, batch, place)

        def updated(carry: tuple[TrainState, Array], total: Array, squares: Array | None) -> Any:
            return self.update(carry[0], total, window["hyper"], squares)

        def step(_: Array, carry: tuple[TrainState, Array]) -> tuple[TrainState, Array]:
            before = dataclasses.replace(carry[0], frozen=frozen)
            if self.fused:
                return alone(whole, carry, self.pick(before.step, window["rows"], kept))
            inputs = ReplicaInput.of(before, window["rows"], kept, place)
            total = self.in_turn(inputs, calls, resident=True)
            squares = None
            if (shape := self.updates.squares) is not None:
                zeros = jnp.zeros(shape.shape, shape.dtype)
                squares = alone(lambda _, total: self.square(total), zeros, total)
            return alone(updated, carry, total, squares)

        return lax.fori_loop(jnp.int32(0), steps, step, (state, jnp.int32(0)))

    def update(
        self,
        state: TrainState,
        total: Array,
        hyper: WindowHyper,
        squares: Array | None,
    ) -> tuple[TrainState, Array]:
        """Returns the state after a step and a token (see `Update`)."""
        size, masks = self.updates.flat.size, self.updates.spread()
        with traced_for(self.device):
            return self.updates(state, total[:size], total[size:], hyper, squares, masks)

    def update_chunk(
        self,
        state: TrainState,
        summed: Array,
        beside: Array,
        hyper: WindowHyper,
        squares: Array | None,
        masks: dict[str, Array],
    ) -> tuple[TrainState, Array]:
        """Updates a device's part of the vector and of the optimizer's state, if they are
        `sharded` (see `update`)."""
        with traced_for(self.device):
            return self.updates(state, summed, beside, hyper, squares, masks, self._part)

    def square(self, total: Array) -> Array:
        with traced_for(self.device):
            return self.updates.square(total, self._part)

    def measured(self, vector: Array) -> tuple[Array, Array]:
        """The squares of the whole gradient in a block's vector or in the sum, as
        `Update.square` returns them, and the loss's count `()`."""
        beside = vector[self.updates.flat.size :]
        with traced_for(self.device):
            return self.updates.square(vector), self.updates.aside.unpack(beside)["sums"][
                "loss"
            ].count

    def replica_and_update(
        self,
        state: TrainState,
        frozen: Tree,
        window: Window,
        data: Batch,
        place: Array,
    ) -> tuple[TrainState, Array]:
        """Runs a whole step. `frozen` is not part of `state`, since it is not overwritten."""
        inputs = ReplicaInput.of(state, window["rows"], data, place)._replace(frozen=frozen)
        return self.after(state, self.replica(inputs), window["hyper"])

    def after(
        self, state: TrainState, total: Array, hyper: WindowHyper
    ) -> tuple[TrainState, Array]:
        """Runs all programs after the sum `total`."""
        squares = self.square(total) if self.updates.squares is not None else None
        return self.update(state, total, hyper, squares)

    def specs(self) -> dict[str, Any]:
        """The shapes of the programs' inputs on one device: `state`, `window`, `data`, `place`,
        `vector` and `squares`, as `ShapeDtypeStruct`s. Reads no data and touches no device."""
        recipe, n = self.recipe, self.layout.group_batch
        return {
            "state": self.carried,
            "window": window.window_spec(recipe, n),
            "data": window.flat_spec(self.spec, n),
            "place": jax.ShapeDtypeStruct((2,), jnp.int32),
            "vector": jax.ShapeDtypeStruct((self.updates.size,), jnp.float32),
            "squares": self.updates.squares,
        }

    def kept_spec(self) -> Spec:
        """The shapes of all examples, as a device keeps them for `pick`."""
        return window.flat_spec(self.spec, len(self.recipe.task.train))

    @property
    def carried(self) -> TrainState:
        """The shapes of the state on a device, with its parameters as a vector."""
        state = dataclasses.replace(self.state, params=self.updates.whole.shape)
        if not self.sharded:
            return state
        return jax.eval_shape(lambda state: self.part_of(state, self.group), state)

    @functools.cached_property
    def windows(self) -> tuple[Ranges, Ranges]:
        """The parts of the vector's values, and of their squares, that each device updates, if they
        are `sharded`."""
        return self.updates.windows(self.layout.devices)

    def on(self, group: int) -> Step:
        """Returns the step of another device. Its programs differ if it updates other leaves."""
        other = copy.copy(self)
        other.group = group
        return other

    @property
    def alike(self) -> bool:
        """Whether all devices run the same programs."""
        return not self.sharded or self.updates.leaves is None

    @property
    def _part(self) -> OwnLeaves | None:
        """The leaves that this device updates, or `None` if all devices run the same programs."""
        leaves = self.updates.leaves
        return (
            None if self.alike or leaves is None else leaves.part(self.group, self.layout.devices)
        )

    def cuts(self, group: int) -> dict[str, list[RowRange | None]]:
        """The rows that a device has of each leaf of "optimizer" and "ema", in the rows of `rowed`.
        `None` means the whole leaf."""
        values, leaves = self.windows[0], self.updates.leaves
        window = RowRange(
            values.start(group), values.start(group) + values.part, *values.own(group)
        )
        if leaves is None:
            flat = [self.is_flat(leaf) for leaf in jax.tree.leaves(self.state.optimizer)]
            return {"optimizer": [window if one else None for one in flat], "ema": [window]}
        rows = {
            i: RowRange(a, b, 0, b - a)
            for i, (a, b) in leaves.part(group, self.layout.devices).span.items()
        }
        own = [None if i is None else rows.get(i, RowRange(0, 0, 0, 0)) for i in leaves.owners]
        return {"optimizer": own, "ema": [window]}

    def rowed(self, name: str, whole: Tree) -> Tree:
        """Returns the part `name` of the whole state with an axis along which each leaf can be
        cut."""
        leaves = self.updates.leaves
        return whole if leaves is None or name == "ema" or whole is None else leaves.rows(whole)

    def part_of(self, state: TrainState, group: int) -> TrainState:
        """Returns `state` with a device's part of the optimizer's state and of the average."""

        def part(name: str) -> Tree:
            leaves, structure = jax.tree.flatten(self.rowed(name, getattr(state, name)))
            pairs = zip(leaves, self.cuts(group)[name], strict=False)  # there may be no average
            own = [x if cut is None else x[cut.first : cut.after] for x, cut in pairs]
            return jax.tree.unflatten(structure, own)

        return dataclasses.replace(state, optimizer=part("optimizer"), ema=part("ema"))

    def is_flat(self, leaf: Any) -> bool:
        """Whether a leaf of the optimizer's state has one value for each value of the parameter
        vector."""
        return leaf.shape == (self.updates.whole.size,)

    def update_specs(self, hyper: WindowHyper) -> tuple[Any, ...]:
        """The shapes of the inputs of `update`, or of `update_chunk` if `sharded`, on a device.

        *Arguments:* `hyper` is that of the window, as arrays or shapes.
        """
        updates, specs = self.updates, self.specs()
        state = specs["state"].without("donated")
        if not self.sharded:
            return state, specs["vector"], hyper, specs["squares"]
        params = jax.ShapeDtypeStruct((self.windows[0].part,), updates.flat.dtype)
        beside = jax.ShapeDtypeStruct((updates.size - updates.flat.size,), jnp.float32)
        masks = {
            name: jax.ShapeDtypeStruct(params.shape, dtype)
            for name, (dtype, _) in updates.masks().items()
        }
        summed = jax.ShapeDtypeStruct(params.shape, jnp.float32)
        state = dataclasses.replace(state, params=params)
        return state, summed, beside, hyper, updates.squares, masks

    def take(self, inputs: ReplicaInput) -> ReplicaBatch:
        """Returns the batch of the replicas from `place` on. If one program computes several, it
        has a first axis for the replicas."""
        if self.together == 1:
            batch = self._take_rows(inputs)
        else:
            # Within a block the compiler may batch and add in any order, since a block is the same
            # program on any number of devices
            each = jax.vmap(lambda place: self._take_rows(inputs._replace(place=place)))
            place = inputs.place
            batch = each(place[None] + jnp.arange(self.together, dtype=jnp.int32)[:, None])
        return batch._replace(number=mark(batch.number))

    def _take_rows(self, inputs: ReplicaInput) -> ReplicaBatch:
        """Returns the batch of the replica at `place`."""
        layout, rows, n = self.layout, inputs.rows, self.layout.replica_batch
        row, (number, local) = inputs.step - rows["start"], inputs.place
        indices = lax.dynamic_slice(rows["indices"], (row, local * n), (1, n))[0]

        def own(column: Array) -> Array:
            if layout.shards > 1:  # replicas have an axis: the rows of each are cut over devices
                return lax.dynamic_index_in_dim(column, local, keepdims=False)
            # A gather is faster on a CPU, but its code depends on the number of a device's rows
            return lax.dynamic_slice_in_dim(column, local * n, n)

        columns = window.shaped({k: own(v) for k, v in inputs.data.items()}, self.spec)
        # A batch may begin in one epoch and end in the next, which begins at position `cut`.
        position = number * n + jnp.arange(n, dtype=jnp.int32)
        epochs = rows["epoch"][row] + (position >= rows["cut"][row]).astype(jnp.int32)
        examples = self.recipe.clock.examples
        if layout.batch > examples:  # or in a later one
            epochs += jnp.maximum(position - rows["cut"][row], 0) // examples
        return ReplicaBatch(columns, indices, epochs, number)
