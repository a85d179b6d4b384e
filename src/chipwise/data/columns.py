"""Columns: the arrays that examples consist of, in types that JAX has by default.

64-bit columns become 32-bit, after a check that no value is lost, and byte order becomes the machine's.
Examples of other people's data sets are dicts or (image, label), of whatever holds numbers; torch tensors and
PIL pictures are told by what they can do, so neither library is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ..errors import DataError

Spec = dict[str, jax.ShapeDtypeStruct]  # column to the shape and type of one example
Columns = dict[str, np.ndarray]  # column to (n, ...)

# JAX has no 64-bit types by default and would cut them silently, label 2**32 + 1 to label 1.
NARROW = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}
_PAIR = ("image", "label")


def read_example(example: Any, index: int) -> Columns:
    """Example `index` of any source as arrays of types that JAX has; see `as_columns` and `narrow`."""
    return {name: narrow(name, value) for name, value in as_columns(example, index).items()}


def as_columns(example: Any, index: int) -> dict[str, Any]:
    """Example `index` of a map data set, such as PyTorch's, as column to something NumPy takes as an array.

    A dict keeps its names; a pair becomes `image` and `label`, and a tuple of one becomes `image`. Torch
    tensors, on any device, and PIL pictures become arrays: a picture `(h, w)` or `(h, w, channels)`, one with
    a palette its colours (3 channels, 4 with transparency), bfloat16 float32. The rest stays as it is.

    Raises `DataError` for an example of another kind, and for a picture that cannot be decoded.
    """
    kind = type(example).__name__
    if isinstance(example, (tuple, list)) and 1 <= len(example) <= len(_PAIR):
        example = dict(zip(_PAIR, example, strict=False))
    if isinstance(example, (tuple, list)) or (isinstance(example, Mapping) and not example):
        raise DataError("example-length", example=index, kind=kind, length=len(example))
    if not isinstance(example, Mapping):
        raise DataError("example-kind", example=index, kind=kind)
    columns = {}
    for name, value in example.items():
        try:
            columns[str(name)] = _array(value)
        except (OSError, RuntimeError, TypeError, ValueError) as error:  # whatever Pillow and torch raise
            raise DataError(
                "example-unreadable", example=index, column=str(name), reason=one_line(error)
            ) from error
    return columns


def _array(value: Any) -> Any:
    if hasattr(value, "detach") and hasattr(value, "numpy"):  # torch
        value = value.detach().cpu()
        # NumPy has no bfloat16
        return (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy(force=True)
    if hasattr(value, "getbands") and hasattr(value, "convert"):  # PIL
        if value.mode in ("P", "PA"):  # its numbers are places in a list of colours
            transparent = value.mode == "PA" or "transparency" in value.info
            value = value.convert("RGBA" if transparent else "RGB")
        return np.asarray(value)
    return value


def narrow(name: str, values: Any) -> np.ndarray:
    """`values` as an array of a type JAX has by default and of native byte order; copies only if it must.

    Raises `DataError` for text and objects, and for values that the 32-bit type cannot hold.
    """
    try:
        # asarray also drops numpy.memmap, whose slices cost more than those of a plain array
        array = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise DataError("column-not-array", column=name, reason=one_line(error)) from error
    if not (array.dtype == np.bool_ or jax.dtypes.issubdtype(array.dtype, np.number)):
        raise DataError("column-not-numbers", column=name, dtype=str(array.dtype))
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    target = NARROW.get(array.dtype.name)
    if target is None:
        return array
    with np.errstate(over="ignore"):
        small = array.astype(target)
    lost = small != array if array.dtype.kind in "iu" else np.isinf(small) & np.isfinite(array)
    if lost.any():
        place = np.unravel_index(int(np.argmax(lost)), lost.shape)
        value = array[place].item()
        if not place:
            raise DataError("value-overflows", column=name, value=value, dtype=target)
        raise DataError("column-overflows", column=name, value=value, row=int(place[0]), dtype=target)
    return small


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


def one_line(error: BaseException) -> str:
    """What an exception says, on one line."""
    return " ".join(str(error).split())
