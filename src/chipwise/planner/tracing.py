"""Makes the programs of a step for absent chips.

They are those that a run starts, with shapes instead of arrays. Tracing reads no data and runs
nothing.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from ..data.sources import nbytes as source_bytes
from ..data.stream import batches_in_memory
from ..recipe.recipe import Recipe
from ..recipe.source import rows_of, spec_of
from ..run.evaluate import evaluation
from ..step.blueprint import Blueprint, blueprint
from ..step.freeze import adapted_matrices
from ..step.group_step import GroupStep
from ..step.layout import Layout
from ..step.program import Program, tracing
from ..step.state import TrainState, abstract_model, nbytes
from ..step.step import Step


def training_step(
    recipe: Recipe,
    layout: Layout,
    *,
    resident: bool,
    state: TrainState | None = None,
    keeps_evaluation: bool | None = None,
) -> Blueprint:
    """A step of training on one device, or group, of `layout`.

    *Arguments:*

    - `state`: `abstract_state(recipe)`, if known. It is half of the work, and the same in every
      layout.
    - `keeps_evaluation`: whether evaluation data is on the device. Unless it is None, or a group
      has several devices, a block of the evaluation is one of the programs, `EVALUATION`.

    Raises `RecipeError` if the recipe's own functions raise an error while they are traced.
    """
    with tracing(recipe.name):
        make = Step if recipe.shards == 1 else GroupStep
        step = make(recipe, layout, state=state)
        made = blueprint(step, resident=resident, apart=True)
    # No compiler is asked about a gradient's squares or about picking examples: these take a small
    # part of a step's time.
    made = replace(made, programs=tuple(p for p in made.programs if p.name != "square"))
    if keeps_evaluation is None or recipe.shards > 1:
        return made
    with tracing(recipe.name):
        made = _with_evaluation(made, keeps_evaluation)
    merged = adapted_matrices(step.state.params, step.state.frozen)
    return replace(made, eval_merged_bytes=nbytes(merged))


def _with_evaluation(step: Blueprint, resident: bool) -> Blueprint:
    """`step` and a block of the evaluation. The evaluation data is on the device if `resident`."""
    recipe = step.recipe
    source = step.recipe.task.eval
    assert source is not None
    made = evaluation(recipe, source)
    columns = rows_of(spec_of(source), made.size)
    specs = (*abstract_model(recipe), columns, jax.ShapeDtypeStruct((2,), jnp.int32))
    read = nbytes(columns)
    held = (
        source_bytes(source) if resident else batches_in_memory(step.layout.devices * read) * read
    )
    return replace(
        step,
        programs=(*step.programs, Program(EVALUATION, made.block, specs)),
        data_bytes=step.data_bytes + held,
        eval_block=made.size,
    )


EVALUATION = "evaluation"
