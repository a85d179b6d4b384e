"""Distributes replicas over devices, and fixes the order in which their sums are added.

Floating-point addition is not associative, so a sum over replicas is independent of the number of
devices only if the order of additions is fixed. It is a binary tree that halves the range of
replicas. If their number is odd, the left half is larger.

    8 replicas            6 replicas
    ((01)(23))((45)(67))  ((01)2)((34)5)

The leaves are blocks. A block is the replicas that one program computes together, by default one
replica. A device has any contiguous range of blocks. Without changing the order, it can add the
nodes of the tree that are inside its range, up to the largest ones, the range's cover. So it sends
one vector for each node of its cover.

    8 blocks on 3 devices    012 345 67      covers (01)2  3(45)  (67)       at most 2 vectors

If the device count is a power of two that divides the number of blocks, or is the number of blocks,
equal ranges are all nodes. Then each device sends a single vector.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..base import DeviceError
from ..recipe.recipe import Recipe

T = TypeVar("T")
Node = tuple[int, int]
"""A node of the tree, as its first block and the block after its last."""


def tree_sum(parts: Sequence[T], add: Callable[[T, T], T]) -> T:
    """The sum of `parts`, at least one, in the order of the fixed tree."""
    return covered_sum({(i, i + 1): part for i, part in enumerate(parts)}, len(parts), add)


def covered_sum(parts: dict[Node, T], blocks: int, add: Callable[[T, T], T]) -> T:
    """The sum over `blocks` blocks in the order of the fixed tree, from the sums of nodes that
    cover it."""

    def total(node: Node) -> T:
        if node in parts:
            return parts[node]
        left, right = _halves(node)
        return add(total(left), total(right))

    return total((0, blocks))


def _halves(node: Node) -> tuple[Node, Node]:
    first, after = node
    middle = first + (after - first + 1) // 2
    return (first, middle), (middle, after)


def merges(leaves: int) -> tuple[int, ...]:
    """For each leaf, the number of times to pop two values and push their sum after pushing the
    leaf.

    This is `tree_sum` with a stack, for a loop that computes one leaf at a time. The depth is at
    most `1 + ceil(log2(leaves))`.
    """
    if leaves == 1:
        return (0,)
    middle = (leaves + 1) // 2
    left, right = merges(middle), merges(leaves - middle)
    return left + right[:-1] + (right[-1] + 1,)


def cover(blocks: int, first: int, after: int) -> tuple[Node, ...]:
    """The largest nodes, in order, of the tree of `blocks` leaves that are inside the range from
    `first` to `after`. The range excludes `after`."""

    def inside(node: Node) -> tuple[Node, ...]:
        if first <= node[0] and node[1] <= after:
            return (node,)
        if node[1] <= first or after <= node[0]:
            return ()
        left, right = _halves(node)
        return inside(left) + inside(right)

    return inside((0, blocks))


def covers(blocks: int, shares: Sequence[int]) -> list[tuple[Node, ...]]:
    """The cover of each group's range, from the number of its blocks."""
    ends = itertools.accumulate(shares, initial=0)
    return [cover(blocks, first, after) for first, after in itertools.pairwise(ends)]


def cover_merges(nodes: Sequence[Node]) -> tuple[int, ...]:
    """The `merges` for the leaves of the `nodes` of a cover. The sums of the nodes stay on the
    stack."""
    return tuple(pops for first, after in nodes for pops in merges(after - first))


def even_shares(blocks: int, groups: int) -> tuple[int, ...]:
    """The number of blocks of each of `groups` groups, as equal as possible. Their order keeps the
    largest cover small."""
    least, larger = divmod(blocks, groups)
    up, down = (
        [(i * blocks + more) // groups for i in range(groups + 1)] for more in (groups - 1, 0)
    )
    orders = [[least + 1] * larger + [least] * (groups - larger)]
    orders += [[after - first for first, after in itertools.pairwise(ends)] for ends in (up, down)]
    return min(map(tuple, orders), key=lambda shares: max(map(len, covers(blocks, shares))))


@dataclass(frozen=True)
class Ranges:
    """The parts of a vector that groups update. Each group owns the values `bounds[group]` to
    `bounds[group + 1]`, inside a window of `part` values. `part` is the largest number of values
    that a group owns. If groups own different numbers, windows overlap. No window extends beyond
    the ends of the vector."""

    bounds: tuple[int, ...]

    @classmethod
    def even(cls, chunks: int, groups: int, unit: int = 1) -> Ranges:
        """The ranges of `chunks` chunks of `unit` values, distributed as evenly as possible."""
        each = -(-chunks // groups)
        return cls(tuple(min(group * each, chunks) * unit for group in range(groups + 1)))

    @functools.cached_property
    def part(self) -> int:
        return max(after - first for first, after in itertools.pairwise(self.bounds))

    def start(self, group: int) -> int:
        """The position at which the window of `group` begins."""
        return min(self.bounds[group], self.bounds[-1] - self.part)

    def own(self, group: int) -> tuple[int, int]:
        """The positions in the window of `group` at which its own values begin and end."""
        first, after = self.bounds[group : group + 2]
        return first - self.start(group), after - self.start(group)


def balanced(sizes: Sequence[int], groups: int) -> tuple[int, ...]:
    """Distributes consecutive parts of the given `sizes` over `groups` groups, so that the largest
    sum of sizes is as small as possible. Returns the first part of each group, and the number of
    parts at the end."""

    def ends(most: int) -> list[int]:
        firsts, room = list[int](), most
        for i, size in enumerate(sizes):
            if size > room:
                firsts, room = [*firsts, i], most
            room -= size
        return firsts

    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(ends(middle)) < groups else (middle + 1, high)
    inner = ends(low)
    return (0, *inner, *[len(sizes)] * (groups - len(inner)))


@dataclass(frozen=True)
class Layout:
    """The distribution of a recipe over a machine. All counts are global unless the name says
    otherwise.

    Raises `DeviceError` when there are more groups than blocks, when devices are not whole groups,
    or when `shares` do not match these groups and blocks.
    """

    batch: int
    replicas: int
    devices: int
    exact: bool = True
    blocks: int = 0
    """The recipe's number of blocks. 0 means one for each replica. Without `exact`, blocks are cut
    further if there are more groups."""
    shards: int = 1
    """The devices of a group, usually 1. A group computes its replicas one after another."""
    shares: tuple[int, ...] = ()
    """The blocks of each group, in order, by default `even_shares`."""

    @classmethod
    def of(
        cls, recipe: Recipe, devices: int, exact: bool = True, shares: tuple[int, ...] = ()
    ) -> Layout:
        """Returns the layout of `recipe` on `devices` devices. Raises `RecipeError` for a batch
        that cannot be divided."""
        recipe.check_batch()
        return cls(
            recipe.batch, recipe.replicas, devices, exact, recipe.block_count, recipe.shards, shares
        )

    def __post_init__(self) -> None:
        if self.devices % self.shards:
            raise DeviceError("shards-uneven", shards=self.shards, devices=self.devices)
        blocks = self.blocks or self.replicas
        if not self.exact:
            finer = (n for n in range(blocks, self.replicas, blocks) if self.replicas % n == 0)
            blocks = next((n for n in finer if n >= self.groups), self.replicas)
        if self.groups > blocks:
            facts = {
                "devices": self.devices,
                "replicas": self.replicas,
                "most": blocks * self.shards,
            }
            raise DeviceError("devices-above-blocks", **facts, blocks=blocks)
        shares = self.shares or even_shares(blocks, self.groups)
        if len(shares) != self.groups or sum(shares) != blocks or min(shares) < 1:
            raise DeviceError(
                "shares-unlike", shares=list(shares), blocks=blocks, groups=self.groups
            )
        object.__setattr__(self, "blocks", blocks)
        object.__setattr__(self, "shares", shares)

    @property
    def groups(self) -> int:
        """The number of groups over which replicas are distributed. A group has `shards` devices,
        usually one."""
        return self.devices // self.shards

    @property
    def together(self) -> int:
        """The number of replicas that one program computes."""
        return self.replicas // self.blocks

    @functools.cached_property
    def firsts(self) -> tuple[int, ...]:
        """The first block of each group."""
        return tuple(itertools.accumulate(self.shares[:-1], initial=0))

    @functools.cached_property
    def covers(self) -> list[tuple[Node, ...]]:
        """The nodes whose sums each group sends. Without `exact` it is one node of all its
        blocks."""
        if self.exact:
            return covers(self.blocks, self.shares)
        return [((first, first + n),) for first, n in zip(self.firsts, self.shares, strict=True)]

    @property
    def vectors(self) -> int:
        """The number of vectors that each group sends in a step, the size of the largest cover."""
        return max(map(len, self.covers))

    @property
    def aligned(self) -> bool:
        """Whether all groups have equally many blocks, and each can send a single sum of them."""
        return self.vectors == 1 and len(set(self.shares)) == 1

    @property
    def blocks_per_device(self) -> int:
        """The number of programs that a device, or a group, runs for its replicas in a step. It is
        that of the device or group with most blocks."""
        return max(self.shares)

    @property
    def replicas_per_device(self) -> int:
        """The number of replicas of the device, or group, that has most."""
        return self.together * self.blocks_per_device

    @property
    def replica_batch(self) -> int:
        return self.batch // self.replicas

    @property
    def group_batch(self) -> int:
        """The number of rows of a batch on the group that has most. Every group has room for
        them."""
        return self.replica_batch * self.replicas_per_device


def usable_devices(recipe: Recipe, available: int, exact: bool = True, hosts: int = 1) -> int:
    """The largest device count up to `available` that `recipe` can use. Groups beyond its number of
    blocks (of replicas, without `exact`) stay idle.

    Raises `DeviceError` if the devices cannot be divided into its groups, or if the blocks cannot
    be distributed over this number of hosts.
    """
    if available % recipe.shards:
        raise DeviceError("shards-uneven", shards=recipe.shards, devices=available)
    units, groups = recipe.block_count if exact else recipe.replicas, available // recipe.shards
    if units < min(hosts, groups):
        raise DeviceError("hosts-above-blocks", hosts=hosts, blocks=units, last=units - 1)
    return recipe.shards * min(units, groups)
