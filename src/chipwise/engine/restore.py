"""Reading a run's parameters back, to evaluate or to use them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from ..data.sources import spec_of
from ..errors import CheckpointError
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from . import step as steps
from .checkpoint import Checkpoints


@dataclass(frozen=True)
class Restored:
    """*Fields:* `params` (the averaged ones when the recipe has an EMA) and `state` as NumPy arrays;
    `steps` done."""

    params: Tree
    state: Tree
    steps: int


def abstract_state(recipe: Recipe) -> Tree:
    """The training state of `recipe` as shapes and types only."""
    return jax.eval_shape(lambda: steps.init_state(recipe, spec_of(recipe.task.train)))


def restore_run(recipe: Recipe, run: str | Path, say: Callable[[str], None] = warnings.warn) -> Restored:
    """The newest readable checkpoint of the run folder `run`, made with `recipe`.

    Raises `CheckpointError` when there is none.
    """
    folder = Path(run) / "checkpoints"
    if not folder.is_dir():
        raise CheckpointError(f"{run} holds no checkpoints: train first, with --run {run}.")
    checkpoints = Checkpoints(folder, read_only=True)
    try:
        found = checkpoints.restore(abstract_state(recipe), say)
    finally:
        checkpoints.close()
    if found is None:
        raise CheckpointError(f"{run} holds no complete checkpoint: train first, with --run {run}.")
    state, _ = found
    params = state.ema if recipe.ema is not None else state.params
    return Restored(params, state.state, int(state.step))
