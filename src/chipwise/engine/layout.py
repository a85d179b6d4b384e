"""How logical replicas map onto devices, and in which order their sums are added.

Floating-point addition is not associative, so a sum over replicas is only the same on every
number of devices if its brackets are fixed. They are: a binary tree that halves the replica range,
the left half taking the odd one.

    8 replicas            6 replicas
    ((01)(23))((45)(67))  ((01)2)((34)5)

The leaves are blocks: the replicas that one program computes together, one each unless the recipe says
otherwise. A device owns a contiguous range of them. It can add its range alone, without changing a
bracket, exactly when the range is a node of the tree. Equal ranges are all nodes when the device
count is a power of two that divides the blocks, or the blocks themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import DeviceError, RecipeError
from ..recipe.recipe import Recipe

T = TypeVar("T")


def tree_sum(parts: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Adds `parts` in the brackets of the fixed tree. At least one part."""
    if len(parts) == 1:
        return parts[0]
    middle = (len(parts) + 1) // 2
    return add(tree_sum(parts[:middle], add), tree_sum(parts[middle:], add))


def merges(leaves: int) -> tuple[int, ...]:
    """After pushing leaf `i` on a stack, how often to pop two and push their sum.

    The stack form of `tree_sum`, for a loop that makes one leaf at a time; its depth never
    exceeds `1 + ceil(log2(leaves))`.
    """
    if leaves == 1:
        return (0,)
    middle = (leaves + 1) // 2
    left, right = merges(middle), merges(leaves - middle)
    return left + right[:-1] + (right[-1] + 1,)


def exact_counts(blocks: int) -> list[int]:
    """The device counts that give the same bits for this many blocks, ascending."""
    powers = [1 << i for i in range(blocks.bit_length()) if blocks % (1 << i) == 0]
    return sorted({*powers, blocks})


def even_counts(replicas: int) -> list[int]:
    """The device counts that divide the replicas, ascending (enough for `exact=False`)."""
    return [n for n in range(1, replicas + 1) if replicas % n == 0]


@dataclass(frozen=True)
class Layout:
    """How one recipe lies on one machine. All counts are global unless the name says otherwise.

    `blocks`: of the recipe, as many as replicas when 0; without `exact` as many as groups. `shards`: devices
    of a group, which computes its replicas one after another; mostly 1.
    """

    batch: int
    replicas: int
    devices: int
    exact: bool = True
    blocks: int = 0
    shards: int = 1

    @classmethod
    def of(cls, recipe: Recipe, devices: int, exact: bool = True) -> Layout:
        """`recipe` on `devices` devices."""
        return cls(recipe.batch, recipe.replicas, devices, exact, recipe.block_count, recipe.shards)

    def __post_init__(self):
        if self.batch < 1 or self.replicas < 1:
            raise RecipeError("batch-below-one", batch=self.batch, replicas=self.replicas)
        if self.batch % self.replicas:
            lower = self.batch // self.replicas * self.replicas
            near = [n for n in (lower, lower + self.replicas) if n]
            raise RecipeError("batch-indivisible", batch=self.batch, replicas=self.replicas, near=near)
        if self.replica_batch % self.shards:
            unit = self.replicas * self.shards
            near = [n for n in (self.batch // unit * unit, (self.batch // unit + 1) * unit) if n]
            facts = {"batch": self.batch, "replicas": self.replicas, "shards": self.shards}
            raise RecipeError("shards-above-batch", **facts, near=near)
        if self.devices % self.shards:
            raise DeviceError("shards-uneven", shards=self.shards, devices=self.devices)
        blocks = (self.blocks or self.replicas) if self.exact else self.groups
        counts = [n * self.shards for n in exact_counts(blocks)]
        facts = {"devices": self.devices, "replicas": self.replicas}
        if self.exact and blocks < self.replicas and self.devices not in counts:
            raise DeviceError("devices-above-blocks", **facts, blocks=blocks, counts=counts)
        if self.replicas % self.groups:
            every = [n * self.shards for n in exact_counts(self.replicas)]
            raise DeviceError("devices-uneven", **facts, counts=every)
        if self.exact and self.devices not in counts:
            raise DeviceError("devices-inexact", **facts, counts=counts)
        object.__setattr__(self, "blocks", blocks)

    @property
    def groups(self) -> int:
        """Over which the replicas are shared out: one device each, or `shards`."""
        return self.devices // self.shards

    @property
    def together(self) -> int:
        """How many replicas one program computes."""
        return self.replicas // self.blocks

    @property
    def blocks_per_device(self) -> int:
        """How many programs a device, or a group, runs in a step to compute its replicas."""
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
    """What devices share out: the recipe's blocks, or without `exact` its replicas. See `usable`."""
    return recipe.block_count if exact else recipe.replicas


def usable_devices(recipe: Recipe, available: int, exact: bool = True, hosts: int = 1) -> int:
    """The largest device count up to `available` that `recipe` can use; see `usable`.

    Raises `DeviceError` also where the devices cannot be cut into its groups.
    """
    if available % recipe.shards:
        raise DeviceError("shards-uneven", shards=recipe.shards, devices=available)
    groups = available // recipe.shards
    return recipe.shards * usable(shares(recipe, exact), groups, exact, min(hosts, groups))


def usable(replicas: int, available: int, exact: bool = True, hosts: int = 1) -> int:
    """The largest device count up to `available` that this many replicas can use, equally many on each host.

    Raises `DeviceError` where this number of hosts cannot share them.
    """
    counts = exact_counts(replicas) if exact else even_counts(replicas)
    fit = [n for n in counts if n <= available and n % hosts == 0]
    if not fit:
        near = max(n for n in counts if n <= hosts)
        facts = {"hosts": hosts, "replicas": replicas, "counts": counts, "most": near}
        raise DeviceError("hosts-inexact", **facts, last=hosts - 1)
    return max(fit)
