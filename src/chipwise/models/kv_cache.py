"""The keys and values that a decoder keeps of earlier tokens, so that each further token is one
position of work."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from . import wide
from .attention import attention


class KVCache:
    """The keys and values of a stack of attention layers, while layer `layer` is traced.

    *Fields:* `kept`: keys and values, each `(layers, batch, kv_heads, s, d)`, or None if there are
    none yet. They are stored by heads, the layout in which products read them. `position`
    `(batch,)` int32: where each row's new tokens begin. `new`: the keys and values of this layer,
    if `kept` is None.
    """

    def __init__(self, kept: Any, layer: jax.Array, position: jax.Array):
        self.kept = kept
        self.layer = layer
        self.position = position
        self.new: Any = None

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """Computes causal attention, and keeps `key` and `value`. The arguments are those of
        `attention`, with one new position that sees all that are kept up to its own, or with
        several, which begin at position 0."""
        b, t, _, d = query.shape
        if self.kept is None:
            self.new = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
            return attention(query, key, value, causal=True)
        places = jnp.arange(b)[:, None], slice(None), self.position[:, None] + jnp.arange(t)[None]
        both = zip(self.kept, (key, value), strict=True)
        self.kept = tuple(old.at[self.layer, *places].set(new) for old, new in both)
        if t > 1:
            return attention(query, key, value, causal=True)
        keys, values = (kept[self.layer] for kept in self.kept)
        dtype = wide(query.dtype)
        grouped = query.reshape(b, keys.shape[1], -1, d)
        scores = (
            jnp.einsum("bngd,bnsd->bngs", grouped, keys, preferred_element_type=dtype) * d**-0.5
        )
        seen = jnp.arange(keys.shape[2])[None] <= self.position[:, None]
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf)).astype(
            values.dtype
        )
        out = jnp.einsum("bngs,bnsd->bngd", weights, values, preferred_element_type=dtype)
        return out.astype(query.dtype).reshape(query.shape)
