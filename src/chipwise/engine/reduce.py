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
from .layout import Ranges, covered_sum, covers, tree_sum

AXIS = "group"  # the mesh axis over which replicas are distributed
_LANES, _TILE = 128, 1024  # float32 values in a row and in a tile of a TPU's memory
_LARGE = 16 * _TILE  # from this size on, padding to tiles adds at most a sixteenth to the traffic


@dataclass(frozen=True)
class Exchange:
    """What devices send each other in a step.

    *Fields:* `kind`: "reduce", the sum over replicas, or "gather" of a vector of which each device has a
    part; `groups` of `shards` devices each; `local` vectors of `size` float32 on each device (of "gather",
    the whole); `cut`: of so many first values of the sum each device gets only its part; 0: all are whole;
    `bounds` of such parts (see `layout.Ranges`), by default equal ones; `shares`, the blocks of each group,
    if `local` are the sums of its cover's nodes, otherwise they are added first.
    """

    kind: str
    groups: int
    size: int
    local: int = 1
    exact: bool = True
    shards: int = 1
    cut: int = 0
    bounds: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()

    @property
    def devices(self) -> int:
        return self.groups * self.shards

    @property
    def part(self) -> int:
        """The values of which each device has the sum, or which it has of what is gathered."""
        return self._windows.part

    @property
    def _windows(self) -> Ranges:
        whole = self.size if self.kind == "gather" else self.cut
        even = Ranges.even(self.groups, self.groups, whole // self.groups)
        return Ranges(tuple(self.bounds)) if self.bounds else even

    def program(self, mesh: Mesh) -> Callable[..., Any]:
        """The exchange over `mesh` of groups and shards, jitted: a `reducer`, `scatterer` or `gatherer`."""
        if self.kind == "gather":
            return gatherer(mesh, self._windows)
        if self.cut:
            return scatterer(mesh, self._windows, self.exact, self.shares)
        return reducer(mesh, self.exact, self.shares)

    def specs(self, mesh: Mesh) -> Any:
        """The shapes of the argument of `program`."""
        if self.kind == "gather":
            shape = (self.groups * self.part,)
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(AXIS)))
        shape, over = (self.devices * self.size,), NamedSharding(mesh, P((AXIS, SHARD)))
        return [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=over)] * self.local


def device_sum(vectors: Sequence[jax.Array], devices: int, shares: Sequence[int] = ()) -> jax.Array:
    """The sum of all devices' `vectors`, each `(n,)`, in tree order, with the same bits on every device.

    Call it inside of `shard_map` over `AXIS`. *Arguments:* `shares`, the blocks of each device, whose vectors
    are then the sums of its cover's nodes, followed by any to be as many as the others'; by default each
    device has one vector, and the tree is over devices.

    The devices exchange chunks (all-to-all), each adds its chunk of all vectors in tree order, and the sums
    are gathered. With one vector, a device sends `2 (D - 1) / D` times the vector's bytes, as in a ring
    all-reduce (Patarasuk and Yuan, 2009); with K, `K + 1` times `(D - 1) / D`. With `lax.psum`, the back end
    would choose the order of additions.
    """
    if devices == 1:
        return vectors[0]
    size = vectors[0].size
    chunk, shape = _tiled(-(-size // devices))
    padded = [jnp.pad(one, (0, chunk * devices - size)).reshape(devices, *shape) for one in vectors]
    total = _exchanged(padded, devices, shares)
    return lax.all_gather(total, AXIS, tiled=True).reshape(-1)[:size]


def _exchanged(rows: Sequence[jax.Array], devices: int, shares: Sequence[int]) -> jax.Array:
    """The sum in tree order of each device's row of all devices' vectors, each `(devices, ...)`."""
    if not shares:
        chunks = lax.all_to_all(rows[0], AXIS, split_axis=0, concat_axis=0)  # (devices, ...): one of each
        return tree_sum([chunks[i] for i in range(devices)], jnp.add)
    chunks = lax.all_to_all(jnp.stack(rows, 1), AXIS, split_axis=0, concat_axis=0)
    blocks = sum(shares)
    nodes = [(node, d, i) for d, own in enumerate(covers(blocks, shares)) for i, node in enumerate(own)]
    return covered_sum({node: chunks[d, i] for node, d, i in nodes}, blocks, jnp.add)


def _tiled(chunk: int) -> tuple[int, tuple[int, ...]]:
    """The padded size and the shape in which a chunk of `chunk` values is sent."""
    if chunk < _LARGE:
        return chunk, (chunk,)
    # Whole tiles: otherwise a TPU rearranges every chunk, and pads it with zeros to gather it.
    chunk = -(-chunk // _TILE) * _TILE
    return chunk, (chunk // _LANES, _LANES)


def _fitted(piece: jax.Array, size: int) -> jax.Array:
    """`piece` cut to `size` values, or filled up with zeros."""
    return piece[:size] if piece.size >= size else jnp.pad(piece, (0, size - piece.size))


def _pieces(vector: jax.Array, starts: Sequence[int], old: int, new: int) -> jax.Array:
    """The pieces of `old` values from `starts` on, each cut to `new` or filled up with zeros, one after
    another. Never the rows of a matrix in between, which a TPU would copy in a loop."""
    if old == new and list(starts) == list(range(0, vector.size, old)):
        return vector
    return jnp.concatenate([_fitted(vector[start : start + old], new) for start in starts])


def scatterer(
    mesh: Mesh, windows: Ranges, exact: bool = True, shares: Sequence[int] = ()
) -> Callable[[Sequence[jax.Array]], tuple[jax.Array, jax.Array]]:
    """As `reducer`, but of the sum's first values each device gets only its window: all windows one after
    another are cut over `mesh`. The other values are whole on every device."""
    devices, part, size = mesh.devices.size, windows.part, windows.bounds[-1]
    starts = [windows.start(group) for group in range(devices)]

    def local(vectors):
        sums = list(vectors) if shares else [tree_sum(vectors, jnp.add)]
        if not exact:
            whole = _pieces(sums[0][:size], starts, part, part)
            return lax.psum_scatter(whole, AXIS, tiled=True), lax.psum(sums[0][size:], AXIS)
        chunk, shape = _tiled(part)
        rows = [_pieces(one[:size], starts, part, chunk).reshape(devices, *shape) for one in sums]
        total = _exchanged(rows, devices, shares)
        return total.reshape(-1)[:part], device_sum([one[size:] for one in sums], devices, shares)

    body = jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=(P(AXIS), P()), check_vma=False)
    return jax.jit(body)


def gatherer(mesh: Mesh, windows: Ranges) -> Callable[[jax.Array], jax.Array]:
    """A jitted function that gathers a vector, of which each device has its window, on every device; of each
    window the device's own values count."""
    own = [windows.own(group) for group in range(mesh.devices.size)]

    def local(part):
        chunk, shape = _tiled(part.size)
        gathered = lax.all_gather(_fitted(part, chunk).reshape(shape), AXIS).reshape(-1)
        if all(first == 0 and after == chunk for first, after in own):
            return gathered
        return jnp.concatenate([gathered[i * chunk + a : i * chunk + b] for i, (a, b) in enumerate(own)])

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P(), check_vma=False))


def reducer(
    mesh: Mesh, exact: bool = True, shares: Sequence[int] = ()
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """A jitted function that adds the vectors of all replicas.

    Its argument is a list with one entry for each replica (or partial sum) of a device, in order: `(devices *
    n,)`, with part `d` on device `d` of `mesh`; with `shares`, for each node of its cover (`device_sum`). It
    returns `(n,)`, whole on every device. In groups of several devices, each device adds its own shard over
    the groups, and the result is the concatenated shards, `(shards * n,)`. Without `exact`, the back end
    chooses the order of additions over devices.

    Vectors are never rows of a matrix: a TPU arranges these in another way, and copying a vector of any
    length from the one to the other takes as long as adding it.
    """
    devices, others = mesh.shape[AXIS], tuple(a for a in mesh.axis_names if a != AXIS and mesh.shape[a] > 1)

    def local(vectors):
        sums = list(vectors) if shares else [tree_sum(vectors, jnp.add)]
        return device_sum(sums, devices, shares) if exact or devices == 1 else lax.psum(sums[0], AXIS)

    if devices == 1 and not others:
        return jax.jit(local)
    in_specs, out_specs = (P((AXIS, *others)), P(others)) if others else (P(AXIS), P())
    body = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    # Stated, since JAX passes on a lone vector as it came: cut over an axis that one group does not have.
    return jax.jit(body, out_shardings=NamedSharding(mesh, out_specs))
