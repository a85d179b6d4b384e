"""The one step: what `fit` runs, what a benchmark times, what a plan compiles.

A step is three programs, none of which touches the host:

    replica   one replica's gradient, sums and state, as one flat vector      on each device
    reduce    the sum of all replicas' vectors in the order of a fixed tree   across devices
    update    optimizer, averages, state                                      on each device

The first and the last are compiled for a single device, whatever their number: a device with
several replicas runs the same program several times. That is what makes the bits equal. In one
program for all, the compiler fuses each replica's work differently depending on what stands around
it, contracts products and sums into fused multiply-adds or not, and orders the terms of a reduction
accordingly; measured on the CPU back end, the gradients on 1 and on 2 devices then differ in the
last place after a single step. Compiled apart, only additions ever meet another device.

With `exact=False` all replicas of a device are mapped over in one call, the compiler may batch them and
add as it likes, and on a single device everything is one program.

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
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from ..data.sources import Spec, spec_of
from ..errors import RecipeError
from ..recipe.optimizers import ema_init, ema_update
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from . import keys, loader
from .layout import Layout
from .replica import contribution, from_sums, summable_shapes
from .state import TrainState


def first_state(recipe: Recipe) -> TrainState:
    """`init_state` on the default device. Recipes that differ in the seed alone share its program."""
    make = jax.jit(lambda seed: init_state(recipe, spec_of(recipe.task.train), seed))
    return make(np.uint32(recipe.seed))


def init_state(recipe: Recipe, example: dict, seed: jax.Array | None = None) -> TrainState:
    """The state before the first step. Traced or not.

    *Arguments:* `example`, column to `ShapeDtypeStruct`, one unbatched example; `seed` `()` uint32, an
    input instead of the recipe's own.
    Raises `RecipeError` if `init` or `loss` does not keep the contract of `Task`.
    """
    made = recipe.task.init(keys.init_key(recipe.seed if seed is None else seed))
    if not (isinstance(made, tuple) and len(made) == 2):
        raise RecipeError(f"Task.init must return (params, state), got {type(made).__name__}.")
    params, state = jax.tree.map(jnp.asarray, made)
    first = TrainState(
        step=jnp.int32(0),
        params=params,
        state=state,
        optimizer=recipe.optimizer.init(params),
        ema=ema_init(params) if recipe.ema is not None else None,
        sums={},
    )
    shapes = jax.eval_shape(lambda s: _shape_of_contribution(recipe, s, example), first)["sums"]
    return dataclasses.replace(first, sums=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))


def _shape_of_contribution(recipe: Recipe, state: TrainState, example: dict) -> dict:
    n = recipe.batch // recipe.replicas
    batch = {name: jnp.zeros((n, *spec.shape), spec.dtype) for name, spec in example.items()}
    zeros = jnp.zeros(n, jnp.int32)
    params, task_state, step = read(state)
    return contribution(recipe, params, task_state, step, batch, zeros, zeros, jnp.int32(0), jnp.uint32(0))


def compiler_options(platform: str, exact: bool) -> dict[str, Any] | None:
    """What XLA offers towards the same bits in every program: on GPUs kernels without atomics, and
    no autotuning, which picks kernels by the clock."""
    if exact and platform in ("gpu", "cuda", "rocm"):
        return {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}
    return None


class Step:
    """The programs of a recipe's step as pure functions of arrays, for one device of a layout.

    *Arguments:* `resident`: whether `data` holds every example, to be indexed on the device; otherwise it
    is the step's own batch, the device's rows of it.

    `calls` is how often a device runs `replica` in a step; `fused` says that `replica_and_update` takes the
    place of all three.
    """

    def __init__(self, recipe: Recipe, layout: Layout, *, resident: bool):
        self.recipe, self.layout, self.resident = recipe, layout, resident
        self.spec = spec_of(recipe.task.train)
        # How many of a device's replicas one call of the replica program computes.
        self.group = 1 if layout.exact else layout.replicas_per_device
        self.calls = layout.replicas_per_device // self.group
        self.fused = not layout.exact and layout.devices == 1

    @functools.cached_property
    def traced(self):
        """`replica`, jitted: whoever asks for its shapes or operations traces it once."""
        return jax.jit(self.replica)

    def replica(self, params, state, step, at, data, place) -> jax.Array:
        """Gradient, sums and state of the group of replicas that begins at `place`, `(1, n)` float32."""
        return ravel_pytree(self._summed(params, state, step, at, data, place))[0].reshape(1, -1)

    def update(self, state: TrainState, total: jax.Array, hyper: dict) -> tuple[TrainState, jax.Array]:
        """The state after a step, from the sum `(n,)` over all replicas; and a token `()` to wait for."""
        shape = {"grads": state.params, "sums": state.sums, "state": summable_shapes(state.state)}
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shape)
        return updated(self.recipe, self.layout, state, ravel_pytree(zeros)[1](total), hyper)

    def replica_and_update(self, state, window, data, place) -> tuple[TrainState, jax.Array]:
        params, task_state, step = read(state)
        summed = self._summed(params, task_state, step, window["rows"], data, place)
        return updated(self.recipe, self.layout, state, summed, window["hyper"])

    def specs(self) -> dict[str, Any]:
        """Shapes of what the programs take on one device: `state`, `window`, `data`, `place` and `vector`,
        as `ShapeDtypeStruct`s. Reads no data and touches no device."""
        recipe, n = self.recipe, self.layout.device_batch
        rows, data = len(recipe.task.train) if self.resident else n, {}
        for name, s in self.spec.items():
            shape = (math.prod(s.shape),) if self.resident and s.shape else s.shape
            data[name] = jax.ShapeDtypeStruct((rows, *shape), s.dtype)
        state = jax.eval_shape(lambda: init_state(recipe, self.spec))
        window = loader.window_spec(recipe, n)
        place = jax.ShapeDtypeStruct((2,), jnp.int32)
        vector = jax.eval_shape(self.traced, *read(state), window["rows"], data, place)
        return {"state": state, "window": window, "data": data, "place": place, "vector": vector}

    def _summed(self, params, state, step, at, data, place) -> dict[str, Any]:
        take = functools.partial(rows, self.layout, self.resident, self.spec, step, at, data)
        if self.group > 1:
            place = place[None] + jnp.arange(self.group, dtype=jnp.int32)[:, None]
            take = jax.vmap(take)
        batch, indices, epochs, number = take(place)
        return contribution(self.recipe, params, state, step, batch, indices, epochs, number, at["seed"])


def read(state: TrainState) -> tuple[Tree, Tree, jax.Array]:
    """What a replica reads of the training state. Each argument of a call costs the host time."""
    return state.params, state.state, state.step


def rows(layout: Layout, resident: bool, spec: Spec, step, at: dict, data: dict, place):
    """The batch of one replica: columns `(replica_batch, ...)`, indices, epochs, and its number.

    *Arguments:* `spec` of one example; `at`: `start`, `indices` (of this device), `epoch` and `cut` of the
    window; `place` `(2,)` int32, the replica's number globally and on this device.
    """
    row, n, (number, local) = step - at["start"], layout.replica_batch, place
    indices = lax.dynamic_slice(at["indices"], (row, local * n), (1, n))[0]
    if resident:
        batch = loader.pick(data, indices, spec)
    else:
        batch = {k: lax.dynamic_slice_in_dim(v, local * n, n) for k, v in data.items()}
    # A batch may begin in one epoch and end in the next, from position `cut` on.
    position = number * n + jnp.arange(n, dtype=jnp.int32)
    epochs = at["epoch"][row] + (position >= at["cut"][row]).astype(jnp.int32)
    return batch, indices, epochs, number


def updated(recipe: Recipe, layout: Layout, state: TrainState, summed: dict, hyper: dict):
    """The state after a step, from the sums over all replicas. Decay and clipping act here, once."""
    examples = summed["sums"]["loss"].count
    grads = jax.tree.map(lambda g: g / examples.astype(g.dtype), summed["grads"])
    now = {name: table[state.step - hyper["start"]] for name, table in hyper["tables"].items()}
    params, optimizer = recipe.optimizer.update(grads, state.optimizer, state.params, now)
    done = state.step + jnp.int32(1)
    after = TrainState(
        step=done,
        params=params,
        state=from_sums(state.state, summed["state"], layout.replicas),
        optimizer=optimizer,
        ema=ema_update(state.ema, params, recipe.ema) if recipe.ema is not None else None,
        sums=_added(state.sums, summed["sums"]),
    )
    return after, done


def _added(old: Tree, new: Tree) -> Tree:
    """Leaf by leaf, as `old` is built: a `finish` made inside the loss is a new function in every trace,
    which `jax.tree.map` takes for another structure."""
    leaves, shape = jax.tree.flatten(old)
    return jax.tree.unflatten(shape, [a + b for a, b in zip(leaves, jax.tree.leaves(new), strict=True)])
