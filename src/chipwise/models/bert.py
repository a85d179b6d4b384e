"""BERT's encoder with a classification head: post-norm blocks, and masked padding.

Source: Devlin et al., "BERT" (2018, arXiv:1810.04805). It computes what Hugging Face's
`BertForSequenceClassification` does, except that dropout is only on the embeddings and before the
head.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .adapted import Linear
from .gelu import gelu
from .layer_norm import LayerNorm
from .tied import embed
from .transformer import KEPT_ON_GPUS, Attention, Blocks, Embedding, summed


class PostNormBlock(nnx.Module):
    """`norm(x + attention(x))`, then `norm(x + mlp(x))` with a hidden layer of `4 * width`."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        init = nnx.initializers.truncated_normal(0.02)
        self.attention = Attention(width, heads, causal=False, init=init, out_init=init, rngs=rngs)
        self.norm1 = LayerNorm(width, epsilon=1e-12)
        self.hidden = Linear(width, 4 * width, kernel_init=init, rngs=rngs)
        self.out = Linear(4 * width, width, kernel_init=init, rngs=rngs)
        self.norm2 = LayerNorm(width, epsilon=1e-12)

    def __call__(self, x: jax.Array, seen: jax.Array, first: int | None = None) -> jax.Array:
        y = self.attention(x, seen, first=first)
        x = self.norm1(summed(x if first is None else x[:, :first], y, "attended"))
        hidden = checkpoint_name(self.hidden(x), "mlpwi")
        y = checkpoint_name(self.out(gelu(hidden)), "mlpwo")
        return self.norm2(summed(x, y, "summed"))


class BERT(nnx.Module):
    """Integer tokens `(batch, t)`, `t <= context` -> logits `(batch, classes)`. With `classes=0` it
    returns features `(batch, width)` of the first token.

    Token 0 is padding: no position sees it. 109,483,778 parameters for two classes. `kinds`: the
    number of segment types. `__call__` also takes the segment type of each token, by default 0.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 30_522,
        context: int = 512,
        depth: int = 12,
        width: int = 768,
        heads: int = 12,
        classes: int = 2,
        kinds: int = 2,
        dropout: float = 0.1,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.truncated_normal(0.02)
        self.words = Embedding(vocabulary, width, rngs=rngs)
        self.places = Embedding(context, width, rngs=rngs)
        self.kinds = Embedding(kinds, width, rngs=rngs)
        self.norm = LayerNorm(width, epsilon=1e-12)
        self.blocks = Blocks(
            depth, partial(_block, width, heads), on_gpus=f"{KEPT_ON_GPUS}+summed", rngs=rngs
        )
        self.pooler = nnx.Linear(width, width, kernel_init=init, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        head = nnx.Linear(width, classes, kernel_init=init, rngs=rngs) if classes else None
        self.classifier: Any = head

    def __call__(self, tokens: jax.Array, kinds: jax.Array | None = None) -> jax.Array:
        x = (
            embed(self.words.embedding[...], tokens)
            + self.places.embedding[...][None, : tokens.shape[1]]
        )
        kinds = jnp.zeros_like(tokens) if kinds is None else kinds
        x = self.dropout(self.norm(x + embed(self.kinds.embedding[...], kinds)))
        x = self.blocks(x, tokens != 0, first=1)
        x = self.dropout(jnp.tanh(self.pooler(x[:, 0])))
        return x if self.classifier is None else self.classifier(x)


def _block(width: int, heads: int, rngs: nnx.Rngs) -> PostNormBlock:
    return PostNormBlock(width, heads, rngs=rngs)
