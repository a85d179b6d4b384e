"""Llama 3 and Qwen 3: pre-norm transformers with rotary positions, grouped-query attention and
gated layers, without biases.

Sources:

- Llama 3: Dubey et al., "The Llama 3 Herd of Models" (2024, arXiv:2407.21783).
- Qwen 3: Yang et al., "Qwen3 Technical Report" (2025, arXiv:2505.09388).
- RMSNorm: Zhang and Sennrich (2019, arXiv:1910.07467).
- Rotary positions: Su et al. (2021, arXiv:2104.09864).
- Grouped queries: Ainslie et al. (2023, arXiv:2305.13245).
- SwiGLU: Shazeer (2020, arXiv:2002.05202).

Blocks are stacked and looped over, and each is a layer of `cw.models.fsdp`: see
`chipwise.models.transformer`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from . import wide
from .adapted import Adapted, Linear, einsum
from .attention import attention, document_numbers, places_in
from .chip_traits import traits
from .kv_cache import KVCache
from .large import fsdp
from .tied import embed
from .transformer import QKV, Blocks, Embedding

_NORMAL = nnx.initializers.normal(0.02)
TURNED = 8192
"""Positions that Llama 3 was trained on before its context was stretched."""


class RMSNorm(nnx.Module):
    """Divides each vector of `width` entries by its root mean square, times a scale. Computed in
    float32."""

    def __init__(self, width: int, *, epsilon: float):
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """`(..., width)` -> the same shape and dtype."""
        y = x.astype(wide(x.dtype))
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        scale = self.scale[...].astype(y.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
        return (y * scale).astype(x.dtype)


def rotated(
    x: jax.Array, base: float, places: jax.Array | None = None, factor: float = 1.0
) -> jax.Array:
    """Rotates entries `i` and `i + d / 2` of `(batch, t, heads, d)` by
    `position / base ** (2 i / d)`, the order of the weights at huggingface.co. Angles are float32,
    whatever the dtype of `x`. `places` `(batch, t)`: the positions, instead of 0 to `t - 1`.
    `factor`: divides the frequencies of less than a turn in `TURNED` positions. Those of four turns
    and more stay, as in Llama 3.1's `apply_scaling`."""
    t = x.shape[1]
    half = x.shape[3] // 2
    frequencies = jnp.float32(base) ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if factor != 1:
        kept = jnp.clip((TURNED / (2 * math.pi) * frequencies - 1) / 3, 0, 1)
        frequencies = frequencies * (kept + (1 - kept) / factor)
    if places is None:
        angles = jnp.arange(t, dtype=jnp.float32)[:, None] * frequencies[None]
        cos, sin = (f(angles)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    else:
        angles = places.astype(jnp.float32)[..., None] * frequencies[None, None]
        cos, sin = (f(angles)[:, :, None, :] for f in (jnp.cos, jnp.sin))
    left, right = (part.astype(jnp.float32) for part in (x[..., :half], x[..., half:]))
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)


def by_heads(x: jax.Array, kernel: jax.Array | Adapted, heads: int) -> jax.Array:
    """`(b, t, width)` and a kernel `(width, heads * d)` -> `(b, t, heads, d)`. See
    `transformer.Attention` for why the products of most TPUs give arrays of heads."""
    kernel = kernel.astype(x.dtype)
    if traits().by_heads:
        return einsum("btw,whd->bthd", x, kernel.reshape(kernel.shape[0], heads, -1))
    return (x @ kernel).reshape(*x.shape[:2], heads, -1)


def joined(x: jax.Array, kernel: jax.Array | Adapted) -> jax.Array:
    """`(b, t, heads, d)` and a kernel `(heads * d, width)` -> `(b, t, width)`, in the same way."""
    kernel = kernel.astype(x.dtype)
    if traits().by_heads:
        return einsum("bthd,hdw->btw", x, kernel.reshape(*x.shape[2:], -1))
    return x.reshape(*x.shape[:2], -1) @ kernel


class GroupedQueryAttention(nnx.Module):
    """Causal self-attention with `heads / kv_heads` queries per key: `(b, t, width)` -> the same.
    Its arguments are those of `Llama`."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        rope_theta: float,
        rope_factor: float = 1.0,
        head_dim: int = 0,
        norm: float | None = None,
        *,
        rngs: nnx.Rngs,
    ):
        linear = partial(Linear, use_bias=False, kernel_init=_NORMAL, rngs=rngs)
        head_dim = head_dim or width // heads
        self.q = linear(width, heads * head_dim)
        self.out = linear(heads * head_dim, width)
        self.k, self.v = (linear(width, kv_heads * head_dim) for _ in range(2))
        self.heads = heads
        self.kv_heads = kv_heads
        self.normed = norm is not None
        self.rope_theta = rope_theta
        self.rope_factor = rope_factor
        if norm is not None:
            self.q_norm, self.k_norm = (RMSNorm(head_dim, epsilon=norm) for _ in range(2))

    def __call__(
        self, x: jax.Array, document: jax.Array | None = None, cache: KVCache | None = None
    ) -> jax.Array:
        places = None if document is None else places_in(document)
        if cache is not None:
            places = cache.position[:, None] + jnp.arange(x.shape[1])[None]
        q, k, v = (
            by_heads(x, layer.kernel[...], heads)
            for layer, heads in (
                (self.q, self.heads),
                (self.k, self.kv_heads),
                (self.v, self.kv_heads),
            )
        )
        if self.normed:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q, k = (rotated(part, self.rope_theta, places, self.rope_factor) for part in (q, k))
        q, k, v = (checkpoint_name(part, name) for part, name in zip((q, k, v), QKV, strict=True))
        if cache is not None:
            attended = cache.attend(q, k, v)
        else:
            attended = attention(q, k, v, causal=True, document=document)
        return checkpoint_name(joined(attended, self.out.kernel[...]), "out_proj")


class LlamaBlock(nnx.Module):
    """`x + attention(norm(x))`, then `x + down(silu(gate(norm(x))) * up(norm(x)))`."""

    def __init__(self, width: int, hidden: int, epsilon: float, attention: partial, rngs: nnx.Rngs):
        linear = partial(Linear, use_bias=False, kernel_init=_NORMAL, rngs=rngs)
        self.norm1, self.norm2 = (RMSNorm(width, epsilon=epsilon) for _ in range(2))
        self.attention = attention(rngs=rngs)
        self.gate = linear(width, hidden)
        self.up = linear(width, hidden)
        self.down = linear(hidden, width)

    def __call__(
        self, x: jax.Array, document: jax.Array | None = None, cache: KVCache | None = None
    ) -> jax.Array:
        x = x + self.attention(self.norm1(x), document, cache)
        y = self.norm2(x)
        gate = jax.nn.silu(checkpoint_name(self.gate(y), "mlpwi_0"))
        return x + checkpoint_name(
            self.down(gate * checkpoint_name(self.up(y), "mlpwi_1")), "mlpwo"
        )


class Llama(nnx.Module):
    """Integer tokens `(batch, t)` -> final states `(batch, t, width)`.

    The logits are `states @ table.T`, with the table `params["head"]["embedding"]`, or that of
    `words` if they are `tied`.

    `rope_theta` and `rope_factor`: see `rotated`. `head_dim`: the entries of a head, by default
    `width / heads`. `qk_norm`: queries and keys are normalised, as in Qwen 3. `keep`: a policy of
    `cw.models.remat`. `end` is that of `GPT2`. Initial values: normal of 0.02.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        depth: int,
        width: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        keep: str,
        rope_theta: float = 500_000.0,
        rope_factor: float = 1.0,
        epsilon: float = 1e-5,
        head_dim: int = 0,
        qk_norm: bool = False,
        tied: bool = False,
        end: int | None = None,
        rngs: nnx.Rngs,
    ):
        self.end = end
        self.words = Embedding(vocabulary, width, rngs=rngs)
        if not tied:
            self.head = Embedding(vocabulary, width, rngs=rngs)
        attention = partial(
            GroupedQueryAttention,
            width,
            heads,
            kv_heads,
            rope_theta,
            rope_factor,
            head_dim,
            epsilon if qk_norm else None,
        )
        block = partial(LlamaBlock, width, hidden, epsilon, attention)
        self.blocks = Blocks(depth, block, keep=keep, rngs=rngs)
        self.norm = RMSNorm(width, epsilon=epsilon)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        document = () if self.end is None else (document_numbers(tokens, self.end),)
        x = self.blocks(fsdp(embed, self.words.embedding[...], tokens), *document)
        graph, norm = nnx.split(self.norm)
        return fsdp(lambda whole, x: nnx.merge(graph, whole)(x), norm, x)

    def decode(self, tokens: jax.Array, cache: Any, position: jax.Array) -> tuple[jax.Array, Any]:
        """The same as `decode` of `transformer.GPT2`."""
        x, cache = self.blocks.decode(embed(self.words.embedding[...], tokens), cache, position)
        return self.norm(x), cache
