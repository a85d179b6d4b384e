"""The programs of a recipe's step for a device that need not be there, and what they keep in its memory.

They are the ones that `fit` runs (`engine.step.Step`), with shapes in place of arrays.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from ..data.stream import batches_in_memory
from ..engine.layout import Layout
from ..engine.programs import meet_at_once
from ..engine.state import read
from ..engine.step import Step
from ..errors import ChipwiseError, RecipeError
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from .operations import Traced, trace


@dataclass(frozen=True)
class Traceable:
    """A function of arrays, the shapes it takes, and which argument it may overwrite."""

    name: str
    function: Callable[..., Any]
    specs: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    traced: dict[str, Traced] = field(default_factory=dict, repr=False, compare=False)  # by platform


@dataclass(frozen=True)
class StepPrograms:
    """What one device of a layout runs in a step: `replica` `calls` times, then `update`; between them the
    sum of `size` float32 over all replicas. Bytes are of one device."""

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
    replica_sum_bytes: int
    fused: bool  # `fit` runs all of them as one program

    @property
    def local_vectors(self) -> int:
        """How many vectors of a device meet in `reduce`; more are added as they come."""
        return self.calls if meet_at_once(self.calls, self.size) else 1


def step_programs(recipe: Recipe, layout: Layout, *, resident: bool) -> StepPrograms:
    """The programs of `recipe` on one device of `layout`. Reads no data and runs nothing.

    Raises `RecipeError` when the recipe's own functions raise while they are traced.
    """
    step = Step(recipe, layout, resident=resident)
    with tracing(recipe.name):
        specs = step.specs()
    state, window, data = specs["state"], specs["window"], specs["data"]
    size, moving = specs["vector"].shape[1], state.without("donated")
    total = jax.ShapeDtypeStruct((size,), specs["vector"].dtype)
    held = step.calls if meet_at_once(step.calls, size) else 1 + math.ceil(math.log2(step.calls))
    ahead = 1 if resident else batches_in_memory(layout.devices * nbytes(data))
    return StepPrograms(
        recipe=recipe,
        layout=layout,
        resident=resident,
        replica=Traceable("replica", step.traced, (*read(state), window["rows"], data, specs["place"])),
        update=Traceable("update", step.update, (moving, total, window["hyper"], specs["squares"]), (0,)),
        calls=step.calls,
        size=size,
        parameters=sum(math.prod(x.shape) for x in jax.tree.leaves((state.params, state.frozen))),
        parameter_bytes=nbytes(state.params) + nbytes(state.frozen) + nbytes(state.ema),
        optimizer_bytes=nbytes(state.optimizer),
        state_bytes=nbytes(state.state) + nbytes(state.sums),
        data_bytes=ahead * nbytes(data) + 2 * nbytes(window),
        replica_sum_bytes=4 * size * (held + 1),  # and their total
        fused=step.fused,
    )


def traced_program(program: Traceable, platform: str) -> Traced:
    """The operations of a program in the form that `platform` ("cuda", "cpu", "tpu") would run: found once,
    for all the targets that share the program."""
    if platform not in program.traced:
        with tracing(program.name):
            program.traced[platform] = trace(program.function, *program.specs, platform=platform)
    return program.traced[platform]


@contextlib.contextmanager
def tracing(name: str) -> Iterator[None]:
    """Makes one `RecipeError` of whatever a recipe's functions raise while they are traced."""
    try:
        yield
    except ChipwiseError:
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise RecipeError(
            "recipe-not-traced", recipe=name, error=type(error).__name__, message=line
        ) from error


def nbytes(tree: Tree) -> int:
    """Bytes of a tree of arrays or shapes; keys count as their data."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        total += math.prod(leaf.shape) * leaf.dtype.itemsize
    return total
