"""Swin-B, as a recipe (Liu et al. 2021, arXiv:2103.14030; sizes and order of timm's `swin_transformer.py`).

    chipwise plan benchmarks/plan_accuracy/recipes/swin.py:base --set batch=64 --set replicas=1 --on rtx-3090

Windows of 7 x 7 patches, every second block's shifted by 3. Attention is written out, as in timm by default,
and a tenth of the samples skips the last layers, fewer the earlier ones.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from images import mean, recipe

from chipwise.models.conv import conv
from chipwise.models.layer_norm import LayerNorm

SIDE, SHIFT = 7, 3  # patches of a window, and of its shift
HEAD = 32


def base(width=128, depths=(2, 2, 18, 2)):
    return recipe("swin-b", lambda rngs: Swin(width, depths, rngs), optimizer="adamw")


def windows(x):
    """`(b, h, w, c)` -> `(b, windows, 49, c)`."""
    b, h, w, c = x.shape
    x = x.reshape(b, h // SIDE, SIDE, w // SIDE, SIDE, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, SIDE * SIDE, c)


def joined(x, h, w):
    """The inverse of `windows`."""
    b, *_, c = x.shape
    x = x.reshape(b, h // SIDE, w // SIDE, SIDE, SIDE, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)


def places():
    """For each pair of a window's patches, the row of the table of biases: `(49, 49)`."""
    y, x = np.divmod(np.arange(SIDE * SIDE), SIDE)
    return (y[:, None] - y + SIDE - 1) * (2 * SIDE - 1) + x[:, None] - x + SIDE - 1


def strangers(side):
    """-100 where two patches of a shifted window come from different regions: `(windows, 49, 49)`."""
    region = np.searchsorted((side - SIDE, side - SHIFT), np.arange(side), side="right")
    part = windows((3 * region[:, None] + region)[None, :, :, None])[0, :, :, 0]
    return np.where(part[:, :, None] == part[:, None], 0.0, -100.0).astype(np.float32)


class Block(nnx.Module):
    """*Arguments:* `side`: patches of the whole image. `skip`: the share of samples that skips a layer."""

    def __init__(self, c, side, shifted, skip, rngs):
        linear = partial(nnx.Linear, rngs=rngs)
        self.norm1, self.norm2 = (LayerNorm(c, epsilon=1e-5) for _ in range(2))
        self.qkv, self.mixed = linear(c, 3 * c), linear(c, c)
        self.table = nnx.Param(0.02 * jax.random.normal(rngs.params(), ((2 * SIDE - 1) ** 2, c // HEAD)))
        self.hidden, self.out = linear(c, 4 * c), linear(4 * c, c)
        self.skip = nnx.Dropout(skip, broadcast_dims=(1, 2, 3), rngs=rngs)
        self.shift, self.side = SHIFT if shifted and side > SIDE else 0, side

    def __call__(self, x):
        x = x + self.skip(self.attention(self.norm1(x)))
        return x + self.skip(self.out(nnx.gelu(self.hidden(self.norm2(x)), approximate=False)))

    def attention(self, x):
        _, h, w, _ = x.shape
        x = windows(jnp.roll(x, (-self.shift, -self.shift), (1, 2)) if self.shift else x)
        q, k, v = (part.reshape(*x.shape[:3], -1, HEAD) for part in jnp.split(self.qkv(x), 3, axis=-1))
        weights = jnp.einsum("bwqhd,bwkhd->bwhqk", q / math.sqrt(HEAD), k).astype(jnp.float32)
        weights = weights + self.table[...][places()].transpose(2, 0, 1)[None, None].astype(jnp.float32)
        if self.shift:
            weights = weights + strangers(self.side)[None, :, None]
        y = jnp.einsum("bwhqk,bwkhd->bwqhd", jax.nn.softmax(weights).astype(x.dtype), v)
        y = joined(self.mixed(y.reshape(x.shape)), h, w)
        return jnp.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y


class Merging(nnx.Module):
    """Four neighbours become one patch with twice the channels."""

    def __init__(self, c, rngs):
        self.norm = LayerNorm(4 * c, epsilon=1e-5)
        self.reduction = nnx.Linear(4 * c, 2 * c, use_bias=False, rngs=rngs)

    def __call__(self, x):
        b, h, w, c = x.shape
        x = x.reshape(b, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 4, 2, 5)
        return self.reduction(self.norm(x.reshape(b, h // 2, w // 2, 4 * c)))


class Swin(nnx.Module):
    """`(b, 224, 224, 3)` -> logits `(b, 1000)`."""

    def __init__(self, width, depths, rngs):
        self.patches = nnx.Conv(
            3, width, (4, 4), strides=4, padding="VALID", conv_general_dilated=conv, rngs=rngs
        )
        self.norm1 = LayerNorm(width, epsilon=1e-5)
        made, side, done = [], 56, 0
        for stage, depth in enumerate(depths):
            if stage:
                made.append(Merging(width, rngs))
                width, side = 2 * width, side // 2
            for i in range(depth):
                made.append(Block(width, side, i % 2 == 1, 0.1 * done / (sum(depths) - 1), rngs))
                done += 1
        self.layers = nnx.List(made)
        self.norm2, self.classifier = LayerNorm(width, epsilon=1e-5), nnx.Linear(width, 1000, rngs=rngs)

    def __call__(self, x):
        x = self.norm1(self.patches(x))
        for layer in self.layers:
            x = layer(x)
        return self.classifier(mean(self.norm2(x), (1, 2)))
