"""The compiled step: its programs for every local device, and how one step runs through them.

Nothing here waits for a device.
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

from ..errors import RecipeError
from ..recipe.recipe import Recipe
from ..words.facts import Fact, fact
from . import dispatch
from .layout import Layout, merges
from .placement import Placement
from .reduce import reducer
from .sharding import Sharding
from .sharing import on_device
from .state import TrainState, read
from .step import Step, compiler_options

MEET_AT_ONCE = 8  # local replicas' vectors handed to `reduce` together; more are added as they come
MEET_BYTES = 1 << 30
TURNS_BYTES = 32 << 20  # all replicas' vectors up to which a device makes one call for its own
_FAST = "dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"


def meet_at_once(calls: int, size: int) -> bool:
    """Whether a device keeps its `calls` vectors of `size` float32 until `reduce`, or adds as they come."""
    return calls <= MEET_AT_ONCE and 4 * size * calls <= MEET_BYTES


class Programs:
    """The step of `recipe` in `layout`, on the devices of `placement`.

    A `carry` is the training state as the devices hold it: a list with one `TrainState` a local group, all
    equal. Windows and data are lists with one entry a group too.

    *Arguments:* `resident`: whether data holds every example on each device, to be indexed there; otherwise
    it is the step's own batch, each device its rows; `shard_optimizer`: see `update.shares_out`.

    *Fields:* `steps_at_once`, that one call of `step` may make; `flops_per_step_per_device`; `sharding`,
    where the optimizer's state is shared out; `looped`, that a device makes one call for all its replicas.
    """

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout,
        placement: Placement,
        *,
        resident: bool,
        state: TrainState | None = None,
        shard_optimizer: bool | None = None,
    ):
        self.layout, self.placement = layout, placement
        self.of = self._step(recipe, resident=resident, state=state, shard_optimizer=shard_optimizer)
        self.sharding = Sharding(self.of, placement) if self.of.sharded else None
        self.steps_at_once = 1
        self.flops_per_step_per_device: float | None = None
        self.compiled = self.looped = False
        self._places: list[list[jax.Array]]
        self._turns: list[Any]
        self._counts: dict[int, jax.Array] = {}

    def _step(self, recipe: Recipe, **more: Any) -> Any:
        return Step(recipe, self.layout, device=self.placement.lead, **more)

    def data_shapes(self) -> list:
        """What `step` takes as data, as shapes, when it is streamed: to compile before the first batch."""
        n = self.layout.group_batch
        batch = {name: jax.ShapeDtypeStruct((n, *s.shape), s.dtype) for name, s in self.of.spec.items()}
        return [_on(batch, device) for device in self.placement.devices]

    def compile(self, carry: list, window: list, data: list, steps_at_once: int | None = 1) -> Fact | None:
        """Compiles every program of the step; must be called before `step`.

        *Arguments:* `steps_at_once`: see `fit`. *Returns* what was decided about it, if anything was.
        """
        layout, each = self.layout, self.layout.replicas_per_device
        options = compiler_options(self.placement.lead.platform, layout.exact)
        starts = range(0, each, self.of.together)
        self._places, self._turns = [], []  # of each call: its first replica's number, globally and here
        for group in self.placement.local:
            places = np.asarray([[group.index * each + i, i] for i in starts], np.int32)
            self._places.append([jax.device_put(place, group.device) for place in places])
            rows = places[np.arange(max(2, len(places))) % len(places)]
            self._turns.append(jax.device_put((rows, np.int32(len(places))), group.device))
        if self.of.fused:
            fused = jax.jit(self.of.replica_and_update, donate_argnums=0, compiler_options=options)
            arguments = (*_apart(carry[0]), window[0], data[0], self._places[0][0])
            self._fused = fused.lower(*arguments).compile()
            self.flops_per_step_per_device = _flops(self._fused)
            self.compiled = True
            if layout.exact or not self.of.resident:  # the clock may not choose between programs
                return None
            return self._choose_loop(arguments, options, steps_at_once)

        # Compiled for the first device, and loaded on the others; side by side, since XLA releases the GIL.
        devices = self.placement.devices
        with ThreadPoolExecutor(max(1, min(len(devices), os.cpu_count() or 1))) as pool:
            replica = self.of.in_turn if self._in_turn(carry, window, data) else self.of.replica
            self.looped = replica == self.of.in_turn
            jitted = [  # made once, so that a function is traced once for all devices
                jax.jit(replica, compiler_options=options),
                jax.jit(self.of.update, donate_argnums=0, compiler_options=options),
                jax.jit(self.of.square, compiler_options=options),
            ]
            lowered = functools.partial(self._lowered, carry, window, data, jitted)
            lead = list(pool.map(lambda one: one and one.compile(), lowered(0)))

            def loaded(d: int) -> list[Any]:
                here = functools.cache(lambda: lowered(d))

                def again(i: int) -> Any:
                    return here()[i].compile()

                return [
                    one and on_device(one, devices[d], functools.partial(again, i))
                    for i, one in enumerate(lead)
                ]

            others = pool.map(loaded, range(1, len(devices)))
            self._replicas, self._updates, self._squares = zip(lead, *others, strict=True)
        self._at_once = meet_at_once(len(starts), self.of.updates.size)
        self._pops = merges(len(starts))
        self._add = jax.jit(jnp.add, donate_argnums=0)
        self._reduce = reducer(self.placement.mesh, layout.exact)
        if self.sharding is not None:
            self.sharding.compile(window, options)
        one, update = map(_flops, self.executables)  # of a loop, a turn
        self.flops_per_step_per_device = one * len(starts) + update
        self.compiled = True
        return None

    @property
    def executables(self) -> list[Any]:
        """What `compile` made for the first device, as JAX's compiled objects: the replica's program and the
        update's, or the one that is both."""
        if not self.of.fused:
            update = self._updates[0] if self.sharding is None else self.sharding.executable
            return [self._replicas[0], update]
        return [self._fused if self.steps_at_once == 1 else self._several]

    def step(self, carry: list, window: list, data: list, steps: int = 1) -> tuple[list, jax.Array]:
        """`steps` steps, at most `steps_at_once`, of one window. Uses up `carry`.

        *Returns* the new carry and a token, `()` int32, to wait for.
        """
        if self.of.fused:
            state, frozen = _apart(carry[0])
            arguments = (state, frozen, window[0], data[0], self._places[0][0])
            if steps == 1:
                after, token = self._fused(*arguments)
            else:
                after, token = self._several(*arguments, self._count(steps))
            return [dataclasses.replace(after, frozen=frozen)], token
        vectors = [self._vectors(d, carry[d], window[d], data[d]) for d in range(len(carry))]
        if self.sharding is not None:
            return self.sharding(vectors, carry, window)
        if self.placement.groups == 1:
            totals = [self._reduce(vectors[0])]
        else:
            joined = [self.placement.join(parts) for parts in zip(*vectors, strict=True)]
            totals = self.placement.split(self._reduce(joined))
        after, token = [], None
        for d, (held, total) in enumerate(zip(carry, totals, strict=True)):
            squares = self._squares[d](total) if self._squares[d] is not None else None
            state, frozen = _apart(held)
            state, done = self._updates[d](state, total, window[d]["hyper"], squares)
            after.append(dataclasses.replace(state, frozen=frozen))
            token = done if token is None else token
        assert token is not None
        return after, token

    def drain(self, carry: list) -> tuple[dict, list]:
        """The metric sums since the last call, and the carry with them at zero. Uses up `carry`."""
        fresh = [dataclasses.replace(state, sums=_zeros(state.sums)) for state in carry]
        return carry[0].sums, fresh

    def _lowered(self, carry, window, data, jitted, d: int) -> tuple[Any, Any, Any]:
        """For a device: the replica's program, the update's, and the one for squares or `None`; where the
        optimizer's state is shared out, `sharding` has the other two."""
        of, device = self.of, self.placement.devices[d]
        total = _on(jax.ShapeDtypeStruct((of.updates.size,), jnp.float32), device)
        squares, (replica, update, square) = _on(of.updates.squares, device), jitted
        state, _ = _apart(carry[d])
        places = self._turns[d] if self.looped else self._places[d][:1]
        arguments = (*read(carry[d]), window[d]["rows"], data[d], *places)
        if self.sharding is not None:
            return replica.lower(*arguments), None, None
        return (
            replica.lower(*arguments),
            update.lower(state, total, window[d]["hyper"], squares),
            square.lower(total) if squares is not None else None,
        )

    def _in_turn(self, carry: list, window: list, data: list) -> bool:
        """Whether a device makes one call for all its replicas: on the CPU, for a net so small that it feels
        its calls. Not with convolutions of another layout than XLA's fast code has: outside of loops alone
        it turns them into that one (JAX 0.10.2: 40 times as slow). The recipe decides, so it is so on any
        number of devices."""
        layout, size = self.layout, self.of.updates.size
        small = 4 * size * layout.blocks <= TURNS_BYTES
        if not (layout.exact and small and self.placement.lead.platform == "cpu"):
            return False
        arguments = (*read(carry[0]), window[0]["rows"], data[0], self._places[0][0])
        text = self.of.traced.lower(*arguments).as_text()
        return text.count("stablehlo.convolution(") == text.count(_FAST)

    def _choose_loop(self, arguments: tuple, options: dict | None, wanted: int | None) -> Fact | None:
        """Decides how many steps a call makes, by trial unless `wanted`."""
        if wanted == 1 or (wanted is None and not dispatch.worth_a_trial(self._fused, arguments)):
            return None
        self._several = dispatch.compile_loop(self.of.replica_and_update, arguments, options)
        if wanted is not None:
            self.steps_at_once = wanted
            return fact("steps-per-call", steps=wanted)
        ratio = dispatch.gain(self._fused, self._several, arguments)
        self.steps_at_once = dispatch.STEPS if dispatch.is_worth_it(ratio) else 1
        return fact("steps-per-call-tried", steps=self.steps_at_once, tried=dispatch.STEPS, ratio=ratio)

    def _count(self, steps: int) -> jax.Array:
        if steps not in self._counts:
            self._counts[steps] = jax.device_put(np.int32(steps), self.placement.lead)
        return self._counts[steps]

    def _vectors(self, d: int, state: TrainState, window: dict, data: dict) -> list[jax.Array]:
        """The vectors of one device's replicas, `(1, n)` each, or their sum in tree order."""
        run, of, at = self._replicas[d], read(state), window["rows"]
        if self.looped:
            return [run(*of, at, data, *self._turns[d])]
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
        raise RecipeError("steps-per-call-below-one", steps=steps)
    if layout.exact or layout.devices > 1 or not resident:
        feed = "device" if resident else "host"
        raise RecipeError(
            "steps-per-call-impossible", steps=steps, exact=layout.exact, devices=layout.devices, feed=feed
        )


def _apart(state: TrainState) -> tuple[TrainState, Any]:
    """What the update overwrites, and the frozen part, which it does not."""
    return state.without("donated"), state.frozen


def _on(shapes: Any, device: jax.Device) -> Any:
    here = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes)


@functools.partial(jax.jit, keep_unused=True)  # the unread sums say on which device the zeros belong
def _zeros(sums):
    return jax.tree.map(jnp.zeros_like, sums)


def _flops(compiled) -> float:
    return (compiled.cost_analysis() or {}).get("flops", 0.0)
