"""Trees as flat vectors: what is summed over replicas, and what an elementwise update works on.

The vector is padded to `chunks` equal chunks. Where it is cut changes no value of an elementwise update, so
the optimizer's state may lie on several devices, some chunks on each, with the same bits.

In a group of several devices each has a part of every leaf, and all of one device's parts in one vector: a
`Cut` is these vectors, one behind another.
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

    @property
    def local(self) -> Flat:
        """How a device has it."""
        return self

    @property
    def tree(self) -> Tree:
        """The shapes of the leaves."""
        return jax.tree.unflatten(self._structure, self._leaves)

    def widened(self, dtype: Any = None) -> Flat:
        """The same with every leaf as wide as the vector, or of `dtype`, so that `unpack` rounds nothing."""
        dtype = dtype or self.dtype
        return Flat(_all_of(self.tree, dtype), self.chunks, dtype)

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


class Cut:
    """How the leaves of a tree lie on `shards` devices: as many vectors of equal length, one behind another,
    each with a part of every leaf. What `Flat` has, this has.

    *Arguments:* `axes`, along which each leaf is cut (`recipe.sharding.axes`): of one with -1 the flat values
    are cut, padded to equal parts; the others as of `Flat`, `chunks` of each device's vector.

    *Fields:* `local`, how the parts lie in one device's vector.
    """

    def __init__(self, tree: Tree, axes: Tree, shards: int, chunks: int = 1, dtype: Any = jnp.float32):
        leaves, structure = jax.tree.flatten(tree)
        self.tree = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
        self._axes, self._shards, self._parts = jax.tree.leaves(axes), shards, []
        for leaf, axis in zip(leaves, self._axes, strict=True):
            shape = list(leaf.shape) if axis >= 0 else [-(-math.prod(leaf.shape) // shards)]
            if axis >= 0:
                shape[axis] //= shards
            self._parts.append(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype))
        self.local = Flat(jax.tree.unflatten(structure, self._parts), chunks, dtype)
        self.dtype, self.size, self.rounds = self.local.dtype, shards * self.local.size, self.local.rounds

    def widened(self, dtype: Any = None) -> Cut:
        """As of `Flat`."""
        dtype = dtype or self.dtype
        axes = jax.tree.unflatten(jax.tree.structure(self.tree), self._axes)
        return Cut(_all_of(self.tree, dtype), axes, self._shards, self.local.chunks, dtype)

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        """Of all the vectors."""
        return jax.ShapeDtypeStruct((self.size,), self.dtype)

    def pack(self, tree: Tree) -> jax.Array:
        """`(size,)`: the leaves of `tree`, and zeros behind those of each device."""
        rows = []
        for leaf, axis, part in zip(jax.tree.leaves(tree), self._axes, self._parts, strict=True):
            leaf = jnp.asarray(leaf).astype(self.dtype)
            if axis >= 0:
                apart = leaf.reshape(*leaf.shape[:axis], self._shards, *part.shape[axis:])
                leaf = jnp.moveaxis(apart, axis, 0)
            else:
                leaf = jnp.pad(leaf.reshape(-1), (0, self._shards * part.size - leaf.size))
            rows.append(leaf.reshape(self._shards, -1))
        rows.append(jnp.zeros((self._shards, self.local.size - self.local.used), self.dtype))
        return jnp.concatenate(rows, axis=1).reshape(-1)

    def unpack(self, vector: Any) -> Tree:
        """The tree whose `pack` is `vector`, traced or a NumPy array; each leaf in its own dtype."""
        leaves, structure = jax.tree.flatten(self.tree)
        rows, start, made = vector.reshape(self._shards, -1), 0, []
        for leaf, axis, part in zip(leaves, self._axes, self._parts, strict=True):
            parts = rows[:, start : start + part.size]
            if axis >= 0:
                order = list(range(1, len(leaf.shape) + 1))
                order.insert(axis, 0)
                value = parts.reshape(self._shards, *part.shape).transpose(order).reshape(leaf.shape)
            else:
                value = parts.reshape(-1)[: math.prod(leaf.shape)].reshape(leaf.shape)
            made.append(value.astype(leaf.dtype))
            start += part.size
        return jax.tree.unflatten(structure, made)


def _all_of(tree: Tree, dtype: Any) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)
