"""The cases of `tests/golden`: every built-in recipe, and variations of the tests' small recipe.

The small recipe (`tasks.py`) has batch norm, dropout, augmentation and an integer in its state.
Six optimizers train it. What else a recipe can say is varied one thing at a time, with an
optimizer that works on the flat vector of parameters, and with LAMB, which works leaf by leaf,
where that matters.

Of the built-in recipes, digits and mnist are trained, which takes seconds on a CPU. The others
are large and only traced, as are variations whose training would repeat what another one shows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import chipwise as cw
import tasks
from chipwise.data.synthetic import like
from chipwise.recipes import BUILT_IN

STEPS = 20
"""How long a case is trained."""

DEVICES = (1, 2, 3, 8)
"""On how many simulated devices, or on how many groups of several devices."""

RATE = cw.one_cycle(0.02, warmup="20%")

OPTIMIZERS = {
    "sgd": cw.sgd(lr=RATE, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": cw.adam(lr=RATE),
    "adamw": cw.adamw(lr=RATE, weight_decay=0.01, decay="kernels", clip=1.0),
    "lamb": cw.recipe.lamb(lr=RATE, clip=1.0),
    "lars": cw.recipe.lars(lr=RATE, weight_decay=0.01),
    "muon": cw.recipe.muon(lr=RATE, weight_decay=0.01),
}


@dataclass(frozen=True)
class Case:
    """A recipe whose programs and bits are kept.

    *Fields:* `recipe` makes it; `trained`, whether it is trained or only traced; `examples`, how
    many made-up ones it is trained on, if it would have to download its data.
    """

    recipe: Callable[[], cw.Recipe]
    trained: bool = True
    examples: int | None = None

    @property
    def device_counts(self) -> tuple[int, ...]:
        """On how many devices the case is trained: in groups of `shards`, at most one a block."""
        made = self.recipe()
        most = min(made.block_count, max(DEVICES) // made.shards)
        return tuple(sorted({min(groups, most) * made.shards for groups in DEVICES}))

    def to_train(self) -> cw.Recipe:
        """The recipe as it is trained: for `STEPS` steps, on data that is here, not evaluated."""
        made = self.recipe()
        train = made.task.train
        if self.examples is not None:
            drawn = like(train, made.task.classes).take(np.arange(self.examples))
            train = cw.Arrays(**drawn)
        task = dataclasses.replace(made.task, train=train, eval=None)
        return dataclasses.replace(made, task=task, duration=f"{STEPS}st")


def small(optimizer: str = "adamw", **changes: Any) -> cw.Recipe:
    """The tests' small recipe."""
    return tasks.recipe(optimizer=OPTIMIZERS[optimizer], **changes)


def ragged(optimizer: str = "sgd") -> cw.Recipe:
    """The small net on examples of 1 to 12 values, padded to 12.

    Each example counts as much as it has values, so that replicas count differently.
    """

    def padded(examples: int, seed: int) -> cw.data.Padded:
        columns = tasks.data(examples, seed).take(np.arange(examples))
        lengths = np.random.default_rng(seed).integers(1, tasks.FEATURES + 1, examples)
        rows = [
            {"x": x[:length], "label": label}
            for x, label, length in zip(columns["x"], columns["label"], lengths, strict=True)
        ]
        return cw.data.Padded(rows, tasks.FEATURES)

    def loss(params, state, batch, key, train):
        x = jnp.where(batch["seen"], batch["x"], jnp.uint8(0))
        logits = tasks.plain_logits(params, {"x": x})
        values = cw.losses.softmax_cross_entropy(logits, batch["label"])
        counted = jnp.sum(batch["seen"], axis=1, dtype=jnp.float32)
        return {"loss": cw.Sum(jnp.sum(values * counted), jnp.sum(counted))}, state

    task = cw.Task(init=tasks.init, loss=loss, train=padded(101, 0), eval=padded(53, 1))
    return small(optimizer, task=task)


def documents(name: str, *sizes: str, **changes: Any) -> cw.Recipe:
    """A small language model whose rows hold several documents, on made-up tokens."""
    kinds, context = 32, 24
    settings = [
        f"vocabulary={kinds}",
        f"context={context}",
        "depth=1",
        "width=16",
        "heads=2",
        *sizes,
    ]
    settings += ["documents=true", "precision=f32", "batch=16", "replicas=8"]
    made = cw.load(name, settings, synthetic=True)
    token = np.random.default_rng(0).integers(0, kinds, (57, context + 1)).astype(np.uint16)
    train, held_out = cw.Arrays(token=token[:48]), cw.Arrays(token=token[48:])
    task = dataclasses.replace(made.task, train=train, eval=held_out)
    return dataclasses.replace(made, task=task, optimizer=OPTIMIZERS["adamw"], **changes)


PLAIN = tasks.task(loss=tasks.plain_loss)
"""Without batch norm, whose float32 statistics strict tests do not mix with other types."""

LORA = cw.recipe.lora(rank=2, alpha=3, on=("w", "v"))
IN_BLOCKS = dataclasses.replace(LORA, on=("blocks/*kernel",))


def _case(make: Callable[..., cw.Recipe], *given: Any, **changes: Any) -> Case:
    return Case(functools.partial(make, *given, **changes))


def _traced(make: Callable[..., cw.Recipe], *given: Any, **changes: Any) -> Case:
    return Case(functools.partial(make, *given, **changes), trained=False)


CASES: dict[str, Case] = {
    **{name: _traced(cw.load, name) for name in BUILT_IN},
    "digits": _case(cw.load, "digits"),
    "mnist": Case(functools.partial(cw.load, "mnist"), examples=600),
    **{f"small-{name}": _case(small, name) for name in OPTIMIZERS},
    "small-sgd-one-block": _case(small, "sgd", blocks=1),
    "small-sgd-blocks": _case(small, "sgd", blocks=4),
    "small-lamb-blocks": _traced(small, "lamb", blocks=4),
    "small-adamw-shards": _case(small, batch=48, shards=2),
    "small-adamw-tf32": _traced(small, precision="tf32"),  # as float32 on a CPU
    "small-adamw-bf16": _case(small, precision="bf16", task=PLAIN),
    "small-lamb-bf16": _traced(small, "lamb", precision="bf16", task=PLAIN),
    "small-adamw-f16": _case(small, precision="f16", task=PLAIN),
    "small-adamw-average": _traced(small, ema=0.9),
    "small-sgd-ragged": _case(ragged),
    "small-adamw-lora": _case(small, adapters=LORA),
    "small-lamb-lora": _traced(small, "lamb", adapters=LORA),
    "gpt2-documents": _case(documents, "gpt2-124m"),
    "gpt2-documents-lora": _traced(documents, "gpt2-124m", adapters=IN_BLOCKS),
    "llama-documents": _traced(documents, "llama-8b", "kv_heads=1", "hidden=24", "shards=1"),
}
"""By the names of their files."""
