"""What a step is, as values: its programs, the exchanges between them, and the bytes that live meanwhile.

`engine.programs` runs a blueprint, `bench` and trials time and size it, and the planner
compiles it for chips that are not here. So they cannot disagree about what a step computes or needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives

from ..data.stream import batches_in_memory
from ..errors import ChipwiseError, RecipeError
from ..models.remat import inside
from ..recipe.recipe import Recipe
from ..words.facts import Fact, plain
from .layout import Layout, cover_merges, merges
from .reduce import Exchange
from .state import count, nbytes, read
from .step import Step

MEET_AT_ONCE = 8  # vectors of a device's replicas that `reduce` adds; more are added as they are ready
MEET_BYTES = 1 << 30
LOOP_BYTES = 32 << 20  # total size of all replicas' vectors up to which a CPU device makes a single call


@dataclass(frozen=True)
class Program:
    """A program of a device, or of a group of devices: a pure function of arrays.

    *Fields:* `specs`: its arguments, trees of `ShapeDtypeStruct`, with shardings for a group; `donate`: the
    arguments that it may overwrite; `calls`: in a step.
    """

    name: str
    function: Callable[..., Any] = field(repr=False, compare=False)
    specs: tuple[Any, ...] = field(repr=False)
    donate: tuple[int, ...] = ()
    calls: int = 1


class Named(Protocol):
    @property
    def name(self) -> str: ...


P = TypeVar("P", bound=Named, covariant=True)


@dataclass(frozen=True)
class Whole:
    """What stays in memory between steps, of all devices of a group: `kept`, the bytes of parameters,
    optimizer and average, and the `trained` numbers."""

    kept: int
    trained: int


@dataclass(frozen=True)
class Memory:
    """Bytes of one device's memory during training, by category."""

    parameters: int  # with their averages, if the recipe has an EMA
    optimizer: int
    state: int  # batch-norm statistics and metric sums
    replica_sums: int  # gradients, their sum and new parameters, while the program that needs most runs
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
class Blueprint(Generic[P]):
    """A step of `recipe` in `layout`, on one device, or on one group of several: one that has most blocks.

    The programs are "replica", called `calls` times, which makes vectors of `size` float32; the exchange
    "reduce" of these over all replicas; "square" for clipping; and "update". If the optimizer's state is
    sharded, the exchange "gather" follows. A `fused` step is the single program "step".

    *Fields:* `resident`: whether data holds every example, on the device; `cut`: how many values of the sum,
    the parameters', are cut over the devices if the optimizer's state is sharded, otherwise 0; `bounds` of
    the devices' parts of them; `looped`: whether one call of "replica" computes all of a device's replicas;
    `eval_block`: the examples of a block of the evaluation, if a plan has added that to the programs. Bytes
    are of the device that has most of the optimizer's state, except those of `whole` and of a checkpoint.
    """

    recipe: Recipe
    layout: Layout
    resident: bool
    programs: tuple[P, ...]
    calls: int
    size: int
    parameters: int  # numbers, not bytes
    parameter_bytes: int
    optimizer_bytes: int
    state_bytes: int
    data_bytes: int
    whole: Whole
    cut: int = 0
    bounds: tuple[int, ...] = ()
    looped: bool = False
    eval_block: int = 0

    @property
    def fused(self) -> bool:
        """Whether the engine runs all programs as one: there is a single block, and so a single device."""
        return self.layout.blocks == 1 and self.layout.shards == 1

    @property
    def replica(self) -> P:
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
        """The sum over replicas, if there is more than one vector; and if the optimizer's state is sharded,
        the gathering of parameters after the update."""
        groups = self.layout.groups
        if groups == 1 and self.calls == 1:
            return {}
        shares = () if self.layout.aligned else self.layout.shares
        about = (self.size, self.local_vectors, self.exact, self.shards, self.cut, self.bounds, shares)
        reduce = Exchange("reduce", groups, *about)
        gather = {"gather": Exchange("gather", groups, self.cut, bounds=self.bounds)} if self.cut else {}
        return {"reduce": reduce} | gather

    @property
    def local_vectors(self) -> int:
        """The number of a device's vectors in `reduce`; if there are more, they are added as they are
        ready."""
        if not self.layout.aligned:
            return self.layout.vectors
        return self.calls if meet_at_once(self.calls, self.size) else 1

    @property
    def sums(self) -> dict[str, int]:
        """The bytes of gradients, sums and new parameters that wait on a device while each program runs. In a
        program of all replicas they are part of its temporary memory."""
        if self.programs[0].name == "step":
            return {"step": 0}
        reduce, whole = self.exchanges.get("reduce"), 4 * self.size
        parts = 4 * reduce.part if reduce is not None else 0
        total = parts + 4 * (self.size - self.cut)
        during = {program.name: total + parts for program in self.programs}
        held = whole * self.local_vectors if self.looped else waiting(self.calls, self.size, self.layout)
        during |= {"replica": held, "reduce": self.local_vectors * whole + total}
        return during | {"gather": total + parts + 4 * self.cut}

    def peak(self, temporary: Mapping[str, float]) -> tuple[int, int]:
        """The bytes of `sums` and of temporary memory in the program that needs most of both.

        *Arguments:* `temporary`: bytes by program, of those that are compiled.
        """
        names = dict.fromkeys((self.programs[0].name, *self.exchanges, *temporary))
        return max(((self.sums[name], int(temporary.get(name, 0))) for name in names), key=sum)

    def memory(self, temporary: Mapping[str, float], program: float, available: int, source: Fact) -> Memory:
        """The memory of a device in a step. *Arguments:* `temporary`: see `peak`; `program`: bytes of
        code."""
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


def blueprint(step: Step, *, platform: str | None = None, apart: bool = False) -> Blueprint[Program]:
    """The blueprint of `step`. Reads no data and runs nothing.

    *Arguments:* `platform`, for which it is compiled: on "cpu", a small step may be `looped`; `apart`: as
    several programs although the engine would fuse them. They are the same in every layout, so a compiler's
    answer serves for all.
    """
    recipe, layout, specs, updates = step.recipe, step.layout, step.specs(), step.updates
    state, window, data, whole = specs["state"], specs["window"], specs["data"], step.state
    size, inputs = specs["vector"].size // layout.shards, (*read(state), window["rows"], data)
    ahead = 1 if step.resident else batches_in_memory(layout.devices * nbytes(data))
    calls, looped, made = step.calls, False, list[Program]()
    if step.fused and not apart:
        given = (state.without("donated"), state.frozen, window, data, specs["place"])
        made.append(Program("step", step.replica_and_update, given, (0,)))
    else:
        replica = Program("replica", step.traced, (*inputs, specs["place"]), calls=calls)
        looped = platform == "cpu" and _may_loop(step, replica)
        if looped:
            places = jax.ShapeDtypeStruct((max(2, calls), 2), jnp.int32)
            turns = (*inputs, places, jax.ShapeDtypeStruct((), jnp.int32))
            replica, calls = Program("replica", step.in_turn, turns), 1
        made += [replica, *after_replicas(step, window["hyper"])]
    return Blueprint(
        recipe=recipe,
        layout=layout,
        resident=step.resident,
        programs=tuple(made),
        calls=calls,
        size=size,
        parameters=count((whole.params, whole.frozen)),
        parameter_bytes=nbytes(state.params) + nbytes(state.frozen) + nbytes(state.ema),
        optimizer_bytes=nbytes(state.optimizer),
        state_bytes=nbytes(state.state) + nbytes(state.sums),
        data_bytes=ahead * nbytes(data) + 2 * nbytes(window),
        whole=Whole(nbytes((whole.params, whole.frozen, whole.optimizer, whole.ema)), count(whole.params)),
        cut=updates.flat.size if step.sharded else 0,
        bounds=step.windows[0].bounds if step.sharded else (),
        looped=looped,
    )


def after_replicas(step: Step, hyper: dict) -> Iterator[Program]:
    """The programs that follow the sum over replicas, in the order in which they run."""
    update = step.update_specs(hyper)
    if step.updates.squares is not None:
        yield Program("square", step.square, (update[1],))
    yield Program("update", step.update_chunk if step.sharded else step.update, update, (0,))


def _may_loop(step: Step, replica: Program) -> bool:
    """Whether a CPU device makes a single call for all its replicas: for nets so small that the calls cost
    more than the work.

    Not with convolutions in another layout than that of XLA's fast code, into which XLA turns them only
    outside of loops: in a loop they are 40 times as slow (JAX 0.10.2). Only the recipe decides, so the answer
    is the same on any number of devices.
    """
    layout = step.layout
    small = 4 * step.updates.size * layout.blocks <= LOOP_BYTES
    if layout.shards > 1 or not small:
        return False
    traced = step.traced.trace(*replica.specs).jaxpr  # the trace that `in_turn` calls
    return all(
        equation.params["dimension_numbers"] == _FAST
        for jaxpr in inside(traced.jaxpr)
        for equation in jaxpr.eqns
        if equation.primitive is primitives.conv_general_dilated_p
    )


_FAST = lax.conv_dimension_numbers((1,) * 4, (1,) * 4, ("NHWC", "HWIO", "NHWC"))


def meet_at_once(calls: int, size: int) -> bool:
    """Whether a device keeps its `calls` vectors of `size` float32 until `reduce`, or adds them as they are
    ready."""
    return calls <= MEET_AT_ONCE and 4 * size * calls <= MEET_BYTES


def waiting(calls: int, size: int, layout: Layout | None = None) -> int:
    """The peak bytes of a device's vectors of `size` float32 while one of its `calls` replicas runs
    (including its own vector). If they are added as they are ready, there are a partial sum for each level of
    the tree, and a leaf. *Arguments:* `layout`, whose devices may have other covers."""
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


@contextlib.contextmanager
def tracing(name: str) -> Iterator[None]:
    """A context that turns errors of a recipe's functions during tracing into a `RecipeError`."""
    try:
        yield
    except ChipwiseError:
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise RecipeError(
            "recipe-not-traced", recipe=name, error=type(error).__name__, message=line
        ) from error


# ---- the largest batch


def largest_batch(recipe: Recipe, fits: Callable[[Recipe], tuple[bool, float]], limit: int) -> int | None:
    """The largest global batch, a multiple of the smallest one and at most `limit`, for which `fits`.

    *Arguments:* `fits` returns whether a recipe's step fits, and the share of the memory that it needs.
    Memory grows almost linearly with the batch, so each try extrapolates from the two nearest ones. A few
    tries give the result to within 1/20, and the compiler's cache keeps them.

    *Returns* `None` if not even the smallest batch fits.
    """
    unit = recipe.least_batch
    most = limit // unit
    known: dict[int, tuple[bool, float]] = {}

    def end() -> float:
        """The batch at which the share is 1, on the line through the two nearest tries. If that is outside of
        what is left, for compilers save memory where it is short, through the two largest that fit."""
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
    """Where the line through two tries has the share 1, infinite if it does not rise; through 0, if there is
    one try."""
    (a, (_, low)), (b, (_, high)) = (0, (True, 0.0)) if len(tries) == 1 else tries[0], tries[-1]
    slope = (high - low) / (b - a)
    return a + (1 - low) / slope if slope > 0 else math.inf
