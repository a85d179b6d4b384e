"""Runs the step of a recipe: compiles its programs for the devices at hand and drives them.

Nothing here waits for a device.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..errors import RecipeError
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from . import dispatch
from .layout import Layout, merges
from .reduce import AXIS, reducer
from .state import TrainState
from .step import Step, compiler_options, read

QUEUED_STEPS = 32  # how far the host may run ahead of the device: a stop is answered within these
MEET_AT_ONCE = 8  # local replicas' vectors handed to `reduce` together; more are added as they come
MEET_BYTES = 1 << 30


def meet_at_once(calls: int, size: int) -> bool:
    """Whether a device keeps its `calls` vectors of `size` float32 until `reduce`, or adds as they come."""
    return calls <= MEET_AT_ONCE and 4 * size * calls <= MEET_BYTES


class Program:
    """The step of `recipe` on `devices`.

    `carry` is the training state as the devices hold it: a list with one `TrainState` a device, all equal.
    Windows and data are lists with one entry a device too.

    *Arguments:* `resident`: whether `data` holds every example on each device, to be indexed there;
    otherwise it is the step's own batch, each device its rows.
    """

    def __init__(self, recipe: Recipe, layout: Layout, devices: Sequence[jax.Device], *, resident: bool):
        self.recipe, self.layout = recipe, layout
        self.of = Step(recipe, layout, resident=resident)
        self.devices = list(devices)
        self.mesh = Mesh(np.asarray(self.devices), (AXIS,))
        self.flops_per_step_per_device: float | None = None
        self.steps_at_once = 1  # that one call of `step` may make

    def put_all(self, tree: Tree) -> list:
        """`tree` on every device."""
        return [jax.device_put(tree, device) for device in self.devices]

    def put_cut(self, columns: dict[str, np.ndarray]) -> list:
        """Columns `(batch, ...)`, on each device its own rows."""
        n = self.layout.device_batch
        return [
            jax.device_put({k: v[d * n : (d + 1) * n] for k, v in columns.items()}, device)
            for d, device in enumerate(self.devices)
        ]

    def put_window(self, window: dict[str, Any]) -> list:
        """A window of `feed.loader.host_window`, on each device the indices of its own rows."""
        n = self.layout.device_batch
        return [
            jax.device_put(
                {
                    **window,
                    "rows": {**window["rows"], "indices": window["rows"]["indices"][:, d * n : (d + 1) * n]},
                },
                device,
            )
            for d, device in enumerate(self.devices)
        ]

    def data_shapes(self) -> list:
        """What `step` takes as data, as shapes, when it is streamed: to compile before the first batch."""
        n = self.layout.device_batch
        return [
            {
                name: jax.ShapeDtypeStruct(
                    (n, *s.shape), s.dtype, sharding=jax.sharding.SingleDeviceSharding(device)
                )
                for name, s in self.of.spec.items()
            }
            for device in self.devices
        ]

    def compile(self, carry: list, window: list, data: list, steps_at_once: int | None = 1) -> str:
        """Compiles every program of the step; must be called before `step`.

        *Arguments:* `steps_at_once`: see `fit`. *Returns* what was decided about it, or "".
        """
        layout, each = self.layout, self.layout.replicas_per_device
        options = compiler_options(self.devices[0].platform, layout.exact)
        starts = range(0, each, self.of.group)
        self._places = [  # of each call: the number of its first replica, globally and on the device
            [jax.device_put(np.asarray([d * each + i, i], np.int32), at) for i in starts]
            for d, at in enumerate(self.devices)
        ]

        if self.of.fused:
            fused = jax.jit(self.of.replica_and_update, donate_argnums=0, compiler_options=options)
            arguments = (carry[0], window[0], data[0], self._places[0][0])
            self._step = fused.lower(*arguments).compile()
            self.flops_per_step_per_device = _flops(self._step)
            return self._compile_loop(arguments, options, steps_at_once) if self.of.resident else ""

        replica = jax.jit(self.of.replica, compiler_options=options)
        update = jax.jit(self.of.update, donate_argnums=0, compiler_options=options)

        def compile_for(d):
            arguments = (*read(carry[d]), window[d]["rows"], data[d], self._places[d][0])
            size = replica.eval_shape(*arguments).shape[1]
            here = jax.sharding.SingleDeviceSharding(self.devices[d])
            total = jax.ShapeDtypeStruct((size,), jnp.float32, sharding=here)
            updated = update.lower(carry[d], total, window[d]["hyper"]).compile()
            return replica.lower(*arguments).compile(), updated, size

        # One compilation a device, of the same program: side by side, since XLA lets go of the GIL.
        with ThreadPoolExecutor(max(1, min(len(self.devices), os.cpu_count() or 1))) as pool:
            made = list(pool.map(compile_for, range(len(self.devices))))
        self._replicas, self._updates = [m[0] for m in made], [m[1] for m in made]
        size, calls = made[0][2], len(starts)
        self._shape, self._sharding = (layout.devices, size), NamedSharding(self.mesh, P(AXIS))
        self._at_once = meet_at_once(calls, size)
        self._pops = merges(calls)
        self._add = jax.jit(jnp.add, donate_argnums=0)
        self._reduce = reducer(self.mesh, layout.exact)
        self.flops_per_step_per_device = _flops(self._replicas[0]) * calls + _flops(self._updates[0])
        return ""

    @property
    def executables(self) -> list[Any]:
        """What `compile` made for the first device, as JAX's compiled objects: the replica's program and the
        update's, or the one that is both."""
        if not self.of.fused:
            return [self._replicas[0], self._updates[0]]
        return [self._step if self.steps_at_once == 1 else self._several]

    def step(self, carry: list, window: list, data: list, steps: int = 1) -> tuple[list, jax.Array]:
        """`steps` steps, at most `steps_at_once`, of one window. Uses up `carry`.

        *Returns* the new carry and a token, `()` int32, to wait for.
        """
        if steps > 1:
            if steps not in self._counts:
                self._counts[steps] = jax.device_put(np.int32(steps), self.devices[0])
            count = self._counts[steps]
            state, token = self._several(carry[0], window[0], data[0], self._places[0][0], count)
            return [state], token
        if self.of.fused:
            state, token = self._step(carry[0], window[0], data[0], self._places[0][0])
            return [state], token
        local = [self._local(d, carry[d], window[d], data[d]) for d in range(len(self.devices))]
        if len(self.devices) == 1:
            totals = [self._reduce(local[0])]
        else:
            vectors = [
                jax.make_array_from_single_device_arrays(self._shape, self._sharding, list(parts))
                for parts in zip(*local, strict=True)
            ]
            totals = [shard.data for shard in self._reduce(vectors).addressable_shards]
        pairs = [
            update(state, total, at["hyper"])
            for update, state, total, at in zip(self._updates, carry, totals, window, strict=True)
        ]
        return [pair[0] for pair in pairs], pairs[0][1]

    def drain(self, carry: list) -> tuple[dict, list]:
        """The metric sums since the last call, and the carry with them at zero. Uses up `carry`."""
        fresh = [dataclasses.replace(state, sums=_zeros(state.sums)) for state in carry]
        return carry[0].sums, fresh

    def without_optimizer(self, carry: list) -> list:
        """The carry with the optimizer's state given up, when no step follows."""
        return [dataclasses.replace(state, optimizer=None) for state in carry]

    def whole(self, carry: list) -> TrainState:
        """The state as arrays over the mesh, whole on every device, without copying."""
        everywhere = NamedSharding(self.mesh, P())

        def join(*parts):
            return jax.make_array_from_single_device_arrays(parts[0].shape, everywhere, list(parts))

        return jax.tree.map(join, *carry)

    def _compile_loop(self, arguments: tuple, options: dict | None, wanted: int | None) -> str:
        """Decides how many steps a call makes, by trial unless `wanted`."""
        self._counts: dict[int, jax.Array] = {}
        if wanted == 1 or (wanted is None and not dispatch.worth_a_trial(self._step, arguments)):
            return ""
        self._several = dispatch.compile_loop(self.of.replica_and_update, arguments, options)
        if wanted is not None:
            self.steps_at_once = wanted
            return f"{wanted} steps a call"
        ratio = dispatch.gain(self._step, self._several, arguments)
        self.steps_at_once = dispatch.STEPS if dispatch.is_worth_it(ratio) else 1
        plural = "s" * (self.steps_at_once > 1)
        return f"{self.steps_at_once} step{plural} a call: {dispatch.STEPS} are {ratio:.1f} × as fast"

    def _local(self, d: int, state: TrainState, window: dict, data: dict) -> list[jax.Array]:
        """The vectors of one device's replicas, `(1, n)` each, or their sum in tree order."""
        run, of, at = self._replicas[d], read(state), window["rows"]
        if self._at_once:
            return [run(*of, at, data, place) for place in self._places[d]]
        stack: list[jax.Array] = []
        for place, pops in zip(self._places[d], self._pops, strict=True):
            stack.append(run(*of, at, data, place))
            for _ in range(pops):
                right = stack.pop()
                stack[-1] = self._add(stack[-1], right)
        return stack


def check_steps_per_call(steps: int, layout: Layout, resident: bool) -> None:
    """Raises `RecipeError` unless `steps` steps can be made in one call."""
    if steps < 1:
        raise RecipeError(f"steps_per_call={steps}: expected at least 1, or nothing to let a trial decide.")
    if layout.exact or layout.devices > 1 or not resident:
        data = "in the device's memory" if resident else "streamed"
        raise RecipeError(
            f"steps_per_call={steps} with exact={layout.exact}, {layout.devices} devices and data {data}: "
            f"needs exact=False (--no-exact), one device (--devices 1) and --feed device."
        )


@functools.partial(jax.jit, keep_unused=True)  # the unread sums say on which device the zeros belong
def _zeros(sums):
    return jax.tree.map(jnp.zeros_like, sums)


def _flops(compiled) -> float:
    return (compiled.cost_analysis() or {}).get("flops", 0.0)
