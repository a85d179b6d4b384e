"""The interface of data for a recipe: `len()`, `[i] -> dict of arrays`, and the shape and type of
an example.

A list or a PyTorch map-style dataset has it. Examples are dicts or pairs (image, label) of anything
numeric. Torch tensors and PIL pictures are recognised by their methods, so neither library is
imported here. 64-bit columns become 32-bit, after a check that no value is lost, and byte order
becomes the machine's. `chipwise.data.sources` describes the optional methods that make a source
fast.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sized
from typing import Any, Protocol

import jax
import numpy as np

from ..base import DataError, invalid
from ..base.figures import one_line

Spec = dict[str, jax.ShapeDtypeStruct]  # column to the shape and type of one example
Columns = dict[str, np.ndarray]  # column to (n, ...)

# JAX has no 64-bit types by default and would cut them silently, label 2**32 + 1 to label 1.
NARROW = {
    "float64": "float32",
    "int64": "int32",
    "uint64": "uint32",
    "complex128": "complex64",
    # NumPy's long double, where it has 80 or 128 bits
    "float128": "float32",
    "complex256": "complex64",
}
_PAIR = ("image", "label")
# The spec of example 0, for sources without one: reading it may take seconds, and it is needed
# often
_SPECS: weakref.WeakKeyDictionary[Any, Spec] = weakref.WeakKeyDictionary()


class Source(Protocol):
    """Examples by index: a list, a chipwise source, or a PyTorch-style map dataset.

    It may have a `digest`, a string or bytes that change with its contents, or a method that
    returns these. A run that resumes with another digest is refused. `chipwise.data.sources` has
    the other optional attributes.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


def kind_of(source: Any) -> type:
    """The class of the user's source: that below chipwise's own wrappers, such as
    `cw.data.Padded`."""
    while type(source).__module__.startswith("chipwise.") and hasattr(source, "source"):
        source = source.source
    return type(source)


def check_source(given: Any, what: str = "the source", **facts: str) -> None:
    """Raises `RecipeError` for what has no examples by index."""
    if isinstance(given, str | bytes | type | Mapping) or not (
        hasattr(given, "__len__") and hasattr(given, "__getitem__")
    ):
        expected = (
            "len() and [i] -> dict of arrays, as cw.Arrays(image=x, label=y), or one of its splits"
        )
        raise invalid("task-source-expected", what, given, expected, **facts)


def number_of_classes(source: Any) -> int | None:
    """The number of classes that `source.classes` states: a number, or a list of names as
    torchvision's data sets have it (ImageNet's are tuples of names)."""
    classes = getattr(source, "classes", None)
    if isinstance(classes, list | tuple) and all(isinstance(n, str | tuple) for n in classes):
        return len(classes) or None
    return int(classes) if isinstance(classes, int | np.integer) else None


def spec_of(source: Any) -> Spec:
    """Column to the shape and type of one example.

    Reads example 0 if the source has no `spec`. Raises `DataError` if the source is empty, or if
    its `spec` has a 64-bit column.
    """
    spec = getattr(source, "spec", None)
    if spec is not None:
        for name, s in spec.items():
            narrower = NARROW.get(np.dtype(s.dtype).name)
            if narrower is not None:
                kind = type(source).__name__
                raise DataError(
                    "spec-64-bit", source=kind, column=name, dtype=str(s.dtype), expected=narrower
                )
        return dict(spec)
    with contextlib.suppress(TypeError, KeyError):  # lists and unhashable objects are not cached
        return dict(_SPECS[source])
    check_source(source)
    if not len(source):
        raise DataError("source-empty")
    known = {
        n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in read_example(source[0], 0).items()
    }
    with contextlib.suppress(TypeError):
        _SPECS[source] = known
    return dict(known)


def rows_of(spec: Spec, rows: Any) -> Spec:
    """The shapes and types of a batch of `rows` examples, a number or one of `jax.export`'s
    symbols."""
    return {name: jax.ShapeDtypeStruct((rows, *s.shape), s.dtype) for name, s in spec.items()}


def read_example(example: Any, index: int) -> Columns:
    """Example `index` of any source as arrays with JAX's dtypes. See `as_columns` and `narrow`."""
    return {name: narrow(name, value) for name, value in as_columns(example, index).items()}


def as_columns(example: Any, index: int) -> dict[str, Any]:
    """Example `index` of a map data set, such as PyTorch's, as column to something NumPy takes as
    an array.

    A dict keeps its names. A pair becomes `image` and `label`, and a tuple of one becomes `image`.
    Torch tensors, on any device, and PIL pictures become arrays. A picture becomes `(h, w)` or
    `(h, w, channels)`, and one with a palette becomes its colours (3 channels, 4 with
    transparency). bfloat16 becomes float32. The rest stays as it is.

    Raises `DataError` for an example of another kind, and for a picture that cannot be decoded.
    """
    kind = type(example).__name__
    if isinstance(example, (tuple, list)) and 1 <= len(example) <= len(_PAIR):
        example = dict(zip(_PAIR, example, strict=False))
    if not isinstance(example, Mapping) or not example:
        of = f"a {kind} of {len(example)}" if isinstance(example, Sized) else f"a {kind}"
        raise DataError("example-kind", example=index, kind=of)
    columns = {}
    for name, value in example.items():
        try:
            columns[str(name)] = _array(value)
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            # whatever Pillow and torch raise
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


def unmasked(name: str, values: Any) -> Any:
    """`values`, an array or a list of arrays. Raises `DataError` if NumPy masks some of them, since
    arrays here have no mask, and what is below it would be trained."""
    parts = values if isinstance(values, (list, tuple)) else [values]
    if any(isinstance(part, np.ma.MaskedArray) and np.ma.is_masked(part) for part in parts):
        raise DataError("column-masked", column=name)
    return values


def narrow(name: str, values: Any) -> np.ndarray:
    """`values` as an array of a type JAX has by default and of native byte order. Copies only if it
    must.

    Raises `DataError` for text, objects and masked values, and for values that the 32-bit type
    cannot hold.
    """
    try:
        # asarray also drops numpy.memmap, whose slices cost more than those of a plain array
        array = np.asarray(unmasked(name, values))
    except (ValueError, TypeError) as error:
        raise DataError("column-not-array", column=name, reason=one_line(error)) from error
    if not (array.dtype == np.bool_ or jax.dtypes.issubdtype(array.dtype, np.number)):
        kind = "text" if array.dtype.kind == "U" else str(array.dtype)
        raise DataError("column-not-numbers", column=name, dtype=kind)
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
        value = value if isinstance(value, int | float | complex) else str(value)  # a long double
        if not place:
            raise DataError("value-overflows", column=name, value=value, dtype=target)
        raise DataError(
            "column-overflows", column=name, value=value, row=int(place[0]), dtype=target
        )
    return small
