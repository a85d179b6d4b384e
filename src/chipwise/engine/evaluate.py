"""Evaluation: every example exactly once, with the same bits on any number of devices and hosts.

The loss of each example is computed separately (`vmap` over batches of one). One program on one device or
group adds the sums of a block (`blocks`), whose padding is masked; the host adds the blocks in their order,
in float64, and divides once at the end.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..data.cached import steady
from ..data.draws import Drawn
from ..data.sources import check_labels, spec_of
from ..data.stream import Stream
from ..data.workers import Workers
from ..errors import DataError, RecipeError
from ..machine.arithmetic import check_flags, fixed
from ..machine.detect import detect
from ..models.chip_traits import traced_for
from ..recipe import precision
from ..recipe.recipe import Recipe
from ..recipe.source import Source
from ..recipe.task import Sum, Tree, finished
from ..recipe.user_code import user_code
from . import feed, keys
from .blocks import ExampleBlocks, block_size
from .on import ALL, On
from .placement import Placement
from .replica import checked
from .state import abstract_model, axes_of

QUEUED_READS = 16  # more do not help


@fixed()
def evaluate(
    recipe: Recipe, params: Tree, state: Tree, *, batch: int | None = None, on: On = ALL
) -> dict[str, Any]:
    """Metric name to value over the task's `eval` source, every example exactly once.

    The values have the same bits on any number of devices. *Arguments:* `batch`: examples that are read at a
    time, on all devices, if they are not kept there; `on`, of which only the devices matter.
    """
    placement = Placement.of(detect(on.devices, on.platform, recipe.shards), recipe.shards)
    if on.exact:
        check_flags(placement.machine.platform)
    with (
        placement.hosts.failing(),
        contextlib.closing(Evaluator(recipe, placement, batch=batch, on=on)) as evaluator,
    ):
        placed = placement.put_cut(params, axes_of(recipe, params)), placement.put(state)
        return evaluator(*map(placement.gather, placed))


def evaluation(
    recipe: Recipe, source: Source, device: jax.Device | None = None
) -> tuple[int, Callable[..., dict[str, Sum]], list[str]]:
    """The size of the blocks of `source`, and a traceable function `(params, state, columns, count)`: the
    sums of the first `count` `()` examples of a block with columns `(size, ...)`; and the metrics' names.

    *Arguments:* `device`: for which kernels are chosen, by default that of `models.chip_traits`.
    """

    def one(params, state, example: dict) -> dict[str, Sum]:
        """The sums of one unbatched example, with `params` in the compute dtype."""
        batch = precision.cast_batch({k: v[None] for k, v in example.items()}, recipe.precision)
        with precision.products(recipe.precision), traced_for(device), user_code("Task.loss", batch):
            returned = recipe.task.loss(params, state, batch, keys.eval_key(recipe.seed), False)
        return checked(returned, state)[0]

    def block(params, state, columns, count):
        keep = jnp.arange(size, dtype=jnp.int32) < count
        params = precision.cast(params, recipe.precision)

        def total(x):
            return jnp.sum(jnp.where(keep.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x)), axis=0)

        def added(s: Sum) -> Sum:
            if s.each:  # `(size, 1, ...)`, of one example each
                return Sum(s.total[:, 0], total(s.count), s.finish, True)
            return Sum(total(s.total), total(s.count), s.finish)

        made = jax.vmap(one, (None, None, 0))(params, state, columns)
        return {name: added(s) for name, s in made.items()}

    alone = jax.make_jaxpr(
        lambda p, *given: one(precision.cast(p, recipe.precision), *given), return_shape=True
    )
    jaxpr, sums = alone(*abstract_model(recipe), spec_of(source))
    size = block_size(recipe, len(source), jaxpr)
    return size, block, [f"eval/{name}" for name in sums]


class Evaluator:
    """Evaluates a task's `eval` source; compiled once, used any number of times.

    *Arguments:* `batch`: see `evaluate`; `on`, of which `workers` matter, if they read data that is not on
    the devices, and `exact`: whether to refuse examples that are others at a second reading.

    Raises `DataError` when evaluation data is missing or empty, `DeviceError` when a block does not fit.
    """

    def __init__(self, recipe: Recipe, placement: Placement, *, batch: int | None = None, on: On = ALL):
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
        self.resident = placement.all("resident evaluation", feed.fits(source, placement.memory_bytes))
        self._spec = spec_of(source)
        # A loss that cannot evaluate fails now, not after the training.
        size, self._block, self.names = evaluation(recipe, source, placement.lead)
        self.blocks = ExampleBlocks(placement, size, len(source), None if self.resident else batch)
        self._data = None
        if self.resident:
            self._data = placement.put(feed.flat(feed.read(source, recipe.task.classes, "evaluation")))
        self._wanted = on.workers
        self._workers: Workers | None = None
        self._programs: list[Any] = []
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

        def columns(i: int) -> dict[str, jax.ShapeDtypeStruct]:
            return blocks.shapes(i, self._spec)

        if self._data is not None:
            # By a program of its own, so that a block has the same bits as one that is streamed
            data, places = self._data, lambda i: {n: s.sharding for n, s in columns(i).items()}
            self._picks = blocks.compile(self._picked, lambda i: (data[i], zero[i]), places)
        self._programs = blocks.compile(
            self._block, lambda i: (*model[i], columns(i), zero[i]), lambda i: groups[i].place()
        )

    def _picked(self, data, start):
        """The columns of the block from `start` `()` on."""
        rows = start + jnp.arange(self.blocks.size, dtype=jnp.int32)
        return feed.pick(data, jnp.where(rows < self.blocks.examples, rows, jnp.int32(0)), self._spec)

    def _run(self, model: list[tuple[Tree, Tree]]) -> dict[str, Any]:
        blocks, groups = self.blocks, self.placement.local
        starts = range(0, blocks.examples, blocks.rows)
        parts: dict[int, Any] = {}  # the sums of this host's blocks, by number
        if self._data is None and self._workers is None:
            self._workers = Workers(self.source, self._wanted)  # kept: processes take seconds to start
        with contextlib.ExitStack() as closing:
            queued = QUEUED_READS
            if self._data is None:
                even = (1,) * self.placement.groups
                wanted = (self.placement.own(blocks.indices(start), shares=even) for start in starts)
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
                        parts[number] = self._programs[i](*model[i], block, groups[i].put(np.int32(count)))
                        started.append(parts[number])
                        del block
                turns = columns = None  # frees its memory for another read
                in_flight.append(started)
                if len(in_flight) >= queued:
                    jax.block_until_ready(in_flight.popleft())  # otherwise reads would queue up on the device
            return self._added(parts)

    def _pick(self, i: int, number: int) -> Any:
        assert self._data is not None
        start = self.placement.local[i].put(np.int32(number * self.blocks.size))
        return self._picks[i](self._data[i], start)

    def _added(self, parts: dict[int, Any]) -> dict[str, Any]:
        """The metrics, from the sums of this host's blocks by number. Waits for all hosts."""
        blocks, placement = self.blocks, self.placement

        def of_all(shape: Any, *sums: jax.Array) -> np.ndarray:
            """The arrays of all blocks, `(blocks, ...)` float64."""
            each = np.zeros((len(blocks), *shape.shape), shape.dtype)
            for number, value in zip(parts, sums, strict=True):
                if blocks.owner(number) == placement.hosts.index:
                    each[number] = np.asarray(value.addressable_data(0))
            if placement.hosts.count > 1:
                each = placement.from_one_host(each, each)
            return each.astype(np.float64)

        def whole(s: Sum) -> Sum:
            """One block after another: `np.sum` would add them in another order."""
            total, count = s.total, functools.reduce(np.add, s.count)
            if s.each:
                return Sum(total.reshape(-1, *total.shape[2:])[: blocks.examples], count, s.finish, True)
            return Sum(functools.reduce(np.add, total), count, s.finish)

        sums = jax.tree.map(of_all, self._programs[0].out_info, *parts.values())
        return finished({name: whole(s) for name, s in sums.items()})

    def close(self) -> None:
        """Stops the workers that read data."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _place(self, columns: dict[str, np.ndarray], indices: np.ndarray) -> Any:
        check_labels(columns, self.recipe.task.classes, "evaluation", indices)
        return self.blocks.cut(columns)
