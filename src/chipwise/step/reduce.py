"""Adds vectors over replicas in one fixed order, with the traffic of an ordinary all-reduce.

All arithmetic here is addition, so compilers cannot round it differently. There is no product for a
fused multiply-add, and XLA does not reassociate floating-point sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ..models.large import SHARD, AnyMesh, on_each
from .layout import Ranges, covered_sum, covers, tree_sum

AXIS = "group"  # the mesh axis over which replicas are distributed
_LANES, _TILE = 128, 1024  # float32 values in a row and in a tile of a TPU's memory
_LARGE = 16 * _TILE  # from this size on, padding to tiles adds at most a sixteenth to the traffic


@dataclass(frozen=True)
class Exchange:
    """The vectors that devices send each other in a step."""

    kind: str
    """The kind of exchange. "reduce" is the sum over replicas. "gather" gathers a vector when each
    device has a part of it."""
    groups: int
    """The number of groups, of `shards` devices each."""
    size: int
    """The number of float32 values in a vector of a device. For "gather" it is that of the whole
    vector."""
    local: int = 1
    """The number of vectors on each device."""
    exact: bool = True
    shards: int = 1
    cut: int = 0
    """The number of first values of the sum that are split over the devices, so that each gets only
    its part. With 0, each device gets the whole sum."""
    bounds: tuple[int, ...] = ()
    """The bounds of these parts (see `layout.Ranges`), by default those of equal parts."""
    shares: tuple[int, ...] = ()
    """The blocks of each group, if a device's vectors are the sums of its cover's nodes. Without
    them, a device adds its vectors first."""

    @property
    def devices(self) -> int:
        return self.groups * self.shards

    @property
    def part(self) -> int:
        """The number of values of the sum, or of the gathered vector, that each device has."""
        return self._windows.part

    @property
    def _windows(self) -> Ranges:
        whole = self.size if self.kind == "gather" else self.cut
        even = Ranges.even(self.groups, self.groups, whole // self.groups)
        return Ranges(tuple(self.bounds)) if self.bounds else even

    def program(self, mesh: AnyMesh) -> Callable[..., Any]:
        """Returns the exchange over `mesh` of groups and shards, jitted. It is a `reducer`, a
        `scatterer` or a `gatherer`."""
        if self.kind == "gather":
            return gatherer(mesh, self._windows)
        if self.cut:
            return scatterer(mesh, self._windows, self.exact, self.shares)
        return reducer(mesh, self.exact, self.shares)

    def specs(self, mesh: AnyMesh) -> Any:
        """The shapes of the argument of `program`."""
        if self.kind == "gather":
            shape = (self.groups * self.part,)
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(AXIS)))
        shape, over = (self.devices * self.size,), NamedSharding(mesh, P((AXIS, SHARD)))
        return [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=over)] * self.local

    def over(self, devices: Sequence[jax.Device]) -> tuple[Callable[..., Any], Any]:
        """`program` and `specs` over the first of `devices`."""
        here = np.asarray(devices[: self.devices]).reshape(self.groups, self.shards)
        mesh = Mesh(here, (AXIS, SHARD))
        return self.program(mesh), self.specs(mesh)


def device_sum(vectors: Sequence[Array], devices: int, shares: Sequence[int] = ()) -> Array:
    """Returns the sum of all devices' `vectors`, each `(n,)`, in tree order, with the same bits on
    every device. Call it inside of `shard_map` over `AXIS`.

    *Arguments:* `shares` are the blocks of each device. The device's vectors are then the sums of
    its cover's nodes, followed by any vectors, so that all devices have equally many. By default
    each device has one vector, and the tree is over devices.

    The devices exchange chunks (all-to-all), each adds its chunk of all vectors in tree order, and
    the sums are gathered. With one vector, a device sends `2 (D - 1) / D` times the vector's bytes,
    as in a ring all-reduce (Patarasuk and Yuan, 2009). With K vectors, it sends `K + 1` times
    `(D - 1) / D`. With `lax.psum`, the back end would choose the order of additions.
    """
    if devices == 1:
        return vectors[0]
    size = vectors[0].size
    chunk, shape = _tiled(-(-size // devices))
    padded = [jnp.pad(one, (0, chunk * devices - size)).reshape(devices, *shape) for one in vectors]
    total = _exchanged(padded, devices, shares)
    return lax.all_gather(total, AXIS, tiled=True).reshape(-1)[:size]


def _exchanged(rows: Sequence[Array], devices: int, shares: Sequence[int]) -> Array:
    """The sum in tree order of each device's row of all devices' vectors, each `(devices, ...)`."""
    if not shares:
        # (devices, ...): one of each
        chunks = lax.all_to_all(rows[0], AXIS, split_axis=0, concat_axis=0)
        return tree_sum([chunks[i] for i in range(devices)], jnp.add)
    chunks = lax.all_to_all(jnp.stack(rows, 1), AXIS, split_axis=0, concat_axis=0)
    blocks = sum(shares)
    nodes = [
        (node, d, i) for d, own in enumerate(covers(blocks, shares)) for i, node in enumerate(own)
    ]
    return covered_sum({node: chunks[d, i] for node, d, i in nodes}, blocks, jnp.add)


def _tiled(chunk: int) -> tuple[int, tuple[int, ...]]:
    """The padded size and the shape in which a chunk of `chunk` values is sent."""
    if chunk < _LARGE:
        return chunk, (chunk,)
    # Whole tiles: otherwise a TPU rearranges every chunk, and pads it with zeros to gather it.
    chunk = -(-chunk // _TILE) * _TILE
    return chunk, (chunk // _LANES, _LANES)


def _fitted(piece: Array, size: int) -> Array:
    """Cuts `piece` to `size` values, or fills it up with zeros."""
    return piece[:size] if piece.size >= size else jnp.pad(piece, (0, size - piece.size))


def _pieces(vector: Array, starts: Sequence[int], old: int, new: int) -> Array:
    """The pieces of `old` values from `starts` on, each cut to `new` values or filled up with
    zeros, one after another. They are never rows of a matrix in between, since a TPU would copy
    these in a loop."""
    if old == new and list(starts) == list(range(0, vector.size, old)):
        return vector
    return jnp.concatenate([_fitted(vector[start : start + old], new) for start in starts])


def scatterer(
    mesh: AnyMesh, windows: Ranges, exact: bool = True, shares: Sequence[int] = ()
) -> Callable[[Sequence[Array]], tuple[Array, Array]]:
    """A jitted function that adds the vectors of all replicas (see `reducer`), and returns two
    arrays. The first has all windows of the sum's first values one after another, cut over `mesh`,
    so that each device gets only its window. The second has the other values, whole on every
    device."""
    devices, part, size = mesh.size, windows.part, windows.bounds[-1]
    starts = [windows.start(group) for group in range(devices)]

    def local(vectors: Sequence[Array]) -> tuple[Array, Array]:
        sums = list(vectors) if shares else [tree_sum(vectors, jnp.add)]
        if not exact:
            whole = _pieces(sums[0][:size], starts, part, part)
            return lax.psum_scatter(whole, AXIS, tiled=True), lax.psum(sums[0][size:], AXIS)
        chunk, shape = _tiled(part)
        rows = [_pieces(one[:size], starts, part, chunk).reshape(devices, *shape) for one in sums]
        total = _exchanged(rows, devices, shares)
        return total.reshape(-1)[:part], device_sum([one[size:] for one in sums], devices, shares)

    return jax.jit(on_each(mesh, local, P(AXIS), (P(AXIS), P())))


def gatherer(mesh: AnyMesh, windows: Ranges) -> Callable[[Array], Array]:
    """A jitted function that gathers a vector on every device from the devices' windows of it. Of
    each window only the device's own values count."""
    own = [windows.own(group) for group in range(mesh.size)]

    def local(part: Array) -> Array:
        chunk, shape = _tiled(part.size)
        gathered = lax.all_gather(_fitted(part, chunk).reshape(shape), AXIS).reshape(-1)
        if all(first == 0 and after == chunk for first, after in own):
            return gathered
        return jnp.concatenate(
            [gathered[i * chunk + a : i * chunk + b] for i, (a, b) in enumerate(own)]
        )

    return jax.jit(on_each(mesh, local, P(AXIS), P()))


def reducer(
    mesh: AnyMesh, exact: bool = True, shares: Sequence[int] = ()
) -> Callable[[Sequence[Array]], Array]:
    """A jitted function that adds the vectors of all replicas.

    Its argument is a list with one entry for each replica (or partial sum) of a device, in order.
    An entry is `(devices * n,)`, with part `d` on device `d` of `mesh`. With `shares`, there is an
    entry for each node of the device's cover (`device_sum`). It returns `(n,)`, whole on every
    device. In groups of several devices, each device adds its own shard over the groups, and the
    result is the concatenated shards, `(shards * n,)`. Without `exact`, the back end chooses the
    order of additions over devices.

    Vectors are never rows of a matrix. A TPU arranges these in another way, and copying a vector of
    any length from one arrangement to the other takes as long as adding it.
    """
    devices = mesh.shape[AXIS]
    others = tuple(a for a in mesh.axis_names if a != AXIS and mesh.shape[a] > 1)

    def local(vectors: Sequence[Array]) -> Array:
        sums = list(vectors) if shares else [tree_sum(vectors, jnp.add)]
        return (
            device_sum(sums, devices, shares) if exact or devices == 1 else lax.psum(sums[0], AXIS)
        )

    if devices == 1 and not others:
        return jax.jit(local)
    in_specs, out_specs = (P((AXIS, *others)), P(others)) if others else (P(AXIS), P())
    body = on_each(mesh, local, in_specs, out_specs)
    # Stated, since JAX passes on a lone vector as it came: cut over an axis that one group does not
    # have.
    return jax.jit(body, out_shardings=NamedSharding(mesh, out_specs))
