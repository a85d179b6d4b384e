"""Which devices compute which replicas, and in which order their sums are added.

Floating-point addition is not associative, so a sum over replicas does not depend on the number of devices
only if the order of additions is fixed. It is a binary tree that halves the range of replicas; if their
number is odd, the left half is larger.

    8 replicas            6 replicas
    ((01)(23))((45)(67))  ((01)2)((34)5)

The leaves are blocks: the replicas that one program computes together, by default one replica. A device has a
contiguous range of blocks. It can add its range first, without changing the order, if and only if the range
is a node of the tree. Equal ranges are all nodes if the device count is a power of two that divides the
number of blocks, or is the number of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import DeviceError
from ..recipe.recipe import Recipe

T = TypeVar("T")


def tree_sum(parts: Sequence[T], add: Callable[[T, T], T]) -> T:
    """The sum of `parts`, at least one, in the order of the fixed tree."""
    if len(parts) == 1:
        return parts[0]
    middle = (len(parts) + 1) // 2
    return add(tree_sum(parts[:middle], add), tree_sum(parts[middle:], add))


def merges(leaves: int) -> tuple[int, ...]:
    """For each leaf, the number of times to pop two values and push their sum after pushing the leaf.

    This is `tree_sum` with a stack, for a loop that makes one leaf at a time. The depth is at most
    `1 + ceil(log2(leaves))`.
    """
    if leaves == 1:
        return (0,)
    middle = (leaves + 1) // 2
    left, right = merges(middle), merges(leaves - middle)
    return left + right[:-1] + (right[-1] + 1,)


def exact_counts(blocks: int) -> list[int]:
    """The device counts that give the same bits with `blocks` blocks, ascending."""
    powers = [1 << i for i in range(blocks.bit_length()) if blocks % (1 << i) == 0]
    return sorted({*powers, blocks})


def even_counts(replicas: int) -> list[int]:
    """The device counts that divide the replicas, ascending: those of `exact=False`."""
    return [n for n in range(1, replicas + 1) if replicas % n == 0]


@dataclass(frozen=True)
class Layout:
    """The distribution of a recipe over a machine. All counts are global unless the name says otherwise.

    *Fields:* `blocks` of the recipe, as many as replicas if 0; without `exact`, cut so that the groups share
    them. `shards`, the devices of a group, which computes its replicas one after another; usually 1.

    Raises `DeviceError` when replicas, blocks and devices do not divide.
    """

    batch: int
    replicas: int
    devices: int
    exact: bool = True
    blocks: int = 0
    shards: int = 1

    @classmethod
    def of(cls, recipe: Recipe, devices: int, exact: bool = True) -> Layout:
        """`recipe` on `devices` devices. Raises `RecipeError` for a batch that cannot be divided."""
        recipe.check_batch()
        return cls(recipe.batch, recipe.replicas, devices, exact, recipe.block_count, recipe.shards)

    def __post_init__(self):
        if self.devices % self.shards:
            raise DeviceError("shards-uneven", shards=self.shards, devices=self.devices)
        blocks = self.blocks or self.replicas
        counts = [n * self.shards for n in exact_counts(blocks)]
        facts = {"devices": self.devices, "replicas": self.replicas}
        if self.exact and blocks < self.replicas and self.devices not in counts:
            text = (
                "{devices} devices cannot share {blocks:count block}: --devices {counts:or}, or more blocks."
            )
            raise DeviceError("devices-above-blocks", text, **facts, blocks=blocks, counts=counts)
        if self.replicas % self.groups:
            every = [n * self.shards for n in exact_counts(self.replicas)]
            text = "{devices} devices cannot share {replicas} replicas evenly: --devices {counts:or}."
            raise DeviceError("devices-uneven", text, **facts, counts=every)
        if self.exact and self.devices not in counts:
            text = (
                "{devices} devices would add {replicas} replicas in another order: --devices {counts:or}, or"
                " --no-exact for other bits."
            )
            raise DeviceError("devices-inexact", text, **facts, counts=counts)
        object.__setattr__(self, "blocks", math.lcm(blocks, self.groups))  # with `exact`, `blocks`

    @property
    def groups(self) -> int:
        """The number of groups over which replicas are distributed: one device each, or `shards`."""
        return self.devices // self.shards

    @property
    def together(self) -> int:
        """The number of replicas that one program computes."""
        return self.replicas // self.blocks

    @property
    def blocks_per_device(self) -> int:
        """The number of programs that a device, or a group, runs for its replicas in a step."""
        return self.blocks // self.groups

    @property
    def replicas_per_device(self) -> int:
        return self.replicas // self.groups

    @property
    def replica_batch(self) -> int:
        return self.batch // self.replicas

    @property
    def group_batch(self) -> int:
        return self.batch // self.groups


def shares(recipe: Recipe, exact: bool) -> int:
    """The number of units that are distributed over devices: blocks, or without `exact` replicas."""
    return recipe.block_count if exact else recipe.replicas


def usable_devices(recipe: Recipe, available: int, exact: bool = True, hosts: int = 1) -> int:
    """The largest device count up to `available` that `recipe` can use; see `usable`.

    Raises `DeviceError` also if the devices cannot be divided into its groups.
    """
    if available % recipe.shards:
        raise DeviceError("shards-uneven", shards=recipe.shards, devices=available)
    groups = available // recipe.shards
    return recipe.shards * usable(shares(recipe, exact), groups, exact, min(hosts, groups))


def usable(replicas: int, available: int, exact: bool = True, hosts: int = 1) -> int:
    """The largest device count up to `available` that `replicas` replicas (or blocks) can use, with equally
    many on each host.

    Raises `DeviceError` if the replicas cannot be distributed over this number of hosts.
    """
    counts = exact_counts(replicas) if exact else even_counts(replicas)
    fit = [n for n in counts if n <= available and n % hosts == 0]
    if not fit:
        near = max(n for n in counts if n <= hosts)
        facts = {"hosts": hosts, "replicas": replicas, "counts": counts, "most": near}
        text = "{hosts} hosts cannot share {replicas} replicas: start {most:count host}, up to host {last}."
        raise DeviceError("hosts-inexact", text, **facts, last=hosts - 1)
    return max(fit)
