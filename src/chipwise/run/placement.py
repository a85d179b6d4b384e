"""Where replicas run: which device has which data, and the decisions that all hosts share.

A mesh has two axes: replicas are distributed over `group`, and one replica's parameters over
`shard`. A group is one device unless the recipe has `shards`. A host has one or more whole groups,
or a group consists of several whole hosts. Each host controls its own devices. Devices are
identified by their position in the mesh, since their `id`s are not contiguous over hosts.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ..base import DeviceError, Fact, RecipeError, fact
from ..machine.arithmetic import check_flags
from ..machine.cluster import outside_srun
from ..machine.detect import Machine, detect, shared
from ..machine.hosts import hosts
from ..machine.kernels import Kernels, stated
from ..models.large import SHARD, WHOLE, on_each, spec_at
from ..recipe import precision
from ..recipe.task import Tree
from ..step.layout import Layout, usable_devices
from ..step.reduce import AXIS as GROUP
from .on import On

SENT_WORDS = 1 << 26  # in one message between hosts: 256 MB on each device
T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Devices that run a replica's program together. `device` is the first of `here`, and `mesh` is
    that of all `devices`."""

    index: int
    """The index among all groups of the run."""
    devices: tuple[jax.Device, ...]
    """All devices of the group."""
    here: tuple[jax.Device, ...]
    """The devices of this host."""

    @property
    def device(self) -> jax.Device:
        return self.here[0]

    @functools.cached_property
    def mesh(self) -> Mesh:
        return Mesh(np.asarray(self.devices), (SHARD,))

    def place(self, spec: P = WHOLE) -> Any:
        """The device or sharding for arrays that are whole on each device, or cut as `spec`
        says."""
        return self.device if len(self.devices) == 1 else NamedSharding(self.mesh, spec)

    def shapes(self, tree: Tree) -> Tree:
        """The shapes of arrays of any group, or shapes, on this one."""

        def here(x: Any) -> jax.ShapeDtypeStruct:
            place: Any = jax.sharding.SingleDeviceSharding(self.device)
            place = place if len(self.devices) == 1 else NamedSharding(self.mesh, x.sharding.spec)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

        return jax.tree.map(here, tree)

    def moved(self, tree: Tree) -> Tree:
        """Arrays of another group of this host, on this one."""
        return jax.tree.map(
            lambda x, shape: jax.device_put(x, shape.sharding), tree, self.shapes(tree)
        )

    def put(self, tree: Tree, spec: P = WHOLE) -> Tree:
        """`tree`, whose arrays every host of the group has, on the group."""
        place = self.place(spec)
        if len(self.here) == len(self.devices):
            return jax.device_put(tree, place)
        host = jax.tree.map(np.asarray, tree)
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, place, x.__getitem__), host
        )


class Placement:
    """The groups of a run on a machine.

    *Arguments:* `devices`: how many of the machine's devices to use (the first ones). `shards`: the
    devices of a group. `shares`: the number of parts of a batch that each group has, by default
    one.

    *Fields:*

    - `mesh`, `shares` and `hosts`.
    - `groups`: their number over all hosts.
    - `local`: the groups with devices of this host.
    - `over_hosts`: whether a group has devices of several hosts.
    - `lead`: this host's device for what is computed only once.

    Raises `DeviceError` when a host would have no device, or a part of a group and other groups
    too.
    """

    def __init__(
        self,
        machine: Machine,
        devices: int | None = None,
        shards: int = 1,
        shares: Sequence[int] = (),
    ):
        self.hosts = hosts()
        count = len(machine.devices) if devices is None else devices
        if count % shards:
            raise DeviceError("shards-uneven", shards=shards, devices=count)
        used = shared(machine.devices, count, self.hosts.count, shards)
        self.machine, self.groups, self.shards = machine, len(used) // shards, shards
        self.shares = tuple(shares) or (1,) * self.groups
        self.mesh = Mesh(np.asarray(used).reshape(self.groups, shards), (GROUP, SHARD))
        self.over_hosts, mine = _over_hosts(self.mesh.devices), self.hosts.index
        groups = [
            Group(i, tuple(row), tuple(d for d in row if d.process_index == mine))
            for i, row in enumerate(self.mesh.devices)
        ]
        self.local = tuple(group for group in groups if group.here)
        self.lead = self.local[0].device
        spec = P(GROUP) if shards == 1 else P((GROUP, SHARD))
        self._whole, self._cut = NamedSharding(self.mesh, P()), NamedSharding(self.mesh, spec)

    @classmethod
    def laid(cls, machine: Machine, layout: Layout) -> Placement:
        """The groups of `layout`."""
        return cls(machine, layout.devices, layout.shards, layout.shares)

    @classmethod
    def of(cls, machine: Machine, shards: int, most: int | None = None) -> Placement:
        """At most `most` groups of `shards` devices, or of one device each if the devices cannot be
        divided into such groups. For evaluation and prediction, whose results do not depend on the
        groups."""
        shards = shards if len(machine.devices) % shards == 0 else 1
        groups = len(machine.devices) // shards
        return cls(machine, shards * min(groups, most or groups), shards)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices of this host."""
        return tuple(device for group in self.local for device in group.here)

    @property
    def share(self) -> float:
        """The share of a batch that this host reads."""
        return sum(self.shares[group.index] for group in self.local) / sum(self.shares)

    @property
    def count(self) -> int:
        """The devices of all hosts."""
        return self.groups * self.shards

    def put(self, tree: Tree) -> list[Tree]:
        """`tree` whole on every device of every local group."""
        return [group.put(tree) for group in self.local]

    def put_cut(self, tree: Tree, axes: Tree, only: int | None = None) -> list[Tree]:
        """`tree` on every local group, or the first `only` of them, each leaf cut over the group's
        devices along its axis in `axes` (whole if it is -1)."""
        return [
            jax.tree.map(lambda leaf, axis, group=group: group.put(leaf, spec_at(axis)), tree, axes)
            for group in self.local[:only]
        ]

    def own(self, array: np.ndarray, axis: int = 0, shares: Sequence[int] = ()) -> np.ndarray:
        """The rows of this host's groups, from an array that has a global batch along `axis`.

        *Arguments:* `shares`, other ones of all groups.
        """
        if self.hosts.count == 1:
            return array
        ends = list(itertools.accumulate(shares or self.shares, initial=0))
        size, first, last = array.shape[axis] // ends[-1], self.local[0].index, self.local[-1].index
        return np.take(array, np.arange(ends[first] * size, ends[last + 1] * size), axis)

    def cut(self, tree: Tree, axis: int = 0, within: P = WHOLE) -> list[Tree]:
        """Puts the rows of each local group on that group, from arrays that have this host's rows
        of a batch (`own`) along `axis`. Within the group, the rows are whole on each device, or cut
        as `within` says. All groups get as many rows as the largest. Groups with fewer get
        arbitrary rows after their own."""
        ends = list(
            itertools.accumulate((self.shares[group.index] for group in self.local), initial=0)
        )

        def rows(array: np.ndarray, i: int) -> np.ndarray:
            size = array.shape[axis] // ends[-1]
            first, after = ends[i] * size, (ends[i] + max(self.shares)) * size
            if after <= array.shape[axis]:
                return array[(slice(None),) * axis + (slice(first, after),)]
            return np.take(array, np.arange(first, after), axis, mode="clip")

        return [
            group.put(jax.tree.map(lambda a, i=i: rows(a, i), tree), within)
            for i, group in enumerate(self.local)
        ]

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """One array `(k * groups, ...)` over the mesh, from one array `(k, ...)` of each local
        group, which is cut along `k` if groups have several devices. Copies nothing."""
        shape = (self.groups * parts[0].shape[0], *parts[0].shape[1:])
        shards = (
            list(parts)
            if self.shards == 1
            else [s.data for p in parts for s in p.addressable_shards]
        )
        return jax.make_array_from_single_device_arrays(shape, self._cut, shards)

    def split(self, array: jax.Array) -> list[jax.Array]:
        """Returns each local group's part of an array over the mesh. If groups have several
        devices, the array must be whole on every group. Copies nothing."""
        parts = [shard.data for shard in array.addressable_shards]
        if self.shards == 1:
            return parts
        by_device = {next(iter(part.devices())): part for part in parts}
        return [
            jax.make_array_from_single_device_arrays(
                array.shape, group.place(_spec(array)), [by_device[device] for device in group.here]
            )
            for group in self.local
        ]

    def gather(self, carry: Sequence[Tree]) -> Tree:
        """Equal trees of the local groups as arrays over the mesh, whole on every group, and cut
        within a group as before. Copies nothing."""

        def joined(*parts: jax.Array) -> jax.Array:
            sharding, shards = self._whole, list(parts)
            if self.shards > 1:
                sharding = NamedSharding(self.mesh, _spec(parts[0]))
                shards = [shard.data for part in parts for shard in part.addressable_shards]
            return jax.make_array_from_single_device_arrays(parts[0].shape, sharding, shards)

        return jax.tree.map(joined, *carry)

    def broadcast(self, tree: Tree, shapes: Tree) -> Tree:
        """Copies NumPy arrays of host 0 to NumPy arrays on every host, bit for bit. Waits for all
        hosts.

        *Arguments:* `tree`: anything on hosts other than 0. `shapes`: the shapes of its arrays.
        """
        if self.hosts.count == 1:
            return tree
        leaves, structure = jax.tree.flatten(shapes)
        arrays = jax.tree.leaves(tree) if self.hosts.first else [None] * len(leaves)
        copies = [self.from_one_host(a, s) for a, s in zip(arrays, leaves, strict=True)]
        return jax.tree.unflatten(structure, copies)

    def from_one_host(self, array: Any, shape: Any) -> np.ndarray:
        """Copies the `array` of the only host that passes one to every host, bit for bit. The
        others pass None. Several hosts may also pass arrays, each with zeros at the places of the
        others. Waits for all hosts.

        *Arguments:* `shape`: the shape, with its `dtype`.
        """
        dtype, size = np.dtype(shape.dtype), math.prod(shape.shape)
        words = np.zeros(-(-size * dtype.itemsize // 4), np.uint32)
        values = words.view(np.uint8)[: size * dtype.itemsize].view(dtype)
        if array is not None:
            values[:] = np.asarray(array).reshape(-1)
        # The bits are added as integers to the zeros of all other devices: a sum of floats would
        # lose the sign of a zero.
        for start in range(0, words.size, SENT_WORDS):
            piece = words[None, start : start + SENT_WORDS]
            parts = [
                jax.device_put(piece if i == 0 else 0 * piece, d)
                for i, d in enumerate(self.devices)
            ]
            joined = jax.make_array_from_single_device_arrays(
                (self.count, piece.shape[1]), self._cut, parts
            )
            words[start : start + SENT_WORDS] = np.asarray(self._added(joined).addressable_data(0))[
                0
            ]
        return values.reshape(shape.shape)

    def send_cut(self, leaf: Any, axis: int) -> jax.Array:
        """Host 0's array (on other hosts `leaf` may be its shape), cut along `axis`, on this host's
        first group. Waits for all hosts."""
        group = self.local[0]
        parts: list[Any] = [None] * self.shards
        if axis < 0:
            return group.put(self.from_one_host(leaf if self.hosts.first else None, leaf))
        if self.hosts.first:
            parts = np.split(np.asarray(leaf), self.shards, axis)
        sharding, shards = group.place(spec_at(axis)), []
        shape = jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype)
        for device, part in zip(group.devices, parts, strict=True):
            part = self.from_one_host(part, shape)
            shards += [jax.device_put(part, device)] if device in group.here else []
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)

    def receive_cut(self, leaf: jax.Array, axis: int) -> np.ndarray:
        """The first group's array, which is cut along `axis`, on every host. Waits for all
        hosts."""
        if axis < 0:
            return np.array(jax.device_get(leaf))
        shards = leaf.addressable_shards if self.local[0].index == 0 else []
        parts = {shard.index[axis].start or 0: shard.data for shard in shards}
        shape = jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        starts = range(0, leaf.shape[axis], shape.shape[axis])
        return np.concatenate(
            [self.from_one_host(parts.get(start), shape) for start in starts], axis
        )

    @functools.cached_property
    def _added(self) -> Any:
        body = functools.partial(lax.psum, axis_name=(GROUP, SHARD))
        cut = self._cut.spec
        return jax.jit(on_each(self.mesh, body, cut, P()))

    def agree(self, what: str, value: T) -> T:
        """The first host's `value`, a JSON value, on which all hosts base a decision."""
        return self.hosts.agree(what, value)

    def all(self, what: str, value: bool) -> bool:
        """Whether `value` is true on every host."""
        return all(self.hosts.everyone(what, value))

    @property
    def memory_bytes(self) -> int | None:
        """The bytes of a device's memory that this process may use, or `None` if unknown (on a
        CPU)."""
        return (self.lead.memory_stats() or {}).get("bytes_limit")


def _over_hosts(groups: Any) -> bool:
    """Whether one of `groups`, rows of devices, is of several hosts. Raises `DeviceError` if one of
    these hosts has a part of another group too."""
    here = collections.Counter(device.process_index for row in groups for device in row)
    several = False
    for row in groups:
        of = dict.fromkeys(device.process_index for device in row)
        if len(of) > 1 and sum(here[host] for host in of) > len(row):
            part = next(host for host in of if here[host] % len(row))
            raise DeviceError("shards-over-hosts", shards=len(row), here=here[part])
        several |= len(of) > 1
    return several


def _spec(array: Any) -> P:
    return array.sharding.spec


def lay_out(
    recipe: Any, on: On, machine: Machine | None = None
) -> tuple[Machine, Layout, list[Fact]]:
    """Returns the machine, the recipe's layout on it, and warnings.

    Uses all the machine's devices except those beyond the blocks. If `on` has a number of devices
    or shares, uses those, or raises `DeviceError`.
    """
    machine = machine or detect(on.devices, on.platform, recipe.shards)
    precision.check_on(recipe.precision, machine.platform)
    if on.exact:
        check_flags(machine.platform)
    used = found = len(machine.devices)
    host_count, shares = hosts().count, tuple(on.shares)
    if on.devices is None:
        used = min(
            usable_devices(recipe, found, on.exact, host_count),
            len(shares) * recipe.shards or found,
        )
    layout = Layout.of(recipe, used, on.exact, shares)
    not_in_srun = outside_srun(os.environ) if host_count == 1 else None
    warnings = [not_in_srun] if not_in_srun is not None else []
    if used < found and not shares:
        warnings.append(fact("devices-left", found=found, used=used, blocks=used // recipe.shards))
    if layout.blocks == 1 and (on.noise or (on.verified and layout.shards == 1)):
        name, of = (
            ("replicas", layout.batch) if layout.replicas == 1 else ("blocks", layout.replicas)
        )
        number = next((n for n in (8, 4, 2, 3, 5, 7) if of % n == 0), of)
        how = f"--set {name}={number}" if of > 1 else "--set batch=8 --set replicas=8"
        code = "noise-one-block" if on.noise else "verify-one-block"
        raise RecipeError(code, verify=on.verify, replicas=layout.replicas, how=how)
    if on.verified and layout.groups < 2 * host_count:
        warnings.append(fact("verify-same-device", hosts=host_count))
    return machine, layout, warnings


def device_names(placement: Placement, groups: Sequence[int]) -> list[str]:
    """The devices of groups, by number, such as "TPU v4 5 (host 1, node-7)"."""
    names = placement.hosts.names
    return [
        f"{device.device_kind} {device.id} (host {device.process_index}, "
        f"{names[device.process_index]})"
        for group in groups
        for device in placement.mesh.devices[group]
    ]


def describe(machine: Machine, layout: Layout, kernels: Kernels | None = None) -> dict[str, Any]:
    """The machine, the layout and tuned `kernels` as plain JSON values."""
    return {
        "platform": machine.platform,
        "kind": machine.kind,
        "count": layout.devices,
        **({"shards": layout.shards, "groups": layout.groups} if layout.shards > 1 else {}),
        "simulated": machine.simulated,
        **({"portable": True} if machine.portable else {}),
        "replicas": layout.replicas,
        "replicas_per_device": layout.replicas_per_device,
        **({} if layout.aligned else {"shares": list(layout.shares)}),
        "batch": layout.batch,
        "replica_batch": layout.replica_batch,
        "blocks": layout.blocks,
        "together": layout.together,
        "exact": layout.exact,
        "hosts": hosts().count,
        **stated(kernels),
    }


def start_fact(
    machine: Machine, layout: Layout, computed_in: str, kernels: Kernels | None = None
) -> Fact:
    """The first line of a run: platform, device kind, count, replicas per device, precision,
    batches and tuned `kernels`."""
    if layout.shards > 1:
        code = "start-groups"
    elif not layout.exact:
        code = "start-free"
    elif layout.together > 1:
        code = "start-together"
    else:
        code = "start" if layout.blocks_per_device == 1 else "start-in-turn"
    least, most = (layout.together * share for share in (min(layout.shares), max(layout.shares)))
    each = str(most) if least == most else f"{least} to {most}"
    mark = " (simulated)" * machine.simulated + " (portable)" * machine.portable
    mark += f" (kernels {kernels.digest[:12]})" if kernels else ""
    return fact(
        code, **describe(machine, layout) | {"precision": computed_in, "mark": mark, "each": each}
    )
