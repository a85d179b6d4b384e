"""The optimizer's state shared out over the devices (ZeRO-1: Rajbhandari et al., 2020), with the same bits.

Each device adds, and updates, its own chunks of the flat vector, and the parameters are gathered:

    scatter   exchange the replicas' vectors, add them in the tree: a device has the sum of its chunks
    square    the squares of its chunks, where the norm clips; all devices get all
    slice     its chunks of the parameters
    update    optimizer and average, over its chunks alone
    gather    the parameters, whole on every device again

What moves is what an all-reduce moves. An elementwise update does not see where the vector is cut, the norm
is summed chunk by chunk in any case, and slices and collectives round nothing: so the bits are those of the
whole update, on any number of devices. Slices stay out of the update's program, whose arithmetic they would
change.
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
    """The programs between the replicas and the next step, where the optimizer's state is shared out.

    *Arguments:* `of`, a step that is `sharded`.
    """

    def __init__(self, of: Step, placement: Placement):
        self.functions, self.placement = of, placement
        flat = of.updates.flat
        self.chunk = flat.size // placement.groups
        self._scatter = reduce.scatterer(placement.mesh, flat.size)
        self._gather = reduce.gatherer(placement.mesh)
        self._slice = jax.jit(lambda whole, start: lax.dynamic_slice(whole, (start,), (self.chunk,)))

    def compile(self, window: list, options: dict[str, Any] | None) -> None:
        """Compiles the update for each local device, and places which values decay and which are grouped."""
        masks = self.functions.updates.host_masks()
        update = jax.jit(self.functions.update_chunk, donate_argnums=0, compiler_options=options)
        square = jax.jit(self.functions.square, compiler_options=options)
        self._starts: list[Any] = []
        self._masks: list[Any] = []
        self._updates: list[Any] = []
        self._squares: list[Any] = []
        for group, rows in zip(self.placement.local, window, strict=True):
            start = group.index * self.chunk
            self._starts.append(jax.device_put(np.int32(start), group.device))
            parts = {name: mask[start : start + self.chunk] for name, mask in masks.items()}
            self._masks.append(jax.device_put(parts, group.device))
            here = jax.sharding.SingleDeviceSharding(group.device)
            specs = jax.tree.map(
                lambda s, here=here: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here),
                self.functions.update_specs(rows["hyper"]),
            )
            self._updates.append(update.lower(*specs).compile())
            summed = specs[1]
            self._squares.append(square.lower(summed).compile() if self.functions.updates.squares else None)

    @property
    def executable(self) -> Any:
        """The update, compiled for the first device."""
        return self._updates[0]

    def __call__(
        self, vectors: list[list[jax.Array]], carry: list[TrainState], window: list
    ) -> tuple[list[TrainState], jax.Array]:
        """The states after a step, from the vectors of each local device's replicas, and a token."""
        put = self.placement
        summed, aside = self._scatter([put.join(parts) for parts in zip(*vectors, strict=True)])
        sums, asides = put.split(summed), put.split(aside)
        squares: list[Any] = [None] * len(carry)
        if self.functions.updates.squares is not None:
            own = [square(one) for square, one in zip(self._squares, sums, strict=True)]
            squares = put.split(self._gather(put.join(own)))
        after, token = [], None
        for d, held in enumerate(carry):
            part = self._slice(held.params, self._starts[d])
            state = dataclasses.replace(held, params=part, frozen=None)
            hyper = window[d]["hyper"]
            done, step = self._updates[d](state, sums[d], asides[d], hyper, squares[d], self._masks[d])
            after.append(done)
            token = step if token is None else token
        assert token is not None
        params = put.split(self._gather(put.join([done.params for done in after])))
        return [
            dataclasses.replace(done, params=whole, frozen=held.frozen)
            for done, whole, held in zip(after, params, carry, strict=True)
        ], token

    def first(self, state: TrainState) -> list[TrainState]:
        """As `put` of a first state without optimizer and average, which each device makes of its own part:
        whole, they might be more than one of them holds."""
        recipe, held = self.functions.recipe, []
        make = jax.jit(recipe.optimizer.init)
        for group, whole in zip(self.placement.local, self.placement.put(state), strict=True):
            part = self._slice(whole.params, jax.device_put(np.int32(group.index * self.chunk), group.device))
            average = jnp.copy(part) if recipe.ema is not None else None  # the update overwrites both
            held.append(dataclasses.replace(whole, optimizer=make(part), ema=average))
        return held

    def put(self, state: TrainState) -> list[TrainState]:
        """`state`, NumPy arrays with the vector as `params`, on each local device, of what is shared out a
        part."""
        held = []
        beside = dataclasses.replace(state, optimizer=None, ema=None)
        for group, whole in zip(self.placement.local, self.placement.put(beside), strict=True):
            start = group.index * self.chunk

            def part(leaf: Any, start: int = start) -> Any:
                return leaf[start : start + self.chunk] if self.functions.is_flat(leaf) else leaf

            own = jax.tree.map(part, (state.optimizer, state.ema))
            optimizer, ema = jax.device_put(own, group.device)
            held.append(dataclasses.replace(whole, optimizer=optimizer, ema=ema))
        return held

    def whole(self, parts: list[Tree]) -> Tree:
        """What is shared out, a part a local device, as NumPy arrays on every host. Waits, for all hosts."""
        shapes = (self.functions.state.optimizer, self.functions.state.ema)

        def one(shape: jax.ShapeDtypeStruct, *held: jax.Array) -> np.ndarray:
            if not self.functions.is_flat(shape):
                return np.array(jax.device_get(held[0]))
            gathered = self._gather(self.placement.join(held))
            return np.array(self.placement.split(gathered)[0])

        return jax.tree.map(one, shapes, *parts)

    def average(self, carry: list[TrainState]) -> jax.Array:
        """The averaged parameters as one vector over the mesh, whole on every device."""
        return self._gather(self.placement.join([state.ema for state in carry]))
