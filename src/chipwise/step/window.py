"""Defines a step's inputs other than its state: the window, and the examples of a device.

A window has the indices, epochs and hyperparameters of some hundred steps, so that the host sends
them only now and then.
"""

from __future__ import annotations

import math
from typing import Any, TypedDict

import jax
import numpy as np
from jax import Array

from ..data import order
from ..data.sources import Columns, Spec
from ..recipe.recipe import Recipe

_WINDOW_INDICES = 1 << 20  # 4 MB of int32: little memory, and thousands of steps with a small batch
_WINDOW_STEPS = 1024

Batch = dict[str, Array]  # column to (rows, ...)


class WindowRows(TypedDict):
    """The part of a window that says which examples a step has."""

    start: Array
    """`()` int32: the first step of the window."""
    seed: Array
    """`()` uint32: the recipe's. It is an input, so that runs with other seeds share a program."""
    indices: Array
    """`(length, batch)` int32: the indices of the examples, on a device those of its rows."""
    epoch: Array
    """`(length,)` int32: the epoch of a step's first example."""
    cut: Array
    """`(length,)` int32: the position in the batch from which examples belong to the next epoch."""


class WindowHyper(TypedDict):
    """The part of a window that has the hyperparameters."""

    start: Array
    """`()` int32: the first step of the window."""
    tables: dict[str, Array]
    """`(length,)` float32 for each hyperparameter of the optimizer."""


class Window(TypedDict):
    """The inputs of some hundred steps. On the host they are NumPy arrays, and as the argument of a
    program that is not traced yet, shapes."""

    rows: WindowRows
    hyper: WindowHyper


def window_length(recipe: Recipe) -> int:
    """The number of steps in a window of this recipe."""
    return max(1, min(_WINDOW_STEPS, _WINDOW_INDICES // recipe.batch, recipe.clock.total or 1))


def window_spec(recipe: Recipe, rows: int) -> dict[str, Any]:
    """The shapes of `host_window` on a device that has `rows` rows of each batch."""
    length = window_length(recipe)
    scalar, steps = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((length,), np.int32)
    values = jax.ShapeDtypeStruct((length,), np.float32)
    return {
        "rows": {
            "start": scalar,
            "seed": jax.ShapeDtypeStruct((), np.uint32),
            "indices": jax.ShapeDtypeStruct((length, rows), np.int32),
            "epoch": steps,
            "cut": steps,
        },
        "hyper": {"start": scalar, "tables": dict.fromkeys(recipe.optimizer.hyper, values)},
    }


def host_window(recipe: Recipe, start: int, length: int) -> dict[str, Any]:
    """Computes the `Window` of steps `start` to `start + length - 1`, as NumPy arrays.

    Rows after the end of the run repeat the last row. No step reads them.
    """
    clock, batch = recipe.clock, recipe.batch
    assert clock.total is not None
    stop = max(start + 1, min(start + length, clock.total))
    rows = stop - start
    indices = order.indices(recipe.seed, start * batch, stop * batch, clock.examples).reshape(
        rows, batch
    )
    first = np.arange(start, stop, dtype=np.int64) * batch
    epoch, offset = np.divmod(first, clock.examples)
    tables = recipe.optimizer.tables(clock, start, stop)

    def pad(a: np.ndarray) -> np.ndarray:
        return np.concatenate([a, np.repeat(a[-1:], length - rows, axis=0)]) if rows < length else a

    return {
        "rows": {
            "start": np.int32(start),
            "seed": np.uint32(recipe.seed),
            "indices": pad(indices),
            "epoch": pad(epoch.astype(np.int32)),
            "cut": pad(
                np.minimum(clock.examples - offset, np.iinfo(np.int32).max).astype(np.int32)
            ),
        },
        "hyper": {
            "start": np.int32(start),
            "tables": {
                name: pad(np.asarray(values, np.float32)) for name, values in tables.items()
            },
        },
    }


def flat(columns: Columns) -> Columns:
    """Reshapes columns `(n, ...)` to rows `(n, values)`, without copying. This is the layout of
    training data on a device.

    A TPU gathers rows of a matrix in microseconds. For images `(n, height, width, channels)` its
    compiler first rearranges the whole data set, in every step: 12.6 ms for CIFAR-10 on a v2.
    """
    return {k: v.reshape(len(v), -1) if v.ndim > 1 else v for k, v in columns.items()}


def flat_spec(spec: Spec, count: int) -> Spec:
    """The shapes of `count` examples as `flat` columns.

    *Arguments:* `spec` is that of one example."""

    def shape(column: jax.ShapeDtypeStruct) -> tuple[int, ...]:
        return (math.prod(column.shape),) if column.shape else ()

    return {name: jax.ShapeDtypeStruct((count, *shape(s)), s.dtype) for name, s in spec.items()}


def shaped(columns: Batch, spec: Spec) -> Batch:
    """Reshapes `flat` columns to columns `(n, ...)` with the shapes of `spec`, which is that of one
    example. Traced."""
    return {k: v.reshape(len(v), *spec[k].shape) for k, v in columns.items()}


def pick(columns: Batch, indices: Array) -> Batch:
    """Picks the examples at `indices` `(n,)` from `flat` columns, and returns `flat` columns.
    Traced."""
    return {k: v.at[indices].get(mode="promise_in_bounds") for k, v in columns.items()}
