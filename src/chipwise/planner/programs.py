"""The programs of a recipe's step for a device that may be absent, and the memory that they need.

They are the programs of `fit` (`engine.step.Step`), with shapes instead of arrays.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from ..chips.catalogue import Chip
from ..chips.targets import Target
from ..engine.blueprint import Blueprint, Memory, blueprint, tracing
from ..engine.group_step import GroupStep
from ..engine.layout import Layout
from ..engine.state import TrainState
from ..engine.step import Step
from ..machine.detect import GPU_SHARE
from ..machine.limits import memory as host_memory
from ..models.target import Target as Kernels
from ..models.target import depends_on_chip, traced_for
from ..recipe import precision
from ..recipe.recipe import Recipe
from ..words.facts import Fact, fact
from .exporting import Contents, Exported, export_program, flat_positions


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
            known = replace(known, write=lambda: self._export(chip, one_pass).body)
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


StepPrograms = Blueprint[Traceable]
"""A step whose programs can be exported for chips that are not here."""


def step_programs(
    recipe: Recipe, layout: Layout, *, resident: bool, state: TrainState | None = None
) -> StepPrograms:
    """The programs of `recipe` on one device, or group, of `layout`. Reads no data and runs nothing.

    *Arguments:* `state`: `abstract_state(recipe)`, if known; it is half of the work, and the same in every
    layout.

    Raises `RecipeError` if the recipe's own functions raise an error while they are traced.
    """
    with tracing(recipe.name):
        make: Any = Step if recipe.shards == 1 else GroupStep
        made: Any = blueprint(make(recipe, layout, resident=resident, state=state), apart=True)
    # No compiler is asked about a gradient's squares: they take a small part of the update's time.
    asked = (program for program in made.programs if program.name != "square")
    return replace(made, programs=tuple(Traceable.of(p.name, p.function, p.specs, p.donate) for p in asked))


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
