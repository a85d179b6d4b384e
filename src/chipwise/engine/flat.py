"""Trees as flat vectors, which are summed over replicas, and which an elementwise optimizer updates.

The vector is padded to `chunks` equal chunks. The bits of an elementwise update do not depend on where the
vector is cut, so the optimizer's state may be distributed over several devices, some chunks on each. For
optimizers with a ratio for each layer, each layer begins a row of the vector: see `engine.layers`.

In a group of several devices, each device has a part of every leaf, and concatenates its parts to a vector. A
`Cut` is the concatenation of these vectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..models.chip_traits import platform
from ..recipe.task import Tree


class Flat:
    """The layout of a tree's leaves in a vector, one after another in JAX's order.

    *Arguments:* `tree` of arrays or shapes; `chunks`, the number of equal chunks to which the vector is
    padded; `dtype` of the vector; `row`, the values to a multiple of which each layer is padded, and each
    half of a chunk if it is not 1; `layers`, the number of layers in each leaf, one after another, by default
    1.

    *Fields:* `used`, the number of values in the leaves, padded; `chunk`, the number of values in a chunk;
    `size` of the vector.
    """

    def __init__(
        self,
        tree: Tree,
        chunks: int = 1,
        dtype: Any = jnp.float32,
        row: int = 1,
        layers: Sequence[int] | None = None,
    ):
        leaves, self._structure = jax.tree.flatten(tree)
        self._leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        self.row, self.layers = row, tuple(layers or [1] * len(leaves))
        self._own = [math.prod(x.shape) // n for x, n in zip(leaves, self.layers, strict=True)]  # of a layer
        self._padded = [_up(size, row) for size in self._own]
        self._sizes = [n * size for n, size in zip(self.layers, self._padded, strict=True)]
        self.used, self.chunks, self.dtype = sum(self._sizes), chunks, jnp.dtype(dtype)
        self.chunk = _up(-(-self.used // chunks), row if row == 1 else 2 * row)
        self.size = self.chunk * chunks

    @property
    def local(self) -> Flat:
        """The layout on one device."""
        return self

    @property
    def tree(self) -> Tree:
        """The shapes of the leaves."""
        return jax.tree.unflatten(self._structure, self._leaves)

    def widened(self, dtype: Any = None) -> Flat:
        """The same layout with leaves and vector of `dtype`, by default the vector's, so that `unpack` rounds
        nothing."""
        dtype = dtype or self.dtype
        return self.of(_all_of(self.tree, dtype), dtype)

    def of(self, tree: Tree, dtype: Any) -> Flat:
        """The same layout for leaves of other dtypes."""
        return Flat(tree, self.chunks, dtype, self.row, self.layers)

    @property
    def bounds(self) -> np.ndarray:
        """The first row of each layer, and the row after the last layer, `(layers + 1,)` int32."""
        sizes = [size for n, size in zip(self.layers, self._padded, strict=True) for _ in range(n)]
        return (np.cumsum([0, *sizes]) // self.row).astype(np.int32)

    @property
    def rounds(self) -> bool:
        """Whether a leaf is narrower than the vector, so that `unpack` rounds it."""
        return any(leaf.dtype != self.dtype for leaf in self._leaves)

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        """The vector's shape."""
        return jax.ShapeDtypeStruct((self.size,), self.dtype)

    def pack_host(self, tree: Tree) -> np.ndarray:
        """`pack` of NumPy arrays, on the host."""
        vector = np.zeros(self.size, self.dtype)
        start = 0
        for i, leaf in enumerate(jax.tree.leaves(tree)):
            part = vector[start : start + self._sizes[i]].reshape(self.layers[i], -1)
            part[:, : self._own[i]] = np.asarray(leaf).reshape(self.layers[i], -1)
            start += self._sizes[i]
        return vector

    def pack(self, tree: Tree) -> jax.Array:
        """The vector `(size,)` of the leaves of `tree`, which has this structure, and zeros after them."""
        parts = []
        for i, leaf in enumerate(jax.tree.leaves(tree)):
            leaf, padding = jnp.asarray(leaf).astype(self.dtype), self._padded[i] - self._own[i]
            if padding and self.layers[i] > 1:
                leaf = jnp.pad(leaf.reshape(self.layers[i], -1), ((0, 0), (0, padding)))
            parts.append(leaf.reshape(-1))
            if padding and self.layers[i] == 1:
                parts.append(jnp.zeros(padding, self.dtype))
        parts.append(jnp.zeros(self.size - self.used, self.dtype))
        return jnp.concatenate(parts)

    def unpack(self, vector: Any) -> Tree:
        """The inverse of `pack`, of a traced or NumPy `vector`; each leaf in its own dtype."""
        leaves, start = [], 0
        for i, leaf in enumerate(self._leaves):
            size = self._sizes[i]
            part = vector[start : start + (size if self.layers[i] > 1 else self._own[i])]
            if self.layers[i] > 1 and self._padded[i] != self._own[i]:
                part = part.reshape(self.layers[i], -1)[:, : self._own[i]]
            if leaf.ndim > 1 and isinstance(part, jax.Array) and platform() == "tpu":
                # Otherwise the compiler rounds and reshapes the whole vector, once for each shape, and only
                # then slices. With two columns it pads rows to 128 values: 87 GB for BERT-Large.
                part = lax.optimization_barrier(part)
            leaves.append(part.reshape(leaf.shape).astype(leaf.dtype))
            start += size
        return jax.tree.unflatten(self._structure, leaves)


class Cut:
    """The layout of a tree's leaves on `shards` devices, with the interface of `Flat`: the concatenation of
    one vector per device, each of which has a part of every leaf.

    *Arguments:* `axes`, along which each leaf is cut (`models.large.axes`); a leaf with axis -1 is cut as
    flat values, padded to equal parts. The others as for `Flat`; `chunks` of each device's vector.

    *Fields:* `local`, the layout of one device's vector.
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
        """As in `Flat`."""
        dtype = dtype or self.dtype
        axes = jax.tree.unflatten(jax.tree.structure(self.tree), self._axes)
        return Cut(_all_of(self.tree, dtype), axes, self._shards, self.local.chunks, dtype)

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        """The shape of the whole vector."""
        return jax.ShapeDtypeStruct((self.size,), self.dtype)

    def pack(self, tree: Tree) -> jax.Array:
        """The vector `(size,)` of the leaves of `tree`, with zeros after those of each device."""
        rows = []
        for leaf, axis, part in zip(jax.tree.leaves(tree), self._axes, self._parts, strict=True):
            leaf = jnp.asarray(leaf).astype(self.dtype)
            if axis >= 0:
                split = leaf.reshape(*leaf.shape[:axis], self._shards, *part.shape[axis:])
                leaf = jnp.moveaxis(split, axis, 0)
            else:
                leaf = jnp.pad(leaf.reshape(-1), (0, self._shards * part.size - leaf.size))
            rows.append(leaf.reshape(self._shards, -1))
        rows.append(jnp.zeros((self._shards, self.local.size - self.local.used), self.dtype))
        return jnp.concatenate(rows, axis=1).reshape(-1)

    def unpack(self, vector: Any) -> Tree:
        """The inverse of `pack`, of a traced or NumPy `vector`; each leaf in its own dtype."""
        leaves, structure = jax.tree.flatten(self.tree)
        rows, start, values = vector.reshape(self._shards, -1), 0, []
        for leaf, axis, part in zip(leaves, self._axes, self._parts, strict=True):
            parts = rows[:, start : start + part.size]
            if axis >= 0:
                order = list(range(1, len(leaf.shape) + 1))
                order.insert(axis, 0)
                value = parts.reshape(self._shards, *part.shape).transpose(order).reshape(leaf.shape)
            else:
                value = parts.reshape(-1)[: math.prod(leaf.shape)].reshape(leaf.shape)
            values.append(value.astype(leaf.dtype))
            start += part.size
        return jax.tree.unflatten(structure, values)


def _up(size: int, unit: int) -> int:
    """`size`, rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


def _all_of(tree: Tree, dtype: Any) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)
