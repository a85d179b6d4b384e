"""The optimizer's state sharded over the devices (ZeRO-1: Rajbhandari et al., 2020), with the same bits
if sums are exact.

Each device adds and updates its own chunks of the flat vector, and the parameters are gathered:

    scatter   exchange the replicas' vectors and add them in tree order, or in the back end's if sums need not
              be exact; each device has the sum of its chunks
    square    the squares of a device's chunks, for clipping by norm, sent to all devices
    slice     a device's chunks of the parameters
    measure   the lengths of a device's rows, for norms of layers, sent to all devices
    ratios    of all rows, and the slice of a device's
    update    optimizer and average, for a device's chunks
    gather    the parameters, whole on every device

The traffic is that of an all-reduce. An elementwise update does not depend on where the vector is cut, the
norm is always summed chunk by chunk, and slices and collectives round nothing. So the bits are those of the
unsharded update, on any number of devices. Slices are not part of the update's program, since the compiler
would fuse them with its arithmetic and change the bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..recipe.task import Tree
from . import reduce
from .placement import Placement
from .state import TrainState
from .step import Step


class Sharding:
    """The programs of a step after the replicas' if the optimizer's state is sharded.

    *Arguments:* `functions`, a step that is `sharded`; `exact`: devices add in the fixed order.
    """

    def __init__(self, functions: Step, placement: Placement, exact: bool = True):
        self.functions, self.placement = functions, placement
        flat = functions.updates.flat
        self.chunk = flat.size // placement.groups
        self._scatter = reduce.scatterer(placement.mesh, flat.size, exact)
        self._gather = reduce.gatherer(placement.mesh)
        self._slice = jax.jit(lambda vector, start: lax.dynamic_slice(vector, (start,), (self.chunk,)))
        row, rows = flat.row, self.chunk // flat.row
        self._slice_rows = jax.jit(lambda by_row, start: lax.dynamic_slice(by_row, (start // row,), (rows,)))

    def compile(self, window: list, options: dict[str, Any] | None) -> None:
        """Compiles the update for each local device, and places its masks (`Update.masks`)."""
        masks = self.functions.updates.host_masks()
        update = jax.jit(self.functions.update_chunk, donate_argnums=0, compiler_options=options)
        square = jax.jit(self.functions.square, compiler_options=options)
        measure = jax.jit(self.functions.measure_chunk, compiler_options=options)
        ratios = jax.jit(self.functions.ratios, compiler_options=options)
        updates = self.functions.updates
        self._starts: list[Any] = []
        self._masks: list[Any] = []
        self._updates: list[Any] = []
        self._squares: list[Any] = []
        self._measures: list[Any] = []
        self._ratios: list[Any] = []
        for group, rows in zip(self.placement.local, window, strict=True):
            start = group.index * self.chunk
            self._starts.append(jax.device_put(np.int32(start), group.device))
            parts = {name: mask[start : start + self.chunk] for name, mask in masks.items()}
            self._masks.append(jax.device_put(parts, group.device))
            here = jax.sharding.SingleDeviceSharding(group.device)
            hyper = rows["hyper"]
            specs, of_ratios = jax.tree.map(
                lambda s, here=here: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here),
                (self.functions.update_specs(hyper), self.functions.ratios_specs(hyper)),
            )
            self._updates.append(update.lower(*specs).compile())
            self._squares.append(square.lower(specs[1]).compile() if updates.squares else None)
            if updates.lengths is not None:
                self._measures.append(measure.lower(*specs[:-1]).compile())
                self._ratios.append(ratios.lower(*of_ratios).compile())

    @property
    def executable(self) -> Any:
        """The update, compiled for the first device."""
        return self._updates[0]

    def __call__(
        self, vectors: list[jax.Array], carry: list[TrainState], window: list
    ) -> tuple[list[TrainState], jax.Array]:
        """The states after a step, and a token. *Arguments:* `vectors`: of the first replicas of all devices,
        of the second ones and so on; the list is emptied when they are added, so that their memory is free.
        """
        placement = self.placement
        summed, aside = self._scatter(vectors)
        vectors.clear()
        sums, asides = placement.split(summed), placement.split(aside)
        squares: list[Any] = [None] * len(carry)
        if self.functions.updates.squares is not None:
            parts = [square(total) for square, total in zip(self._squares, sums, strict=True)]
            squares = placement.split(self._gather(placement.join(parts)))
        inputs = []
        for d, before in enumerate(carry):
            part = self._slice(before.params, self._starts[d])
            state = dataclasses.replace(before, params=part, frozen=None)
            inputs.append((state, sums[d], asides[d], window[d]["hyper"], squares[d], self._masks[d]))
        ratios: list[Any] = [None] * len(carry)
        if self.functions.updates.lengths is not None:
            parts = [measure(*given) for measure, given in zip(self._measures, inputs, strict=True)]
            lengths = placement.split(self._gather(placement.join(parts)))
            for d, before in enumerate(carry):
                by_row = self._ratios[d](lengths[d], before.step, window[d]["hyper"])
                ratios[d] = self._slice_rows(by_row, self._starts[d])
        after, tokens = [], []
        for update, given, own in zip(self._updates, inputs, ratios, strict=True):
            state, token = update(*given, own)
            after.append(state)
            tokens.append(token)
        params = placement.split(self._gather(placement.join([state.params for state in after])))
        return [
            dataclasses.replace(state, params=vector, frozen=before.frozen)
            for state, vector, before in zip(after, params, carry, strict=True)
        ], tokens[0]

    def first(self, state: TrainState) -> list[TrainState]:
        """A first state without optimizer and average on each local device, which makes its own part of
        these. The whole might not fit into a device's memory."""
        recipe, carry = self.functions.recipe, []
        init = jax.jit(recipe.optimizer.init)
        for group, placed in zip(self.placement.local, self.placement.put(state), strict=True):
            start = jax.device_put(np.int32(group.index * self.chunk), group.device)
            part = self._slice(placed.params, start)
            average = jnp.copy(part) if recipe.ema is not None else None  # the update overwrites both
            carry.append(dataclasses.replace(placed, optimizer=init(part), ema=average))
        return carry

    def put(self, state: TrainState) -> list[TrainState]:
        """`state`, of NumPy arrays with `params` as a vector, on each local device; of optimizer and average
        only the device's part."""
        carry = []
        replicated = dataclasses.replace(state, optimizer=None, ema=None)
        for group, placed in zip(self.placement.local, self.placement.put(replicated), strict=True):
            start = group.index * self.chunk

            def part(leaf: Any, start: int = start) -> Any:
                return leaf[start : start + self.chunk] if self.functions.is_flat(leaf) else leaf

            parts = jax.tree.map(part, (state.optimizer, state.ema))
            optimizer, ema = jax.device_put(parts, group.device)
            carry.append(dataclasses.replace(placed, optimizer=optimizer, ema=ema))
        return carry

    def whole(self, parts: list[Tree]) -> Tree:
        """Optimizer and average as NumPy arrays on every host, from the parts of each local device. Waits for
        all hosts."""
        shapes = (self.functions.state.optimizer, self.functions.state.ema)

        def gathered(shape: jax.ShapeDtypeStruct, *leaves: jax.Array) -> np.ndarray:
            if not self.functions.is_flat(shape):
                return np.array(jax.device_get(leaves[0]))
            vector = self._gather(self.placement.join(leaves))
            return np.array(self.placement.split(vector)[0])

        return jax.tree.map(gathered, shapes, *parts)

    def average(self, carry: list[TrainState]) -> jax.Array:
        """The averaged parameters as one vector over the mesh, whole on every device."""
        return self._gather(self.placement.join([state.ema for state in carry]))
