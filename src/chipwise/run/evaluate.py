"""Evaluates every example exactly once, with the same bits on any number of devices and hosts.

The loss of each example is computed separately (`vmap` over batches of one). With
`Task.eval_group`, the loss is computed for each group of that many consecutive examples. One
program on one device or group of devices adds the sums of a block (`blocks`), and masks its
padding. The examples left over form a smaller group with its own program, since a loss that
compares examples must not see padding. The host adds the blocks in their order, in float64, and
divides once at the end.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base import DataError, RecipeError
from ..data.cached import steady
from ..data.draws import Drawn
from ..data.sources import spec_of
from ..data.stream import Stream
from ..data.workers import Workers
from ..machine.arithmetic import check_flags, fixed
from ..machine.detect import detect
from ..models.chip_traits import traced_for
from ..recipe import logits, precision
from ..recipe.random_keys import as_data, as_keys
from ..recipe.recipe import Recipe
from ..recipe.source import Columns, Source, rows_of
from ..recipe.task import Sum, Tree, finished
from ..recipe.user_code import user_code
from ..step import keys, window
from ..step.program_digest import digest
from ..step.replica import checked
from ..step.state import abstract_model, axes_of
from . import feed
from .blocks import ExampleBlocks, block_size
from .indexed import in_evaluation
from .on import ALL, On
from .placement import Placement

QUEUED_READS = 16  # more do not help


@fixed()
def evaluate(
    recipe: Recipe, params: Tree, state: Tree, *, batch: int | None = None, on: On = ALL
) -> dict[str, Any]:
    """Returns metric name to value over the task's `eval` source, every example exactly once. The
    values have the same bits on any number of devices.

    *Arguments:* `batch`: the number of examples that are read at a time, on all devices, if they do
    not stay on the devices. `on`: its devices, `exact` and `workers` matter, see `Evaluator`.
    """
    placement = Placement.of(detect(on.devices, on.platform, recipe.shards), recipe.shards)
    if on.exact:
        check_flags(placement.machine.platform)
    with (
        placement.hosts.failing(),
        contextlib.closing(Evaluator(recipe, placement, batch=batch, on=on)) as evaluator,
    ):
        params, state = as_data((params, state))
        placed = placement.put_cut(params, axes_of(recipe, params)), placement.put(state)
        return evaluator(*map(placement.gather, placed))


@dataclass(frozen=True)
class Evaluation:
    """The computation of an evaluation."""

    size: int
    """The number of examples in a block."""
    group: int
    """The number of examples that the loss gets at once."""
    block: Callable[..., dict[str, Sum]]
    """A traceable function `(params, state, columns, place)`. It returns the sums of the examples
    of a block with columns `(size, ...)`. `place` is `(2,)` int32: the block begins at example
    `place[0]` and has `place[1]` examples in whole groups."""
    left: Callable[..., dict[str, Sum]]
    """A function with the same arguments. It returns the sums of the last block's examples after
    those of `block`."""
    sums: dict[str, Sum]
    """The shapes of the sums of a group."""
    one: Any
    """The closed jaxpr of the computation for a group."""

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the metrics and their computation. It does not depend on the size of
        blocks."""
        names = " ".join(f"eval/{name}" for name in self.sums)
        return digest([self.one])[:16] + hashlib.sha256(names.encode()).hexdigest()[:16]


def evaluation(recipe: Recipe, source: Source, device: jax.Device | None = None) -> Evaluation:
    """The evaluation of `recipe` on the examples of `source`. Traces the loss.

    *Arguments:* `device`: for which kernels are chosen, by default that of `models.chip_traits`.
    """

    group = min(recipe.task.eval_group, len(source))

    def one(params, state, key, batch: dict) -> dict[str, Sum]:
        """The sums of one group, or of one unbatched example, with `params` in the compute
        dtype."""
        params, state = as_keys((params, state))
        batch = {k: v[None] for k, v in batch.items()} if group == 1 else batch
        batch = precision.cast_batch(batch, recipe.precision, recipe.task.uncast)
        with (
            precision.products(recipe.precision),
            traced_for(device),
            user_code("Task.loss", batch),
        ):
            returned = recipe.task.loss(params, state, batch, key, False)
        return checked(returned, state)[0]

    def block(params, state, columns, place):
        rows = jnp.arange(size, dtype=jnp.int32)[::group]  # the first of each group
        keep, drawn = rows < place[1], keys.eval_keys(recipe.seed, place[0] + rows)
        params = precision.cast(params, recipe.precision)
        if group > 1:
            columns = {k: v.reshape(-1, group, *v.shape[1:]) for k, v in columns.items()}

        def total(x):
            return jnp.sum(
                jnp.where(keep.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x)), axis=0
            )

        def added(s: Sum) -> Sum:
            if s.each:  # `(groups, group, ...)`
                rows = s.total.reshape(size, *s.total.shape[2:])
                return replace(s, total=rows, count=total(s.count))
            return replace(s, total=total(s.total), count=total(s.count))

        made = jax.vmap(one, (None, None, 0, 0))(params, state, drawn, columns)
        return {name: added(s) for name, s in made.items()}

    def left(params, state, columns, place):
        rest = len(source) % group
        columns = {k: jax.lax.dynamic_slice_in_dim(v, place[1], rest) for k, v in columns.items()}
        key = keys.eval_keys(recipe.seed, place.sum(keepdims=True))[0]
        return one(precision.cast(params, recipe.precision), state, key, columns)

    def alone(params, state, key, batch):
        return one(precision.cast(params, recipe.precision), state, key, batch)

    key = jax.eval_shape(lambda: keys.init_key(recipe.seed))
    spec = spec_of(source) if group == 1 else rows_of(spec_of(source), group)
    jaxpr, sums = logits.traced(alone, *abstract_model(recipe), key, spec)
    size = block_size(recipe, len(source), jaxpr, group)
    return Evaluation(size, group, block, left, sums, jaxpr)


class Evaluator:
    """Evaluates a task's `eval` source. Compiles once, and can be called any number of times.

    *Fields:* `computes`.

    *Arguments:* `batch`: see `evaluate`. `on`: its `workers` read data that is not on the devices,
    and `exact` decides whether to refuse examples that differ at a second reading.

    Raises `DataError` when evaluation data is missing or empty, `DeviceError` when a block does not
    fit.
    """

    def __init__(
        self, recipe: Recipe, placement: Placement, *, batch: int | None = None, on: On = ALL
    ):
        source = recipe.task.eval
        if source is None:
            raise DataError("no-evaluation-data")
        if not len(source):
            raise DataError("evaluation-data-empty", "The evaluation source is empty (len() is 0).")
        if batch is not None and batch < 1:
            raise RecipeError("evaluation-batch-below-one", batch=batch)
        source = steady(source)
        if on.exact and isinstance(source, Drawn):
            source.check()
        self.recipe, self.placement, self.source = recipe, placement, source
        self.resident = placement.all(
            "resident evaluation", feed.fits(source, placement.memory_bytes)
        )
        self._spec = spec_of(source)
        # A loss that cannot evaluate fails now, not after the training.
        computes = self.computes = evaluation(recipe, source, placement.lead)
        self._indexed = in_evaluation(recipe, source, computes.one, computes.sums, computes.group)
        self.blocks = ExampleBlocks(
            placement, self.computes.size, len(source), None if self.resident else batch
        )
        self._data = None
        if self.resident:
            self._data = placement.put(window.flat(self._indexed.read(source, "evaluation")))
        self._wanted = on.workers
        self._workers: Workers | None = None
        self._programs: list[Any] = []
        self._lefts: list[Any] = []
        self._picks: list[Any] = []

    def __call__(self, params: Tree, state: Tree) -> dict[str, Any]:
        """Metric name to value: `Sum.value` over all examples, a float or a NumPy array.

        *Arguments:* arrays over the mesh, whole on every group.
        """
        model = list(zip(self._local(params), self._local(state), strict=True))
        if not self._programs:
            self._compile(model)
        try:
            return self._run(model)
        except jax.errors.JaxRuntimeError as error:
            raise self.blocks.above_memory(error) from error

    def _local(self, tree: Tree) -> list[Tree]:
        """Arrays over the mesh as those of each local group."""
        leaves, structure = jax.tree.flatten(tree)
        parts = [self.placement.split(leaf) for leaf in leaves]
        groups = range(len(self.placement.local))
        return [jax.tree.unflatten(structure, [part[i] for part in parts]) for i in groups]

    def _compile(self, model: list[tuple[Tree, Tree]]) -> None:
        blocks, groups = self.blocks, self.placement.local
        zero = [group.put(np.int32(0)) for group in groups]
        nowhere = [group.put(np.zeros(2, np.int32)) for group in groups]

        def columns(i: int) -> dict[str, jax.ShapeDtypeStruct]:
            return blocks.shapes(i, self._spec)

        if self._data is not None:
            # By a program of its own, so that a block has the same bits as one that is streamed
            data, places = self._data, lambda i: {n: s.sharding for n, s in columns(i).items()}
            self._picks = blocks.compile(self._picked, lambda i: (data[i], zero[i]), places)
        functions = [
            self.computes.block,
            *[self.computes.left] * bool(blocks.examples % self.computes.group),
        ]
        self._programs, *self._lefts = (
            blocks.compile(
                f, lambda i: (*model[i], columns(i), nowhere[i]), lambda i: groups[i].place()
            )
            for f in functions
        )

    def _picked(self, data, start):
        """The columns of the block from `start` `()` on."""
        rows = start + jnp.arange(self.blocks.size, dtype=jnp.int32)
        picked = window.pick(data, jnp.where(rows < self.blocks.examples, rows, jnp.int32(0)))
        return window.shaped(picked, self._spec)

    def _run(self, model: list[tuple[Tree, Tree]]) -> dict[str, Any]:
        blocks, groups = self.blocks, self.placement.local
        starts = range(0, blocks.examples, blocks.rows)
        parts: dict[int, Any] = {}  # the sums of this host's blocks, by number
        # Those of the examples after the last whole group, if they are here
        left: dict[int, Any] = {}
        if self._data is None and self._workers is None:
            # Kept: processes take seconds to start
            self._workers = Workers(self.source, self._wanted)
        with contextlib.ExitStack() as closing:
            queued = QUEUED_READS
            if self._data is None:
                even = (1,) * self.placement.groups
                wanted = (
                    self.placement.own(blocks.indices(start), shares=even) for start in starts
                )
                rows = blocks.rows // self.placement.groups * len(groups)
                stream = Stream(self.source, wanted, rows, self._place, self._workers)
                closing.callback(stream.close)
                queued = min(queued, stream.in_use)
            in_flight: deque[list[Any]] = deque()
            for start in starts:
                self.placement.hosts.pace.calls += 1
                turns = stream.next() if self._data is None else [None]
                started = []
                for turn, columns in enumerate(turns):
                    for i, number, count in blocks.places(start, turn):
                        block = columns[i] if columns is not None else self._pick(i, number)
                        whole = count - count % self.computes.group
                        place = groups[i].put(np.array([number * blocks.size, whole], np.int32))
                        parts[number] = self._programs[i](*model[i], block, place)
                        if whole < count:
                            left[number] = self._lefts[0][i](*model[i], block, place)
                        started += [parts[number], *left.values()]
                        del block
                turns = columns = None  # frees its memory for another read
                in_flight.append(started)
                if len(in_flight) >= queued:
                    # Otherwise reads would queue up on the device
                    jax.block_until_ready(in_flight.popleft())
            return self._added(parts, left)

    def _pick(self, i: int, number: int) -> Any:
        assert self._data is not None
        start = self.placement.local[i].put(np.int32(number * self.blocks.size))
        return self._picks[i](self._data[i], start)

    def _added(self, parts: dict[int, Any], left: dict[int, Any]) -> dict[str, Any]:
        """The metrics, from the sums of this host's blocks by number, and of the last one's smaller
        group. Waits for all hosts."""
        blocks, placement = self.blocks, self.placement

        def gathered(programs: list[Any], made: dict[int, Any], numbers: range) -> dict[str, Sum]:
            def of_all(shape: Any, *sums: jax.Array) -> np.ndarray:
                """The arrays of all `numbers`, `(len(numbers), ...)` float64."""
                each = np.zeros((len(numbers), *shape.shape), shape.dtype)
                for number, value in zip(made, sums, strict=True):
                    if blocks.owner(number) == placement.hosts.index:
                        each[number - numbers.start] = np.asarray(value.addressable_data(0))
                if placement.hosts.count > 1:
                    each = placement.from_one_host(each, each)
                return each.astype(np.float64)

            return jax.tree.map(of_all, programs[0].out_info, *made.values())

        def whole(*sums: Sum) -> Sum:
            """One block after another: `np.sum` would add them in another order."""
            each, finish = sums[0].each, sums[0].finish
            count = functools.reduce(np.add, [count for s in sums for count in s.count])
            totals = [total for s in sums for total in s.total]
            if not each:
                return Sum(functools.reduce(np.add, totals), count, finish)
            ends = [blocks.examples - blocks.examples % self.computes.group, blocks.examples]
            rows = [np.concatenate(s.total)[:end] for s, end in zip(sums, ends, strict=False)]
            return Sum(np.concatenate(rows), count, finish, True)

        numbers = range(len(blocks))
        sums = [gathered(self._programs, parts, numbers)]
        sums += [gathered(programs, left, numbers[-1:]) for programs in self._lefts]
        return finished({name: whole(*(made[name] for made in sums)) for name in sums[0]})

    def close(self) -> None:
        """Stops the workers that read data."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _place(self, columns: Columns, indices: np.ndarray) -> Any:
        self._indexed.check(columns, "evaluation", indices)
        return self.blocks.cut(columns)
