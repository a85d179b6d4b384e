"""What a trained model says of examples: each once, in order, the same on any number of devices.

Examples are cut into blocks whose size depends on the model, the chip and the number of examples alone. Every
block goes through one program, compiled for one device (or group), on whichever is next. So the number of
devices cannot show in the outputs, and any block can be computed again later.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..data.sources import Columns, Spec, described
from ..data.stream import Stream
from ..data.workers import Workers
from ..errors import DataError, DeviceError, RecipeError
from ..models.large import SHARD, in_group
from ..recipe import precision
from ..recipe.recipe import Recipe
from ..recipe.source import Source, spec_of
from ..recipe.task import Tree
from . import keys
from .placement import Placement
from .state import axes_of

LARGEST_BLOCK = 256  # examples: past it no chip we know of predicts faster
_CPU_BYTES = 1 << 30  # of temporary memory; a chip may give half of its own
_IN_FLIGHT = 2  # batches: while one is computed, the one before is fetched


def largest_block(examples: int) -> int:
    """How many of `examples` examples a device takes at a time if its memory allows."""
    return min(LARGEST_BLOCK, -(-examples // 8))


def temporary_limit(memory_bytes: int | None) -> int:
    """Of a device's memory, what a program's temporary arrays may take; a block that needs more is halved."""
    return _CPU_BYTES if memory_bytes is None else memory_bytes // 2


def inputs_of(recipe: Recipe) -> Spec:
    """The columns that `Task.predict` reads, to the shape and type of one example, as training stores them.

    Nothing is computed. Raises `RecipeError` when the task has no `predict`, or it wants the label.
    """
    task = recipe.task
    if task.predict is None:
        raise RecipeError("task-without-predict", recipe=recipe.name)
    spec = {name: s for name, s in sorted(spec_of(task.train).items()) if name != "label"}
    batch = {name: jax.ShapeDtypeStruct((2, *s.shape), s.dtype) for name, s in spec.items()}
    shapes = jax.eval_shape(lambda batch: precision.cast_batch(batch, recipe.precision), batch)
    try:
        traced = jax.make_jaxpr(task.predict)(*_abstract(recipe), shapes).jaxpr
    except KeyError as error:
        raise RecipeError("predict-reads", column=str(error.args[0]), columns=list(spec)) from error
    used = {id(v) for equation in traced.eqns for v in equation.invars} | {id(v) for v in traced.outvars}
    inputs = traced.invars[len(traced.invars) - len(spec) :]  # a dict's leaves lie by name
    return {name: spec[name] for name, v in zip(spec, inputs, strict=True) if id(v) in used}


def prediction(recipe: Recipe) -> Any:
    """`(params, state, inputs) -> outputs` in the recipe's precision, to be traced: a dict of arrays
    `(batch, ...)`, float32 where they are floating; what `Task.predict` returns alone is called `outputs`."""

    def run(params: Tree, state: Tree, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        assert recipe.task.predict is not None
        with precision.products(recipe.precision):
            made = recipe.task.predict(
                precision.cast(params, recipe.precision),
                state,
                precision.cast_batch(inputs, recipe.precision),
            )
        return checked(made, next(iter(inputs.values())).shape[0])

    return run


def checked(made: Any, rows: int) -> dict[str, jax.Array]:
    """What a `predict` returned, as a dict, after saying what does not fit its contract."""
    outputs = made if isinstance(made, dict) else {"outputs": made}
    for name, value in outputs.items():
        shape = getattr(value, "shape", None)
        if not isinstance(name, str) or shape is None or shape[:1] != (rows,):
            kind = type(value).__name__ if shape is None else str(list(shape))
            raise RecipeError("predict-returns", name=str(name), got=kind, rows=rows)
    wide = {n: jnp.asarray(v) for n, v in outputs.items()}
    return {n: v.astype(jnp.float32) if jnp.issubdtype(v.dtype, jnp.floating) else v for n, v in wide.items()}


class Predictor:
    """Predicts examples of `source` with a task's `predict`; compiled once, used any number of times.

    *Arguments:* `inputs`: what the model reads, see `inputs_of`; `block`: examples that a device takes at a
    time, chosen by the memory that the program needs when left out.

    *Fields:* `block`; `examples`; `source_spec`; `rows`, examples that all devices take at a time; `outputs`,
    name to the shape and type for one example.

    Raises `RecipeError`, `DataError` when the source lacks a column or has it of another shape or type, and
    `DeviceError` when not even one example fits.
    """

    def __init__(
        self,
        recipe: Recipe,
        params: Tree,
        state: Tree,
        source: Source,
        placement: Placement,
        block: int | None = None,
        workers: int | str | None = None,
    ):
        if block is not None and block < 1:
            raise RecipeError("predict-batch-below-one", batch=block)
        placement.hosts.alone("predict")
        self.recipe, self.source, self.placement = recipe, source, placement
        self.examples = len(source)
        if not self.examples:
            raise DataError("source-empty")
        self.inputs = inputs_of(recipe)
        given = spec_of(source)
        wrong = [
            n
            for n, s in self.inputs.items()
            if n not in given or described({n: given[n]}) != described({n: s})
        ]
        if wrong:
            raise DataError("predict-columns", columns=described(given), expected=described(self.inputs))
        self.source_spec = given
        self._held = [placement.put_cut(params, axes_of(recipe, params)), placement.put(state)]
        unit = placement.shards  # a group's devices share out its block
        if block is not None and block % unit:
            raise RecipeError("predict-batch-shards", batch=block, shards=unit)
        self.block = block or unit * -(-largest_block(self.examples) // unit)
        self._compile(chosen=block is not None)
        self._wanted = workers
        self._workers: Workers | None = None

    @property
    def rows(self) -> int:
        return self.block * self.placement.groups

    def __call__(self, start: int = 0) -> Iterator[tuple[Columns, dict[str, np.ndarray]]]:
        """From example `start`, a multiple of `block`, to the last: columns of at most `rows` examples that
        the model did not read, such as `label`, and the outputs for them."""
        stops = range(start, self.examples, self.rows)
        flying: deque[tuple[int, Columns, list[Any]]] = deque()
        workers = self._workers = self._workers or Workers(self.source, self._wanted)
        stream = Stream(self.source, map(self._indices, stops), self.rows, self._place, workers)
        with contextlib.closing(stream):
            for first in stops:
                beside, placed = stream.next()
                made = self._run(placed)
                del placed
                flying.append((first, beside, made))
                if len(flying) == _IN_FLIGHT:
                    yield self._fetched(*flying.popleft())
            while flying:
                yield self._fetched(*flying.popleft())

    def now(self, columns: Columns) -> dict[str, np.ndarray]:
        """The outputs for `rows` examples, there when it returns."""
        _, placed = self._place(columns, np.arange(self.rows))
        return self._fetched(0, {}, self._run(placed))[1]

    def _run(self, placed: list[Any]) -> list[Any]:
        """What each device makes of its block; does not wait."""
        programs = zip(self._programs, *self._held, placed, strict=True)
        return [run(params, state, block) for run, params, state, block in programs]

    def close(self) -> None:
        """Ends the workers that read the source."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _indices(self, start: int) -> np.ndarray:
        rows = np.arange(start, start + self.rows, dtype=np.int32)
        return np.where(rows < self.examples, rows, 0).astype(
            np.int32
        )  # the last is filled up with the first

    def _place(self, columns: Columns, indices: np.ndarray) -> tuple[Columns, list[Any]]:
        beside = {n: np.array(c) for n, c in columns.items() if n not in self.inputs}  # the buffer is reused
        return beside, self.placement.cut({n: columns[n] for n in self.inputs}, within=P(SHARD))

    def _fetched(self, first: int, beside: Columns, made: list[Any]) -> tuple[Columns, dict[str, np.ndarray]]:
        count = min(self.rows, self.examples - first)
        try:
            parts = jax.device_get(made)
        except jax.errors.JaxRuntimeError as error:
            raise _above_memory(error, self.block) from error
        joined = {n: np.concatenate([part[n] for part in parts])[:count] for n in self.outputs}
        return {n: c[:count] for n, c in beside.items()}, joined

    def _compile(self, chosen: bool) -> None:
        """Compiles for each group, with the largest block, halved as often as needed, that fits."""
        predict, groups, least = prediction(self.recipe), self.placement.local, self.placement.shards
        mesh = groups[0].mesh.abstract_mesh

        @jax.jit
        def run(params, state, inputs):
            with in_group(mesh):
                return predict(params, state, inputs)

        limit = temporary_limit(self.placement.memory_bytes)

        def compiled(g: int) -> Any:
            to = groups[g].place(P(SHARD))
            here = to if isinstance(to, jax.sharding.Sharding) else jax.sharding.SingleDeviceSharding(to)
            inputs = {
                n: jax.ShapeDtypeStruct((self.block, *s.shape), s.dtype, sharding=here)
                for n, s in self.inputs.items()
            }
            return run.lower(self._held[0][g], self._held[1][g], inputs).compile()

        while True:
            try:
                first = compiled(0)
            except jax.errors.JaxRuntimeError as error:
                if chosen or self.block == least:
                    raise _above_memory(error, self.block) from error
                self.block = self._half(least)
                continue
            analysis = first.memory_analysis()
            if chosen or self.block == least or analysis is None or analysis.temp_size_in_bytes <= limit:
                break
            self.block = self._half(least)
        self.outputs = {n: jax.ShapeDtypeStruct(s.shape[1:], s.dtype) for n, s in first.out_info.items()}
        with ThreadPoolExecutor(4) as pool:
            self._programs = [first, *pool.map(compiled, range(1, len(groups)))]

    def _half(self, unit: int) -> int:
        return max(unit, self.block // 2 // unit * unit)


def _above_memory(error: jax.errors.JaxRuntimeError, block: int) -> Exception:
    if "RESOURCE_EXHAUSTED" not in str(error):
        return error
    return DeviceError("predict-above-memory", block=block, reason=str(error).splitlines()[0])


def _abstract(recipe: Recipe) -> tuple[Tree, Tree]:
    """Parameters in the compute type, and state, as shapes."""

    def make():
        params, state = recipe.task.init(keys.init_key(recipe.seed))
        return precision.cast(jax.tree.map(jnp.asarray, params), recipe.precision), state

    return jax.eval_shape(make)
