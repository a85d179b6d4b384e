"""Lays out trees as flat vectors, which are summed over replicas and updated by an elementwise
optimizer.

The vector is padded to `chunks` equal chunks. The bits of an elementwise update do not depend on
where the vector is cut, so the optimizer's state may be distributed over several devices, some
chunks on each.

In a group of several devices, each device has a part of every leaf, and concatenates its parts to a
vector. A `Cut` is the concatenation of these vectors.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ..models.chip_traits import platform
from ..recipe.task import Tree


class Flat:
    """The layout of a tree's leaves in a vector, one after another in JAX's order.

    *Arguments:* `tree` has arrays or shapes. The vector is padded to `chunks` equal chunks, and has
    `dtype`.

    *Fields:* `used` is the number of values in the leaves, `chunk` the number of values in a chunk,
    and `size` that of the vector.
    """

    def __init__(self, tree: Tree, chunks: int = 1, dtype: DTypeLike = jnp.float32):
        leaves, self._structure = jax.tree.flatten(tree)
        self._leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        self._sizes = [math.prod(leaf.shape) for leaf in leaves]
        self.used, self.chunks, self.dtype = sum(self._sizes), chunks, jnp.dtype(dtype)
        self.chunk = -(-self.used // chunks)
        self.size = self.chunk * chunks

    @property
    def local(self) -> Flat:
        """The layout on one device."""
        return self

    @property
    def tree(self) -> Tree:
        """The shapes of the leaves."""
        return jax.tree.unflatten(self._structure, self._leaves)

    def widened(self, dtype: DTypeLike | None = None) -> Flat:
        """Returns the same layout with leaves and vector of `dtype`, by default the vector's, so
        that `unpack` rounds nothing."""
        dtype = dtype or self.dtype
        return self.of(_all_of(self.tree, dtype), dtype)

    def of(self, tree: Tree, dtype: DTypeLike) -> Flat:
        """Returns the same layout for the leaves of `tree`, with a vector of `dtype`."""
        return Flat(tree, self.chunks, dtype)

    @property
    def rounds(self) -> bool:
        """Whether a leaf is narrower than the vector, so that `unpack` rounds it."""
        return any(leaf.dtype != self.dtype for leaf in self._leaves)

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        """The vector's shape."""
        return jax.ShapeDtypeStruct((self.size,), self.dtype)

    def pack(self, tree: Tree, numpy: ModuleType = jnp) -> Any:
        """Returns the vector `(size,)` of the leaves of `tree`, which has this structure, with
        zeros after them. It is an array of `numpy`."""
        parts = [
            numpy.asarray(x).astype(self.dtype, copy=False).reshape(-1)
            for x in jax.tree.leaves(tree)
        ]
        assert sum(part.size for part in parts) == self.used
        return numpy.concatenate([*parts, numpy.zeros(self.size - self.used, self.dtype)])

    def unpack(self, vector: jax.Array | np.ndarray) -> Tree:
        """Returns the tree in a traced or NumPy `vector`, each leaf in its own dtype. It is the
        inverse of `pack`."""
        leaves, start = [], 0
        for leaf, size in zip(self._leaves, self._sizes, strict=True):
            part = vector[start : start + size]
            # Without a barrier the compiler rounds and reshapes the whole vector, once for each
            # shape, and only then slices it. On TPUs it pads rows of two values to 128, which takes
            # 87 GB for BERT-Large. On GPUs cuBLASLt gets an address within the whole vector. It
            # refuses products of bfloat16 at an address that is no multiple of 16 bytes, as all
            # those after a bias of two values.
            apart = {"tpu": True, "cuda": start % 8 != 0}.get(platform(), False)
            if leaf.ndim > 1 and isinstance(part, jax.Array) and apart:
                part = lax.optimization_barrier(part)
            leaves.append(part.reshape(leaf.shape).astype(leaf.dtype))
            start += size
        return jax.tree.unflatten(self._structure, leaves)


class Cut:
    """The layout of a tree's leaves on `shards` devices, with the interface of `Flat`. It is the
    concatenation of one vector per device, and each vector has a part of every leaf.

    *Arguments:* `axes` has the axis along which each leaf is cut (`models.large.axes`). A leaf with
    axis -1 is cut as flat values, padded to equal parts. Each device's vector has `chunks` chunks.
    The other arguments are as for `Flat`.

    *Fields:* `local` is the layout of one device's vector.
    """

    def __init__(
        self, tree: Tree, axes: Tree, shards: int, chunks: int = 1, dtype: DTypeLike = jnp.float32
    ):
        leaves, structure = jax.tree.flatten(tree)
        self.tree = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
        self._axes, self._shards, self._parts = jax.tree.leaves(axes), shards, []
        for leaf, axis in zip(leaves, self._axes, strict=True):
            shape = list(leaf.shape) if axis >= 0 else [-(-math.prod(leaf.shape) // shards)]
            if axis >= 0:
                shape[axis] //= shards
            self._parts.append(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype))
        self.local = Flat(jax.tree.unflatten(structure, self._parts), chunks, dtype)
        self.dtype, self.rounds = self.local.dtype, self.local.rounds
        self.size = shards * self.local.size

    def widened(self, dtype: DTypeLike | None = None) -> Cut:
        """Returns the same layout with leaves and vector of `dtype` (see `Flat`)."""
        dtype = dtype or self.dtype
        axes = jax.tree.unflatten(jax.tree.structure(self.tree), self._axes)
        return Cut(_all_of(self.tree, dtype), axes, self._shards, self.local.chunks, dtype)

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        """The shape of the whole vector."""
        return jax.ShapeDtypeStruct((self.size,), self.dtype)

    def pack(self, tree: Tree) -> jax.Array:
        """Returns the vector `(size,)` of the leaves of `tree`, with zeros after those of each
        device."""
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

    def unpack(self, vector: jax.Array | np.ndarray) -> Tree:
        """Returns the tree in a traced or NumPy `vector`, each leaf in its own dtype. It is the
        inverse of `pack`."""
        leaves, structure = jax.tree.flatten(self.tree)
        rows, start, values = vector.reshape(self._shards, -1), 0, []
        for leaf, axis, part in zip(leaves, self._axes, self._parts, strict=True):
            parts = rows[:, start : start + part.size]
            if axis >= 0:
                order = list(range(1, len(leaf.shape) + 1))
                order.insert(axis, 0)
                value = (
                    parts.reshape(self._shards, *part.shape).transpose(order).reshape(leaf.shape)
                )
            else:
                value = parts.reshape(-1)[: math.prod(leaf.shape)].reshape(leaf.shape)
            values.append(value.astype(leaf.dtype))
            start += part.size
        return jax.tree.unflatten(structure, values)


def _all_of(tree: Tree, dtype: DTypeLike) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)
