"""Where replicas run: which device holds what, and what every host decides alike.

A mesh has two axes: `group`, over which replicas are shared out, and `shard`, over which one replica's
parameters lie. A group is one device unless the recipe has `shards`. A host has one or more whole groups, or
a group has several whole hosts. Each host drives its own devices; a device is known by its position among
all, since numbers (`id`) jump from host to host.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..errors import DeviceError
from ..machine.cluster import outside_srun
from ..machine.detect import Machine, detect, shared
from ..machine.hosts import hosts
from ..machine.limits import memory
from ..models.large import SHARD, spec_at
from ..recipe import precision
from ..recipe.task import Tree
from ..words.facts import Fact, fact
from .layout import Layout, usable_devices
from .on import On
from .reduce import AXIS as GROUP

WHOLE = P()
MET_WORDS = 1 << 26  # that hosts send each other at once: 256 MB on each device
T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Devices that together run a replica's program. `index` among all groups of the run; `here`, those of
    its `devices` that are this host's; `device`, the first of these; `mesh` of all."""

    index: int
    devices: tuple[jax.Device, ...]
    here: tuple[jax.Device, ...]

    @property
    def device(self) -> jax.Device:
        return self.here[0]

    @functools.cached_property
    def mesh(self) -> Mesh:
        return Mesh(np.asarray(self.devices), (SHARD,))

    def place(self, spec: P = WHOLE) -> Any:
        """Where arrays lie that are whole on each device, or cut as `spec` says."""
        return self.device if len(self.devices) == 1 else NamedSharding(self.mesh, spec)

    def put(self, tree: Tree, spec: P = WHOLE) -> Tree:
        """`tree`, of arrays that every host of the group has, there."""
        to = self.place(spec)
        if len(self.here) == len(self.devices):
            return jax.device_put(tree, to)
        whole = jax.tree.map(np.asarray, tree)
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, to, x.__getitem__), whole)


class Placement:
    """The groups of a run on a machine.

    *Arguments:* `devices`, how many of the machine's to use, the first ones; `shards`, how many make a group.

    *Fields:* `mesh`; `groups`, their number over all hosts; `local`, those that this host has devices of;
    `over_hosts`, whether a group lies on several; `lead`, this host's device for what is computed once;
    `hosts`.

    Raises `DeviceError` when a host would have none of so many, or neither hosts have whole groups nor groups
    whole hosts.
    """

    def __init__(self, machine: Machine, devices: int | None = None, shards: int = 1):
        self.hosts = hosts()
        count = len(machine.devices) if devices is None else devices
        used = shared(machine.devices, count, self.hosts.count)
        if len(used) % shards:
            raise DeviceError("shards-uneven", shards=shards, devices=len(used))
        if (here := len(used) // self.hosts.count) % shards and shards % here:
            raise DeviceError("shards-over-hosts", shards=shards, here=here)
        self.machine, self.groups, self.shards = machine, len(used) // shards, shards
        self.mesh = Mesh(np.asarray(used).reshape(self.groups, shards), (GROUP, SHARD))
        self.over_hosts, mine = shards > here, self.hosts.index
        found = [
            Group(i, tuple(row), tuple(d for d in row if d.process_index == mine))
            for i, row in enumerate(self.mesh.devices)
        ]
        self.local = tuple(group for group in found if group.here)
        self.lead = self.local[0].device
        over = P(GROUP) if shards == 1 else P((GROUP, SHARD))
        self._whole, self._cut = NamedSharding(self.mesh, P()), NamedSharding(self.mesh, over)

    @classmethod
    def of(cls, machine: Machine, shards: int, most: int | None = None) -> Placement:
        """Groups of `shards` of all devices, at most as many as `most`; without groups where the devices
        cannot be cut into them: for what needs no fixed bits."""
        shards = shards if len(machine.devices) % shards == 0 else 1
        groups = len(machine.devices) // shards
        return cls(machine, shards * min(groups, most or groups), shards)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices of this host."""
        return tuple(device for group in self.local for device in group.here)

    @property
    def count(self) -> int:
        """The devices of all hosts."""
        return self.groups * self.shards

    def put(self, tree: Tree) -> list[Tree]:
        """`tree` whole on every local group: on each of its devices."""
        return [group.put(tree) for group in self.local]

    def put_cut(self, tree: Tree, axes: Tree, only: int | None = None) -> list[Tree]:
        """`tree` on every local group, or the first `only`, each leaf cut over the devices along its axis, -1
        for none."""
        return [
            jax.tree.map(lambda leaf, axis, to=to: to.put(leaf, spec_at(axis)), tree, axes)
            for to in self.local[:only]
        ]

    def own(self, tree: Tree, axis: int = 0, *, devices: bool = False) -> Tree:
        """Of a global batch, arrays with it along `axis`, the rows of this host's groups, in their order, or
        of its `devices` alone."""
        if self.hosts.count == 1:
            return tree
        of, held = self.groups, [group.index for group in self.local]
        if devices:
            order = {device: at for at, device in enumerate(self.mesh.devices.flat)}
            of, held = self.count, [order[device] for device in self.devices]

        def rows(array: np.ndarray) -> np.ndarray:
            each = array.shape[axis] // of
            blocks = [np.arange(at * each, (at + 1) * each) for at in held]
            return np.take(array, np.concatenate(blocks), axis)

        return jax.tree.map(rows, tree)

    def cut(self, tree: Tree, axis: int = 0, within: P = WHOLE) -> list[Tree]:
        """This host's rows of a batch (`own`), with them along `axis`: on each local group its own, and there
        on each device or cut as `within` says."""

        def rows(array: np.ndarray, at: int) -> np.ndarray:
            each = array.shape[axis] // len(self.local)
            return array[(slice(None),) * axis + (slice(at * each, (at + 1) * each),)]

        return [
            group.put(jax.tree.map(lambda a, at=at: rows(a, at), tree), within)
            for at, group in enumerate(self.local)
        ]

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Arrays `(k, n)` of the local groups, where these are several devices cut along `k`, as one
        `(k * groups, n)` over the mesh. Copies nothing."""
        shape = (self.groups * parts[0].shape[0], *parts[0].shape[1:])
        held = list(parts) if self.shards == 1 else [s.data for p in parts for s in p.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, self._cut, held)

    def split(self, array: jax.Array) -> list[jax.Array]:
        """What each local group holds of an array over the mesh: where a group is several devices, of one
        that is whole on every group. Copies nothing."""
        held = [shard.data for shard in array.addressable_shards]
        if self.shards == 1:
            return held
        on = {next(iter(data.devices())): data for data in held}
        return [
            jax.make_array_from_single_device_arrays(
                array.shape, group.place(_spec(array)), [on[device] for device in group.here]
            )
            for group in self.local
        ]

    def gather(self, carry: Sequence[Tree]) -> Tree:
        """Equal trees of the local groups as arrays over the mesh, whole on every group, and there cut as
        they were. Copies nothing."""

        def joined(*parts: jax.Array) -> jax.Array:
            over, held = self._whole, list(parts)
            if self.shards > 1:
                over = NamedSharding(self.mesh, _spec(parts[0]))
                held = [shard.data for part in parts for shard in part.addressable_shards]
            return jax.make_array_from_single_device_arrays(parts[0].shape, over, held)

        return jax.tree.map(joined, *carry)

    def spread(self, tree: Tree, *, rows: bool = False) -> Tree:
        """`tree` as arrays over the mesh: whole on every device or, with `rows`, the rows of this host's
        devices (`own`) of arrays that are cut along the first axis."""
        if self.hosts.count == 1:
            return jax.device_put(tree, self._cut if rows else self._whole)
        if self.shards > 1 and rows:
            return jax.tree.map(lambda x: jax.make_array_from_process_local_data(self._cut, x), tree)
        if not rows:
            return self.gather(self.put(tree))
        return jax.tree.map(lambda *parts: self.join(parts), *self.cut(tree))

    def assemble(self, parts: Sequence[jax.Array]) -> np.ndarray:
        """Arrays `(k, n)` of the local groups as `(k * groups, n)` on every host. Waits, for all hosts."""
        joined = self.join(parts)
        return np.asarray(joined if self.hosts.count == 1 else self._gathered(joined).addressable_data(0))

    def broadcast(self, tree: Tree, shapes: Tree) -> Tree:
        """NumPy arrays of host 0 as NumPy arrays on every host, to the bit. Waits, for all hosts.

        *Arguments:* `tree` on host 0, anything on the others; `shapes` of it.
        """
        if self.hosts.count == 1:
            return tree
        leaves, structure = jax.tree.flatten(shapes)
        given = jax.tree.leaves(tree) if self.hosts.first else [None] * len(leaves)
        return jax.tree.unflatten(structure, [self.met(a, s) for a, s in zip(given, leaves, strict=True)])

    def met(self, array: Any, shape: Any) -> np.ndarray:
        """The `array` of the one host that gives it, the others None, on every host to the bit. Waits, for
        all hosts. *Arguments:* `shape`, with its `dtype`."""
        dtype, size = np.dtype(shape.dtype), math.prod(shape.shape)
        words = np.zeros(-(-size * dtype.itemsize // 4), np.uint32)
        held = words.view(np.uint8)[: size * dtype.itemsize].view(dtype)
        if array is not None:
            held[:] = np.asarray(array).reshape(-1)
        # Added as whole numbers to the zeros of all others: a sum of floats would lose the sign of a zero
        for start in range(0, words.size, MET_WORDS):
            piece = words[None, start : start + MET_WORDS]
            parts = [jax.device_put(piece if i == 0 else 0 * piece, d) for i, d in enumerate(self.devices)]
            over = (self.count, piece.shape[1])
            joined = jax.make_array_from_single_device_arrays(over, self._cut, parts)
            words[start : start + MET_WORDS] = np.asarray(self._added(joined).addressable_data(0))[0]
        return held.reshape(shape.shape)

    @functools.cached_property
    def _gathered(self) -> Any:
        return self._over(functools.partial(jax.lax.all_gather, axis_name=GROUP, tiled=True), P(GROUP))

    @functools.cached_property
    def _added(self) -> Any:
        return self._over(functools.partial(jax.lax.psum, axis_name=(GROUP, SHARD)), self._cut.spec)

    def _over(self, body: Any, cut: P) -> Any:
        return jax.jit(jax.shard_map(body, mesh=self.mesh, in_specs=cut, out_specs=P(), check_vma=False))

    def shapes(self, tree: Tree, *, rows: bool = False) -> Tree:
        """The shapes of what `spread` makes of `tree`, arrays or shapes."""
        sharding = self._cut if rows else self._whole
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    def agree(self, what: str, value: T) -> T:
        """The value on which all hosts decide alike, that of the first: a JSON value."""
        return self.hosts.agree(what, value)

    def all(self, what: str, value: bool) -> bool:
        """Whether it is so on every host."""
        return all(self.hosts.everyone(what, value))

    @property
    def memory_bytes(self) -> int | None:
        """Memory of a device that this process may use; `None` where the device does not say (a CPU)."""
        return (self.lead.memory_stats() or {}).get("bytes_limit")

    def free_bytes(self) -> int:
        """Memory of a device that is free; a CPU's devices share what the host has free."""
        stats = self.lead.memory_stats() or {}
        if "bytes_limit" in stats:
            return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        return memory().available_bytes // len(self.local)


def _spec(array: Any) -> P:
    return array.sharding.spec


def lay_out(recipe: Any, on: On, machine: Machine | None = None) -> tuple[Machine, Layout, list[Fact]]:
    """The machine, the recipe's layout on it, and what is to be said of that.

    All the machine's devices are used, or as many as the replicas can use; when `on` asks for a number, that
    number or a `DeviceError`.
    """
    machine = machine or detect(on.devices, on.platform)
    precision.check_on(recipe.precision, machine.platform)
    found, replicas, of = len(machine.devices), recipe.replicas, hosts().count
    used = found if on.devices is not None else usable_devices(recipe, found, on.exact, of)
    alone = outside_srun(os.environ) if of == 1 else None
    warnings = [alone] if alone is not None else []
    if used < found:
        code = "devices-left-exact" if on.exact else "devices-left"
        if on.exact and recipe.block_count < replicas:
            code = "devices-left-blocks"
        warnings.append(fact(code, found=found, used=used, replicas=replicas, blocks=recipe.block_count))
    return machine, Layout.of(recipe, used, on.exact), warnings


def describe(machine: Machine, layout: Layout) -> dict[str, Any]:
    """The machine and the layout as plain JSON values."""
    return {
        "platform": machine.platform,
        "kind": machine.kind,
        "count": layout.devices,
        **({"shards": layout.shards, "groups": layout.groups} if layout.shards > 1 else {}),
        "simulated": machine.simulated,
        "replicas": layout.replicas,
        "replicas_per_device": layout.replicas_per_device,
        "batch": layout.batch,
        "replica_batch": layout.replica_batch,
        "blocks": layout.blocks,
        "together": layout.together,
        "exact": layout.exact,
        "hosts": hosts().count,
    }


def start_fact(machine: Machine, layout: Layout, computed_in: str) -> Fact:
    """Platform, device kind, count, replicas a device, precision and batches: the first line of a run."""
    if layout.shards > 1:
        code = "start-groups"
    elif not layout.exact:
        code = "start-free"
    elif layout.together > 1:
        code = "start-together"
    else:
        code = "start" if layout.blocks_per_device == 1 else "start-in-turn"
    return fact(
        code,
        **describe(machine, layout) | {"precision": computed_in, "mark": " (simulated)" * machine.simulated},
    )
