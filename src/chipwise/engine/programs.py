"""The compiled step: a blueprint's programs for every local device or group, and a step's calls of them.

Nothing here waits for a device.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import DeviceError
from ..machine.compilation_cache import compile_on
from ..models.attention_fused import in_fixed_order
from ..recipe.recipe import Recipe
from .blueprint import Blueprint, Program, after_replicas, blueprint, meet_at_once
from .group_step import GroupStep
from .holding import Carry, Holding, hold
from .layout import Layout, cover_merges
from .noise import GradientSquares, Squared
from .placement import Group, Placement
from .program_digest import digest
from .program_flops import program_flops
from .state import TrainState, read
from .state_digest import Digests, Pending, Piece, pieces
from .step import Step, compiler_options

_tuned: set[str] = set()  # platforms for which this process has compiled with exact=False


def check_tuned(platform: str, exact: bool) -> None:
    """Raises `DeviceError` for an exact step on a GPU after one that was not. XLA keeps for the whole process
    which kernels were fastest, and takes these whatever a later program's options say (jaxlib 0.11.2)."""
    if not exact:
        _tuned.add(platform)
    elif platform in _tuned and platform != "cpu":
        raise DeviceError("kernels-tuned")


class Again(NamedTuple):
    """A call of "replica" in a step to make once more. *Fields:* its number on local group `group`; the local
    group `by` which it is made."""

    step: int
    call: int
    group: int
    by: int


class Told(NamedTuple):
    """What a step tells besides its result. *Fields:* `digest` of the summed gradient, for `digest_of`;
    `squares` of the gradients, for `squared`."""

    digest: bool = False
    squares: bool = False


NOTHING = Told()


class Programs:
    """The step of `recipe` in `layout`, on the devices of `placement`.

    Windows and data are lists with one entry per local group, as the `carry` of `engine.holding`.

    *Arguments:* `resident`: whether data holds every example on each device, and is indexed there; otherwise
    it is each device's rows of the step's batch; `shard_optimizer`: see `update.shares_out`; `told`: what
    some steps tell.

    *Fields:* `functions`, the step as pure functions; `compiled`, the executables of each program on the
    local groups, none before `compile`; `flops_per_step_per_device`; `digests` of what the devices hold;
    `compared`, calls that were made again, with the sums of their digest and of the first one's, to be taken;
    `squared`, of the last step that told the squares of its gradients.
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
        told: Told = NOTHING,
    ):
        self._may_tell = told
        self.layout, self.placement = layout, placement
        about: dict[str, Any] = {"resident": resident, "state": state, "device": placement.lead}
        self.functions: Any
        if layout.shards > 1:
            mesh = placement.local[0].mesh.abstract_mesh
            self.functions = GroupStep(recipe, layout, mesh=mesh, **about)
        else:
            self.functions = Step(recipe, layout, shard_optimizer=shard_optimizer, **about)
        self.compiled: dict[str, list[Any]] = {}
        self.flops_per_step_per_device: float | None = None
        self._add = jax.jit(jnp.add, donate_argnums=0)
        self.digests, self._summed = Digests(placement), list[Pending]()
        self.squared: Squared | None = None
        self._measuring: Squared | None = None
        self.compared, self._first = deque[list[tuple[Again, Any, Any]]](), dict[tuple[int, int], Any]()

    @functools.cached_property
    def blueprint(self) -> Blueprint[Program]:
        """What the step is. Traces the replica of a small net on the CPU, so the constructor does not."""
        return blueprint(self.functions, platform=self.placement.lead.platform)

    @functools.cached_property
    def holding(self) -> Holding:
        """Where the step's state lives."""
        return hold(self.functions, self.blueprint, self.placement)

    @functools.cached_property
    def _pops(self) -> list[tuple[int, ...]]:
        """For each local group see `cover_merges`; empty if its vectors wait until `reduce`."""
        groups, layout = self.placement.local, self.layout
        if layout.aligned and meet_at_once(self.blueprint.calls, self.blueprint.size):
            return [()] * len(groups)
        return [cover_merges(layout.covers[group.index]) for group in groups]

    @functools.cached_property
    def places(self) -> list[list[tuple[jax.Array, ...]]]:
        """For each local group the last arguments of its calls."""
        return [self._placed_replicas(group) for group in self.placement.local]

    def _placed_replicas(self, group: Group) -> list[tuple[jax.Array, ...]]:
        """The last arguments of each call of "replica" on a group: the number of its first replica among all,
        and in the group, `(2,)` int32; or of all its replicas, and how many these are."""
        layout, together = self.layout, self.functions.together
        first, own = layout.firsts[group.index], layout.shares[group.index]
        places = np.asarray([[(first + i) * together, i * together] for i in range(own)], np.int32)
        if not self.blueprint.looped:
            return [(group.put(place),) for place in places]
        rows = places[np.arange(max(2, layout.blocks_per_device)) % own]
        return [group.put((rows, np.int32(own)))]

    @property
    def _options(self) -> dict[str, Any] | None:
        lead = self.placement.lead
        return compiler_options(lead.platform, self.layout.exact, lead.device_kind, self.layout.shards)

    @functools.cached_property
    def squares(self) -> GradientSquares:
        """Of the gradients of a step that tells them."""
        return GradientSquares(self.functions, self.placement, self._options)

    @functools.cached_property
    def _jitted(self) -> list[list[tuple[Any, Program]]]:
        """The programs of each local group, jitted; once for all groups, if these have the same."""
        check_tuned(self.placement.lead.platform, self.layout.exact)

        def jitted(one: Program) -> tuple[Any, Program]:
            # What no input determines would lie on the first device: the squares of no leaves.
            about: dict[str, Any] = {"donate_argnums": one.donate, "keep_unused": not self.functions.alike}
            return jax.jit(inspect.unwrap(one.function), compiler_options=self._options, **about), one

        first, groups = [jitted(one) for one in self.blueprint.programs], self.placement.local
        if self.functions.alike:
            return [first] * len(groups)
        steps = [self.functions.on(group.index) for group in groups]
        hyper = self.functions.specs()["window"]["hyper"]
        return [[first[0], *map(jitted, after_replicas(step, hyper))] for step in steps]

    @functools.cached_property
    def digest(self) -> str:
        """See `program_digest`. Traces the programs, which `compile` does not do again."""
        first, step = self.placement.local[0], self.functions
        traced = [jitted.trace(*first.shapes(one.specs)).jaxpr for jitted, one in self._jitted[0]]
        if step.sharded:  # the update of a whole vector, whatever the part of a device
            whole = copy.copy(step)
            whole.sharded = False
            after = after_replicas(whole, whole.specs()["window"]["hyper"])
            traced[1:] = [jax.make_jaxpr(one.function)(*one.specs) for one in after]
        return digest(traced)

    def compile(self) -> None:
        """Compiles every program of the step; must be called before `step`."""
        programs = self.blueprint.programs

        on_gpu, flops = self.placement.lead.platform == "gpu", [0.0] * len(programs)

        def lower(i: int, g: int) -> Any:
            jitted, program = self._jitted[g][i]
            traced = jitted.trace(*self.placement.local[g].shapes(program.specs))
            if g == 0:
                flops[i] = program_flops(traced.jaxpr, self.layout.shards)
            lowered = traced.lower()
            return in_fixed_order(lowered) if on_gpu and self.layout.exact else lowered

        made = compile_on(len(self.placement.local), len(programs), lower)
        self.compiled = {program.name: each for program, each in zip(programs, made, strict=True)}
        # Where all calls are turns of one loop, its jaxpr does not say how many.
        times = [self.functions.calls if program.name == "replica" else 1 for program in programs]
        self.flops_per_step_per_device = sum(f * n for f, n in zip(flops, times, strict=True))
        if self._may_tell.squares and self.blueprint.looped:
            each = jax.jit(self.functions.each_in_turn, compiler_options=self._options)
            groups, specs = self.placement.local, self.blueprint.replica.specs
            (self.compiled["each"],) = compile_on(
                len(groups), 1, lambda _, g: each.lower(*groups[g].shapes(specs))
            )

    @property
    def executables(self) -> dict[str, Any]:
        """JAX's compiled programs of the first device, or group, by name."""
        return {name: each[0] for name, each in self.compiled.items()}

    def step(
        self, carry: Carry, window: list, data: list, told: Told = NOTHING, again: Sequence[Again] = ()
    ) -> tuple[Carry, jax.Array]:
        """Starts a step. `carry` must not be used again. *Arguments:* `told`: also this; `again`: calls
        to make once more, for `compared`. A fused step has neither.

        *Returns* the new carry and a token, `()` int32, to wait for.
        """
        if self.blueprint.fused:
            (step,), frozen = self.compiled["step"], carry[0].frozen
            after, token = step(carry[0].without("donated"), frozen, window[0], data[0], *self.places[0][0])
            return [dataclasses.replace(after, frozen=frozen)], token
        self._first = dict.fromkeys((one.group, one.call) for one in again)
        self._measuring = Squared({}, []) if told.squares else None
        vectors = [self.vectors(g, carry[g], window[g], data[g]) for g in range(len(carry))]
        if made := [(one, self._made_again(one, carry, window, data)) for one in again]:
            self.compared.append([(one, self._first[one.group, one.call], sums) for one, sums in made])
        self._first = {}
        summed = functools.partial(self._sum, told.digest) if any(told) else None
        return self.holding.step(self.compiled, vectors, carry, window, summed)

    def _made_again(self, one: Again, carry: Carry, window: list, data: list) -> Any:
        """The digest's sums of what a call of "replica" makes by another group: from its state, which is
        equal."""
        rows, batch, place = window[one.by]["rows"], data[one.by], self.places[one.group][one.call]
        if one.by != one.group:
            there = self.placement.local[one.by]
            indices, place = there.moved((window[one.group]["rows"]["indices"], place))
            rows = {**rows, "indices": indices}
            batch = batch if self.functions.resident else there.moved(data[one.group])
        made = self.compiled["replica"][one.by](*read(carry[one.by]), rows, batch, *place)
        return self.digests.sums(one.by, pieces("replica", made))

    def _sum(self, digest: bool, parts: list[list[Piece]]) -> None:
        if digest:
            self._summed = [self.digests.start(parts)]
        if (squared := self._measuring) is not None:
            squared.total.extend(self.squares.of_sum(parts))
            self.squared, self._measuring = squared, None

    def digest_of(self, carry: Carry) -> list[Pending]:
        """Starts digests of a state, and of the summed gradient if the last step told it. To be read by
        `digests`."""
        summed, self._summed = self._summed, []
        return [*summed, self.digests.start(self.holding.pieces(carry))]

    def vectors(self, g: int, state: TrainState, window: dict, data: dict) -> list[jax.Array]:
        """The vectors of one group's replicas, `(n,)` each, or the sums of its cover's nodes, followed by the
        first of these if other groups have more."""
        given = *read(state), window["rows"], data
        run = functools.partial(self.compiled["replica"][g], *given)
        if self._measuring is not None and self.blueprint.looped:
            # Their sum alone is told: once more, and not in the step's own program, whose bits would change.
            for i, vector in enumerate(self._each(g, *given)):
                self._measure(g, i, vector)
        made = (self._noted(g, i, run(*place)) for i, place in enumerate(self.places[g]))
        if not self._pops[g]:
            return list(made)
        if self.blueprint.looped:
            made = iter(next(made))
        stack = list[jax.Array]()
        for pops in self._pops[g]:
            stack.append(next(made))
            for _ in range(pops):
                right = stack.pop()
                stack[-1] = self._add(stack[-1], right)
                del right  # its memory is free while the next replica runs
        return stack + stack[:1] * (self.layout.vectors - len(stack))

    def _noted(self, g: int, i: int, made: Any) -> Any:
        """What call `i` of local group `g` made. Starts its digest if it is made again."""
        if (g, i) in self._first:
            self._first[g, i] = self.digests.sums(g, pieces("replica", made))
        if self._measuring is not None and not self.blueprint.looped:
            self._measure(g, i, made)
        return made

    def _measure(self, g: int, i: int, vector: jax.Array) -> None:
        """Starts the squares of the vector of block `i` of local group `g`."""
        assert self._measuring is not None
        first = self.layout.firsts[self.placement.local[g].index]
        self._measuring.blocks[first + i] = self.squares.of(g, vector)

    def _each(self, g: int, *given: Any) -> list[jax.Array]:
        """The vectors of all blocks of local group `g`, where one call computes them all."""
        (place,), share = self.places[g], self.layout.shares[self.placement.local[g].index]
        return self.compiled["each"][g](*given, *place)[:share]
