"""Where replicas run: which device holds what, and what every host decides alike.

A mesh has two axes: `group`, over which replicas are shared out, and `shard`, over which one replica's
parameters would lie. Today a group is one device, and one process drives them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
import psutil
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..errors import DeviceError
from ..machine.detect import Machine, detect
from ..recipe.task import Tree
from ..words.facts import Fact, fact
from .layout import Layout, usable
from .on import On
from .reduce import AXIS as GROUP

SHARD = "shard"  # the other axis of the mesh
T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Devices that together run a replica's program, on this host. `index` among all groups of the run."""

    index: int
    device: jax.Device


class Placement:
    """The groups of a run on a machine.

    *Arguments:* `groups`, how many of the machine's devices to use, the first ones.

    *Fields:* `mesh`; `groups`, their number over all hosts; `local`, those of this host; `lead`, the device
    for what is computed once.

    Raises `DeviceError` when several processes share the devices.
    """

    def __init__(self, machine: Machine, groups: int | None = None):
        if jax.process_count() > 1:
            raise DeviceError("run-of-several-processes", processes=jax.process_count())
        devices = machine.devices[:groups]
        self.machine, self.groups = machine, len(devices)
        self.mesh = Mesh(np.asarray(devices).reshape(len(devices), 1), (GROUP, SHARD))
        self.local = tuple(Group(i, device) for i, device in enumerate(devices))
        self.lead = devices[0]
        self._whole, self._cut = NamedSharding(self.mesh, P()), NamedSharding(self.mesh, P(GROUP))

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices of this host."""
        return tuple(group.device for group in self.local)

    def put(self, tree: Tree) -> list[Tree]:
        """`tree` whole on every local group."""
        return [jax.device_put(tree, group.device) for group in self.local]

    def cut(self, tree: Tree, axis: int = 0) -> list[Tree]:
        """A global batch, arrays with the batch along `axis`, on each local group its own rows."""

        def rows(array: np.ndarray, group: Group) -> np.ndarray:
            each = array.shape[axis] // self.groups
            return array[(slice(None),) * axis + (slice(group.index * each, (group.index + 1) * each),)]

        return [
            jax.device_put(jax.tree.map(lambda a, g=group: rows(a, g), tree), group.device)
            for group in self.local
        ]

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Arrays `(1, n)` of the local groups as one array `(groups, n)` over the mesh. Copies nothing."""
        shape = (self.groups, *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._cut, list(parts))

    def split(self, array: jax.Array) -> list[jax.Array]:
        """What each local group holds of an array over the mesh. Copies nothing."""
        return [shard.data for shard in array.addressable_shards]

    def gather(self, carry: Sequence[Tree]) -> Tree:
        """Equal trees of the local groups as arrays over the mesh, whole on every group. Copies nothing."""
        return jax.tree.map(
            lambda *parts: jax.make_array_from_single_device_arrays(parts[0].shape, self._whole, list(parts)),
            *carry,
        )

    def spread(self, tree: Tree, *, rows: bool = False) -> Tree:
        """`tree` as arrays over the mesh: whole on every group or, with `rows`, cut along the first axis."""
        return jax.device_put(tree, self._cut if rows else self._whole)

    def shapes(self, tree: Tree, *, rows: bool = False) -> Tree:
        """The shapes of what `spread` makes of `tree`, arrays or shapes."""
        sharding = self._cut if rows else self._whole
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    def agree(self, value: T) -> T:
        """The value on which all hosts decide alike: that of the first. With one host, `value`."""
        return value

    @property
    def memory_bytes(self) -> int | None:
        """Memory of a device that this process may use; `None` where the device does not say (a CPU)."""
        return (self.lead.memory_stats() or {}).get("bytes_limit")

    def free_bytes(self) -> int:
        """Memory of a device that is free; a CPU's devices share what the host has free."""
        stats = self.lead.memory_stats() or {}
        if "bytes_limit" in stats:
            return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        return psutil.virtual_memory().available // self.groups


def lay_out(recipe: Any, on: On, machine: Machine | None = None) -> tuple[Machine, Layout, list[Fact]]:
    """The machine, the recipe's layout on it, and what is to be said of that.

    All the machine's devices are used, or as many as the replicas can use; when `on` asks for a number, that
    number or a `DeviceError`.
    """
    machine = machine or detect(on.devices, on.platform)
    found, replicas = len(machine.devices), recipe.replicas
    used = found if on.devices is not None else usable(replicas, found, on.exact)
    warnings = []
    if used < found:
        code = "devices-left-exact" if on.exact else "devices-left"
        warnings.append(fact(code, found=found, used=used, replicas=replicas))
    return machine, Layout(recipe.batch, replicas, used, on.exact), warnings


def describe(machine: Machine, layout: Layout) -> dict[str, Any]:
    """The machine and the layout as plain JSON values."""
    return {
        "platform": machine.platform,
        "kind": machine.kind,
        "count": layout.devices,
        "simulated": machine.simulated,
        "replicas": layout.replicas,
        "replicas_per_device": layout.replicas_per_device,
        "batch": layout.batch,
        "replica_batch": layout.replica_batch,
        "exact": layout.exact,
    }


def start_fact(machine: Machine, layout: Layout, precision: str) -> Fact:
    """Platform, device kind, count, replicas a device, precision and batches: the first line of a run."""
    code = "start" if layout.exact else "start-free"
    return fact(
        code,
        **describe(machine, layout) | {"precision": precision, "mark": " (simulated)" * machine.simulated},
    )
