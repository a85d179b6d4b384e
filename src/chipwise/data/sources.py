"""Where examples come from: anything with `len()` and `[i] -> dict of arrays`, and three sources of our own.

The contract is the one of a list or of a PyTorch map dataset, so most people's data already meets
it. Three optional doors make it fast: `spec` tells shapes without reading anything, `take(indices)` reads a
batch at once, and `fill(indices, out)` writes one into memory that is there already, column to `(n, ...)` of
exactly the shapes and types of `spec`. A source with `fill` is read by several threads at once. One with
`prefetch(indices)` is told, from another thread, what will be read soon. The last three count only beside a
`spec`. Columns are the arrays that examples consist of, one example a row.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from ..errors import DataError
from ..machine.limits import usable_cores
from ..recipe.source import Columns as Columns
from ..recipe.source import Source, narrow, read_example
from ..recipe.source import Spec as Spec
from ..recipe.source import spec_of as spec_of
from .stages import stage


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


_PIECE = 2048  # examples that one thread reads at a time when all are read


class Arrays:
    """Examples that are rows of arrays, in memory or memory-mapped.

        Arrays(image=images, label=labels, classes=10)

    *Arguments:*

    - `classes`: when given, the column `label` must hold integers in `[0, classes)`.
    - `**columns`: each `(n, ...)`, of one length `n >= 1`. float64 and int64 become float32 and
      int32; other columns are kept unchanged, without a copy.

    Raises `DataError` for no columns, no examples, unequal lengths, values that 32 bits cannot hold,
    and labels out of range, naming the first bad row.
    """

    def __init__(self, /, *, classes: int | None = None, **columns: Any):
        if not columns:
            raise DataError("no-columns")
        self.columns: Columns = {name: narrow(name, values) for name, values in columns.items()}
        self.classes = classes
        for name, column in self.columns.items():
            if not column.ndim:
                raise DataError("column-single-value", column=name)
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise DataError("column-lengths", lengths=lengths)
        if not len(self):
            raise DataError("columns-empty", columns=list(self.columns))
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
    - `load`: `() -> dict of arrays (length, ...)`, called once, by whichever thread comes first; an error
      is raised by that access, and the next access tries again.
    - `classes`: as in `Arrays`.

    Raises `DataError` on access when what was loaded is not what was promised.
    """

    def __init__(
        self, length: int, spec: Spec, load: Callable[[], Mapping[str, Any]], classes: int | None = None
    ):
        if length < 1:
            raise DataError("length-not-positive", length=length)
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
                columns, expected = described(arrays.spec), described(self.spec)
                if (len(arrays), columns) != (self._length, expected):
                    raise DataError(
                        "loaded-differs",
                        examples=len(arrays),
                        columns=columns,
                        expected_examples=self._length,
                        expected=expected,
                    )
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


class Mapped:
    """The examples of `source`, each through `function`: example (a dict of arrays) to another such dict.

    For changes on the host that cannot be traced and run on the device. It runs each time an example is
    read, so what can be done once belongs in a pack and what should differ in every epoch in
    `Task(augment=...)`. Its time counts as the stage "transform".
    Called by one thread, or by processes when a run is given some (`--workers processes:4`); `function`
    must then be one that pickle can send: defined in a module, not a lambda.
    """

    def __init__(self, source: Source, function: Callable[[Mapping[str, Any]], Mapping[str, Any]]):
        self.source, self.function = source, function
        self.classes = getattr(source, "classes", None)

    @functools.cached_property
    def spec(self) -> Spec:
        """Column to the shape and type of one example, from example 0, read once."""
        example = read_example(self[0], 0)
        return {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in example.items()}

    def __len__(self) -> int:
        return len(self.source)

    def prefetch(self, indices: np.ndarray) -> None:
        """Tells the source below, if it listens, what will be read soon."""
        if has(self.source, "prefetch"):
            self.source.prefetch(indices)  # type: ignore[attr-defined]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        example = self.source[index]
        with stage("transform"):
            return self.function(example)


def nbytes(source: Any) -> int:
    """Bytes of the whole source as arrays, from its spec and length: reads example 0 at most."""
    return len(source) * example_bytes(spec_of(source))


def has(source: Any, door: str) -> bool:
    """Whether a source has the optional door `take`, `fill` or `prefetch`. Without a `spec` beside it, a
    method of such a name may do anything, such as taking the first `n` examples."""
    # Without asking for it: a property may read the first example
    known = hasattr(type(source), "spec") or "spec" in getattr(source, "__dict__", ())
    return known and hasattr(source, door)


def take(source: Any, indices: Any) -> Columns:
    """The examples at `indices` `(n,)` of any source: column to `(n, ...)`.

    Uses the source's own `take` or `fill` when it has one, else stacks `source[i]`, one after another: a
    stranger's `[i]` may not be safe in threads. Raises `DataError` for an example that is not
    like the others.
    """
    indices = np.asarray(indices)
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise DataError("indices-not-integers", dtype=str(indices.dtype), shape=indices.shape)
    if has(source, "take"):
        return _taken(source, indices)
    out = empty(spec_of(source), len(indices))
    fill(source, indices, out)
    return out


def fill(source: Any, indices: np.ndarray, out: Columns, stopped: Callable[[], bool] = lambda: False) -> None:
    """Writes the examples at `indices` `(n,)` of any source to `out`, column to `(n, ...)`.

    A source with PyTorch's `__getitems__(indices) -> list of examples` is asked for all at once.
    The time counts as reading, but for what the source says itself (`stages`). Examples that are read
    one by one are left out once `stopped()`. Raises `DataError` when an example is not of the shapes and
    types of `out`.
    """
    with stage("read"):
        if has(source, "fill"):
            source.fill(indices, out)
        elif has(source, "take"):
            columns = _taken(source, indices)
            if described(columns) != described(out):
                raise DataError("columns-unlike", columns=described(columns), expected=described(out))
            for name, column in columns.items():
                np.copyto(out[name], column)
        else:
            kind = {name: (a.shape[1:], a.dtype) for name, a in out.items()}
            for row, (index, given) in enumerate(_examples(source, indices.tolist())):
                if stopped():
                    return
                example = read_example(given, index)
                if _kinds(example) != kind:
                    expected = described({n: jax.ShapeDtypeStruct(*k) for n, k in kind.items()})
                    raise DataError(
                        "example-unlike", example=index, columns=described(example), expected=expected
                    )
                for name, value in example.items():
                    out[name][row] = value


def _examples(source: Any, indices: list[int]) -> Iterator[tuple[int, Any]]:
    """Number and example: all at once from a source with PyTorch's batch hook, which Hugging Face's data sets
    on Arrow have too; otherwise one by one."""
    hook = getattr(source, "__getitems__", None)
    if hook is None:
        yield from ((index, source[index]) for index in indices)
        return
    examples = list(hook(indices))
    if len(examples) != len(indices):
        kind = type(source).__name__
        raise DataError("batch-hook-length", source=kind, examples=len(examples), indices=len(indices))
    yield from zip(indices, examples, strict=True)


def sample_digest(source: Any) -> str | None:
    """SHA-256 of some examples spread over `source`: whether two hosts see the same data. `None` for none,
    and for sources of others, which may give another example each time."""
    known = isinstance(source, (Arrays, Lazy)) or has(source, "fill")
    if source is None or not known or not len(source):
        return None
    indices = np.linspace(0, len(source) - 1, num=min(8, len(source))).astype(np.int32)
    digest = hashlib.sha256()
    for name, column in sorted(take(source, indices).items()):
        digest.update(
            f"{name}:{column.dtype}:{column.shape};".encode() + np.ascontiguousarray(column).tobytes()
        )
    return digest.hexdigest()[:16]


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
    check_labels(columns, getattr(source, "classes", None))
    return {name: np.ascontiguousarray(column) for name, column in columns.items()}


def _taken(source: Any, indices: np.ndarray) -> Columns:
    columns = {name: narrow(name, values) for name, values in source.take(indices).items()}
    for name, column in columns.items():
        if column.shape[:1] != indices.shape:
            kind = type(source).__name__
            raise DataError(
                "take-wrong-length", source=kind, column=name, shape=column.shape, indices=len(indices)
            )
    return columns


def _kinds(example: Columns) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    return {name: (array.shape, array.dtype) for name, array in example.items()}
