"""Predictions of a trained model: each example once, in order, the same on any number of devices.

One program, compiled for one device (or group), computes each block of examples (`blocks`) on the
next device. So outputs do not depend on the number of devices, and any block can be recomputed
later.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base import DataError, RecipeError
from ..data.cached import steady
from ..data.sources import Columns, Spec, described
from ..data.stream import Stream
from ..data.workers import Workers
from ..models.last_activation import PROBABILITIES, last_activation
from ..recipe import precision
from ..recipe.random_keys import as_data, as_keys
from ..recipe.recipe import Recipe
from ..recipe.source import Source, rows_of, spec_of
from ..recipe.task import Tree
from ..recipe.user_code import user_code
from ..step.state import abstract_model, axes_of
from .blocks import ExampleBlocks, block_size
from .placement import Placement

_IN_FLIGHT = 2  # reads: while one is computed, the previous one is fetched


def inputs_of(recipe: Recipe) -> Spec:
    """The columns that `Task.predict` reads: name to shape and type of one example, as in the
    training data.

    Computes nothing. Raises `RecipeError` when the task has no `predict`, or when it reads the
    label.
    """
    task = recipe.task
    if task.predict is None:
        raise RecipeError("task-without-predict", recipe=recipe.name)
    spec = {name: s for name, s in sorted(spec_of(task.train).items()) if name != "label"}
    shapes = jax.eval_shape(
        lambda batch: precision.cast_batch(batch, recipe.precision, task.uncast), rows_of(spec, 2)
    )
    params, state = jax.eval_shape(as_keys, abstract_model(recipe))
    params = jax.eval_shape(lambda params: precision.cast(params, recipe.precision), params)
    with user_code("Task.predict", spec):
        traced = jax.make_jaxpr(task.predict)(params, state, shapes).jaxpr
    used = {id(v) for equation in traced.eqns for v in equation.invars} | {
        id(v) for v in traced.outvars
    }
    inputs = traced.invars[len(traced.invars) - len(spec) :]  # a dict's leaves are sorted by name
    return {name: spec[name] for name, v in zip(spec, inputs, strict=True) if id(v) in used}


def returned(recipe: Recipe, outputs: Spec) -> str | None:
    """Returns what the model's outputs are: "logits", "probabilities" or "values". See
    `Task.returns`. None if neither the task nor the last operation says it, of outputs that have
    the shape of a classifier's.

    *Arguments:* `outputs`: name to shape and type of one example.
    """
    task = recipe.task
    if task.returns is not None:
        return task.returns
    if {name: s.shape for name, s in outputs.items()} != {"outputs": (task.classes,)}:
        return "values"
    one = rows_of(inputs_of(recipe), 1)
    last = last_activation(jax.make_jaxpr(prediction(recipe))(*abstract_model(recipe), one).jaxpr)
    if last in PROBABILITIES:
        return "probabilities"
    return "logits" if last in ("linear", "log-softmax") else None


def prediction(recipe: Recipe) -> Any:
    """Returns a traceable function `(params, state, inputs) -> outputs` in the recipe's precision.

    `outputs` is a dict of arrays `(batch, ...)`, floating ones in float32. A single array that
    `Task.predict` returns is called `outputs`.
    """

    def run(params: Tree, state: Tree, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        assert recipe.task.predict is not None
        with precision.products(recipe.precision):
            params, state = as_keys((precision.cast(params, recipe.precision), state))
            given = precision.cast_batch(inputs, recipe.precision, recipe.task.uncast)
            outputs = recipe.task.predict(params, state, given)
        return checked(outputs, next(iter(inputs.values())).shape[0])

    return run


def checked(returned: Any, rows: int) -> dict[str, jax.Array]:
    """The outputs of a `predict` as a dict. Raises `RecipeError` when they do not keep its
    contract."""
    outputs = returned if isinstance(returned, dict) else {"outputs": returned}
    for name, value in outputs.items():
        shape = getattr(value, "shape", None)
        if not isinstance(name, str) or shape is None or shape[:1] != (rows,):
            kind = type(value).__name__ if shape is None else str(list(shape))
            raise RecipeError("predict-returns", name=str(name), got=kind, rows=rows)
    arrays = {n: jnp.asarray(v) for n, v in outputs.items()}
    floating = {n for n, v in arrays.items() if jnp.issubdtype(v.dtype, jnp.floating)}
    return {n: v.astype(jnp.float32) if n in floating else v for n, v in arrays.items()}


def predicted_together(recipe: Recipe, examples: int, inputs: Spec | None = None) -> int:
    """Returns the size of the blocks in which `examples` examples of the recipe are predicted. See
    `block_size`.

    *Arguments:* `inputs`: `inputs_of(recipe)`, if known. Otherwise it is computed, which traces the
    model.
    """
    one = rows_of(inputs_of(recipe) if inputs is None else inputs, 1)
    return block_size(
        recipe, examples, jax.make_jaxpr(prediction(recipe))(*abstract_model(recipe), one)
    )


class Predictor:
    """Predicts examples of `source` with a task's `predict`. Compiles once, and can be called any
    number of times.

    *Arguments:* `batch`: the examples that are read at a time, on all devices, by default a block
    on each. `workers`: read the source, see `data.workers`. `block`: another size than the
    recipe's, for timing.

    *Fields:*

    - `inputs`: the columns that the model reads (`inputs_of`).
    - `block`: the examples of a block.
    - `examples`.
    - `rows`: the examples of a read.
    - `outputs`: name to shape and type of one example.

    Raises `RecipeError`, `DataError` when the source lacks a column or has one of another shape or
    type, and `DeviceError` when a block does not fit.
    """

    def __init__(
        self,
        recipe: Recipe,
        params: Tree,
        state: Tree,
        source: Source,
        placement: Placement,
        batch: int | None = None,
        workers: int | str | None = None,
        *,
        block: int | None = None,
    ):
        if batch is not None and batch < 1:
            raise RecipeError("predict-batch-below-one", batch=batch)
        placement.hosts.alone("predict")
        self.recipe, self.source, self.placement = recipe, source, placement
        self.examples = len(source)
        if not self.examples:
            raise DataError("source-empty")
        self.inputs = inputs_of(recipe)
        spec = spec_of(source)
        if any(
            n not in spec or described({n: spec[n]}) != described({n: s})
            for n, s in self.inputs.items()
        ):
            raise DataError(
                "predict-columns", columns=described(spec), expected=described(self.inputs)
            )
        self.block = block or predicted_together(recipe, self.examples, self.inputs)
        self._blocks = ExampleBlocks(placement, self.block, self.examples, batch)
        self.rows = self._blocks.rows
        params, state = as_data((params, state))
        self._model = [placement.put_cut(params, axes_of(recipe, params)), placement.put(state)]
        self._programs = self._blocks.compile(
            prediction(recipe),
            lambda i: (self._model[0][i], self._model[1][i], self._blocks.shapes(i, self.inputs)),
            rows=True,
        )
        shapes = self._programs[0].out_info
        self.outputs = {n: jax.ShapeDtypeStruct(s.shape[1:], s.dtype) for n, s in shapes.items()}
        self._wanted = workers
        self._workers: Workers | None = None

    def __call__(self) -> Iterator[tuple[Columns, dict[str, np.ndarray]]]:
        """For all examples in order, at most `rows` at a time: the columns that the model does not
        read, such as `label`, and the outputs."""
        stops = range(0, self.examples, self.rows)
        in_flight: deque[tuple[int, Columns, list[Any]]] = deque()
        workers = self._workers = self._workers or Workers(steady(self.source), self._wanted)
        stream = Stream(
            self.source, map(self._blocks.indices, stops), self.rows, self._place, workers
        )
        with contextlib.closing(stream):
            for first in stops:
                unread, placed = stream.next()
                outputs = self._run(placed)
                del placed
                in_flight.append((first, unread, outputs))
                if len(in_flight) == _IN_FLIGHT:
                    yield self._fetched(*in_flight.popleft())
            while in_flight:
                yield self._fetched(*in_flight.popleft())

    def now(self, columns: Columns) -> dict[str, np.ndarray]:
        """The outputs for `rows` examples. Waits."""
        _, placed = self._place(columns, np.arange(self.rows))
        return self._fetched(0, {}, self._run(placed))[1]

    def _run(self, turns: list[list[Any]]) -> list[Any]:
        """Starts the program of each device on its blocks. *Returns* the outputs, block after
        block. Does not wait."""
        outputs = [
            [
                run(params, state, block)
                for run, params, state, block in zip(
                    self._programs, *self._model, columns, strict=True
                )
            ]
            for columns in turns
        ]
        return [of_group for each in zip(*outputs, strict=True) for of_group in each]

    def close(self) -> None:
        """Stops the workers that read the source."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _place(self, columns: Columns, indices: np.ndarray) -> tuple[Columns, list[Any]]:
        # Copied, since the stream reuses its buffers
        unread = {n: np.array(c) for n, c in columns.items() if n not in self.inputs}
        return unread, self._blocks.cut({n: columns[n] for n in self.inputs})

    def _fetched(
        self, first: int, unread: Columns, outputs: list[Any]
    ) -> tuple[Columns, dict[str, np.ndarray]]:
        count = min(self.rows, self.examples - first)
        try:
            parts = jax.device_get(outputs)
        except jax.errors.JaxRuntimeError as error:
            raise self._blocks.above_memory(error) from error
        joined = {n: np.concatenate([part[n] for part in parts])[:count] for n in self.outputs}
        return {n: c[:count] for n, c in unread.items()}, joined
