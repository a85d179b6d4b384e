"""Text classification with a net of BERT's size (109,483,778 parameters), from random weights.

    chipwise train bert-base --data DIR
    chipwise train bert-base --synthetic               # random tokens: speed without a data set
    chipwise plan bert-base --on t4,v5e-8              # no data needed

DIR is a packed folder with the columns `token`, `length` integers with 0 for padding after the
text, and `label`. The settings are those of fine-tuning in Devlin et al. (2018, arXiv:1810.04805):
batch 32, 3 epochs, Adam with a decoupled decay of 0.01 on matrices, a peak of 5e-5 after a tenth of
the run.

To start from BERT's weights, in your own recipe:

    recipe = cw.load("bert-base", data=DIR)
    weights = cw.pretrained("model.safetensors", names="bert")
    recipe = dataclasses.replace(recipe, task=weights.start(recipe.task, fresh=("classifier/*",)))

Expected accuracy: 93.5 % on the sentences of SST-2 with BERT's weights (the source's table 1), and
much less from random weights. Without data, the numbers of examples are those of SST-2. Not
measured here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..base import invalid
from ..data.synthetic import Absent
from ..interop.nnx import functional
from ..models.bert import BERT
from ..models.transformer import kernels
from ..recipe import losses
from ..recipe.optimizers import adamw
from ..recipe.recipe import Recipe
from ..recipe.schedules import one_cycle
from ..recipe.source import Source
from ..recipe.task import Sum, Task
from .tokens import packed


def recipe(
    data: str | None = None,
    length: int = 128,
    vocabulary: int = 30_522,
    depth: int = 12,
    width: int = 768,
    heads: int = 12,
    classes: int = 2,
) -> Recipe:
    """*Arguments:*

    - `length`: the tokens of a text.
    - `vocabulary`: the number of different tokens.
    - `depth`: the blocks.
    - `width`: the entries of a token's state.
    - `heads`: the heads of attention, a divisor of `width`.
    - `classes`: the number of classes when there is no data.
    """
    if width % heads or not 1 <= vocabulary <= 65_536:
        expected = "heads that divide the width, and at most 65,536 kinds of tokens"
        raise invalid(
            "bert-sizes", "width, heads, vocabulary", (width, heads, vocabulary), expected
        )
    train, held_out, classes = _texts(data, length, vocabulary, classes)
    init, apply = functional(
        lambda rngs: BERT(
            vocabulary=vocabulary,
            context=max(length, 512),
            depth=depth,
            width=width,
            heads=heads,
            classes=classes,
            rngs=rngs,
        )
    )

    def logits(params, state, batch, key, train):
        outputs, state = apply(params, state, batch["token"].astype(jnp.int32), key, train)
        return outputs.astype(jnp.float32), state

    def loss(params, state, batch, key, train):
        outputs, state = logits(params, state, batch, key, train)
        values = losses.softmax_cross_entropy(outputs, batch["label"])
        return {
            "loss": Sum.of(values),
            "accuracy": Sum.of(losses.correct(outputs, batch["label"])),
        }, state

    same = (length, vocabulary, depth, width, heads) == (128, 30_522, 12, 768, 12)
    return Recipe(
        name="bert-base" if same else "bert",
        task=Task(
            init=init,
            loss=loss,
            train=train,
            eval=held_out,
            classes=classes,
            predict=lambda params, state, inputs: logits(params, state, inputs, None, False)[0],
        ),
        batch=32,
        replicas=8,
        duration="3ep",
        optimizer=adamw(
            lr=one_cycle(5e-5, warmup="10%"), weight_decay=0.01, decay=kernels, clip=1.0
        ),
        precision="bf16",
    )


def _texts(
    data: str | None, length: int, vocabulary: int, classes: int
) -> tuple[Source, Source, int]:
    """Training and evaluation texts: columns `token` `(length,)` of whole numbers and `label`."""
    token = jax.ShapeDtypeStruct((length,), np.uint16)
    if data is None:
        spec = {"token": token, "label": jax.ShapeDtypeStruct((), np.int32)}
        below = {"token": vocabulary, "label": classes}
        texts = [Absent(n, spec, "Text in tokens with labels", below) for n in (67_349, 872)]
        return texts[0], texts[1], classes
    train, held_out = packed(data, token, vocabulary, labelled=True)
    return train, held_out, train.classes or classes
