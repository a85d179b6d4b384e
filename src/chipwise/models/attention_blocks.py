"""Attention in blocks of queries and keys, in plain JAX: memory grows with the length, not with its
square.

Only the weights of one pair of blocks exist at a time: the forward pass keeps a running maximum and
sum (Dao et al., 2022, arXiv:2205.14135), and the backward pass recomputes them. Pairs of blocks
without visible pairs are skipped. The loop's order is fixed, so the bits are too.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from . import wide
from .attention_mask import SAVED, Mask, pairs

BLOCK = 256  # positions, at most; 0.25 MB of float32 weights a head and example
# Finite: a row that sees nothing yet has weights that the next block multiplies by 0
_HIDDEN = -1e30


def blocks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    document: jax.Array | None = None,
    block: int = BLOCK,
) -> jax.Array:
    """`attention` in blocks of at most `block` positions. The arguments are already checked."""
    t = query.shape[1]
    s = key.shape[1]
    longest = max(t, s)
    # Equal blocks: 257 positions are two of 136 and not two of 256.
    size = math.ceil(longest / math.ceil(longest / block) / 8) * 8 if longest > block else longest
    return _attend(query, key, value, document, mask, size)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(query, key, value, document, mask: Mask, size: int) -> jax.Array:
    return _forward(query, key, value, document, mask, size)[0]


def _forward(query, key, value, document, mask, size):
    """The result, and the residuals for the gradient."""
    (_, t, heads, d), (s, shared) = query.shape, key.shape[1:3]
    q = _cut(query, size, shared)
    k = _cut(key, size, shared)[:, :, :, 0]
    v = _cut(value, size, shared)[:, :, :, 0]
    dtype = wide(q.dtype)
    numbers = _numbers(document, size)
    row = q.shape[1:-1]  # (b, shared, group, size)

    def step(carry, at):
        outs, stats, total, most, weight = carry
        i, j, first = at
        total, weight = (jnp.where(first, jnp.zeros_like(x), x) for x in (total, weight))
        most = jnp.where(first, jnp.full_like(most, _HIDDEN), most)
        scores, _ = _scores(q[i], k[j], i, j, mask, t, s, numbers)
        highest = jnp.maximum(most, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - highest[..., None])
        scale = jnp.exp(most - highest)
        weight = weight * scale + jnp.sum(weights, axis=-1)
        part = jnp.einsum(
            "bngts,bnsd->bngtd", weights.astype(v.dtype), v[j], preferred_element_type=dtype
        )
        total = total * scale[..., None] + part
        outs = lax.dynamic_update_index_in_dim(
            outs, (total / weight[..., None]).astype(q.dtype), i, 0
        )
        stats = lax.dynamic_update_index_in_dim(stats, highest + jnp.log(weight), i, 0)
        return (outs, stats, total, highest, weight), None

    n = q.shape[0]
    sums = (jnp.zeros((*row, d), dtype), jnp.full(row, _HIDDEN, dtype), jnp.zeros(row, dtype))
    carry = (jnp.zeros(q.shape, q.dtype), jnp.zeros((n, *row), dtype), *sums)
    (outs, stats, *_), _ = lax.scan(step, carry, _order(t, s, mask, size))
    out = checkpoint_name(_join(outs, t, heads), SAVED)
    stats = checkpoint_name(stats, SAVED)
    return out, (query, key, value, document, out, stats)


def _backward(mask, size, kept, gradient):
    query, key, value, document, out, stats = kept
    (_, t, heads, d), (s, shared) = query.shape, key.shape[1:3]
    q = _cut(query, size, shared)
    g = _cut(gradient, size, shared)
    k = _cut(key, size, shared)[:, :, :, 0]
    v = _cut(value, size, shared)[:, :, :, 0]
    dtype = wide(q.dtype)
    numbers = _numbers(document, size)
    product = partial(jnp.einsum, preferred_element_type=dtype)
    # For each query: the gradient's component that the softmax removes
    common = jnp.sum(g.astype(dtype) * _cut(out, size, shared).astype(dtype), axis=-1)

    def step(carry, at):
        dq, dk, dv = carry
        i, j, _ = at
        scores, seen = _scores(q[i], k[j], i, j, mask, t, s, numbers)
        weights = jnp.exp(scores - stats[i][..., None])
        if seen is not None:
            weights = jnp.where(seen, weights, jnp.zeros_like(weights))
        by_weight = product("bngtd,bnsd->bngts", g[i], v[j])
        slope = (weights * (by_weight - common[i][..., None]) * d**-0.5).astype(q.dtype)
        dv = dv.at[j].add(product("bngts,bngtd->bnsd", weights.astype(g.dtype), g[i]))
        dk = dk.at[j].add(product("bngts,bngtd->bnsd", slope, q[i]))
        dq = dq.at[i].add(product("bngts,bnsd->bngtd", slope, k[j]))
        return (dq, dk, dv), None

    zeros = tuple(jnp.zeros(x.shape, dtype) for x in (q, k, v))
    (dq, dk, dv), _ = lax.scan(step, zeros, _order(t, s, mask, size))
    dk = dk[:, :, :, None]
    dv = dv[:, :, :, None]
    joined = (_join(dq, t, heads), _join(dk, s, shared), _join(dv, s, shared))
    return (*(x.astype(query.dtype) for x in joined), None)


_attend.defvjp(_forward, _backward)


def _numbers(document, size: int):
    """The documents of each block, `(t / size, b, size)`."""
    if document is None:
        return None
    more = -document.shape[1] % size
    return jnp.pad(document, [(0, 0), (0, more)]).reshape(len(document), -1, size).swapaxes(0, 1)


def _scores(q, k, i, j, mask: Mask, t: int, s: int, numbers: jax.Array | None):
    """The scores `(b, n, g, size, size)` in float32, and which are visible, `(b or 1, 1, 1, size,
    size)` or None."""
    scores = (
        jnp.einsum("bngtd,bnsd->bngts", q, k, preferred_element_type=wide(q.dtype))
        * q.shape[-1] ** -0.5
    )
    size = q.shape[3]
    if not mask.causal and mask.window is None and s % size == 0 and numbers is None:
        return scores, None
    at = i * size + jnp.arange(size, dtype=jnp.int32)[:, None]
    of = j * size + jnp.arange(size, dtype=jnp.int32)[None, :]
    seen = jnp.broadcast_to(of < s, (size, size))
    if mask.causal:
        seen = seen & (of <= at)
    if mask.window is not None:
        seen = seen & (jnp.abs(at - of) < mask.window)
    seen = seen[None, None, None]
    if numbers is not None:
        seen = seen & (numbers[i][:, :, None] == numbers[j][:, None])[:, None, None]
    return jnp.where(seen, scores, jnp.full_like(scores, _HIDDEN)), seen


def _order(t: int, s: int, mask: Mask, size: int):
    """The loop's input: each pair of blocks, and whether it is its row's first."""
    order = pairs(t, s, mask, size)
    first = np.append(True, order[1:, 0] != order[:-1, 0])
    return jnp.asarray(order[:, 0]), jnp.asarray(order[:, 1]), jnp.asarray(first)


def _cut(x: jax.Array, size: int, shared: int) -> jax.Array:
    """`(b, t, heads, d)` -> blocks `(t / size, b, shared, heads / shared, size, d)`, padded with
    zeros."""
    b, t, heads, d = x.shape
    n = math.ceil(t / size)
    x = jnp.pad(x, [(0, 0), (0, n * size - t), (0, 0), (0, 0)])
    return x.reshape(b, n, size, shared, heads // shared, d).transpose(1, 0, 3, 4, 2, 5)


def _join(x: jax.Array, t: int, heads: int) -> jax.Array:
    """The inverse of `_cut`."""
    n, b, _, _, size, d = x.shape
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(b, n * size, heads, d)[:, :t]
