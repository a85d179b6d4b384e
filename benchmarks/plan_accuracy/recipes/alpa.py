"""The GPT of Alpa's benchmark (Zheng et al. 2022, arXiv:2201.12023), as a recipe.

    chipwise plan benchmarks/plan_accuracy/recipes/alpa.py:gpt --set batch=8 --set replicas=1 --on v100-32gb

As alpa-projects/alpa has it in `alpa/model/bert_model.py` and `gpt_model.py`: norms come after what they
normalise, as in BERT; queries, values and keys come of one product and every token sees all; softmax and GELU
by the error function have the type of the net; layers follow one another and keep everything; no dropout; a
table of its own for the logits; their log-softmax and the words as ones and zeros exist at once.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import chipwise as cw
from chipwise.data.synthetic import Absent
from chipwise.models.layer_norm import LayerNorm
from chipwise.models.tied import embed
from chipwise.models.transformer import Embedding, kernels

EPSILON = 1e-12


def gpt(context=1024, vocabulary=25_600, depth=10, width=2048, heads=16):
    init, apply = cw.nnx.functional(lambda rngs: AlpaGPT(vocabulary, context, depth, width, heads, rngs))

    def loss(params, state, batch, key, train):
        text = batch["token"].astype(jnp.int32)
        logits, state = apply(params, state, text[:, :-1], key, train)
        told = jax.nn.one_hot(text[:, 1:], vocabulary, dtype=jnp.float32)
        losses = -jnp.sum(told * jax.nn.log_softmax(logits).astype(jnp.float32), axis=-1)
        return {"loss": cw.Sum.of(jnp.mean(losses, axis=1))}, state

    spec = {"token": jax.ShapeDtypeStruct((context + 1,), np.uint16)}
    return cw.Recipe(
        name="gpt-alpa", task=cw.Task(init=init, loss=loss, train=Absent(10_000_000, spec, "gpt-alpa")),
        batch=8, replicas=1, duration="10000st", precision="f16",
        optimizer=cw.adamw(lr=cw.schedules.cosine(1e-2), weight_decay=1e-4, decay=kernels),
    )  # fmt: skip


class AlpaBlock(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.qvk, self.mixed = nnx.Linear(width, 3 * width, rngs=rngs), nnx.Linear(width, width, rngs=rngs)
        self.hidden, self.out = (
            nnx.Linear(width, 4 * width, rngs=rngs),
            nnx.Linear(4 * width, width, rngs=rngs),
        )
        self.norm1, self.norm2 = (LayerNorm(width, epsilon=EPSILON) for _ in range(2))
        self.heads = heads

    def attend(self, x):
        b, t, width = x.shape
        qvk = self.qvk(x).reshape(b, t, width, 3)
        q, v, k = (qvk[..., i].reshape(b, t, self.heads, -1) for i in range(3))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k))
        return self.mixed(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, width))

    def __call__(self, x):
        x = self.norm1(self.attend(x) + x)
        return self.norm2(self.out(jax.nn.gelu(self.hidden(x), approximate=False)) + x)


class AlpaGPT(nnx.Module):
    """Tokens (b, t) -> logits (b, t, vocabulary)."""

    def __init__(self, vocabulary, context, depth, width, heads, rngs):
        self.words, self.places = (Embedding(n, width, rngs=rngs) for n in (vocabulary, context))
        self.norm = LayerNorm(width, epsilon=EPSILON)
        self.blocks = nnx.Sequential(*(AlpaBlock(width, heads, rngs) for _ in range(depth)))
        self.logits = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, tokens):
        x = embed(self.words.embedding[...], tokens) + self.places.embedding[...][None, : tokens.shape[1]]
        return self.logits(self.blocks(self.norm(x)))
