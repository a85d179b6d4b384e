"""A run's adapters as Hugging Face's PEFT reads them, beside a language model that Hugging Face has
too.

Its folder has `adapter_config.json` and `adapter_model.safetensors`, whose arrays are `(rank,
inputs)` and `(outputs, rank)`: https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base import RecipeError
from ..recipe.low_rank import Adapter
from ..recipe.task import by_path
from .huggingface import kind_of
from .model import Trained
from .weight_names import TABLES, NamedArrays

_STACK = "blocks/stack/"


def adapter_files(model: Trained) -> tuple[dict[str, Any], NamedArrays]:
    """The content of `adapter_config.json`, and the arrays by name.

    Raises `RecipeError` if the model is none of a run folder with adapters of matrices in the
    blocks of a GPT-2 or Llama, or if more than adapters was trained.
    """
    given = by_path(model.apart, is_leaf=lambda x: isinstance(x, Adapter))
    adapters = {path: one for path, one in given.items() if isinstance(one, Adapter)}
    if not adapters or model.recipe.adapters is None:
        raise RecipeError("peft-without-adapters", recipe=model.recipe.name)
    kind, _ = kind_of(model.recipe.task)
    known = kind in ("gpt2", "llama")
    paths = [
        path for path in given if not known or path not in adapters or not path.startswith(_STACK)
    ]
    if kind is None or paths:
        raise RecipeError("peft-names", recipe=model.recipe.name, paths=paths)
    names = TABLES[kind][-1]
    owners = {
        path: path.rpartition("/")[0].removeprefix(_STACK).replace("/", ".") for path in adapters
    }
    arrays = {}
    targets = {path: names.there()[owner] for path, owner in owners.items()}
    for path, one in adapters.items():
        for part, stack in (("lora_A", one.lora_a), ("lora_B", one.lora_b)):
            for i, layer in enumerate(np.asarray(stack)):
                name = f"base_model.model.{names.begin(i)}{targets[path]}.{part}.weight"
                arrays[name] = np.ascontiguousarray(layer.T)
    settings = model.recipe.adapters
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": sorted(targets.values()),
        "fan_in_fan_out": not names.turned,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }, arrays
