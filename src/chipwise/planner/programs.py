"""The programs of a recipe's step for a device that may be absent, and the memory that they need.

They are the programs of `fit` (`engine.step.Step`), with shapes instead of arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ..chips.catalogue import Chip
from ..chips.targets import Target
from ..data.stream import batches_in_memory
from ..engine.group_step import GroupStep
from ..engine.layout import Layout, merges
from ..engine.programs import meet_at_once
from ..engine.state import TrainState, count, nbytes, read
from ..engine.step import Step
from ..errors import ChipwiseError, RecipeError
from ..machine.detect import GPU_SHARE
from ..machine.limits import memory as host_memory
from ..models.target import Target as Kernels
from ..models.target import depends_on_chip, traced_for
from ..recipe import precision
from ..recipe.recipe import Recipe
from ..words.facts import Fact, fact
from .exporting import Contents, Exported, GatherRequest, ReduceRequest, export_program, flat_positions
from .plans import Memory


@dataclass(frozen=True)
class Traceable:
    """A program to compile for absent chips: a function of arrays, made when it is first needed.

    *Fields:* `make`: gives the function and the shapes of its arguments; `arguments`: the number of arrays in
    these; `donate`: the arguments that the function may overwrite, and `donated`, their arrays' positions
    among all; `exports`: what is known of the program for some chips.
    """

    name: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]] = field(repr=False, compare=False)
    arguments: int
    donate: tuple[int, ...]
    donated: tuple[int, ...]
    exports: dict[Kernels, Exported] = field(default_factory=dict, repr=False, compare=False)
    _traced: dict[Kernels | str, Exported] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls, name: str, function: Callable[..., Any], specs: tuple[Any, ...], donate: tuple[int, ...] = ()
    ) -> Traceable:
        arguments = len(jax.tree.leaves(specs))
        return cls(name, lambda: (function, specs), arguments, donate, flat_positions(specs, donate))

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        return self.make()[0]

    @property
    def specs(self) -> tuple[Any, ...]:
        return self.make()[1]

    def exported(self, chip: Chip, *, one_pass: bool = False) -> Exported:
        """The program for a chip. `one_pass`: with float32 products in one pass (see
        `recipe.precision.one_pass`)."""
        kernels = Kernels.of(chip)
        known = self.exports.get(kernels) or self._export(chip, one_pass)
        if known.write is None:
            known = dataclasses.replace(known, write=lambda: self._export(chip, one_pass).body)
        self.exports[kernels] = known
        return known

    def known(self, chip: Chip) -> bool:
        """Whether `exported` needs no tracing."""
        return Kernels.of(chip) in self.exports

    def _export(self, chip: Chip, one_pass: bool) -> Exported:
        """Traces the program, once for all chips for which it is the same."""
        kernels = Kernels.of(chip)
        if _same_trace(kernels) not in self._traced:
            # a trace that `function`, jitted, may have had has all passes
            function = inspect.unwrap(self.function) if one_pass else self.function
            with traced_for(chip), precision.one_pass() if one_pass else contextlib.nullcontext():
                made = export_program(function, self.specs, kernels.platform)
            self._traced[_same_trace(kernels)] = made
        return self._traced[_same_trace(kernels)]

    def contents(self, chip: Chip) -> Contents:
        """Of the program for a chip, traced unless it was exported."""
        if known := self.exports.get(Kernels.of(chip)):
            return known.contents
        with tracing(self.name), traced_for(chip):
            closed = jax.make_jaxpr(self.function)(*self.specs)
        return Contents.of(closed.jaxpr)


def _same_trace(kernels: Kernels) -> Kernels | str:
    """Equal for chips for which the same program is traced."""
    return kernels if depends_on_chip(kernels.platform) else kernels.platform


@dataclass(frozen=True)
class Whole:
    """What stays in memory between steps, of all devices of a group: `kept`, the bytes of parameters,
    optimizer and average, and the `trained` numbers."""

    kept: int
    trained: int


@dataclass(frozen=True)
class StepPrograms:
    """The programs of one device in a step: `replica`, called `calls` times, the sum of `size` float32 over
    all replicas, then `update`; before it, with LAMB or LARS, those of `norms`, between which devices gather
    `gathered` float32 if the optimizer's state is sharded. `cut`: then, how many values of the sum, the
    parameters', are cut over the devices; otherwise 0. Bytes are of one device, except those of `whole` and a
    checkpoint."""

    recipe: Recipe
    layout: Layout
    resident: bool
    replica: Traceable
    update: Traceable
    calls: int
    size: int
    parameters: int  # numbers, not bytes
    parameter_bytes: int
    optimizer_bytes: int
    state_bytes: int
    data_bytes: int
    whole: Whole
    checkpoint_bytes: int
    fused: bool  # `fit` runs all of them as one program
    norms: tuple[Traceable, ...] = ()
    gathered: int = 0
    cut: int = 0

    @property
    def programs(self) -> tuple[Traceable, ...]:
        """The programs to compile for a device."""
        return self.replica, self.update, *self.norms

    @property
    def exchanges(self) -> dict[str, ReduceRequest | GatherRequest]:
        """The sum over replicas, if there is more than one vector; and if the optimizer's state is sharded,
        the gathering of parameters after the update."""
        groups, exact = self.layout.groups, self.layout.exact
        if groups == 1 and self.calls == 1:
            return {}
        reduce = ReduceRequest(groups, self.local_vectors, self.size, exact, self.shards, self.cut)
        return {"reduce": reduce, **({"gather": GatherRequest(groups, self.cut)} if self.cut else {})}

    @property
    def exact(self) -> bool:
        return self.layout.exact

    @property
    def shards(self) -> int:
        return self.layout.shards

    @property
    def local_vectors(self) -> int:
        """The number of a device's vectors in `reduce`; if there are more, they are added as they are
        ready."""
        return self.calls if meet_at_once(self.calls, self.size) else 1

    @property
    def sums(self) -> dict[str, int]:
        """The bytes of gradients, sums and new parameters that wait on a device while each program runs."""
        parts, whole = 4 * self.cut // self.layout.groups, 4 * self.size
        total = parts + 4 * (self.size - self.cut)
        during = {program.name: total + parts for program in self.programs}
        during |= {"replica": waiting(self.calls, self.size), "reduce": self.local_vectors * whole + total}
        return during | {"gather": total + parts + 4 * self.cut}

    def memory(self, temporary: Mapping[str, float], program: float, available: int, source: Fact) -> Memory:
        """The memory of a device in a step, in the program that needs most.

        *Arguments:* `temporary`: bytes by program, of those that are compiled; `program`: bytes of code.
        """
        own = {name: temporary.get(name, 0.0) for name in ("replica", *self.exchanges, *temporary)}
        held, activations = max(((self.sums[name], own[name]) for name in own), key=sum)
        return Memory(
            parameters=self.parameter_bytes,
            optimizer=self.optimizer_bytes,
            state=self.state_bytes,
            replica_sums=held,
            activations=int(activations),
            data=self.data_bytes,
            program=int(program),
            available=available,
            available_source=source,
        )


def step_programs(
    recipe: Recipe, layout: Layout, *, resident: bool, state: TrainState | None = None
) -> StepPrograms:
    """The programs of `recipe` on one device, or group, of `layout`. Reads no data and runs nothing.

    *Arguments:* `state`: `abstract_state(recipe)`, if known; it is half of the work, and the same in every
    layout.

    Raises `RecipeError` if the recipe's own functions raise an error while they are traced.
    """
    with tracing(recipe.name):
        make = Step if recipe.shards == 1 else GroupStep
        step: Any = make(recipe, layout, resident=resident, state=state)
        specs = step.specs()
    state, window, data = specs["state"], specs["window"], specs["data"]
    size, all_of_it = specs["vector"].size // recipe.shards, step.state
    hyper, lengths, norms = window["hyper"], step.updates.lengths, []
    update = step.update_specs(hyper)
    if lengths is not None:
        norms = [
            Traceable.of("measure", step.measure_chunk if step.sharded else step.measure, update[:-1]),
            Traceable.of("ratios", step.ratios, step.ratios_specs(hyper)),
        ]
    ahead = 1 if resident else batches_in_memory(layout.devices * nbytes(data))
    return StepPrograms(
        recipe=recipe,
        layout=layout,
        resident=resident,
        replica=Traceable.of("replica", step.traced, (*read(state), window["rows"], data, specs["place"])),
        update=Traceable.of("update", step.update_chunk if step.sharded else step.update, update, (0,)),
        calls=step.calls,
        size=size,
        parameters=count((all_of_it.params, all_of_it.frozen)),
        parameter_bytes=nbytes(state.params) + nbytes(state.frozen) + nbytes(state.ema),
        optimizer_bytes=nbytes(state.optimizer),
        state_bytes=nbytes(state.state) + nbytes(state.sums),
        data_bytes=ahead * nbytes(data) + 2 * nbytes(window),
        whole=Whole(
            nbytes((all_of_it.params, all_of_it.frozen, all_of_it.optimizer, all_of_it.ema)),
            count(all_of_it.params),
        ),
        checkpoint_bytes=nbytes(all_of_it.without("saved")),
        fused=step.fused,
        norms=tuple(norms),
        gathered=lengths.size if lengths is not None and step.sharded else 0,
        cut=step.updates.flat.size if step.sharded else 0,
    )


def waiting(calls: int, size: int) -> int:
    """The peak bytes of a device's vectors of `size` float32 while one of its `calls` replicas runs
    (including its own vector), in the order of `engine.programs`.

    If they are added as they are ready, there are a partial sum for each level of the tree, and a leaf.
    """
    if meet_at_once(calls, size):
        return 4 * size * calls
    depth = most = 0
    for pops in merges(calls):
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


TPU_GIB = {"TPU v2": 7.48, "TPU v5e": 15.75, "TPU v6e (Trillium)": 31.25}
"""Of one device, what the compiler says is available when it refuses a program (libtpu 0.0.42)."""

TPU_SHARE = 7.48 / 8
"""Of the others' memory in GiB, whose compiler was not heard: the least of those above."""


def available(target: Target) -> tuple[int | None, Fact]:
    """The available bytes of one JAX device of `target`, and the source of the figure."""
    chip = target.chip
    if chip.kind == "CPU":
        return host_memory().total_bytes, fact("memory-of-this-host")
    if chip.memory_GB is None:
        return None, fact("memory-unknown", chip=chip.name)
    if chip.kind == "TPU":
        each = TPU_GIB.get(chip.name, chip.memory_GB / chip.jax_devices_per_chip * TPU_SHARE)
        return int(each * 2**30), fact("memory-of-tpu", gib=chip.memory_GB)
    total = chip.memory_GB * 1e9 if chip.cuda_MiB is None else chip.cuda_MiB * 2**20
    return int(total * GPU_SHARE), fact("memory-of-gpu", gb=total / 1e9, share=GPU_SHARE)


def held(
    programs: StepPrograms, target: Target, temporary: Mapping[str, float], program: float
) -> Memory | None:
    """The memory of a step of `programs` on a device of `target`; `None` if the device's is unknown.
    Arguments as of `StepPrograms.memory`."""
    limit, source = available(target)
    return None if limit is None else programs.memory(temporary, program, limit, source)


def _crossing(tries: Sequence[tuple[int, tuple[bool, float]]]) -> float:
    """Where the line through two tries has the share 1, infinite if it does not rise; through 0, if there is
    one try."""
    (a, (_, low)), (b, (_, high)) = (0, (True, 0.0)) if len(tries) == 1 else tries[0], tries[-1]
    slope = (high - low) / (b - a)
    return a + (1 - low) / slope if slope > 0 else math.inf


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

    def ask(n: int) -> bool:
        if n not in known:
            known[n] = fits(dataclasses.replace(recipe, batch=n * unit))
        return known[n][0]

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
        if ask(guess):
            good = max(good, guess)
        else:
            bad = min(bad, guess)
        expected = end()
        if good > 0 and len(known) > 1 and good >= 0.96 * min(expected, most):
            break
        guess = min(max(int(min(0.98 * expected, most)), good + 1), bad - 1)
        if guess in known or len(known) > 8:
            guess = (good + bad) // 2
        if guess <= good:
            break
    return good * unit or None
