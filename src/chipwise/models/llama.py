"""Llama 3: a pre-norm transformer with rotary positions, grouped-query attention and gated layers, without
biases.

Sources: Dubey et al., "The Llama 3 Herd of Models" (2024, arXiv:2407.21783); RMSNorm: Zhang and Sennrich
(2019, arXiv:1910.07467); rotary positions: Su et al. (2021, arXiv:2104.09864); grouped queries: Ainslie et
al. (2023, arXiv:2305.13245); SwiGLU: Shazeer (2020, arXiv:2002.05202). Blocks are stacked and looped over,
and each is a layer of `cw.models.fsdp`: see `chipwise.models.transformer`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from . import wide
from .attention import attention, document_numbers, places_in
from .chip_traits import traits
from .kv_cache import KVCache
from .large import fsdp
from .tied import embed
from .transformer import QKV, Blocks, Embedding

_NORMAL = nnx.initializers.normal(0.02)


class RMSNorm(nnx.Module):
    """Divides each vector of `width` entries by its root mean square, times a scale. Computed in float32."""

    def __init__(self, width: int, *, epsilon: float):
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """`(..., width)` -> the same shape and dtype."""
        y = x.astype(wide(x.dtype))
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        scale = self.scale[...].astype(y.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
        return (y * scale).astype(x.dtype)


def rotated(x: jax.Array, base: float, places: jax.Array | None = None) -> jax.Array:
    """Rotates entries `i` and `i + d / 2` of `(batch, t, heads, d)` by `position / base ** (2 i / d)`, the
    order of the weights at huggingface.co. Angles are float32, whatever the dtype of `x`. `places`
    `(batch, t)`: the positions, instead of 0 to `t - 1`."""
    t, half = x.shape[1], x.shape[3] // 2
    frequencies = jnp.float32(base) ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if places is None:
        angles = jnp.arange(t, dtype=jnp.float32)[:, None] * frequencies[None]
        cos, sin = (f(angles)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    else:
        angles = places.astype(jnp.float32)[..., None] * frequencies[None, None]
        cos, sin = (f(angles)[:, :, None, :] for f in (jnp.cos, jnp.sin))
    left, right = (part.astype(jnp.float32) for part in (x[..., :half], x[..., half:]))
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)


def by_heads(x: jax.Array, kernel: jax.Array, heads: int) -> jax.Array:
    """`(b, t, width)` and a kernel `(width, heads * d)` -> `(b, t, heads, d)`. See
    `transformer.Attention` for why the products of most TPUs give arrays of heads."""
    kernel = kernel.astype(x.dtype)
    if traits().by_heads:
        return jnp.einsum("btw,whd->bthd", x, kernel.reshape(kernel.shape[0], heads, -1))
    return (x @ kernel).reshape(*x.shape[:2], heads, -1)


def joined(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`(b, t, heads, d)` and a kernel `(heads * d, width)` -> `(b, t, width)`, likewise."""
    kernel = kernel.astype(x.dtype)
    if traits().by_heads:
        return jnp.einsum("bthd,hdw->btw", x, kernel.reshape(*x.shape[2:], -1))
    return x.reshape(*x.shape[:2], -1) @ kernel


class GroupedQueryAttention(nnx.Module):
    """Causal self-attention with `heads / kv_heads` queries per key: `(b, t, width)` -> the same."""

    def __init__(self, width: int, heads: int, kv_heads: int, base: float, *, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, kernel_init=_NORMAL, rngs=rngs)
        self.q, self.out = linear(width, width), linear(width, width)
        self.k, self.v = (linear(width, width // heads * kv_heads) for _ in range(2))
        self.heads, self.kv_heads, self.base = heads, kv_heads, base

    def __call__(
        self, x: jax.Array, document: jax.Array | None = None, cache: KVCache | None = None
    ) -> jax.Array:
        places = None if document is None else places_in(document)
        if cache is not None:
            places = cache.position[:, None] + jnp.arange(x.shape[1])[None]
        q, k, v = (
            by_heads(x, layer.kernel[...], heads)
            for layer, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        parts = zip((rotated(q, self.base, places), rotated(k, self.base, places), v), QKV, strict=True)
        q, k, v = (checkpoint_name(part, name) for part, name in parts)
        if cache is not None:
            attended = cache.attend(q, k, v)
        else:
            attended = attention(q, k, v, causal=True, document=document)
        return checkpoint_name(joined(attended, self.out.kernel[...]), "out_proj")


class LlamaBlock(nnx.Module):
    """`x + attention(norm(x))`, then `x + down(silu(gate(norm(x))) * up(norm(x)))`."""

    def __init__(
        self, width: int, heads: int, kv_heads: int, hidden: int, base: float, epsilon: float, rngs: nnx.Rngs
    ):
        linear = partial(nnx.Linear, use_bias=False, kernel_init=_NORMAL, rngs=rngs)
        self.norm1, self.norm2 = (RMSNorm(width, epsilon=epsilon) for _ in range(2))
        self.attention = GroupedQueryAttention(width, heads, kv_heads, base, rngs=rngs)
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)

    def __call__(
        self, x: jax.Array, document: jax.Array | None = None, cache: KVCache | None = None
    ) -> jax.Array:
        x = x + self.attention(self.norm1(x), document, cache)
        y = self.norm2(x)
        gate = jax.nn.silu(checkpoint_name(self.gate(y), "mlpwi_0"))
        return x + checkpoint_name(self.down(gate * checkpoint_name(self.up(y), "mlpwi_1")), "mlpwo")


class Llama(nnx.Module):
    """Integer tokens `(batch, t)` -> final states `(batch, t, width)`.

    The logits are `states @ head.T`, with the table `params["head"]["embedding"]`.

    `base`: of the rotary positions; `keep`: a policy of `cw.models.remat`; `end`: as of GPT2. Initial values:
    normal of 0.02.
    """

    def __init__(
        self, *, vocabulary: int, depth: int, width: int, heads: int, kv_heads: int, hidden: int, keep: str,
        base: float = 500_000.0, epsilon: float = 1e-5, end: int | None = None, rngs: nnx.Rngs,
    ):  # fmt: skip
        self.end = end
        self.words, self.head = (Embedding(vocabulary, width, rngs=rngs) for _ in range(2))
        block = partial(LlamaBlock, width, heads, kv_heads, hidden, base, epsilon)
        self.blocks = Blocks(depth, block, keep=keep, rngs=rngs)
        self.norm = RMSNorm(width, epsilon=epsilon)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        document = () if self.end is None else (document_numbers(tokens, self.end),)
        x = self.blocks(fsdp(embed, self.words.embedding[...], tokens), *document)
        graph, norm = nnx.split(self.norm)
        return fsdp(lambda whole, x: nnx.merge(graph, whole)(x), norm, x)

    def decode(self, tokens: jax.Array, cache: Any, position: jax.Array) -> tuple[jax.Array, Any]:
        """As of `transformer.GPT2`."""
        x, cache = self.blocks.decode(embed(self.words.embedding[...], tokens), cache, position)
        return self.norm(x), cache
