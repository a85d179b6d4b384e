"""Evaluation: every example exactly once, for any batch and any number of devices.

The loss of each example is computed separately (`vmap` over batches of one), padding in the last batch is
masked, and totals are divided once at the end. So the batch affects only memory, and is chosen by the memory
that the compiled program needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..data.sources import check_labels, spec_of
from ..data.stream import Stream
from ..data.workers import Workers
from ..errors import DataError, DeviceError, RecipeError
from ..machine.detect import detect
from ..models.large import in_group
from ..models.target import traced_for
from ..recipe import precision
from ..recipe.recipe import Recipe
from ..recipe.task import Sum, Tree, finished
from . import feed, keys
from .on import ALL, On
from .placement import GROUP, Placement
from .replica import checked
from .state import axes_of

FIRST_BATCH_PER_DEVICE = 1024  # no chip we know of is faster with a larger batch
QUEUED_BATCHES = 16  # more do not help, and may deadlock (see `session.QUEUED_ON_CPUS`)
CPU_LIMIT_BYTES = 1 << 30  # a larger batch on the host only exceeds the caches


def evaluate(
    recipe: Recipe, params: Tree, state: Tree, *, batch: int | None = None, on: On = ALL
) -> dict[str, Any]:
    """Metric name to value over the task's `eval` source, every example exactly once.

    *Arguments:* `batch`, global, by default chosen by the memory that it needs; `on`, of which only the
    devices matter (any number works).
    """
    placement = Placement.of(detect(on.devices, on.platform), recipe.shards)
    with placement.hosts.failing(), contextlib.closing(Evaluator(recipe, placement, batch)) as evaluator:
        if placement.shards == 1:
            return evaluator(*placement.spread((params, state)))
        placed = placement.put_cut(params, axes_of(recipe, params)), placement.put(state)
        return evaluator(*map(placement.gather, placed))


class Evaluator:
    """Evaluates a task's `eval` source; compiled once, used any number of times.

    *Arguments:* `batch`, the global batch, by default chosen such that a device needs at most `limit_bytes`
    of temporary memory (default: four fifths of the free memory); `workers`, which read data that is not on
    the devices, see `data.workers`.

    Raises `DataError` when evaluation data is missing or empty, `DeviceError` when not even one example per
    device fits.
    """

    def __init__(
        self,
        recipe: Recipe,
        placement: Placement,
        batch: int | None = None,
        limit_bytes: int | None = None,
        workers: int | str | None = None,
    ):
        source = recipe.task.eval
        if source is None:
            raise DataError("no-evaluation-data")
        if not len(source):
            raise DataError("evaluation-data-empty")
        if batch is not None and batch < 1:
            raise RecipeError("evaluation-batch-below-one", batch=batch)
        self.recipe, self.placement, self.source = recipe, placement, source
        self.examples = len(source)
        self.devices = placement.count
        self.resident = placement.all("resident evaluation", feed.fits(source, placement.memory_bytes))
        self.data = None
        if self.resident:
            self.data = placement.spread(feed.flat(feed.read(source, recipe.task.classes, "evaluation")))
        self._spec = spec_of(source)
        # A loss that cannot evaluate fails now, not after the training.
        initial = jax.eval_shape(lambda: recipe.task.init(keys.init_key(recipe.seed)))
        jax.eval_shape(
            lambda p, s, e: self._one(precision.cast(p, recipe.precision), s, e), *initial, self._spec
        )
        self._limit, self._wanted = limit_bytes, workers
        self._workers: Workers | None = None
        self._compiled: Any = None
        # Rounded up to a multiple of the devices; the mask excludes the padding.
        wanted = batch if batch is not None else FIRST_BATCH_PER_DEVICE * self.devices
        self.device_batch = -(-min(wanted, self.examples) // self.devices)
        self._chosen = batch is not None

    @property
    def batch(self) -> int:
        """The global evaluation batch in use."""
        return self.device_batch * self.devices

    def __call__(self, params: Tree, state: Tree) -> dict[str, Any]:
        """Metric name to value: `Sum.value` over all examples, a float or a NumPy array."""
        while True:
            try:
                if self._compiled is None:
                    self._compile(params, state)
                return self._run(params, state)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error) or self.placement.hosts.count > 1:
                    raise
                if self.device_batch == 1:
                    reason = str(error).splitlines()[0]
                    raise DeviceError("evaluation-above-memory", reason=reason) from error
                self.device_batch //= 2
                self._compiled = None

    def _compile(self, params: Tree, state: Tree) -> None:
        while True:
            compiled = self._lower(params, state).compile()
            analysis = compiled.memory_analysis()
            needed = analysis.temp_size_in_bytes if analysis is not None else 0
            limit = self._limit if self._limit is not None else self._free()
            limit = min(self.placement.hosts.everyone("evaluation memory", limit))
            if self._chosen or self.device_batch == 1 or needed <= limit:
                self._compiled = compiled
                return
            # Temporary memory grows with the batch, so the next try is the size that should fit.
            self.device_batch = max(1, min(self.device_batch // 2, self.device_batch * limit // needed))

    def _lower(self, params, state):
        rows, whole = self.batch, self.placement.shapes
        if self.resident:
            data: Any = whole(self.data)
        else:
            batch = {k: jax.ShapeDtypeStruct((rows, *s.shape), s.dtype) for k, s in self._spec.items()}
            data = whole(batch, rows=True)
        indices, mask = whole(
            (jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.bool_)), rows=True
        )
        if self.placement.shards > 1:
            cut = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
            over_groups = NamedSharding(self.placement.mesh, P(GROUP))
            program = jax.jit(self._group_eval, out_shardings=over_groups)
            return program.lower(cut, whole(state), data, indices, mask)
        body = jax.shard_map(
            self._device_eval,
            mesh=self.placement.mesh,
            in_specs=(P(), P(), P() if self.resident else P(GROUP), P(GROUP), P(GROUP)),
            out_specs=P(GROUP),
            check_vma=False,
        )
        return jax.jit(body).lower(whole(params), whole(state), data, indices, mask)

    def _device_eval(self, params, state, data, indices, mask):
        recipe = self.recipe
        batch = feed.pick(data, indices, self._spec) if self.resident else data
        params = precision.cast(params, recipe.precision)

        def total(x):
            keep = mask.reshape(-1, *[1] * (x.ndim - 1))
            return jnp.sum(jnp.where(keep, x, jnp.zeros_like(x)), axis=0, keepdims=True)

        # The host adds the devices' sums. A collective in a program that also computes could deadlock
        # simulated devices: on the CPU, a waiting collective holds a thread of the pool in which the other
        # devices compute.
        return jax.tree.map(total, jax.vmap(self._one, (None, None, 0))(params, state, batch))

    def _group_eval(self, params, state, data, indices, mask):
        """`_device_eval` for groups of several devices, over which the compiler cuts the parameters: one
        program for all groups, with collectives only within a group."""
        mesh, batch = self.placement.mesh.abstract_mesh, data
        if self.resident:
            rows = NamedSharding(mesh, P(mesh.axis_names))
            picked = feed.pick(data, indices, self._spec)
            batch = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, rows), picked)
        params = precision.cast(params, self.recipe.precision)

        def total(x):
            keep = mask.reshape(-1, *[1] * (x.ndim - 1))
            masked = jnp.where(keep, x, jnp.zeros_like(x))
            return jnp.sum(masked.reshape(self.placement.groups, -1, *x.shape[1:]), axis=1)

        with in_group(mesh, rows=False):
            sums = jax.vmap(self._one, (None, None, 0))(params, state, batch)
        return jax.tree.map(total, sums)

    def _one(self, params, state, example: dict) -> dict[str, Sum]:
        """The sums of one unbatched example."""
        recipe = self.recipe
        batch = precision.cast_batch({k: v[None] for k, v in example.items()}, recipe.precision)
        with precision.products(recipe.precision), traced_for(self.placement.lead):
            returned = recipe.task.loss(params, state, batch, keys.eval_key(recipe.seed), False)
        return checked(returned, state)[0]

    def _run(self, params, state) -> dict[str, Any]:
        starts = range(0, self.examples, self.batch)
        parts: list[Any] = []
        if self.data is None and self._workers is None:
            self._workers = Workers(self.source, self._wanted)  # kept: processes take seconds to start
        queued = QUEUED_BATCHES
        with contextlib.ExitStack() as closing:
            if self.data is None:
                rows = self.device_batch * len(self.placement.devices)
                wanted = (self.placement.own(self._rows(start), devices=True) for start in starts)
                stream = Stream(self.source, wanted, rows, self._place, self._workers)
                closing.callback(stream.close)
                queued = min(queued, stream.in_use)
            for start in starts:
                mask = np.arange(start, start + self.batch) < self.examples
                local = self.placement.own((self._rows(start), mask), devices=True)
                placed = self.placement.spread(local, rows=True)
                data = stream.next() if self.data is None else self.data
                parts.append(self._compiled(params, state, data, *placed))
                del data  # frees its memory for another batch
                if len(parts) >= queued:
                    jax.block_until_ready(parts[-queued])  # otherwise batches would queue up on the device
            host = jax.tree.map(lambda *sums: self._whole(sums), *parts)
        # In float64, so that totals do not depend on the batch.
        totals: dict[str, Sum] = {}
        for name, s in host.items():
            t, c = (_added(np.asarray(x, np.float64)) for x in (s.total, s.count))
            totals[name] = Sum(t, c, s.finish)
        return finished(totals)

    def _whole(self, parts: Sequence[jax.Array]) -> np.ndarray:
        """The sums of all batches, each `(groups, ...)` over the mesh, as one array `(groups, batches,
        ...)`."""
        if self.placement.hosts.count == 1:
            return np.stack(jax.device_get(parts), axis=1)
        if self.placement.shards > 1:
            gathered = [multihost_utils.process_allgather(part, tiled=True) for part in parts]
            return np.stack(gathered, axis=1)
        by_group = [np.stack(sums, axis=1) for sums in zip(*map(self.placement.split, parts), strict=True)]
        placed = [
            jax.device_put(sums, group.device)
            for sums, group in zip(by_group, self.placement.local, strict=True)
        ]
        return self.placement.assemble(placed)

    def close(self) -> None:
        """Stops the workers that read data."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _rows(self, start: int) -> np.ndarray:
        """The indices of the batch from `start` on, `(batch,)` int32, padded with example 0."""
        rows = np.arange(start, start + self.batch, dtype=np.int32)
        return np.where(rows < self.examples, rows, 0).astype(np.int32)

    def _place(self, columns: dict[str, np.ndarray], indices: np.ndarray) -> Any:
        check_labels(columns, self.recipe.task.classes, "evaluation", indices)
        return self.placement.spread(columns, rows=True)

    def _free(self) -> int:
        free = self.placement.free_bytes()
        if self.placement.memory_bytes is not None:
            return free * 4 // 5
        return min(CPU_LIMIT_BYTES // self.devices, free // 4)


def _added(parts: np.ndarray) -> np.ndarray:
    """The sum of `(groups, batches, ...)` over both axes, batch after batch."""
    total = None
    for batch in np.moveaxis(parts, 1, 0):
        of_groups = np.sum(np.ascontiguousarray(batch), axis=0)
        total = of_groups if total is None else total + of_groups
    assert total is not None
    return total
