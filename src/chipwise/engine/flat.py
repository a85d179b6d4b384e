"""Trees as flat vectors: what is summed over replicas, and what an elementwise update works on.

The vector is padded to `chunks` equal chunks. Where it is cut changes no value of an elementwise update, so
the optimizer's state may later lie on several devices, some chunks on each, with the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..models.target import target
from ..recipe.task import Tree

_NARROW = 8
"""Last axis of a leaf, below which a TPU's compiler is kept from reshaping the whole vector before it takes
the leaf: it fills each row up to 128 values, 87 GB for BERT-Large with its head of two classes."""


class Flat:
    """How the leaves of a tree lie in a vector, one after another in JAX's order.

    *Arguments:* `tree` of arrays or shapes; `chunks`, how many equal chunks the vector is padded to; `dtype`
    of the vector.

    *Fields:* `used`, how many values the leaves have; `chunk`, the values of one chunk; `size` of the vector.
    """

    def __init__(self, tree: Tree, chunks: int = 1, dtype: Any = jnp.float32):
        leaves, self._structure = jax.tree.flatten(tree)
        self._leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        self._sizes = [math.prod(leaf.shape) for leaf in leaves]
        self.used, self.chunks, self.dtype = sum(self._sizes), chunks, jnp.dtype(dtype)
        self.chunk = -(-self.used // chunks)
        self.size = self.chunk * chunks

    def widened(self) -> Flat:
        """The same with every leaf as wide as the vector, so that `unpack` rounds nothing."""
        wide = [jax.ShapeDtypeStruct(leaf.shape, self.dtype) for leaf in self._leaves]
        return Flat(jax.tree.unflatten(self._structure, wide), self.chunks, self.dtype)

    @property
    def rounds(self) -> bool:
        """Whether a leaf is narrower than the vector, so that `unpack` rounds it."""
        return any(leaf.dtype != self.dtype for leaf in self._leaves)

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        """Of the vector."""
        return jax.ShapeDtypeStruct((self.size,), self.dtype)

    def pack_host(self, tree: Tree) -> np.ndarray:
        """`pack` of NumPy arrays, on the host."""
        vector = np.zeros(self.size, self.dtype)
        start = 0
        for leaf, size in zip(jax.tree.leaves(tree), self._sizes, strict=True):
            vector[start : start + size] = np.asarray(leaf).reshape(-1)
            start += size
        return vector

    def pack(self, tree: Tree) -> jax.Array:
        """`(size,)`: the leaves of `tree`, which has this structure, and zeros behind them."""
        parts = [jnp.asarray(leaf).astype(self.dtype).reshape(-1) for leaf in jax.tree.leaves(tree)]
        parts.append(jnp.zeros(self.size - self.used, self.dtype))
        return jnp.concatenate(parts)

    def unpack(self, vector: Any) -> Tree:
        """The tree whose `pack` is `vector`, traced or a NumPy array; each leaf in its own dtype."""
        leaves, start = [], 0
        for leaf, size in zip(self._leaves, self._sizes, strict=True):
            part = vector[start : start + size]
            narrow = leaf.ndim > 1 and 1 < leaf.shape[-1] < _NARROW
            if narrow and isinstance(part, jax.Array) and target().platform == "tpu":
                part = lax.optimization_barrier(part)
            leaves.append(part.reshape(leaf.shape).astype(leaf.dtype))
            start += size
        return jax.tree.unflatten(self._structure, leaves)
