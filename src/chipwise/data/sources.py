"""Sources of examples: anything with `len()` and `[i] -> dict of arrays`, and three classes.

A list or a PyTorch map-style dataset is a source. Optional attributes make it faster:

- `spec` gives shapes without reading anything.
- `take(indices)` reads a batch.
- `fill(indices, out)` writes a batch into existing memory, column to `(n, ...)` with exactly the
  shapes and types of `spec`. Several threads call it.
- `prefetch(indices)` is called from another thread with the examples that will be read soon.

The last three are used only together with `spec`. Columns are the arrays of examples, one example
per row.

A run that resumes compares its data with the data at its start (`chipwise.data.compared`). A
source can show without reading whether it is the same by `labels` or `targets`, of all examples,
and by `digest`: a string or bytes that change with the contents, or a method that returns these.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..base import DataError
from ..base.annotations import as_annotated
from ..machine.limits import usable_cores
from ..recipe.source import (
    Columns as Columns,
    Source as Source,
    Spec as Spec,
    kind_of,
    narrow,
    number_of_classes,
    read_example,
    spec_of as spec_of,
)
from .draws import Drawn
from .stages import stage


@as_annotated
def check_labels(
    columns: Mapping[str, np.ndarray],
    classes: int | None,
    data: str | Path = "the data",
    indices: np.ndarray | None = None,
) -> None:
    """Raises `DataError` unless the column `label` `(n, ...)` has integers in `[0, classes)`.

    Does nothing without `classes` or without that column. For the error, `data` is the name of the
    data, and `indices` `(n,)` the numbers of the examples, if they are not the whole source.
    """
    if classes is None or "label" not in columns:
        return
    label = np.asarray(columns["label"])
    if label.dtype.kind not in "iu":
        wrong = "{data}: labels are {dtype}, expected integers from 0 to {last}."
        raise DataError(
            "labels-not-integers", wrong, data=data, dtype=str(label.dtype), last=classes - 1
        )
    bad = first_outside(label, classes, indices)
    if bad is not None:
        raise DataError(
            "label-out-of-range", data=data, example=bad[0], label=bad[1], last=classes - 1
        )


def first_outside(
    values: np.ndarray, limit: int, indices: np.ndarray | None = None
) -> tuple[int, int] | None:
    """Number and value of the first example of `values` `(n, ...)` outside `[0, limit)`, or
    `None`."""
    bad = (values < 0) | (values >= limit)
    if not bad.any():
        return None
    row = int(np.argmax(bad.reshape(len(values), -1).any(axis=1)))
    value = values[row][bad[row]].flat[0] if values.ndim > 1 else values[row]
    return (row if indices is None else int(indices[row])), int(value)


def empty(spec: Spec, examples: int) -> Columns:
    """Uninitialised columns `(examples, ...)` of `spec`."""
    return {name: np.empty((examples, *s.shape), s.dtype) for name, s in spec.items()}


def check_indices(indices: np.ndarray, examples: int) -> None:
    """Raises `IndexError` for an index outside of that many examples."""
    if len(indices) and not 0 <= indices.min() <= indices.max() < examples:
        raise IndexError(f"{examples} examples, asked for {indices.min()} to {indices.max()}")


def copy_rows(columns: Columns, indices: np.ndarray, out: Columns) -> None:
    """Copies rows `indices` `(n,)` of arrays to `out`, without buffers. `IndexError` outside the
    arrays."""
    for name, column in columns.items():
        check_indices(indices, len(column))
        if column.flags.c_contiguous:
            # Checked above; NumPy's own check ("raise") would copy through a buffer
            np.take(column, indices, axis=0, out=out[name], mode="clip")
        else:  # which `np.take` would copy whole, such as a view of windows
            out[name][...] = column[indices]


def example_bytes(spec: Spec) -> int:
    """Bytes of one example."""
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in spec.values())


def described(spec: Mapping[str, Any]) -> list[str]:
    """`["image uint8[8, 8, 3]", "label int32[]"]`: anything with shapes and types, sorted by
    name."""
    return [f"{name} {np.dtype(s.dtype)}{list(s.shape)}" for name, s in sorted(spec.items())]


_PIECE = 2048  # examples that a thread reads at a time when reading everything


class ByBatch:
    """A source that reads examples together: it has `spec`, and `fill` or a `take` of its own."""

    spec: Any
    fill: Any

    def __getitem__(self, index: int) -> Columns:
        return {name: column[0] for name, column in self.take(np.asarray([index])).items()}

    def take(self, indices: np.ndarray) -> Columns:
        """The examples at `indices` `(n,)`: column to `(n, ...)`. `IndexError` outside `len()`."""
        out = empty(self.spec, len(indices))
        self.fill(np.asarray(indices), out)
        return out


class ByRow:
    """The rows of `columns`, arrays `(n, ...)`."""

    columns: Any

    def __getitem__(self, index: int) -> Columns:
        return {name: column[index] for name, column in self.columns.items()}

    def take(self, indices: np.ndarray) -> Columns:
        """The examples at `indices` `(n,)`: column to `(n, ...)`. `IndexError` outside `len()`."""
        return {name: column[indices] for name, column in self.columns.items()}

    def fill(self, indices: np.ndarray, out: Columns) -> None:
        """Writes the examples at `indices` `(n,)` to `out`. Several threads may do so at once."""
        copy_rows(self.columns, indices, out)


@as_annotated
class Arrays(ByRow):
    """Examples as rows of arrays, in memory or memory-mapped.

        Arrays(image=images, label=labels, classes=10)

    *Arguments:*

    - `classes`: if given, the column `label` must have integers in `[0, classes)`.
    - `**columns`: each `(n, ...)`, of the same length `n >= 1`. float64 and int64 become float32
      and int32. Other columns are used without a copy.

    Raises `DataError` for no columns, no examples, unequal lengths, values that do not fit in 32
    bits, and labels out of range, with the first bad row.
    """

    def __init__(self, /, *, classes: int | None = None, **columns: Any):
        if not columns:
            raise DataError("no-columns")
        self.columns: Columns = {name: narrow(name, values) for name, values in columns.items()}
        self.classes = classes
        for name, column in self.columns.items():
            if not column.ndim:
                wrong = "Column '{column}' is a single value, expected an array (n, ...)."
                raise DataError("column-single-value", wrong, column=name)
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            wrong = "Columns must have the same length, got {lengths}."
            raise DataError("column-lengths", wrong, lengths=lengths)
        if not len(self):
            wrong = "The columns {columns:list} are empty: expected at least one example."
            raise DataError("columns-empty", wrong, columns=list(self.columns))
        check_labels(self.columns, classes)

    @property
    def spec(self) -> Spec:
        """Column to the shape and type of one example."""
        return {
            name: jax.ShapeDtypeStruct(c.shape[1:], c.dtype) for name, c in self.columns.items()
        }

    def __len__(self) -> int:
        return next(iter(self.columns.values())).shape[0]


@as_annotated
class Lazy(ByRow):
    """Examples of known number, shape and type, loaded at the first access.

    Planning, listing and describing a recipe then need no file and no network.

    *Arguments:*

    - `length`: number of examples.
    - `spec`: column to `jax.ShapeDtypeStruct` of one example.
    - `load`: `() -> dict of arrays (length, ...)`, called once, by the first thread that needs it.
      After an error the next access tries again.
    - `classes`: as in `Arrays`.

    Access raises `DataError` if the loaded arrays do not match `length` and `spec`.
    """

    def __init__(
        self,
        length: int,
        spec: Spec,
        load: Callable[[], Mapping[str, Any]],
        classes: int | None = None,
    ):
        if length < 1:
            raise DataError("length-not-positive", length=length)
        self.spec = dict(spec)
        self.classes = classes
        self._length = length
        self._load = load
        self._arrays: Arrays | None = None
        self._lock = threading.Lock()  # the feed's thread and the main thread may both load

    @property
    def arrays(self) -> Arrays:
        """The arrays. Loads them if needed."""
        with self._lock:
            if self._arrays is None:
                arrays = Arrays(classes=self.classes, **self._load())
                columns = described(arrays.spec)
                expected = described(self.spec)
                if (len(arrays), columns) != (self._length, expected):
                    raise DataError(
                        "loaded-differs",
                        expected=expected,
                        examples=len(arrays),
                        columns=columns,
                        expected_examples=self._length,
                    )
                self._arrays = arrays
        return self._arrays

    def __len__(self) -> int:
        return self._length

    @property
    def columns(self) -> Columns:
        return self.arrays.columns


def nbytes(source: Any) -> int:
    """The bytes of the whole source as arrays, from its spec and length. Reads at most example
    0."""
    return len(source) * example_bytes(spec_of(source))


def has(source: Any, method: str) -> bool:
    """Whether a source has the optional method `take`, `fill` or `prefetch`. Without `spec`, a
    method with such a name may do something else, such as taking the first `n` examples."""
    # Without evaluating it: a property may read the first example
    known = hasattr(type(source), "spec") or "spec" in getattr(source, "__dict__", ())
    return known and hasattr(source, method)


@as_annotated
def take(source: Any, indices: Any) -> Columns:
    """The examples at `indices` `(n,)` of any source: column to `(n, ...)`.

    Uses the source's `take` or `fill` if it has one, else stacks `source[i]` sequentially, since
    `[i]` may not be thread-safe. Raises `DataError` if an example differs from the others in shape
    or type.
    """
    indices = np.asarray(indices)
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        wrong = "Indices must be integers (n,), got {dtype} {shape}."
        raise DataError(
            "indices-not-integers", wrong, dtype=str(indices.dtype), shape=indices.shape
        )
    if has(source, "take"):
        return _taken(source, indices)
    out = empty(spec_of(source), len(indices))
    fill(source, indices, out)
    return out


def fill(
    source: Any, indices: np.ndarray, out: Columns, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Writes the examples at `indices` `(n,)` of any source to `out`, column to `(n, ...)`.

    A source with PyTorch's `__getitems__(indices) -> list of examples` is called once for all. The
    time counts as reading, except for stages that the source names (`stages`). Reading one by one
    ends early when `stopped()`. Raises `DataError` if an example does not have the shapes and types
    of `out`.
    """
    with stage("read"):
        if has(source, "fill"):
            source.fill(indices, out)
        elif has(source, "take"):
            columns = _taken(source, indices)
            if described(columns) != described(out):
                raise DataError(
                    "columns-unlike", columns=described(columns), expected=described(out)
                )
            for name, column in columns.items():
                np.copyto(out[name], column)
        else:
            kind = {name: (a.shape[1:], a.dtype) for name, a in out.items()}
            for row, (index, given) in enumerate(_examples(source, indices.tolist())):
                if stopped():
                    return
                example = read_example(given, index)
                if {name: (array.shape, array.dtype) for name, array in example.items()} != kind:
                    expected = described({n: jax.ShapeDtypeStruct(*k) for n, k in kind.items()})
                    raise DataError(
                        "example-unlike",
                        example=index,
                        columns=described(example),
                        expected=expected,
                    )
                for name, value in example.items():
                    out[name][row] = value


def _examples(source: Any, indices: list[int]) -> Iterator[tuple[int, Any]]:
    """Yields number and example. Reads all at once with PyTorch's batch hook, which Hugging Face's
    data sets also have, otherwise one by one. Reads a `Drawn` source at positions."""
    if isinstance(source, Drawn):
        yield from source.examples(indices)
        return
    hook = getattr(source, "__getitems__", None)
    if hook is None:
        yield from ((index, source[index]) for index in indices)
        return
    examples = list(hook(indices))
    if len(examples) != len(indices):
        kind = kind_of(source).__name__
        wrong = "{source}.__getitems__ gave {examples:count example} for {indices:count index}."
        raise DataError(
            "batch-hook-length", wrong, source=kind, examples=len(examples), indices=len(indices)
        )
    yield from zip(indices, examples, strict=True)


def columns_digest(columns: Columns) -> str:
    """SHA-256 of arrays with their names, types and shapes."""
    digest = hashlib.sha256()
    for name, column in sorted(columns.items()):
        digest.update(f"{name}:{column.dtype}:{column.shape};".encode())
        # So a view that is not contiguous is never copied whole
        pieces = np.nditer(
            column, ["external_loop", "buffered", "zerosize_ok"], order="C", buffersize=1 << 20
        )
        for piece in pieces:
            digest.update(np.ascontiguousarray(piece).view(np.uint8).data)
    return digest.hexdigest()


def materialize(source: Any) -> Columns:
    """The whole source as contiguous arrays: column to `(len(source), ...)`.

    Arrays in memory are returned without a copy, so treat the result as read-only. Sources with
    `fill` are read by one thread per core. Labels are checked if the source has a number of
    classes. Raises `DataError` like `take`.
    """
    if isinstance(source, Lazy):
        source = source.arrays
    if isinstance(source, Arrays):  # checked when made
        return {name: np.ascontiguousarray(column) for name, column in source.columns.items()}
    if not len(source):
        raise DataError("source-empty")
    if has(source, "fill"):
        columns = empty(spec_of(source), len(source))
        starts = range(0, len(source), _PIECE)

        def read(start: int) -> None:
            stop = min(start + _PIECE, len(source))
            source.fill(np.arange(start, stop), {k: v[start:stop] for k, v in columns.items()})

        with ThreadPoolExecutor(usable_cores(), "chipwise-read") as pool:
            list(pool.map(read, starts))
    else:
        columns = take(source, np.arange(len(source)))
    check_labels(columns, number_of_classes(source))
    return {name: np.ascontiguousarray(column) for name, column in columns.items()}


def _taken(source: Any, indices: np.ndarray) -> Columns:
    columns = {name: narrow(name, values) for name, values in source.take(indices).items()}
    for name, column in columns.items():
        if column.shape[:1] != indices.shape:
            kind = kind_of(source).__name__
            wrong = "{source}.take gave '{column}' {shape} for {indices:count index}."
            raise DataError(
                "take-wrong-length",
                wrong,
                source=kind,
                column=name,
                shape=column.shape,
                indices=len(indices),
            )
    return columns
