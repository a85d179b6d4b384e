"""ViT as published programs in Flax have it, as recipes: blocks one after another, which keep everything.

    chipwise plan benchmarks/plan_accuracy/recipes/vits.py:algoperf --set batch=1024 --on v100:8

`algoperf`: ViT-S/16 of mlcommons/algorithmic-efficiency, `workloads/imagenet_vit/imagenet_jax/models.py`:
sines for places, the mean of all patches, and no dropout, as in four of its five trials. `t5x`: ViT-B/16 of
NVIDIA/JAX-Toolbox, `rosetta/projects/vit/layers.py`: a class token, a tenth dropped by JAX's own generator,
but not of attention's weights, and the gradient's norm clipped. Both have a kernel each for queries, keys and
values, GELU by its tanh formula, and a layer with tanh before the classifier.
"""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from images import recipe
from text import attend

from chipwise.models.conv import conv
from chipwise.models.layer_norm import LayerNorm

PATCH, PLACES = 16, 196


def algoperf():
    return recipe("vit-algoperf", lambda rngs: FlaxViT(384, 6, False, 0.0, rngs), optimizer="adamw")


def t5x():
    return recipe("vit-t5x", lambda rngs: FlaxViT(768, 12, True, 0.1, rngs), optimizer="adamw_clipped")


class FlaxBlock(nnx.Module):
    def __init__(self, width, heads, dropout, rngs):
        linear = partial(nnx.Linear, rngs=rngs)
        self.query, self.key, self.value, self.mixed = (linear(width, width) for _ in range(4))
        self.hidden, self.out = linear(width, 4 * width), linear(4 * width, width)
        self.norm1, self.norm2 = (LayerNorm(width, epsilon=1e-6) for _ in range(2))
        self.drop, self.heads = nnx.Dropout(dropout, rngs=rngs), heads

    def __call__(self, x):
        b, t, width = x.shape
        y = self.norm1(x)
        q, k, v = (layer(y).reshape(b, t, self.heads, -1) for layer in (self.query, self.key, self.value))
        x = x + self.drop(self.mixed(attend(q, k, v, softmax=None).reshape(b, t, width)))
        hidden = self.drop(nnx.gelu(self.hidden(self.norm2(x)), approximate=True))
        return x + self.drop(self.out(hidden))


class FlaxViT(nnx.Module):
    """`(b, 224, 224, 3)` -> logits `(b, 1000)`. `token`: a class token, whose state is classified, and
    learned places."""

    def __init__(self, width, heads, token, dropout, rngs, depth=12):
        self.patches = nnx.Conv(
            3, width, (PATCH, PATCH), strides=PATCH, padding="VALID", conv_general_dilated=conv, rngs=rngs
        )
        self.token = nnx.Param(jnp.zeros((1, 1, width), jnp.float32)) if token else None
        self.places = nnx.Param(jnp.zeros((1, PLACES + 1, width), jnp.float32)) if token else None
        self.drop = nnx.Dropout(dropout, rngs=rngs)
        self.blocks = nnx.Sequential(*(FlaxBlock(width, heads, dropout, rngs) for _ in range(depth)))
        self.norm = LayerNorm(width, epsilon=1e-6)
        self.last, self.classifier = nnx.Linear(width, width, rngs=rngs), nnx.Linear(width, 1000, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x)
        x = x.reshape(x.shape[0], PLACES, -1)
        if self.token is None:
            x = self.norm(self.blocks(self.drop(x + sines(x.shape[-1]).astype(x.dtype))))
            x = jnp.mean(x.astype(jnp.float32), axis=1).astype(x.dtype)
        else:
            token = jnp.broadcast_to(self.token[...], (x.shape[0], 1, x.shape[2]))
            x = jnp.concatenate([token, x], axis=1) + self.places[...]
            x = self.norm(self.blocks(self.drop(x)))[:, 0]
        return self.classifier(jnp.tanh(self.last(x)))


def sines(width):
    """`(1, 196, width)` float32: places in two dimensions (Chen et al. 2021, arXiv:2104.02057)."""
    y, x = jnp.divmod(jnp.arange(PLACES, dtype=jnp.float32), PLACES**0.5)
    each = jnp.arange(width // 4, dtype=jnp.float32) / (width // 4 - 1)
    x, y = (place[:, None] / 10_000.0 ** each[None] for place in (x, y))
    return jnp.concatenate([jnp.sin(x), jnp.cos(x), jnp.sin(y), jnp.cos(y)], axis=1)[None]
