"""Which devices compute which replicas, and in which order their sums are added.

Floating-point addition is not associative, so a sum over replicas does not depend on the number of devices
only if the order of additions is fixed. It is a binary tree that halves the range of replicas; if their
number is odd, the left half is larger.

    8 replicas            6 replicas
    ((01)(23))((45)(67))  ((01)2)((34)5)

The leaves are blocks: the replicas that one program computes together, by default one replica. A device has
any contiguous range of blocks. Without changing the order, it can add the nodes of the tree that lie inside
its range, up to the largest ones: the range's cover. So it sends one vector for each node of its cover.

    8 blocks on 3 devices    012 345 67      covers (01)2  3(45)  (67)       at most 2 vectors

Equal ranges are all nodes, so that each device sends a single vector, if the device count is a power of two
that divides the number of blocks, or is the number of blocks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import DeviceError
from ..recipe.recipe import Recipe

T = TypeVar("T")
Node = tuple[int, int]
"""A node of the tree: its first block, and the one after its last."""


def tree_sum(parts: Sequence[T], add: Callable[[T, T], T]) -> T:
    """The sum of `parts`, at least one, in the order of the fixed tree."""
    return covered_sum({(i, i + 1): part for i, part in enumerate(parts)}, len(parts), add)


def covered_sum(parts: dict[Node, T], blocks: int, add: Callable[[T, T], T]) -> T:
    """The sum over `blocks` blocks in the order of the fixed tree, from the sums of nodes that cover it."""

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
    """For each leaf, the number of times to pop two values and push their sum after pushing the leaf.

    This is `tree_sum` with a stack, for a loop that makes one leaf at a time. The depth is at most
    `1 + ceil(log2(leaves))`.
    """
    if leaves == 1:
        return (0,)
    middle = (leaves + 1) // 2
    left, right = merges(middle), merges(leaves - middle)
    return left + right[:-1] + (right[-1] + 1,)


def cover(blocks: int, first: int, after: int) -> tuple[Node, ...]:
    """The largest nodes of the tree of `blocks` leaves inside of the range from `first` to `after`, which is
    not in it, in order."""

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
    """As `merges`, for the leaves of the `nodes` of a cover, whose sums are left on the stack."""
    return tuple(pops for first, after in nodes for pops in merges(after - first))


def even_shares(blocks: int, groups: int) -> tuple[int, ...]:
    """The number of blocks of each of `groups` groups, as equal as possible; in an order in which the largest
    cover is small."""
    least, larger = divmod(blocks, groups)
    up, down = ([(i * blocks + more) // groups for i in range(groups + 1)] for more in (groups - 1, 0))
    orders = [[least + 1] * larger + [least] * (groups - larger)]
    orders += [[after - first for first, after in itertools.pairwise(ends)] for ends in (up, down)]
    return min(map(tuple, orders), key=lambda shares: max(map(len, covers(blocks, shares))))


@dataclass(frozen=True)
class Ranges:
    """The parts of a vector that groups update: of each group its own values, `bounds[group]` to
    `bounds[group + 1]`, in a window of `part` values, as many as the group has that owns most. Where groups
    own unequally many, windows overlap; none goes beyond the ends."""

    bounds: tuple[int, ...]

    @classmethod
    def even(cls, chunks: int, groups: int, unit: int = 1) -> Ranges:
        """Of `chunks` of `unit` values, which groups own as evenly as they can."""
        each = -(-chunks // groups)
        return cls(tuple(min(group * each, chunks) * unit for group in range(groups + 1)))

    @functools.cached_property
    def part(self) -> int:
        return max(after - first for first, after in itertools.pairwise(self.bounds))

    def start(self, group: int) -> int:
        """Where the window of `group` begins."""
        return min(self.bounds[group], self.bounds[-1] - self.part)

    def own(self, group: int) -> tuple[int, int]:
        """Where in its window the own values of `group` begin and end."""
        first, after = self.bounds[group : group + 2]
        return first - self.start(group), after - self.start(group)


def balanced(sizes: Sequence[int], groups: int) -> tuple[int, ...]:
    """For each of `groups` groups the first of the parts of `sizes` that it gets, and their number: ranges
    that follow one another, of which the largest is as small as it can be."""

    def ends(most: int) -> list[int]:
        found, room = list[int](), most
        for i, size in enumerate(sizes):
            if size > room:
                found, room = [*found, i], most
            room -= size
        return found

    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(ends(middle)) < groups else (middle + 1, high)
    inner = ends(low)
    return (0, *inner, *[len(sizes)] * (groups - len(inner)))


@dataclass(frozen=True)
class Layout:
    """The distribution of a recipe over a machine. All counts are global unless the name says otherwise.

    *Fields:* `blocks` of the recipe, as many as replicas if 0; without `exact`, cut further if there are more
    groups. `shards`, the devices of a group, which computes its replicas one after another; usually 1.
    `shares`, the blocks of each group, in order; by default `even_shares`.

    Raises `DeviceError` when there are more groups than blocks, devices are not whole groups, or `shares` are
    not of these groups and blocks.
    """

    batch: int
    replicas: int
    devices: int
    exact: bool = True
    blocks: int = 0
    shards: int = 1
    shares: tuple[int, ...] = ()

    @classmethod
    def of(cls, recipe: Recipe, devices: int, exact: bool = True, shares: tuple[int, ...] = ()) -> Layout:
        """`recipe` on `devices` devices. Raises `RecipeError` for a batch that cannot be divided."""
        recipe.check_batch()
        return cls(recipe.batch, recipe.replicas, devices, exact, recipe.block_count, recipe.shards, shares)

    def __post_init__(self):
        if self.devices % self.shards:
            raise DeviceError("shards-uneven", shards=self.shards, devices=self.devices)
        blocks = self.blocks or self.replicas
        if not self.exact:
            finer = (n for n in range(blocks, self.replicas, blocks) if self.replicas % n == 0)
            blocks = next((n for n in finer if n >= self.groups), self.replicas)
        if self.groups > blocks:
            facts = {"devices": self.devices, "replicas": self.replicas, "most": blocks * self.shards}
            raise DeviceError("devices-above-blocks", **facts, blocks=blocks)
        given = self.shares
        if given and (len(given) != self.groups or sum(given) != blocks or min(given) < 1):
            raise DeviceError("shares-unlike", shares=list(given), blocks=blocks, groups=self.groups)
        object.__setattr__(self, "blocks", blocks)
        object.__setattr__(self, "shares", self.shares or even_shares(blocks, self.groups))

    @property
    def groups(self) -> int:
        """The number of groups over which replicas are distributed: one device each, or `shards`."""
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
        """The nodes whose sums each group sends: without `exact`, one of all its blocks."""
        if self.exact:
            return covers(self.blocks, self.shares)
        return [((first, first + n),) for first, n in zip(self.firsts, self.shares, strict=True)]

    @property
    def vectors(self) -> int:
        """The number of vectors that each group sends in a step: the size of the largest cover."""
        return max(map(len, self.covers))

    @property
    def aligned(self) -> bool:
        """Whether all groups have equally many blocks, whose sum each can send."""
        return self.vectors == 1 and len(set(self.shares)) == 1

    @property
    def blocks_per_device(self) -> int:
        """The number of programs that a device, or a group, runs for its replicas in a step; of those that
        run most."""
        return max(self.shares)

    @property
    def replicas_per_device(self) -> int:
        """Of the devices, or groups, that have most."""
        return self.together * self.blocks_per_device

    @property
    def replica_batch(self) -> int:
        return self.batch // self.replicas

    @property
    def group_batch(self) -> int:
        """The rows of a batch for which a group has room: those of the groups that have most."""
        return self.replica_batch * self.replicas_per_device


def usable_devices(recipe: Recipe, available: int, exact: bool = True, hosts: int = 1) -> int:
    """The largest device count up to `available` that `recipe` can use: all but those beyond its blocks.

    Raises `DeviceError` if the devices cannot be divided into its groups, or if the blocks cannot be
    distributed over this number of hosts.
    """
    if available % recipe.shards:
        raise DeviceError("shards-uneven", shards=recipe.shards, devices=available)
    units, groups = recipe.block_count if exact else recipe.replicas, available // recipe.shards
    if units < min(hosts, groups):
        raise DeviceError("hosts-above-blocks", hosts=hosts, blocks=units, last=units - 1)
    return recipe.shards * min(units, groups)
