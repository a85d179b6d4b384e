"""What one types here for an argument that other frameworks' training functions take."""

from __future__ import annotations

from collections.abc import Iterable

from .errors import RecipeError

_LENGTH = 'Recipe(duration="20ep") or "5000st"'
_WEIGHTS = "a loss with weights, such as cw.losses.weighted_softmax_cross_entropy"
_SPLIT = "a slice of the arrays as eval=, or chipwise pack --split 0.1"
_TURNS = "more replicas than devices, with all examples of a step in Recipe(batch=...)"
HERE = {
    "accumulate_grad_batches": _TURNS,
    "batch_size": "Recipe(batch=64), over all devices",
    "callbacks": "a loop, for event in cw.training(recipe), where your code runs at its events",
    "class_weight": _WEIGHTS,
    "drop_remainder": "nothing, since an epoch is every example once",
    "epochs": _LENGTH,
    "gradient_accumulation_steps": _TURNS,
    "gradient_clip_val": "clip=, as in cw.sgd(0.1, clip=1.0)",
    "logger": 'track="wandb:PROJECT" of cw.fit',
    "max_epochs": _LENGTH,
    "max_steps": _LENGTH,
    "num_train_epochs": _LENGTH,
    "num_workers": 'On(workers="processes:4")',
    "sample_weight": _WEIGHTS,
    "shuffle": "nothing, since the order follows from Recipe(seed=...)",
    "steps_per_execution": "On(steps_per_call=32)",
    "steps_per_epoch": "nothing, since an epoch is every example once",
    "validation_data": "eval=, beside train=",
    "validation_split": _SPLIT,
    "verbose": 'progress="none" of cw.fit',
}
"""Names of Keras, Lightning and Hugging Face's Trainer, to what takes their place."""


def refuse(function: str, names: Iterable[str], known: Iterable[str] = ()) -> None:
    """Raises `RecipeError` for the first of `names` that is called otherwise here: as the first
    word of it if that is `known` to the function, such as `batch` for `batch_size`."""
    own = {*known}
    for name in names:
        if name in HERE:
            first = name.partition("_")[0]
            raise RecipeError(
                "argument-elsewhere",
                "{function} has no {name}: here it is {here}. docs/coming_from.md lists more.",
                function=function,
                name=name,
                here=f"{first}=" if first in own else HERE[name],
            )
