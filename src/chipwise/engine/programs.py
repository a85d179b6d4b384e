"""The compiled step: its programs for every local device, and a step's calls of them.

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
from .blueprint import blueprint, meet_at_once
from .layout import Layout, merges
from .placement import Group, Placement
from .reduce import reducer
from .sharding import Sharding
from .sharing import on_device
from .state import TrainState, read
from .step import Step, compiler_options


class Programs:
    """The step of `recipe` in `layout`, on the devices of `placement`.

    A `carry` is the training state on the devices: a list with one `TrainState` per local group, all equal.
    Windows and data are also lists with one entry per local group.

    *Arguments:* `resident`: whether data holds every example on each device, and is indexed there; otherwise
    it is each device's rows of the step's batch; `shard_optimizer`: see `update.shares_out`.

    *Fields:* `functions`, the step that is compiled; `steps_at_once`, the most steps in one call of `step`;
    `flops_per_step_per_device`; `sharding`, if the optimizer's state is sharded; `looped`, whether a device
    makes a single call for all its replicas.
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
        self.functions = self._step(recipe, resident=resident, state=state, shard_optimizer=shard_optimizer)
        self.blueprint = blueprint(self.functions, platform=placement.lead.platform)
        self.sharding = Sharding(self.functions, placement, layout.exact) if self.functions.sharded else None
        self.steps_at_once = 1
        self.flops_per_step_per_device: float | None = None
        self.compiled, self.looped = False, self.blueprint.looped
        self._places: list[list[jax.Array]]
        self._turns: list[Any]
        self._counts: dict[int, jax.Array] = {}

    def _step(self, recipe: Recipe, **more: Any) -> Any:
        return Step(recipe, self.layout, device=self.placement.lead, **more)

    def data_shapes(self) -> list:
        """The shapes of streamed data for `step`, so that it can be compiled before the first batch."""
        n = self.layout.group_batch
        batch = {
            name: jax.ShapeDtypeStruct((n, *s.shape), s.dtype) for name, s in self.functions.spec.items()
        }
        return [_on(batch, device) for device in self.placement.devices]

    def compile(self, carry: list, window: list, data: list, steps_at_once: int | None = 1) -> Fact | None:
        """Compiles every program of the step; must be called before `step`.

        *Arguments:* `steps_at_once`: `steps_per_call` of `fit`. *Returns* what was decided about it, if
        anything was.
        """
        layout, options = self.layout, self._options
        self._places = self._placed()
        self._turns = []
        for group in self.placement.local:
            places = self._first_replicas(group)
            rows = places[np.arange(max(2, len(places))) % len(places)]
            self._turns.append(group.put((rows, np.int32(len(places)))))
        if self.functions.fused:
            fused = jax.jit(self.functions.replica_and_update, donate_argnums=0, compiler_options=options)
            arguments = (*_apart(carry[0]), window[0], data[0], self._places[0][0])
            self._fused = fused.lower(*arguments).compile()
            self.flops_per_step_per_device = _flops(self._fused)
            self.compiled = True
            if layout.exact or not self.functions.resident:  # a measured time may not choose between programs
                return None
            return self._choose_loop(arguments, options, steps_at_once)

        # Compiled for the first device and loaded on the others; in parallel, since XLA releases the GIL.
        devices = self.placement.devices
        with ThreadPoolExecutor(max(1, min(len(devices), os.cpu_count() or 1))) as pool:
            replica = self.functions.in_turn if self.looped else self.functions.replica
            lowered = functools.partial(self._lowered, carry, window, data, self._jitted(replica))
            compiled = list(pool.map(lambda program: program and program.compile(), lowered(0)))

            def loaded(d: int) -> list[Any]:
                lowered_here = functools.cache(lambda: lowered(d))

                def compile_again(i: int) -> Any:
                    return lowered_here()[i].compile()

                return [
                    program and on_device(program, devices[d], functools.partial(compile_again, i))
                    for i, program in enumerate(compiled)
                ]

            others = pool.map(loaded, range(1, len(devices)))
            columns = zip(compiled, *others, strict=True)
            self._replicas, self._updates, self._squares, self._measures, self._ratios = columns
        if self.sharding is not None:
            self.sharding.compile(window, options)
        self._prepare_sums()
        return None

    def _first_replicas(self, group: Group) -> np.ndarray:
        """The first replica of each call of a group, `(calls, 2)` int32: its number among all, and in the
        group."""
        replicas = self.layout.replicas_per_device
        starts = range(0, replicas, self.functions.together)
        return np.asarray([[group.index * replicas + i, i] for i in starts], np.int32)

    def _placed(self) -> list[list[jax.Array]]:
        """`_first_replicas` of each local group, one by one, on that group."""
        return [[group.put(place) for place in self._first_replicas(group)] for group in self.placement.local]

    def _jitted(self, replica: Any) -> tuple[Any, ...]:
        """`replica`, `update`, `square`, `measure` and `ratios`, jitted: made once, so that each is traced
        once for all devices."""
        return (
            jax.jit(replica, compiler_options=self._options),
            jax.jit(self.functions.update, donate_argnums=0, compiler_options=self._options),
            jax.jit(self.functions.square, compiler_options=self._options),
            jax.jit(self.functions.measure, compiler_options=self._options),
            jax.jit(self.functions.ratios, compiler_options=self._options),
        )

    @property
    def _options(self) -> dict[str, Any] | None:
        lead = self.placement.lead
        return compiler_options(lead.platform, self.layout.exact, lead.device_kind, self.layout.shards)

    def _prepare_sums(self) -> None:
        """What follows the compilation: how the vectors of a device's calls are added, and FLOPs."""
        calls = self.functions.calls
        self._at_once = meet_at_once(calls, self.functions.updates.size)
        self._pops = merges(calls)
        self._add = jax.jit(jnp.add, donate_argnums=0)
        self._reduce = reducer(self.placement.mesh, self.layout.exact)
        replica, update = map(_flops, self.executables.values())  # XLA counts a loop's body once
        self.flops_per_step_per_device = replica * calls + update
        self.compiled = True

    @property
    def executables(self) -> dict[str, Any]:
        """JAX's compiled programs of the first device, or group: the replica's and the update's, or the one
        that is both."""
        if not self.functions.fused:
            update = self._updates[0] if self.sharding is None else self.sharding.executable
            return {"replica": self._replicas[0], "update": update}
        return {"step": self._fused if self.steps_at_once == 1 else self._several}

    def step(self, carry: list, window: list, data: list, steps: int = 1) -> tuple[list, jax.Array]:
        """Starts `steps` steps, at most `steps_at_once`, of one window. `carry` must not be used again.

        *Returns* the new carry and a token, `()` int32, to wait for.
        """
        if self.functions.fused:
            state, frozen = _apart(carry[0])
            arguments = (state, frozen, window[0], data[0], self._places[0][0])
            if steps == 1:
                after, token = self._fused(*arguments)
            else:
                after, token = self._several(*arguments, self._count(steps))
            return [dataclasses.replace(after, frozen=frozen)], token
        vectors = [self._vectors(d, carry[d], window[d], data[d]) for d in range(len(carry))]
        if self.sharding is not None:
            joined = [self.placement.join(parts) for parts in zip(*vectors, strict=True)]
            del vectors
            return self.sharding(joined, carry, window)
        if self.placement.count == 1:
            totals = [self._reduce(vectors[0])]
        else:
            joined = [self.placement.join(parts) for parts in zip(*vectors, strict=True)]
            totals = self.placement.split(self._reduce(joined))
            del joined
        del vectors  # their memory is free during the update
        after, tokens = [], []
        for d, (before, total) in enumerate(zip(carry, totals, strict=True)):
            squares = self._squares[d](total) if self._squares[d] is not None else None
            state, frozen = _apart(before)
            given = (state, total, window[d]["hyper"], squares)
            ratios = None
            if self._measures[d] is not None:
                ratios = self._ratios[d](self._measures[d](*given), state.step, window[d]["hyper"])
            state, token = self._updates[d](*given, ratios)
            after.append(dataclasses.replace(state, frozen=frozen))
            tokens.append(token)
        return after, tokens[0]

    def drain(self, carry: list) -> tuple[dict, list]:
        """The metric sums since the last call, and the carry with sums of zero."""
        fresh = [dataclasses.replace(state, sums=_zeros(state.sums)) for state in carry]
        return carry[0].sums, fresh

    def _lowered(self, carry, window, data, jitted, d: int) -> tuple[Any, ...]:
        """The lowered programs of device `d`: replica, update, and those of `_jitted` that follow, or `None`.
        If the optimizer's state is sharded, `sharding` has all but the first."""
        functions, device = self.functions, self.placement.devices[d]
        total = _on(jax.ShapeDtypeStruct((functions.updates.size,), jnp.float32), device)
        updates, hyper = functions.updates, window[d]["hyper"]
        squares, lengths, by_row = _on((updates.squares, updates.lengths, updates.by_row), device)
        (replica, update, square, measure, ratios), (state, _) = jitted, _apart(carry[d])
        given = (state, total, hyper, squares)
        places = self._turns[d] if self.looped else self._places[d][:1]
        arguments = (*read(carry[d]), window[d]["rows"], data[d], *places)
        if self.sharding is not None:
            return replica.lower(*arguments), None, None, None, None
        return (
            replica.lower(*arguments),
            update.lower(*given, by_row),
            square.lower(total) if squares is not None else None,
            measure.lower(*given) if lengths is not None else None,
            ratios.lower(lengths, state.step, hyper) if lengths is not None else None,
        )

    def _choose_loop(self, arguments: tuple, options: dict | None, wanted: int | None) -> Fact | None:
        """Decides how many steps a call makes: `wanted`, or if `None`, the faster number in a trial."""
        if wanted == 1 or (wanted is None and not dispatch.worth_a_trial(self._fused, arguments)):
            return None
        self._several = dispatch.compile_loop(self.functions.replica_and_update, arguments, options)
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
        """The vectors of one device's replicas, `(n,)` each, or their sum in tree order."""
        run = functools.partial(self._replicas[d], *read(state), window["rows"], data)
        if self.looped:
            return [run(*self._turns[d])]
        if self._at_once:
            return [run(place) for place in self._places[d]]
        stack: list[jax.Array] = []
        for place, pops in zip(self._places[d], self._pops, strict=True):
            stack.append(run(place))
            for _ in range(pops):
                right = stack.pop()
                stack[-1] = self._add(stack[-1], right)
                del right  # its memory is free while the next replica runs
        return stack


def check_steps_per_call(steps: int, layout: Layout, resident: bool) -> None:
    """Raises `RecipeError` unless one call can make `steps` steps."""
    if steps < 1:
        raise RecipeError("steps-per-call-below-one", steps=steps)
    if layout.exact or layout.devices > 1 or not resident:
        feed = "device" if resident else "host"
        raise RecipeError(
            "steps-per-call-impossible", steps=steps, exact=layout.exact, devices=layout.devices, feed=feed
        )


def _apart(state: TrainState) -> tuple[TrainState, Any]:
    """The part of `state` that the update overwrites, and the frozen part, which it does not."""
    return state.without("donated"), state.frozen


def _on(shapes: Any, device: jax.Device) -> Any:
    here = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes)


@functools.partial(jax.jit, keep_unused=True)  # the unused sums determine the zeros' device
def _zeros(sums):
    return jax.tree.map(jnp.zeros_like, sums)


def _flops(compiled) -> float:
    return (compiled.cost_analysis() or {}).get("flops", 0.0)
