"""The one step: what `fit` runs, what a benchmark times, what a plan compiles.

A step is three programs, four where it clips, none of which touches the host:

    replica   one replica's gradient, sums and state, as one flat vector      on each device
    reduce    the sum of all replicas' vectors in the order of a fixed tree   across devices
    square    the squares of the gradient's chunks, where its norm clips       on each device
    update    optimizer, averages, state                                      on each device

All but `reduce` are compiled for a single device, whatever their number: a device with several replicas
runs the same program several times (on the CPU, where the calls of a small net cost more than its work, it
is the body of a loop: `in_turn`). That is what makes the bits equal. In one
program for all, the compiler fuses each replica's work differently depending on what stands around
it, contracts products and sums into fused multiply-adds or not, and orders the terms of a reduction
accordingly; measured on the CPU back end, the gradients on 1 and on 2 devices then differ in the
last place after a single step. Compiled apart, only additions ever meet another device.

The replicas of a block, of which a recipe has as many as replicas unless it says otherwise, are mapped over
in one call: the compiler may batch them and add as it likes, always alike. One block is one program with
the update too. `exact=False` makes a block of all replicas of a device, and lets the back end add over
devices.

Collectives stay alone in their program for another reason too: on the CPU a waiting collective holds a
thread of the pool that the other simulated devices compute with, and a program that does both can starve.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..data.sources import Spec, spec_of
from ..models.target import traced_for
from ..recipe.recipe import Recipe
from . import feed
from .layout import Layout, tree_sum
from .replica import contribution
from .state import TrainState, abstract_state, read
from .update import Update, shares_out


def compiler_options(platform: str, exact: bool) -> dict[str, Any] | None:
    """What XLA offers towards the same bits in every program: on GPUs kernels without atomics, and no
    autotuning, which picks kernels by the clock. Without it products in Triton have
    tiles of 16 x 8, a few per cent of the chip; the vendor's library chooses its kernel by the shape."""
    if exact and platform in ("gpu", "cuda", "rocm"):
        return {
            "xla_gpu_deterministic_ops": True,
            "xla_gpu_autotune_level": 0,
            "xla_gpu_enable_triton_gemm": False,
        }
    return None


class Step:
    """The programs of a recipe's step as pure functions of arrays, for one device of a layout.

    *Arguments:* `resident`: whether `data` holds every example, to be indexed on the device; otherwise it
    is the step's own batch, the device's rows of it; `state`: `abstract_state(recipe)`, if it is known;
    `device`: one to run on, where kernels are to be chosen for another than `models.target` says.

    `calls` is how often a device runs `replica` in a step, which computes `together` replicas; `fused` says
    that `replica_and_update` takes the place of all, since there is one block and so one device; `updates`
    is the update with how its vector is built; `sharded`, that the devices share out the optimizer's state,
    which `shard_optimizer` asks for or forbids: see `engine.sharding`.
    """

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout,
        *,
        resident: bool,
        state: TrainState | None = None,
        device: jax.Device | None = None,
        shard_optimizer: bool | None = None,
    ):
        self.recipe, self.layout, self.resident, self.device = recipe, layout, resident, device
        self.spec = spec_of(recipe.task.train)
        self.together, self.calls = layout.together, layout.blocks_per_device
        self.fused = layout.blocks == 1
        self.state = abstract_state(recipe) if state is None else state
        self.updates = Update(recipe, self.state)
        self.sharded = shares_out(recipe, self.state, layout.devices, shard_optimizer)

    @functools.cached_property
    def traced(self):
        """`replica`, jitted: whoever asks for its shapes or operations traces it once."""
        return jax.jit(self.replica)

    def replica(self, params, frozen, state, step, scale, at, data, place) -> jax.Array:
        """The vector of the replicas that begin at `place`, `(1, n)` float32; see `Update.vector`.
        `params` is the vector of `Update.flat`."""
        return self._vector((params, frozen, state, step, scale), at, data, place).reshape(1, -1)

    def in_turn(self, params, frozen, state, step, scale, at, data, places, calls) -> jax.Array:
        """The sum of the vectors of all a device's blocks in the order of the tree, `(1, n)`: `replica` in a
        loop, which spares the host all calls but one.

        `calls` is an input, `()` int32, `places` `(calls, 2)` has two rows at least, and the examples are at
        least those of two blocks: where the compiler sees that there is one turn, it takes the body apart.
        """
        if self.calls == 1:
            more = self.layout.group_batch
            at = {**at, "indices": jnp.pad(at["indices"], ((0, 0), (0, more)))}
            if not self.resident:
                data = {k: jnp.pad(v, [(0, more)] + [(0, 0)] * (v.ndim - 1)) for k, v in data.items()}

        def turn(i, made):
            place = lax.dynamic_index_in_dim(places, i, keepdims=False)
            vector = self.traced(params, frozen, state, step, scale, at, data, place)
            return lax.dynamic_update_slice(made, vector, (i, jnp.int32(0)))

        made = jnp.zeros((places.shape[0], self.updates.size), jnp.float32)
        made = lax.fori_loop(jnp.int32(0), calls, turn, made)
        return tree_sum([made[i : i + 1] for i in range(self.calls)], jnp.add)

    def update(self, state: TrainState, total: jax.Array, hyper: dict, squares: jax.Array | None):
        return self.updates(state, total, hyper, squares)

    def update_chunk(self, state: TrainState, summed, beside, hyper: dict, squares, masks: dict):
        """`update` of a device's part of the vector and of the optimizer's state, where that is `sharded`."""
        decaying = masks.get("decaying", self.updates.decays)
        return self.updates.moved(state, summed, beside, hyper, squares, decaying, masks.get("members"))

    def square(self, total: jax.Array) -> jax.Array:
        return self.updates.square(total)

    def replica_and_update(self, state, frozen, window, data, place) -> tuple[TrainState, jax.Array]:
        """A whole step: `state` without its frozen part, which is given apart since it is not overwritten."""
        params, _, task_state, step, scale = read(state)
        total = self._vector((params, frozen, task_state, step, scale), window["rows"], data, place)
        squares = self.updates.square(total) if self.updates.squares is not None else None
        return self.updates(state, total, window["hyper"], squares)

    def specs(self) -> dict[str, Any]:
        """Shapes of what the programs take on one device: `state`, `window`, `data`, `place`, `vector` and
        `squares`, as `ShapeDtypeStruct`s. Reads no data and touches no device."""
        recipe, n = self.recipe, self.layout.group_batch
        data = stored(self.spec, len(recipe.task.train) if self.resident else n, self.resident)
        return {
            "state": self.carried,
            "window": feed.window_spec(recipe, n),
            "data": data,
            "place": jax.ShapeDtypeStruct((2,), jnp.int32),
            "vector": jax.ShapeDtypeStruct((1, self.updates.size), jnp.float32),
            "squares": self.updates.squares,
        }

    @property
    def carried(self) -> TrainState:
        """The shapes of the state as a device holds it: its parameters as a vector."""
        whole = dataclasses.replace(self.state, params=self.updates.flat.shape)
        if not self.sharded:
            return whole
        optimizer, ema = jax.tree.map(self._part, (whole.optimizer, whole.ema))
        return dataclasses.replace(whole, optimizer=optimizer, ema=ema)

    def is_flat(self, leaf: Any) -> bool:
        """Whether a leaf of the optimizer's state has a value for each of the vector of parameters."""
        return leaf.shape == (self.updates.flat.size,)

    def _part(self, leaf: Any) -> jax.ShapeDtypeStruct:
        """What a device has of it."""
        shape = (leaf.shape[0] // self.layout.devices,) if self.is_flat(leaf) else leaf.shape
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    def update_specs(self, hyper: dict) -> tuple[Any, ...]:
        """The shapes of what `update`, or `update_chunk` where that takes its place, takes on a device.

        *Arguments:* `hyper` of the window, arrays or shapes.
        """
        updates, state = self.updates, self.carried.without("donated")
        if not self.sharded:
            return state, jax.ShapeDtypeStruct((updates.size,), jnp.float32), hyper, updates.squares
        params = self._part(updates.flat.shape)
        beside = jax.ShapeDtypeStruct((updates.size - updates.flat.size,), jnp.float32)
        masks = {
            name: jax.ShapeDtypeStruct(params.shape, dtype) for name, (dtype, _) in updates.masks().items()
        }
        summed = jax.ShapeDtypeStruct(params.shape, jnp.float32)
        state = dataclasses.replace(state, params=params)
        return state, summed, beside, hyper, updates.squares, masks

    def _vector(self, inputs, at, data, place) -> jax.Array:
        inputs = (self.updates.flat.unpack(inputs[0]), *inputs[1:])
        take = functools.partial(rows, self.layout, self.resident, self.spec, inputs[3], at, data)
        if self.together > 1:
            place = place[None] + jnp.arange(self.together, dtype=jnp.int32)[:, None]
            take = jax.vmap(take)
        batch, indices, epochs, number = take(place)
        with traced_for(self.device):
            contributed = contribution(self.recipe, inputs, batch, indices, epochs, number, at["seed"])
        return self.updates.vector(contributed)


def stored(spec: Spec, count: int, resident: bool) -> Spec:
    """The shapes of `count` examples as a device holds them: as rows (`feed.flat`), or as a batch."""

    def shape(one: Any) -> tuple[int, ...]:
        return (math.prod(one.shape),) if resident and one.shape else one.shape

    return {name: jax.ShapeDtypeStruct((count, *shape(s)), s.dtype) for name, s in spec.items()}


def rows(layout: Layout, resident: bool, spec: Spec, step, at: dict, data: dict, place):
    """The batch of one replica: columns `(replica_batch, ...)`, indices, epochs, and its number.

    *Arguments:* `spec` of one example; `at`: `start`, `indices` (of this device), `epoch` and `cut` of the
    window; `place` `(2,)` int32, the replica's number globally and on this device.
    """
    row, n, (number, local) = step - at["start"], layout.replica_batch, place
    indices = lax.dynamic_slice(at["indices"], (row, local * n), (1, n))[0]
    if resident:
        batch = feed.pick(data, indices, spec)
    elif layout.shards > 1:  # the rows of each replica apart, since each are cut over the devices
        batch = {k: lax.dynamic_index_in_dim(v, local, keepdims=False) for k, v in data.items()}
    else:
        batch = {k: lax.dynamic_slice_in_dim(v, local * n, n) for k, v in data.items()}
    # A batch may begin in one epoch and end in the next, from position `cut` on.
    position = number * n + jnp.arange(n, dtype=jnp.int32)
    epochs = at["epoch"][row] + (position >= at["cut"][row]).astype(jnp.int32)
    return batch, indices, epochs, number
