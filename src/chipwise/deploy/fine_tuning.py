"""The recipe that fine-tunes a published model, by its `config.json` alone: enough to plan it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from ..base import DataError
from ..base.figures import one_line
from ..recipe.low_rank import lora
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from ..recipes import BUILT_IN
from ..recipes.load import load
from .huggingface import CONFIG, HUB, Config, check_config, from_hub, read_config, settings_of

_LANGUAGE = ("batch=8", "replicas=8", "shards=1", "duration=1000st")
USUAL = {
    "gpt2-124m": (*_LANGUAGE, "warmup=20st"),
    "llama-8b": _LANGUAGE,
    "bert-base": ("batch=32", "duration=1000st"),
    "vit-s16": ("batch=64", "duration=1000st"),
    "imagenet-resnet50": ("batch=64", "duration=1000st"),
}
"""Settings by default in the place of a built-in recipe's, which trains from nothing."""
CONTEXT = 2048
"""The longest context by default, in tokens."""
TYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
"""The types of weights that `config.json` may state."""
EPSILONS = ("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps")
"""Settings that may differ from the built-in model's, since they cost neither time nor memory."""
MATRICES = "blocks/stack/*kernel"
"""What adapters change: every matrix of every block."""


def is_described(path: str) -> bool:
    """Whether `path` is `hf://OWNER/NAME` or a folder with a `config.json`. A folder with the name
    of a built-in recipe is `./NAME`."""
    return path.startswith(HUB) or (path not in BUILT_IN and os.path.isfile(f"{path}/{CONFIG}"))


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
        longest = config.get("max_position_embeddings", config.get("n_positions", CONTEXT))
        if type(longest) is not int or longest < 1:
            raise DataError("config-context", path=path, context=one_line(repr(longest), 40))
        usual.append(f"context={min(CONTEXT, longest)}")
    recipe = load(name, [*usual, *settings], data)
    check_config(path, config, recipe.task, ignored=EPSILONS)
    recipe = dataclasses.replace(recipe, name=Path(path).name)
    return recipe if rank is None else _adapted(recipe, config, path, rank)


def _adapted(recipe: Recipe, config: Config, path: str, rank: int) -> Recipe:
    """`recipe` with adapters of `rank` alone, and weights in the type that `config` states."""
    stated = config.get("dtype", config.get("torch_dtype")) or "float32"
    packed = config.get("quantization_config") is not None
    if packed or not isinstance(stated, str) or stated not in TYPES:
        shown = "quantization_config" if packed else one_line(repr(stated), 40)
        raise DataError("config-type", path=path, stated=shown, known=list(TYPES))
    first = recipe.task.init

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        params, state = first(key)
        return jax.tree.map(lambda leaf: leaf.astype(TYPES[stated]), params), state

    return dataclasses.replace(
        recipe,
        task=dataclasses.replace(recipe.task, init=init),
        adapters=lora(rank=rank, alpha=2 * rank, on=MATRICES),
    )
