"""Blocks of examples for evaluation and prediction. One program computes a block, on one device or
group.

A compiler adds up a product over 64 examples in another order than one over 256, so the bits of an
output depend on the size of its block. The size therefore follows only from the recipe and the
number of examples. It never depends on memory, devices or how much is read at a time. So results
have the same bits wherever they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P, SingleDeviceSharding

from ..base import DeviceError
from ..machine.compilation_cache import compile_on
from ..machine.compiler import jitted
from ..models.large import SHARD, in_group
from ..models.remat import inside
from ..recipe.recipe import Recipe
from ..recipe.source import Columns
from ..recipe.task import Tree
from .placement import Placement

MOST = 256  # examples; no chip we know of is faster with more
WIDEST_BYTES = 64 << 20
"""The limit for one array of a block that has more examples than the batch of a replica. A
replica's batch fits, since its training needs more memory. Small nets need larger blocks to fill a
chip."""


def block_size(recipe: Recipe, examples: int, one: Any, group: int = 1) -> int:
    """Returns the number of examples in a block. This is `recipe.eval_block` if it is set.
    Otherwise it is a replica's batch, or more for a net with small arrays, but at most an eighth of
    `examples`, so that eight devices share a small set. The number is rounded up to whole groups,
    and to equal parts for the devices of a replica.

    *Arguments:* `one`: the closed jaxpr of the computation for `group` examples, which one loss
    sees.
    """
    size = recipe.eval_block
    if size is None:
        largest = max(
            recipe.batch // recipe.replicas, group * (WIDEST_BYTES // max(1, widest(one)))
        )
        size = max(1, min(MOST, largest, -(-examples // 8)))
    unit = math.lcm(recipe.shards, group)  # a block is cut over the devices that compute it
    return -(-size // unit) * unit


def widest(closed: Any) -> int:
    """The bytes of the largest array that a closed jaxpr computes."""
    made = (
        v.aval
        for jaxpr in inside(closed.jaxpr)
        for equation in jaxpr.eqns
        for v in equation.outvars
    )
    return max(
        (math.prod(a.shape) * getattr(a.dtype, "itemsize", 4) for a in made if hasattr(a, "dtype")),
        default=0,
    )


class ExampleBlocks:
    """The blocks of `examples` examples on the groups of `placement`, some on each group at a time.

    *Arguments:* `size`: the examples of a block. `batch`: the examples, of all groups, that are
    read at a time. It is rounded up to a whole number of blocks on each group, and a read never
    holds more blocks than the examples fill. By default, each group reads one block.

    *Fields:* `each`: the blocks of a group in a read. `rows`: the examples of a read.
    """

    def __init__(self, placement: Placement, size: int, examples: int, batch: int | None = None):
        self.placement, self.size, self.examples = placement, size, examples
        turn = size * placement.groups
        self.each = max(1, -(-min(batch or 1, examples) // turn))
        self.rows = turn * self.each

    def __len__(self) -> int:
        return -(-self.examples // self.size)

    def indices(self, start: int) -> np.ndarray:
        """The indices of the read from `start` on, `(rows,)` int32, padded with example 0."""
        rows = np.arange(start, start + self.rows, dtype=np.int32)
        return np.where(rows < self.examples, rows, 0).astype(np.int32)

    def cut(self, columns: Columns) -> list[list[Tree]]:
        """Cuts the columns of this host's rows of a read. *Returns*, for each of a group's blocks
        in turn, the columns of the block on each local group."""
        turns, local = [], self.placement.local
        for turn in range(self.each):
            here = []
            for i, group in enumerate(local):
                first = (i * self.each + turn) * self.size
                rows = slice(first, first + self.size)
                here.append(group.put({n: c[rows] for n, c in columns.items()}, self._within))
            turns.append(here)
        return turns

    def places(self, start: int, turn: int) -> Iterator[tuple[int, int, int]]:
        """Yields the blocks of one turn in the read from `start` on: local group, number of its
        block, examples in it."""
        for i, group in enumerate(self.placement.local):
            number = start // self.size + group.index * self.each + turn
            if (left := self.examples - number * self.size) > 0:
                yield i, number, min(self.size, left)

    def owner(self, number: int) -> int:
        """The index of a host that computes a block."""
        group = number // self.each % self.placement.groups
        return self.placement.mesh.devices[group, 0].process_index

    @property
    def _within(self) -> P:
        return P(SHARD) if self.placement.shards > 1 else P()

    def shapes(self, group: int, spec: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """A block's columns of one example's shapes `spec`, on a local group."""
        place: Any = self.placement.local[group].place(self._within)
        if not isinstance(place, jax.sharding.Sharding):
            place = SingleDeviceSharding(place)
        return {
            n: jax.ShapeDtypeStruct((self.size, *s.shape), s.dtype, sharding=place)
            for n, s in spec.items()
        }

    def compile(
        self,
        function: Callable[..., Any],
        arguments: Callable[[int], tuple],
        outputs: Callable[[int], Any] = lambda _: None,
        *,
        rows: bool = False,
    ) -> list[Any]:
        """Compiles `function` for each local group with its `arguments(group)`, arrays or shapes.
        Raises `DeviceError` if it does not fit.

        *Arguments:* `outputs`: the shardings of the results on a group of several devices. `rows`:
        see `models.large.in_group`.
        """
        groups = self.placement.local
        mesh, lead, shards = (
            groups[0].mesh.abstract_mesh,
            self.placement.lead,
            self.placement.shards,
        )

        def run(*given):
            with in_group(mesh, rows):
                return function(*given)

        def lower(_: int, g: int) -> Any:
            shardings = outputs(g) if shards > 1 else None
            # Exact, as a step: the best checkpoint must be the same wherever it is chosen
            return jitted(run, lead, shards=shards, out_shardings=shardings).lower(*arguments(g))

        try:
            return compile_on(len(groups), 1, lower)[0]
        except jax.errors.JaxRuntimeError as error:
            raise self.above_memory(error) from error

    def above_memory(self, error: jax.errors.JaxRuntimeError) -> Exception:
        """Returns the exception to raise for an error of a program: `DeviceError` if its block does
        not fit."""
        if "RESOURCE_EXHAUSTED" not in str(error):
            return error
        return DeviceError(
            "block-above-memory",
            "a block of {block:count example} does not fit into the device's memory: give "
            "the recipe a "
            "smaller eval_block. {reason}",
            block=self.size,
            reason=str(error).splitlines()[0],
        )
