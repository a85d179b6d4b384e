"""Sums over replicas in one fixed order, at the traffic of an ordinary all-reduce.

Everything here is additions alone, so that no compiler can round it in two ways: there is no
product to contract into a fused multiply-add, and XLA does not reassociate floating-point sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .layout import tree_sum

AXIS = "group"  # the mesh axis over which replicas are shared out
_LANES, _TILE = 128, 1024  # float32 values in a row and in a tile of a TPU's memory
_LARGE = 16 * _TILE  # from here on padding to tiles adds at most a sixteenth to what is sent


def device_sum(vector: jax.Array, devices: int) -> jax.Array:
    """The sum of every device's `vector` `(n,)` in tree order, the same bits on all of them.

    To be called inside `shard_map` over `AXIS`. The devices exchange chunks (all-to-all), each adds
    its chunk of all devices in tree order, and the chunks are gathered. A device sends
    `2 (D - 1) / D` times the vector's bytes, which is what a ring all-reduce sends (Patarasuk and
    Yuan, 2009), while the order in which `lax.psum` adds is the back end's affair.
    """
    if devices == 1:
        return vector
    chunk, shape = _tiled(-(-vector.size // devices))
    padded = jnp.pad(vector, (0, chunk * devices - vector.size)).reshape(devices, *shape)
    mine = lax.all_to_all(padded, AXIS, split_axis=0, concat_axis=0)  # (devices, ...): my chunk of each
    total = tree_sum([mine[i] for i in range(devices)], jnp.add)
    return lax.all_gather(total, AXIS, tiled=True).reshape(-1)[: vector.size]


def _tiled(chunk: int) -> tuple[int, tuple[int, ...]]:
    """How long a chunk of so many values is when it is sent, and in which shape."""
    if chunk < _LARGE:
        return chunk, (chunk,)
    # Whole tiles: a TPU otherwise rearranges every chunk, and gathers with zeros added
    chunk = -(-chunk // _TILE) * _TILE
    return chunk, (chunk // _LANES, _LANES)


def scatterer(mesh: Mesh, size: int) -> Callable[[Sequence[jax.Array]], tuple[jax.Array, jax.Array]]:
    """As `reducer`, but each device keeps its part of the first `size` values, which the devices divide: they
    are `(size,)`, cut over `mesh`; the values behind them are whole on every device."""
    devices = mesh.devices.size
    own = size // devices

    def local(vectors):
        mine = tree_sum([v[0] for v in vectors], jnp.add)
        chunk, shape = _tiled(own)
        rows = jnp.pad(mine[:size].reshape(devices, own), ((0, 0), (0, chunk - own)))
        met = lax.all_to_all(rows.reshape(devices, *shape), AXIS, split_axis=0, concat_axis=0)
        total = tree_sum([met[i] for i in range(devices)], jnp.add)
        return total.reshape(-1)[:own], device_sum(mine[size:], devices)

    body = jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=(P(AXIS), P()), check_vma=False)
    return jax.jit(body)


def gatherer(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """A jitted function that makes a vector cut over `mesh` whole on every device."""
    devices = mesh.devices.size

    def local(part):
        chunk, shape = _tiled(part.size)
        padded = jnp.pad(part, (0, chunk - part.size)).reshape(shape)
        return lax.all_gather(padded, AXIS).reshape(devices, chunk)[:, : part.size].reshape(-1)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P(), check_vma=False))


def reducer(mesh: Mesh, exact: bool = True) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """A jitted function from the vectors of each device's replicas to the sum over all replicas.

    Its argument is a list with one entry for each local replica (or local partial sum) in order:
    `(devices, n)`, row `d` on device `d` of `mesh`. It returns `(n,)`, whole on every device. Where groups
    are several devices, each adds its own shard over the groups, and the shards are returned one behind
    another, `(shards * n,)`. Without
    `exact` the order of additions over devices is the back end's.
    """
    devices, others = mesh.shape[AXIS], tuple(a for a in mesh.axis_names if a != AXIS and mesh.shape[a] > 1)

    def local(vectors):
        mine = tree_sum([v[0] for v in vectors], jnp.add)
        return device_sum(mine, devices) if exact or devices == 1 else lax.psum(mine, AXIS)

    if devices == 1 and not others:
        return jax.jit(local)
    rows, whole = (P((AXIS, *others)), P(others)) if others else (P(AXIS), P())
    body = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=whole, check_vma=False)
    return jax.jit(body)
