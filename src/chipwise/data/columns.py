"""Columns: the arrays that examples consist of, one example a row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import DataError
from ..recipe.source import Columns as Columns
from ..recipe.source import Spec as Spec


def check_labels(
    columns: Mapping[str, np.ndarray],
    classes: int | None,
    data: str = "the data",
    indices: np.ndarray | None = None,
) -> None:
    """Raises `DataError` when the column `label` `(n, ...)` is not of integers in `[0, classes)`.

    Does nothing without `classes` or without such a column. `data` names the data in the error, and
    `indices` `(n,)` the examples, when the columns are not the whole source.
    """
    if classes is None or "label" not in columns:
        return
    label = np.asarray(columns["label"])
    if label.dtype.kind not in "iu":
        raise DataError("labels-not-integers", data=data, dtype=str(label.dtype), last=classes - 1)
    bad = first_outside(label, classes, indices)
    if bad is not None:
        raise DataError("label-out-of-range", data=data, example=bad[0], label=bad[1], last=classes - 1)


def first_outside(
    values: np.ndarray, limit: int, indices: np.ndarray | None = None
) -> tuple[int, int] | None:
    """Number and value of the first example of `values` `(n, ...)` that is not in `[0, limit)`."""
    bad = (values < 0) | (values >= limit)
    if not bad.any():
        return None
    row = int(np.argmax(bad.reshape(len(values), -1).any(axis=1)))
    value = values[row][bad[row]].flat[0] if values.ndim > 1 else values[row]
    return (row if indices is None else int(indices[row])), int(value)


def empty(spec: Spec, examples: int) -> Columns:
    """Uninitialised columns `(examples, ...)` of `spec`."""
    return {name: np.empty((examples, *s.shape), s.dtype) for name, s in spec.items()}


def copy_rows(columns: Columns, indices: np.ndarray, out: Columns) -> None:
    """Copies rows `indices` `(n,)` of arrays to `out`, each byte once. `IndexError` outside the arrays."""
    for name, column in columns.items():
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(column):
            raise IndexError(f"{len(column)} examples, asked for {indices.min()} to {indices.max()}")
        # Checked above, since NumPy's own check ("raise") would copy through a buffer
        np.take(column, indices, axis=0, out=out[name], mode="clip")


def example_bytes(spec: Spec) -> int:
    """Bytes of one example."""
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in spec.values())


def described(spec: Mapping[str, Any]) -> list[str]:
    """`["image uint8[8, 8, 3]", "label int32[]"]`: anything with shapes and types, sorted by name."""
    return [f"{name} {np.dtype(s.dtype)}{list(s.shape)}" for name, s in sorted(spec.items())]
