"""A program of a step: a pure function of arrays, with the shapes of its arguments.

A run compiles it for its devices. A plan exports it for absent chips.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from ..base import ChipwiseError, RecipeError
from ..chips.catalogue import Chip
from ..compile.exports import (
    EXPORTING,
    Contents,
    Exported,
    cudnn_assumed,
    export_program,
    flat_positions,
)
from ..models.chip_traits import ChipTraits, depends_on_chip, traced_for
from ..recipe import precision


@dataclass(frozen=True)
class Program:
    """A program of a device, or of a group of devices."""

    name: str
    function: Callable[..., Any] = field(repr=False, compare=False)
    specs: tuple[Any, ...] = field(repr=False)
    """The program's arguments as trees of `ShapeDtypeStruct`, with shardings for a group."""
    donate: tuple[int, ...] = ()
    """The arguments that the program may overwrite."""
    _exported: dict[ChipTraits | str, Exported] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def donated(self) -> tuple[int, ...]:
        """The positions of the arrays that the program may overwrite, among all of its arrays."""
        return flat_positions(self.specs, self.donate)

    @property
    def arguments(self) -> int:
        """The number of arrays."""
        return len(jax.tree.leaves(self.specs))

    def exported(self, chip: Chip, *, one_pass: bool = False) -> Exported:
        """Returns the program for a chip, traced once for all chips for which it is the same.

        *Arguments:* with `one_pass`, float32 products are in one pass (see
        `recipe.precision.one_pass`)."""
        kernels = ChipTraits.of(chip)
        if known := self._exported.get(_same_trace(kernels)):
            return known
        # JAX may have traced a jitted `function` before, with all passes
        function = inspect.unwrap(self.function) if one_pass else self.function
        with traced_for(chip), precision.one_pass() if one_pass else contextlib.nullcontext():
            exported = export_program(function, self.specs, kernels.platform)
        # Only after the trace is it known whether it depends on the chip
        self._exported[_same_trace(kernels)] = exported
        return exported

    def contents(self, chip: Chip) -> Contents:
        """Returns the contents of the program for a chip. Traces it unless it was exported."""
        if known := self._exported.get(_same_trace(ChipTraits.of(chip))):
            return known.contents
        with EXPORTING, cudnn_assumed(), tracing(self.name), traced_for(chip):
            closed = jax.make_jaxpr(self.function)(*self.specs)
        return Contents.of(closed.jaxpr)


def _same_trace(kernels: ChipTraits) -> ChipTraits | str:
    """A key that is equal for chips for which the same program is traced."""
    return kernels if depends_on_chip(kernels.platform) else kernels.platform


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
