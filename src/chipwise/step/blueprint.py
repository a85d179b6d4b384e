"""Describes a step as values: its programs, the exchanges between them, and the bytes that they
need in memory.

`run.programs` runs a blueprint, `bench` and trials time and size it, and the planner compiles it
for absent chips. So they cannot disagree about the computations and the needs of a step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives

from ..base import Fact, plain
from ..data.stream import batches_in_memory
from ..models.remat import inside
from ..recipe.recipe import Recipe
from .layout import Layout, cover_merges, merges
from .program import Program
from .reduce import Exchange
from .replica import ReplicaInput
from .state import count, nbytes
from .step import Step
from .window import WindowHyper

PICKED_BATCHES = 2  # of data kept on the device: a step's, and the next one's, picked while it runs
# Vectors of a device's replicas that `reduce` adds. If there are more, they are added as they are
# ready.
MEET_AT_ONCE = 8
MEET_BYTES = 1 << 30
# Total size of all replicas' vectors up to which a CPU device makes a single call
LOOP_BYTES = 32 << 20
_FAST = lax.conv_dimension_numbers((1,) * 4, (1,) * 4, ("NHWC", "HWIO", "NHWC"))


@dataclass(frozen=True)
class Whole:
    """The state that stays in memory between steps, summed over all devices of a group."""

    kept: int
    """The bytes of parameters, optimizer's state and average."""
    trained: int
    """The number of trained parameters."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one device's memory during training, by category."""

    parameters: int  # with their averages, if the recipe has an EMA
    optimizer: int
    state: int  # batch-norm statistics and metric sums
    # Gradients, their sum and new parameters, while the program that needs most runs
    replica_sums: int
    activations: int  # that program's temporary memory, by the compiler
    data: int  # examples kept on the device, or batches in flight
    program: int  # compiled code, and on GPUs the libraries
    available: int
    available_source: Fact

    @property
    def needed(self) -> int:
        parts = (self.parameters, self.optimizer, self.state, self.replica_sums, self.activations)
        return sum(parts) + self.data + self.program

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    def json(self) -> dict[str, Any]:
        return plain(self) | {"needed": self.needed, "fits": self.fits}


@dataclass(frozen=True)
class Blueprint:
    """A step of `recipe` in `layout`, on the device, or the group of devices, that has most blocks.

    The program "replica" computes vectors of `size` float32 in `calls` calls. The exchange "reduce"
    adds these over all replicas. The programs "square", for clipping or loss scaling, and "update"
    follow. If the optimizer's state is sharded, the exchange "gather" comes last. A `fused` step is
    the single program "step".

    Bytes are those of the device that has most of the optimizer's state, except in `whole`.
    """

    recipe: Recipe
    layout: Layout
    resident: bool
    """Whether every example is kept on the device. Otherwise batches are streamed."""
    programs: tuple[Program, ...]
    calls: int
    """The calls of "replica" on a device in a step."""
    size: int
    """The number of float32 values in a vector of a device."""
    parameters: int  # numbers, not bytes
    parameter_bytes: int
    optimizer_bytes: int
    state_bytes: int
    data_bytes: int
    whole: Whole
    cut: int = 0
    """The number of values of the sum, those of the parameters, that are split over the devices if
    the optimizer's state is sharded. Otherwise it is 0."""
    bounds: tuple[int, ...] = ()
    """The bounds of the devices' parts of these values."""
    looped: bool = False
    """Whether one call of "replica" computes all of a device's replicas."""
    eval_block: int = 0
    """The examples of a block of the evaluation, if a plan has added the evaluation to the
    programs."""
    eval_merged_bytes: int = 0
    """The bytes of the matrices with adapters, which an evaluation reads merged, beside the frozen
    ones."""
    pick: Program | None = None
    """The program that picks the step's examples before the other programs, if the data is
    `resident`. A `looped` "replica" picks them itself."""

    @property
    def fused(self) -> bool:
        """Whether the engine runs all programs as one, since there is a single block and so a
        single device."""
        return self.layout.blocks == 1 and self.layout.shards == 1

    @property
    def replica(self) -> Program:
        """The first program, which computes the gradient."""
        return self.programs[0]

    @property
    def exact(self) -> bool:
        return self.layout.exact

    @property
    def shards(self) -> int:
        return self.layout.shards

    @property
    def exchanges(self) -> dict[str, Exchange]:
        """The exchanges by name. "reduce" is the sum over replicas, if there is more than one
        vector. "gather" gathers the parameters after the update, if the optimizer's state is
        sharded."""
        # Programs of their own also since, on the CPU, a waiting collective blocks a thread of the
        # pool in which other simulated devices compute. A program that does both can deadlock.
        groups = self.layout.groups
        if groups == 1 and self.calls == 1:
            return {}
        reduce = Exchange(
            "reduce",
            groups,
            self.size,
            local=self.local_vectors,
            exact=self.exact,
            shards=self.shards,
            cut=self.cut,
            bounds=self.bounds,
            shares=() if self.layout.aligned else self.layout.shares,
        )
        exchanges = {"reduce": reduce}
        if self.cut:
            exchanges["gather"] = Exchange("gather", groups, self.cut, bounds=self.bounds)
        return exchanges

    @property
    def local_vectors(self) -> int:
        """The number of vectors that a device passes to `reduce`. If its replicas have more
        vectors, the device adds them as they are ready."""
        if not self.layout.aligned:
            return self.layout.vectors
        return self.calls if meet_at_once(self.calls, self.size) else 1

    @property
    def sums(self) -> dict[str, int]:
        """The bytes of gradients, sums and new parameters that wait on a device while each program
        runs, by program. In a fused step they are part of its temporary memory."""
        picking = {} if self.pick is None else {"pick": 0}
        if self.programs[0].name == "step":
            return {"step": 0} | picking
        reduce, whole = self.exchanges.get("reduce"), 4 * self.size
        parts = 4 * reduce.part if reduce is not None else 0
        total = parts + 4 * (self.size - self.cut)
        during = {program.name: total + parts for program in self.programs}
        held = (
            whole * self.local_vectors
            if self.looped
            else waiting(self.calls, self.size, self.layout)
        )
        during |= picking | {"replica": held, "reduce": self.local_vectors * whole + total}
        return during | {"gather": total + parts + 4 * self.cut}

    def peak(self, temporary: Mapping[str, float]) -> tuple[int, int]:
        """The bytes of `sums` and of temporary memory in the program that needs most of both
        together.

        *Arguments:* `temporary` has the bytes of temporary memory of the compiled programs, by
        program.
        """
        names = dict.fromkeys((self.programs[0].name, *self.exchanges, *temporary))
        sums = self.sums
        return max(((sums.get(name, 0), int(temporary.get(name, 0))) for name in names), key=sum)

    def memory(
        self, temporary: Mapping[str, float], program: float, available: int, source: Fact
    ) -> Memory:
        """The memory of a device in a step.

        *Arguments:* `temporary` is as in `peak`. `program` is the number of bytes of code.
        `available` is the memory in bytes, and `source` the fact that states it."""
        held, activations = self.peak(temporary)
        return Memory(
            parameters=self.parameter_bytes,
            optimizer=self.optimizer_bytes,
            state=self.state_bytes,
            replica_sums=held,
            activations=activations,
            data=self.data_bytes,
            program=int(program),
            available=available,
            available_source=source,
        )


def blueprint(
    step: Step, *, resident: bool, platform: str | None = None, apart: bool = False
) -> Blueprint:
    """Returns the blueprint of `step`. Reads no data and runs nothing.

    *Arguments:* `resident` says whether every example is kept on the device. `platform` is the
    platform for which the step is compiled. On "cpu" a small step may be `looped`. With `apart` the
    step has several programs although the engine would fuse them. These are the same in every
    layout, so a compiler's answer serves for all.
    """
    recipe, layout, specs, updates = step.recipe, step.layout, step.specs(), step.updates
    state, window, data, whole = specs["state"], specs["window"], specs["data"], step.state
    size = specs["vector"].size // layout.shards
    inputs = ReplicaInput.of(state, window["rows"], data, specs["place"])
    held = batches_in_memory(layout.devices * nbytes(data)) * nbytes(data)
    kept: Any = step.kept_spec()
    pick = None
    if resident:
        pick = Program("pick", step.pick, (state.step, window["rows"], kept))
        held = nbytes(kept) + PICKED_BATCHES * nbytes(data)
    calls, looped, programs = step.calls, False, list[Program]()
    if step.fused and not apart:
        arguments = (state.without("donated"), state.frozen, window, data, specs["place"])
        programs.append(Program("step", step.replica_and_update, arguments, (0,)))
    else:
        replica = Program("replica", step.traced, (inputs,))
        looped = platform == "cpu" and _may_loop(step, replica)
        if looped:
            places: Any = jax.ShapeDtypeStruct((max(2, calls), 2), jnp.int32)
            inputs = inputs._replace(place=places)
            in_turn = functools.partial(step.in_turn, resident=resident)
            if resident:  # one call less, which takes a quarter of a small net's step
                inputs, pick = inputs._replace(data=kept), None
            turns = jax.ShapeDtypeStruct((), jnp.int32)
            replica, calls = Program("replica", in_turn, (inputs, turns)), 1
        programs += [replica, *after_replicas(step, window["hyper"])]
    return Blueprint(
        recipe=recipe,
        layout=layout,
        resident=resident,
        programs=tuple(programs),
        calls=calls,
        size=size,
        parameters=count((whole.params, whole.frozen)),
        parameter_bytes=nbytes((state.params, state.frozen, state.ema)),
        optimizer_bytes=nbytes(state.optimizer),
        state_bytes=nbytes((state.state, state.sums)),
        data_bytes=held + 2 * nbytes(window),
        whole=Whole(
            nbytes((whole.params, whole.frozen, whole.optimizer, whole.ema)), count(whole.params)
        ),
        cut=updates.flat.size if step.sharded else 0,
        bounds=step.windows[0].bounds if step.sharded else (),
        looped=looped,
        pick=pick,
    )


def after_replicas(step: Step, hyper: WindowHyper) -> Iterator[Program]:
    """Yields the programs that follow the sum over replicas, in the order in which they run."""
    update = step.update_specs(hyper)
    if step.updates.squares is not None:
        yield Program("square", step.square, (update[1],))
    yield Program("update", step.update_chunk if step.sharded else step.update, update, (0,))


def many_steps(step: Step, made: Blueprint, platform: str) -> Program | None:
    """The program that runs many steps of `made` in a call of the only device, a CPU or a GPU, if
    there is one: for a small net with `resident` data. On a CPU, a `fused` step must have no
    convolution: see `_may_loop`."""
    alone = made.resident and made.layout.groups == made.shards == 1
    on_gpu = platform == "gpu"
    if not (alone and (on_gpu or (platform == "cpu" and (made.fused or made.looped)))):
        return None
    specs, turns = step.specs(), jax.ShapeDtypeStruct((), jnp.int32)
    state, window, place = specs["state"], specs["window"], specs["place"]
    inputs = ReplicaInput.of(state, window["rows"], specs["data"], place)
    if made.looped:
        place = made.replica.specs[0].place
    elif not _may_loop(step, Program("replica", step.traced, (inputs,)), None if on_gpu else ()):
        return None
    elif not made.fused:
        place = jax.ShapeDtypeStruct((max(2, made.calls), 2), jnp.int32)
    given = state.without("donated"), state.frozen, window, step.kept_spec(), place, turns, turns
    return Program("steps", step.in_a_row, given, (0,))


def _may_loop(step: Step, replica: Program, fast: Sequence[Any] | None = (_FAST,)) -> bool:
    """Whether a device makes a single call for all its replicas. It does for nets so small that the
    calls cost more than the work.

    On a CPU, a net does not loop if it has convolutions in other layouts than `fast`, that of XLA's
    fast code. XLA converts them to this layout only outside of loops, and in a loop they are 40
    times as slow (JAX 0.10.2). A GPU has no such layout: None. Only the recipe decides, so the
    answer is the same on any number of devices.
    """
    layout = step.layout
    small = 4 * step.updates.size * layout.blocks <= LOOP_BYTES
    if layout.shards > 1 or not small:
        return False
    if fast is None:
        return True
    traced = step.traced.trace(*replica.specs).jaxpr  # the trace that `in_turn` calls
    return all(
        equation.params["dimension_numbers"] in fast
        for jaxpr in inside(traced.jaxpr)
        for equation in jaxpr.eqns
        if equation.primitive is primitives.conv_general_dilated_p
    )


def meet_at_once(calls: int, size: int) -> bool:
    """Whether a device keeps its `calls` vectors of `size` float32 until `reduce`. Otherwise it
    adds them as they are ready."""
    return calls <= MEET_AT_ONCE and 4 * size * calls <= MEET_BYTES


def waiting(calls: int, size: int, layout: Layout | None = None) -> int:
    """The peak bytes of a device's vectors of `size` float32 while one of its `calls` calls of
    "replica" runs, including the vector of that call. If the device adds them as they are ready, it
    has a partial sum for each level of the tree, and a leaf.

    *Arguments:* If `layout` is not `aligned`, its covers determine the order of the additions."""
    orders = [merges(calls)]
    if layout is not None and not layout.aligned:
        orders = [cover_merges(nodes) for nodes in layout.covers]
    elif meet_at_once(calls, size):
        return 4 * size * calls
    most = 0
    for order in orders:
        depth = 0
        for pops in order:
            depth += 1
            most = max(most, depth)
            depth -= pops
    return 4 * size * most


# ---- the largest batch


def largest_batch(
    recipe: Recipe, fits: Callable[[Recipe], tuple[bool, float]], limit: int
) -> int | None:
    """Searches the largest global batch that `fits`, among the multiples of the smallest one up to
    `limit`.

    *Arguments:* `fits` returns whether a recipe's step fits, and the share of the memory that it
    needs. Memory grows almost linearly with the batch, so each try extrapolates from the two
    nearest ones. A few tries give the result to within 1/20, and the compiler's cache keeps them.

    *Returns* `None` if not even the smallest batch fits.
    """
    unit = recipe.least_batch
    most = limit // unit
    known: dict[int, tuple[bool, float]] = {}

    def end() -> float:
        """The batch at which the share is 1, on the line through the two nearest tries. Compilers
        save memory where it is short, so that batch may be outside of the remaining range. Then the
        line goes through the two largest tries that fit."""
        expected = _crossing(sorted(known.items(), key=lambda one: abs(one[1][1] - 1))[:2])
        if good > 0 and not good <= expected <= bad:
            expected = _crossing(sorted(one for one in known.items() if one[1][0])[-2:])
        return expected

    good, bad = 0, most + 1
    guess = min(most, recipe.batch // unit)
    while bad - good > max(1, good // 40):
        known[guess] = fits(dataclasses.replace(recipe, batch=guess * unit))
        good, bad = (guess, bad) if known[guess][0] else (good, guess)
        expected = end()
        if good > 0 and len(known) > 1 and good >= 0.96 * min(expected, most):
            break
        guess = min(max(int(min(0.98 * expected, most)), good + 1), bad - 1)
        if len(known) > 8:
            guess = (good + bad) // 2
        if guess <= good:
            break
    return good * unit or None


def _crossing(tries: Sequence[tuple[int, tuple[bool, float]]]) -> float:
    """The batch at which the line through two tries has the share 1, infinite if the line does not
    rise. With one try, the line goes through it and 0."""
    (a, (_, low)), (b, (_, high)) = (0, (True, 0.0)) if len(tries) == 1 else tries[0], tries[-1]
    slope = (high - low) / (b - a)
    return a + (1 - low) / slope if slope > 0 else math.inf
