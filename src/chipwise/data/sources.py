"""Where examples come from: anything with `len()` and `[i] -> dict of arrays`, and two sources of our own.

The contract is the one of a list or of a PyTorch map dataset, so most people's data already meets
it. Three optional doors make it fast: `spec` tells shapes without reading anything, `take(indices)` reads a
batch at once, and `fill(indices, out)` writes one into memory that is there already, column to `(n, ...)` of
exactly the shapes and types of `spec`. A source with `fill` is read by several threads at once. One with
`prefetch(indices)` is told, from another thread, what will be wanted soon. The last three count only beside a
`spec`.

Arrays leave this module in types that JAX has by default: 64-bit columns become 32-bit, after a check that
no value is lost, and byte order becomes the machine's.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from ..errors import DataError
from ..machine.limits import usable_cores
from .foreign import as_columns
from .stages import stage

Spec = dict[str, jax.ShapeDtypeStruct]  # column to the shape and type of one example
Columns = dict[str, np.ndarray]  # column to (n, ...)

# JAX has no 64-bit types by default and would cut them silently, label 2**32 + 1 to label 1.
_NARROW = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}
# What example 0 of a source without a spec was like: it may take seconds to read, and is asked for often
_SPECS: weakref.WeakKeyDictionary[Any, Spec] = weakref.WeakKeyDictionary()
_PIECE = 2048  # examples that one thread reads at a time when all are wanted


class Arrays:
    """Examples that are rows of arrays, in memory or memory-mapped.

        Arrays(image=images, label=labels, classes=10)

    *Arguments:*

    - `classes`: when given, the column `label` must hold integers in `[0, classes)`.
    - `**columns`: each `(n, ...)`, of one length `n >= 1`. float64 and int64 become float32 and
      int32; other columns are kept as they are, without a copy.

    Raises `DataError` for no columns, no examples, unequal lengths, values that 32 bits cannot hold,
    and labels out of range, naming the first bad row.
    """

    def __init__(self, /, *, classes: int | None = None, **columns: Any):
        if not columns:
            raise DataError(
                "Arrays needs at least one column, for example Arrays(image=images, label=labels)."
            )
        self.columns: Columns = {name: narrow(name, values) for name, values in columns.items()}
        self.classes = classes
        lengths = {name: c.shape[0] if c.ndim else None for name, c in self.columns.items()}
        if None in lengths.values():
            name = next(n for n, length in lengths.items() if length is None)
            raise DataError(
                f"Column '{name}' is a single value, expected an array (n, ...) with a row an example."
            )
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise DataError(f"Columns must have one length, got {found}.")
        if not len(self):
            raise DataError(
                f"The columns {', '.join(self.columns)} are empty: expected at least one example."
            )
        check_labels(self.columns, classes)

    @property
    def spec(self) -> Spec:
        """Column to the shape and type of one example."""
        return {name: jax.ShapeDtypeStruct(c.shape[1:], c.dtype) for name, c in self.columns.items()}

    def __len__(self) -> int:
        return next(iter(self.columns.values())).shape[0]

    def __getitem__(self, index: int) -> Columns:
        return {name: column[index] for name, column in self.columns.items()}

    def take(self, indices: np.ndarray) -> Columns:
        """The examples at `indices` `(n,)`: column to `(n, ...)`. `IndexError` outside `len()`."""
        return {name: np.take(column, indices, axis=0) for name, column in self.columns.items()}

    def fill(self, indices: np.ndarray, out: Columns) -> None:
        """Writes the examples at `indices` `(n,)` to `out`; several threads may do so at once."""
        copy_rows(self.columns, indices, out)


class Lazy:
    """Examples that are known by size and type, and read when the first one is asked for.

    Planning, listing and describing a recipe then touch no file and no network.

    *Arguments:*

    - `length`: number of examples.
    - `spec`: column to `jax.ShapeDtypeStruct` of one example.
    - `load`: `() -> dict of arrays (length, ...)`, called once, by whichever thread comes first; what
      it raises is raised by the access, and the next access tries again.
    - `classes`: as in `Arrays`.

    Raises `DataError` on access when what was loaded is not what was promised.
    """

    def __init__(
        self, length: int, spec: Spec, load: Callable[[], Mapping[str, Any]], classes: int | None = None
    ):
        if length < 1:
            raise DataError(f"length={length}: a source needs at least one example.")
        self.spec = dict(spec)
        self.classes = classes
        self._length, self._load = length, load
        self._arrays: Arrays | None = None
        self._lock = threading.Lock()  # the feed's thread and the main thread may both come first

    @property
    def arrays(self) -> Arrays:
        """What was loaded; loads it first if need be."""
        with self._lock:
            if self._arrays is None:
                arrays = Arrays(classes=self.classes, **self._load())
                promised, found = _told(self._length, self.spec), _told(len(arrays), arrays.spec)
                if promised != found:
                    raise DataError(f"Loaded {found}, expected {promised}.")
                self._arrays = arrays
        return self._arrays

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Columns:
        return self.arrays[index]

    def take(self, indices: np.ndarray) -> Columns:
        """The examples at `indices` `(n,)`: column to `(n, ...)`. `IndexError` outside `len()`."""
        return self.arrays.take(indices)

    def fill(self, indices: np.ndarray, out: Columns) -> None:
        """Writes the examples at `indices` `(n,)` to `out`; several threads may do so at once."""
        self.arrays.fill(indices, out)


def spec_of(source: Any) -> Spec:
    """Column to the shape and type of one example.

    Reads example 0 when the source has no `spec`; raises `DataError` when there is none.
    """
    spec = getattr(source, "spec", None)
    if spec is not None:
        for name, s in spec.items():
            if np.dtype(s.dtype).name in _NARROW:
                raise DataError(
                    f"{type(source).__name__}.spec has column '{name}' of {s.dtype}, which JAX does not have "
                    f"by default: make spec and examples {_NARROW[np.dtype(s.dtype).name]}."
                )
        return dict(spec)
    known = _read_spec(source)
    if known is None:
        if not len(source):
            raise DataError("The source is empty (len() is 0): expected at least one example.")
        known = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in _example(source, 0).items()}
        with contextlib.suppress(TypeError):  # lists, and what has no hash, cannot be remembered
            _SPECS[source] = known
    return dict(known)


def _read_spec(source: Any) -> Spec | None:
    try:
        return _SPECS.get(source)
    except TypeError:
        return None


def nbytes(source: Any) -> int:
    """Bytes of the whole source as arrays, from its spec and length: reads example 0 at most."""
    return len(source) * example_bytes(spec_of(source))


def example_bytes(spec: Spec) -> int:
    """Bytes of one example."""
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in spec.values())


def take(source: Any, indices: Any) -> Columns:
    """The examples at `indices` `(n,)` of any source: column to `(n, ...)`.

    Uses the source's own `take` or `fill` when it has one, else stacks `source[i]`, one after another: a
    stranger's `[i]` may not be safe in threads. Raises `DataError` when examples are not alike,
    naming two of them.
    """
    indices = np.asarray(indices)
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise DataError(f"Indices must be integers (n,), got {indices.dtype} {indices.shape}.")
    if has(source, "take"):
        return _taken(source, indices)
    if has(source, "fill"):
        out = empty(spec_of(source), len(indices))
        source.fill(indices, out)
        return out
    if not len(indices):
        return empty(spec_of(source), 0)
    first = _example(source, int(indices[0]))
    out = {name: np.empty((len(indices), *a.shape), a.dtype) for name, a in first.items()}
    _stack(source, indices, out, (int(indices[0]), first), lambda: False)
    return out


def has(source: Any, door: str) -> bool:
    """Whether a source has the optional door `take`, `fill` or `prefetch`. Without a `spec` beside it, a
    method of such a name may do anything, such as taking the first `n` examples."""
    # Without asking for it: a property may read the first example
    known = hasattr(type(source), "spec") or "spec" in getattr(source, "__dict__", ())
    return known and hasattr(source, door)


def fill(source: Any, indices: np.ndarray, out: Columns, stopped: Callable[[], bool] = lambda: False) -> None:
    """Writes the examples at `indices` `(n,)` of any source to `out`, column to `(n, ...)`.

    The time counts as reading, but for what the source says itself (`feed.stages`). Examples that are read
    one by one are left out once `stopped()`. Raises `DataError` when an example is not of the shapes and
    types of `out`.
    """
    with stage("read"):
        if has(source, "fill"):
            source.fill(indices, out)
        elif has(source, "take"):
            columns = _taken(source, indices)
            found, expected = _told(None, columns), _told(None, out)
            if found != expected:
                raise DataError(f"Examples must be alike: {found} were read, expected {expected}.")
            for name, column in columns.items():
                np.copyto(out[name], column)
        else:
            _stack(source, indices, out, None, stopped)


def materialize(source: Any) -> Columns:
    """The whole source as contiguous arrays: column to `(len(source), ...)`.

    Arrays in memory are returned as they are, so treat the result as read-only. Sources with `fill` are read
    by a thread a core. Labels are checked when the source knows its number of classes. Raises `DataError`
    like `take`.
    """
    if isinstance(source, Lazy):
        source = source.arrays
    if isinstance(source, Arrays):  # checked when made
        return {name: np.ascontiguousarray(column) for name, column in source.columns.items()}
    if not len(source):
        raise DataError("The source is empty (len() is 0): expected at least one example.")
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
    check_labels(columns, getattr(source, "classes", None))
    return {name: np.ascontiguousarray(column) for name, column in columns.items()}


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


def check_labels(
    columns: Mapping[str, np.ndarray],
    classes: int | None,
    what: str = "",
    indices: np.ndarray | None = None,
) -> None:
    """Raises `DataError` when the column `label` `(n, ...)` is not of integers in `[0, classes)`.

    Does nothing without `classes` or without such a column. `what` names the data in the message, and
    `indices` `(n,)` the examples, when the columns are not the whole source.
    """
    if classes is None or "label" not in columns:
        return
    label = np.asarray(columns["label"])
    of = f"{what} " if what else ""
    if label.dtype.kind not in "iu":
        raise DataError(f"{of}labels are {label.dtype}, expected integers from 0 to {classes - 1}.")
    bad = (label < 0) | (label >= classes)
    if bad.any():
        row = int(np.argmax(bad.reshape(len(label), -1).any(axis=1)))
        value = label[row][bad[row]].flat[0] if label.ndim > 1 else label[row]
        number = row if indices is None else indices[row]
        raise DataError(
            f"{of}example {number} has label {value}, expected 0 to {classes - 1}: "
            f"correct the label, or give the right number of classes."
        )


def narrow(name: str, values: Any) -> np.ndarray:
    """`values` as an array of a type JAX has by default and of native byte order; copies only if it must.

    Raises `DataError` for text and objects, and for values that the 32-bit type cannot hold.
    """
    try:
        # asarray also drops numpy.memmap, whose slices cost more than those of a plain array
        array = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise DataError(f"Column '{name}' is not an array of numbers: {_line(error)}") from error
    if not (array.dtype == np.bool_ or jax.dtypes.issubdtype(array.dtype, np.number)):
        raise DataError(
            f"Column '{name}' holds {array.dtype}, expected numbers: turn text and objects into numbers."
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    target = _NARROW.get(array.dtype.name)
    if target is None:
        return array
    with np.errstate(over="ignore"):
        small = array.astype(target)
    lost = small != array if array.dtype.kind in "iu" else np.isinf(small) & np.isfinite(array)
    if lost.any():
        row = np.unravel_index(int(np.argmax(lost)), lost.shape)
        where = f" at row {row[0]}" if row else ""
        raise DataError(f"Column '{name}' has {array[row]}{where}, which {target} cannot hold.")
    return small


def _example(source: Any, index: int) -> Columns:
    return {name: narrow(name, value) for name, value in as_columns(source[index], index).items()}


def _taken(source: Any, indices: np.ndarray) -> Columns:
    columns = {name: narrow(name, values) for name, values in source.take(indices).items()}
    for name, column in columns.items():
        if column.shape[:1] != indices.shape:
            raise DataError(
                f"{type(source).__name__}.take gave column '{name}' of shape {column.shape} "
                f"for {len(indices)} indices, expected ({len(indices)}, ...)."
            )
    return columns


def _stack(
    source: Any,
    indices: np.ndarray,
    out: Columns,
    read: tuple[int, Columns] | None,
    stopped: Callable[[], bool],
) -> None:
    """Writes examples one by one to `out`; `read`: the number of one that was read before, and it."""
    kind = {name: (a.shape[1:], a.dtype) for name, a in out.items()}
    for row, index in enumerate(indices.tolist()):
        if stopped():
            return
        example = read[1] if read is not None and not row else _example(source, index)
        if {name: (a.shape, a.dtype) for name, a in example.items()} != kind:
            expected = {name: jax.ShapeDtypeStruct(*k) for name, k in kind.items()}
            like = "its spec says" if hasattr(source, "spec") else "example 0 has"
            like = f"example {read[0]} has" if read is not None else like
            raise DataError(
                f"Examples must be alike: {like} {_told(None, expected)}, "
                f"example {index} has {_told(None, example)}."
            )
        for name, value in example.items():
            out[name][row] = value


def _told(length: int | None, spec: Mapping[str, Any]) -> str:
    """Length, shapes and types in one line, columns sorted by name."""
    columns = ", ".join(f"{name} {s.shape} {np.dtype(s.dtype)}" for name, s in sorted(spec.items()))
    return columns if length is None else f"{length} examples of {columns}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
