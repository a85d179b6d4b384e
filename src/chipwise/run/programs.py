"""The compiled step: a blueprint's programs for every local device or group, and a step's calls of
them.

Nothing here waits for a device.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..machine.compilation_cache import compile_on
from ..machine.compiler import jitted
from ..machine.kernels import claim
from ..machine.program_kernels import kernels, same
from ..models.attention_fused import in_fixed_order
from ..recipe.recipe import Recipe
from ..step.blueprint import Blueprint, after_replicas, blueprint, many_steps, meet_at_once
from ..step.group_step import GroupStep
from ..step.layout import Layout, cover_merges
from ..step.program import Program
from ..step.program_digest import digest
from ..step.program_flops import program_flops
from ..step.replica import ReplicaInput
from ..step.state import TrainState
from ..step.step import Step
from .noise import GradientSquares, Squared
from .placement import Group, Placement
from .state_digest import Digests, Pending, Piece, pieces
from .state_layout import Carry, StateLayout, hold
from .tune import take


class Recheck(NamedTuple):
    """A call of "replica" in a step to make once more."""

    step: int
    call: int
    """Its number on local group `group`."""
    group: int
    by: int
    """The local group that makes the call once more."""


class Outputs(NamedTuple):
    """What a step computes besides its result."""

    digest: bool = False
    """Whether to compute the digest of the summed gradient, for `digest_of`."""
    squares: bool = False
    """Whether to compute the squares of the gradients, for `squared`."""


NOTHING = Outputs()


class Programs:
    """The step of `recipe` in `layout`, on the devices of `placement`.

    Windows and data are lists with one entry per local group, as the `carry` of `run.state_layout`.

    *Arguments:* `resident`: whether data is all examples, kept on each device. Otherwise it is each
    device's examples of the step. `shard_optimizer`: see `update.shards_optimizer`. `outputs`: what
    some steps compute besides their result. `kernels`: see `On`.

    *Fields:*

    - `functions`: the step as pure functions.
    - `compiled`: the executables of each program on the local groups. Empty before `compile`.
    - `flops_per_step_per_device`.
    - `digests`: computes digests of the arrays on the devices.
    - `compared`: calls that were made again, each with the sums of the first call's digest and of
      its own. The caller takes them from here.
    - `squared`: the squares of the gradients of the last step that computed them.
    - `kernels`: the tuned kernels that it uses, if any.
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
        outputs: Outputs = NOTHING,
        kernels: str | Path | None = None,
    ):
        self._may_output = outputs
        self.layout, self.placement, self._resident = layout, placement, resident
        about: dict[str, Any] = {"state": state, "device": placement.lead}
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
        self.compared, self._first = (
            deque[list[tuple[Recheck, Any, Any]]](),
            dict[tuple[int, int], Any](),
        )
        self.kernels = take(kernels, self)

    @functools.cached_property
    def blueprint(self) -> Blueprint:
        """The blueprint of the step. Traces the replica of a small net on the CPU, so the
        constructor does not."""
        return blueprint(
            self.functions, resident=self._resident, platform=self.placement.lead.platform
        )

    @functools.cached_property
    def state_layout(self) -> StateLayout:
        """The layout of the step's state."""
        return hold(self.functions, self.blueprint, self.placement)

    @functools.cached_property
    def _pops(self) -> list[tuple[int, ...]]:
        """For each local group, the result of `cover_merges`, or an empty one if its vectors wait
        until `reduce`."""
        groups, layout = self.placement.local, self.layout
        if layout.aligned and meet_at_once(self.blueprint.calls, self.blueprint.size):
            return [()] * len(groups)
        return [cover_merges(layout.covers[group.index]) for group in groups]

    @functools.cached_property
    def places(self) -> list[list[tuple[jax.Array, ...]]]:
        """For each local group the `place` of its calls, and their number if they are turns of a
        loop."""
        return [self._placed_replicas(group) for group in self.placement.local]

    def _placed_replicas(self, group: Group) -> list[tuple[jax.Array, ...]]:
        """Returns the `place` of each call of "replica" on a group (see `ReplicaInput`). If one
        call loops over all its replicas, these are the places of all, and how many there are."""
        if self.blueprint.looped:
            return [self._turns(group)]
        return [(group.put(place),) for place in self._rows(group)]

    def _rows(self, group: Group) -> np.ndarray:
        layout, together = self.layout, self.functions.together
        first, own = layout.firsts[group.index], layout.shares[group.index]
        return np.asarray([[(first + i) * together, i * together] for i in range(own)], np.int32)

    def _turns(self, group: Group) -> tuple[jax.Array, ...]:
        """The places of all replicas of a group, and how many there are, for a loop over these."""
        places = self._rows(group)
        rows = places[np.arange(max(2, self.layout.blocks_per_device)) % len(places)]
        return group.put((rows, np.int32(len(places))))

    @functools.cached_property
    def _steps_turns(self) -> tuple[Any, ...]:
        """The place and the number of turns of `steps`."""
        if self.blueprint.fused:
            return *self.places[0][0], np.int32(1)
        return self._turns(self.placement.local[0])

    def _jit(self, function: Callable[..., Any], **about: Any) -> Any:
        layout = self.layout
        return jitted(
            function, self.placement.lead, exact=layout.exact, shards=layout.shards, **about
        )

    @functools.cached_property
    def squares(self) -> GradientSquares:
        """Computes the squares of the gradients of a step."""
        return GradientSquares(self.functions, self.placement, self._jit)

    @functools.cached_property
    def _jitted(self) -> list[list[tuple[Any, Program]]]:
        """The programs of each local group, jitted. Groups with the same programs share them. The
        last program is the one that picks examples, if there is one."""
        claim(self.placement.lead.platform, self.layout.exact, self.kernels)

        def made_of(one: Program) -> tuple[Any, Program]:
            # What no input determines would be on the first device: the squares of no leaves.
            about: dict[str, Any] = {
                "donate_argnums": one.donate,
                "keep_unused": not self.functions.alike,
            }
            return self._jit(inspect.unwrap(one.function), **about), one

        made, groups = self.blueprint, self.placement.local
        first, pick = (
            [made_of(one) for one in made.programs],
            [made_of(made.pick)] if made.pick else [],
        )
        if self.functions.alike:
            return [[*first, *pick]] * len(groups)
        steps = [self.functions.on(group.index) for group in groups]
        hyper = self.functions.specs()["window"]["hyper"]
        return [[first[0], *map(made_of, after_replicas(step, hyper)), *pick] for step in steps]

    @functools.cached_property
    def digest(self) -> str:
        """The digest of `program_digest`, which is equal for streamed data. Traces the programs,
        which `compile` does not do again."""
        first, step = self.placement.local[0], self.functions
        stepping = self._jitted[0][: len(self.blueprint.programs)]
        traced = [jit.trace(*first.shapes(one.specs)).jaxpr for jit, one in stepping]
        if step.sharded:  # the update of a whole vector, whatever the part of a device
            whole = copy.copy(step)
            whole.sharded = False
            after = after_replicas(whole, whole.specs()["window"]["hyper"])
            traced[1:] = [jax.make_jaxpr(one.function)(*one.specs) for one in after]
        return digest(traced)

    def _ordered(self, lowered: Any) -> Any:
        on_gpu = self.placement.lead.platform == "gpu"
        return in_fixed_order(lowered) if on_gpu and self.layout.exact else lowered

    def compile(self) -> None:
        """Compiles every program of the step. Must be called before `step`."""
        programs = [program for _, program in self._jitted[0]]
        flops = [0.0] * len(programs)

        def lower(i: int, g: int) -> Any:
            jit, program = self._jitted[g][i]
            traced = jit.trace(*self.placement.local[g].shapes(program.specs))
            if g == 0:
                flops[i] = program_flops(traced.jaxpr, self.layout.shards)
            return self._ordered(traced.lower())

        made = compile_on(len(self.placement.local), len(programs), lower)
        self.compiled = {program.name: each for program, each in zip(programs, made, strict=True)}
        # Where all calls are turns of one loop, its jaxpr does not say how many.
        times = [self.functions.calls if program.name == "replica" else 1 for program in programs]
        self.flops_per_step_per_device = sum(f * n for f, n in zip(flops, times, strict=True))
        if self._may_output.squares and self.blueprint.looped:
            each = functools.partial(self.functions.each_in_turn, resident=self._resident)
            each = self._jit(each)
            groups, specs = self.placement.local, self.blueprint.replica.specs
            (self.compiled["each"],) = compile_on(
                len(groups), 1, lambda _, g: each.lower(*groups[g].shapes(specs))
            )

    def compile_steps(self) -> None:
        """Compiles the program that `steps` runs, if there is one. It is only used if its kernels
        are those of a step's programs: otherwise bits would differ, as where XLA compiles a loop
        over less than 1 KiB as one kernel."""
        one = many_steps(self.functions, self.blueprint, self.placement.lead.platform)
        if one is None:
            return
        jit = self._jit(inspect.unwrap(one.function), donate_argnums=one.donate, loops=True)
        made = self._ordered(jit.lower(*self.placement.local[0].shapes(one.specs))).compile()
        names = (program.name for program in self.blueprint.programs)
        each = (kernels(self.executables[name].as_text()) for name in names)
        # The sum over replicas, if another program computes it
        additions = self.blueprint.calls - 1
        if same(kernels(made.as_text()), sum(each, Counter()), additions):
            self.compiled["steps"] = [made]

    @property
    def executables(self) -> dict[str, Any]:
        """JAX's compiled programs of the first device, or group, by name."""
        return {name: each[0] for name, each in self.compiled.items()}

    def step(
        self,
        carry: Carry,
        window: list,
        data: list,
        outputs: Outputs = NOTHING,
        rechecks: Sequence[Recheck] = (),
    ) -> tuple[Carry, jax.Array]:
        """Starts a step. `carry` must not be used again.

        *Arguments:* `outputs`: what to compute besides the result. `rechecks`: calls to make once
        more, for `compared`. A fused step has neither.

        *Returns* the new carry and a token, `()` int32, to wait for.
        """
        if (picks := self.compiled.get("pick")) is not None:
            data = [picks[g](carry[g].step, window[g]["rows"], kept) for g, kept in enumerate(data)]
        if self.blueprint.fused:
            (step,), frozen = self.compiled["step"], carry[0].frozen
            after, token = step(
                carry[0].with_frozen(None), frozen, window[0], data[0], *self.places[0][0]
            )
            return [after.with_frozen(frozen)], token
        self._first = dict.fromkeys((one.group, one.call) for one in rechecks)
        self._measuring = Squared({}, []) if outputs.squares else None
        vectors = [self.vectors(g, carry[g], window[g], data[g]) for g in range(len(carry))]
        if made := [(one, self._recomputed(one, carry, window, data)) for one in rechecks]:
            self.compared.append(
                [(one, self._first[one.group, one.call], sums) for one, sums in made]
            )
        self._first = {}
        summed = functools.partial(self._sum, outputs.digest) if any(outputs) else None
        return self.state_layout.step(self.compiled, vectors, carry, window, summed)

    def steps(self, carry: Carry, window: list, data: list, count: int) -> tuple[Carry, jax.Array]:
        """Starts `count` steps in one call, all in `window`, with the results of `step`. *Returns*
        the new carry and a token to wait for all."""
        (before,) = carry
        given = before.with_frozen(None), before.frozen, window[0], data[0]
        after, token = self.compiled["steps"][0](*given, *self._steps_turns, np.int32(count))
        return [after.with_frozen(before.frozen)], token

    def _recomputed(self, one: Recheck, carry: Carry, window: list, data: list) -> Any:
        """Makes a call of "replica" on another group, from that group's state, which is equal.
        *Returns* the sums of the result's digest."""
        rows, batch, places = window[one.by]["rows"], data[one.by], self.places[one.group][one.call]
        if one.by != one.group:
            there = self.placement.local[one.by]
            indices, places = there.moved((window[one.group]["rows"]["indices"], places))
            rows = {**rows, "indices": indices}
            batch = (
                batch if self._resident and self.blueprint.looped else there.moved(data[one.group])
            )
        place, *calls = places
        inputs = ReplicaInput.of(carry[one.by], rows, batch, place)
        made = self.compiled["replica"][one.by](inputs, *calls)
        return self.digests.sums(one.by, pieces("replica", made))

    def _sum(self, digest: bool, parts: list[list[Piece]]) -> None:
        if digest:
            self._summed = [self.digests.start(parts)]
        if (squared := self._measuring) is not None:
            squared.total.extend(self.squares.of_sum(parts))
            self.squared, self._measuring = squared, None

    def digest_of(self, carry: Carry) -> list[Pending]:
        """Starts digests of a state, and of the summed gradient if the last step computed it.
        `digests` reads them."""
        summed, self._summed = self._summed, []
        return [*summed, self.digests.start(self.state_layout.pieces(carry))]

    def vectors(self, g: int, state: TrainState, window: dict, data: dict) -> list[jax.Array]:
        """The vectors of one group's replicas, `(n,)` each, or the sums of its cover's nodes,
        followed by the first of these if other groups have more."""
        inputs_at = functools.partial(ReplicaInput.of, state, window["rows"], data)
        if self._measuring is not None and self.blueprint.looped:
            # The step returns only their sum. They are computed once more outside its own program,
            # whose bits would change.
            for i, vector in enumerate(self._each(g, inputs_at)):
                self._measure(g, i, vector)
        run = self.compiled["replica"][g]
        made = (
            self._noted(g, i, run(inputs_at(place), *calls))
            for i, (place, *calls) in enumerate(self.places[g])
        )
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
        """Returns `made`, the result of call `i` of local group `g`. Starts its digest if the call
        is made again."""
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

    def _each(self, g: int, inputs_at: Callable[[jax.Array], ReplicaInput]) -> list[jax.Array]:
        """The vectors of all blocks of local group `g`, where one call computes them all."""
        ((places, calls),) = self.places[g]
        share = self.layout.shares[self.placement.local[g].index]
        return self.compiled["each"][g](inputs_at(places), calls)[:share]
