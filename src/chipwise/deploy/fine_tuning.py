"""The recipe that fine-tunes a published model, by its `config.json` alone: enough to plan it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ..base import DataError, RecipeError
from ..base.figures import one_line
from ..recipe.low_rank import lora
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from ..recipes.load import load
from .huggingface import CONFIG, HUB, from_hub, read_config, settings_of, unlike

_LANGUAGE = ("batch=8", "replicas=8", "shards=1", "duration=1000st")
_IMAGES = ("batch=64", "duration=1000st")
USUAL = {
    "gpt2-124m": _LANGUAGE,
    "llama-8b": _LANGUAGE,
    "vit-s16": _IMAGES,
    "imagenet-resnet50": _IMAGES,
}
"""Settings by default in the place of a built-in recipe's, which trains from nothing."""
CONTEXT = 2048
"""The longest context by default, in tokens."""
EPSILONS = ("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps")
"""Settings that may differ from the built-in model's, since they cost neither time nor memory."""
MATRICES = "blocks/stack/*kernel"
"""What adapters change: every matrix of every block."""


def is_described(path: str) -> bool:
    """Whether `path` is `hf://OWNER/NAME` or a folder with a `config.json`."""
    return path.startswith(HUB) or (Path(path) / CONFIG).is_file()


def fine_tuning(
    path: str,
    settings: Sequence[str] = (),
    data: str | Path | None = None,
    rank: int | None = None,
) -> Recipe:
    """The recipe that fine-tunes the model of a folder, or of `hf://OWNER/NAME`. Its weights are
    neither read nor downloaded, so a run would start from random ones.

    *Arguments:*

    - `settings`, `data`: as in `cw.load`. By default a recipe has the settings `USUAL`, and a
      language model its own context, at most `CONTEXT`.
    - `rank`: train adapters of this rank on all matrices of the blocks, with an alpha of twice the
      rank. All else is frozen, in the type that `config.json` states.

    Raises `DataError` for a folder without a readable `config.json` and for a model of another
    family, `RecipeError` for a setting of `config.json` that the built-in model does not have.
    """
    folder = from_hub(path, CONFIG) if path.startswith(HUB) else Path(path)
    try:
        config = read_config(folder)
    except ValueError as error:
        raise DataError("weights-damaged", path=path, reason=one_line(error, 160)) from error
    name, sizes = settings_of(path, config)
    usual = [*sizes, *USUAL.get(name, ())]
    if name in ("gpt2-124m", "llama-8b"):
        longest = config.get("max_position_embeddings") or config.get("n_positions") or CONTEXT
        usual.append(f"context={min(CONTEXT, longest)}")
    recipe = load(name, [*usual, *settings], data)
    for one in unlike(config, recipe.task):
        if one["setting"] not in EPSILONS:
            raise RecipeError("huggingface-setting", path=path, **one)
    recipe = dataclasses.replace(recipe, name=Path(path).name)
    return recipe if rank is None else _adapted(recipe, config, rank)


def _adapted(recipe: Recipe, config: Mapping[str, Any], rank: int) -> Recipe:
    """`recipe` with adapters of `rank` alone, and weights in the type that `config` states."""
    stated = config.get("dtype") or config.get("torch_dtype")
    dtype = jnp.bfloat16 if stated == "bfloat16" else jnp.float32
    first = recipe.task.init

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        params, state = first(key)
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params), state

    return dataclasses.replace(
        recipe,
        task=dataclasses.replace(recipe.task, init=init),
        adapters=lora(rank=rank, alpha=2 * rank, on=MATRICES),
    )
