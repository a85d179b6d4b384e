"""Sums over replicas in one fixed order, with the traffic of an ordinary all-reduce.

All arithmetic here is addition, so compilers cannot round it differently: there is no product for a fused
multiply-add, and XLA does not reassociate floating-point sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..models.large import SHARD
from .layout import tree_sum

AXIS = "group"  # the mesh axis over which replicas are distributed
_LANES, _TILE = 128, 1024  # float32 values in a row and in a tile of a TPU's memory
_LARGE = 16 * _TILE  # from this size on, padding to tiles adds at most a sixteenth to the traffic


@dataclass(frozen=True)
class Exchange:
    """What devices send each other in a step.

    *Fields:* `kind`: "reduce", the sum over replicas, or "gather" of a vector of which each device has a
    part; `groups` of `shards` devices each; `local` vectors of `size` float32 on each device (of "gather",
    the whole); `cut`: of so many first values of the sum each device gets only its part; 0: all are whole.
    """

    kind: str
    groups: int
    size: int
    local: int = 1
    exact: bool = True
    shards: int = 1
    cut: int = 0

    @property
    def devices(self) -> int:
        return self.groups * self.shards

    @property
    def bytes(self) -> int:
        """Of a device's vectors before the exchange."""
        return 4 * self.size * self.local // (self.groups if self.kind == "gather" else 1)

    def program(self, mesh: Mesh) -> Callable[..., Any]:
        """The exchange over `mesh` of groups and shards, jitted: a `reducer`, `scatterer` or `gatherer`."""
        if self.kind == "gather":
            return gatherer(mesh)
        return scatterer(mesh, self.cut, self.exact) if self.cut else reducer(mesh, self.exact)

    def specs(self, mesh: Mesh) -> Any:
        """The shapes of the argument of `program`."""
        if self.kind == "gather":
            return jax.ShapeDtypeStruct((self.size,), jnp.float32, sharding=NamedSharding(mesh, P(AXIS)))
        shape, over = (self.devices * self.size,), NamedSharding(mesh, P((AXIS, SHARD)))
        return [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=over)] * self.local


def device_sum(vector: jax.Array, devices: int) -> jax.Array:
    """The sum of all devices' `vector`s `(n,)` in tree order, with the same bits on every device.

    Call it inside of `shard_map` over `AXIS`. The devices exchange chunks (all-to-all), each adds its chunk
    of all devices in tree order, and the sums are gathered. A device sends `2 (D - 1) / D` times the vector's
    bytes, as in a ring all-reduce (Patarasuk and Yuan, 2009). With `lax.psum`, the back end would choose the
    order of additions.
    """
    if devices == 1:
        return vector
    chunk, shape = _tiled(-(-vector.size // devices))
    padded = jnp.pad(vector, (0, chunk * devices - vector.size)).reshape(devices, *shape)
    chunks = lax.all_to_all(padded, AXIS, split_axis=0, concat_axis=0)  # (devices, ...): one of each device
    total = tree_sum([chunks[i] for i in range(devices)], jnp.add)
    return lax.all_gather(total, AXIS, tiled=True).reshape(-1)[: vector.size]


def _tiled(chunk: int) -> tuple[int, tuple[int, ...]]:
    """The padded size and the shape in which a chunk of `chunk` values is sent."""
    if chunk < _LARGE:
        return chunk, (chunk,)
    # Whole tiles: otherwise a TPU rearranges every chunk, and pads it with zeros to gather it.
    chunk = -(-chunk // _TILE) * _TILE
    return chunk, (chunk // _LANES, _LANES)


def _resized(vector: jax.Array, count: int, old: int, new: int) -> jax.Array:
    """A vector of `count` pieces of `old` values, each cut to `new` or filled up with zeros. Never the rows
    of a matrix in between, which a TPU would copy in a loop."""
    if old == new:
        return vector
    pieces = [vector[i * old : i * old + min(old, new)] for i in range(count)]
    return jnp.concatenate([jnp.pad(piece, (0, new - piece.size)) for piece in pieces])


def scatterer(
    mesh: Mesh, size: int, exact: bool = True
) -> Callable[[Sequence[jax.Array]], tuple[jax.Array, jax.Array]]:
    """As `reducer`, but the sum's first `size` values (a multiple of the devices) are cut over `mesh`,
    `(size,)`; the other values are whole on every device."""
    devices = mesh.devices.size
    part_size = size // devices

    def local(vectors):
        partial = tree_sum(vectors, jnp.add)
        if not exact:
            return lax.psum_scatter(partial[:size], AXIS, tiled=True), lax.psum(partial[size:], AXIS)
        chunk, shape = _tiled(part_size)
        rows = _resized(partial[:size], devices, part_size, chunk).reshape(devices, *shape)
        chunks = lax.all_to_all(rows, AXIS, split_axis=0, concat_axis=0)
        total = tree_sum([chunks[i] for i in range(devices)], jnp.add)
        return total.reshape(-1)[:part_size], device_sum(partial[size:], devices)

    body = jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=(P(AXIS), P()), check_vma=False)
    return jax.jit(body)


def gatherer(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """A jitted function that gathers a vector, which is cut over `mesh`, on every device."""
    devices = mesh.devices.size

    def local(part):
        chunk, shape = _tiled(part.size)
        padded = _resized(part, 1, part.size, chunk).reshape(shape)
        return _resized(lax.all_gather(padded, AXIS).reshape(-1), devices, chunk, part.size)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P(), check_vma=False))


def reducer(mesh: Mesh, exact: bool = True) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """A jitted function that adds the vectors of all replicas.

    Its argument is a list with one entry for each replica (or partial sum) of a device, in order: `(devices *
    n,)`, with part `d` on device `d` of `mesh`. It returns `(n,)`, whole on every device. In groups of
    several devices, each device adds its own shard over the groups, and the result is the concatenated
    shards, `(shards * n,)`. Without `exact`, the back end chooses the order of additions over devices.

    Vectors are never rows of a matrix: a TPU arranges these in another way, and copying a vector of any
    length from the one to the other takes as long as adding it.
    """
    devices, others = mesh.shape[AXIS], tuple(a for a in mesh.axis_names if a != AXIS and mesh.shape[a] > 1)

    def local(vectors):
        partial = tree_sum(vectors, jnp.add)
        return device_sum(partial, devices) if exact or devices == 1 else lax.psum(partial, AXIS)

    if devices == 1 and not others:
        return jax.jit(local)
    in_specs, out_specs = (P((AXIS, *others)), P(others)) if others else (P(AXIS), P())
    body = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    # Stated, since JAX passes on a lone vector as it came: cut over an axis that one group does not have.
    return jax.jit(body, out_shardings=NamedSharding(mesh, out_specs))
