"""Random examples of declared shapes, for training and timing without a data set.

An example is a pure function of the seed and its index, so 1,281,167 images take no storage and are
equal on every machine. `Absent` is for data of known shapes that was not given. It is enough for
plans, and raises a clear error at the first access.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..base import DataError
from ..base.annotations import as_annotated
from ..recipe.source import number_of_classes
from .sources import ByBatch, Columns, Spec, check_indices, spec_of

_NOISE_BYTES = 1 << 20  # range of the offsets of examples in the noise
_LARGE = 1 << 12  # bytes of a column above which an example is a window on shared noise


@as_annotated
class Synthetic(ByBatch):
    """`length` random examples. Stores nothing.

    *Arguments:*

    - `length`: number of examples.
    - `spec`: column to `jax.ShapeDtypeStruct` of one example.
    - `below`: column to `n`, for integers in `[0, n)`, such as `{"label": 1000}`. By default
      integers have the type's whole range. Floats are in `[0, 1)`.
    - `seed`: the seed of the random examples.

    The values come from NumPy's Philox generator, keyed by seed and index. Large uint8 columns
    without a limit are windows on shared noise, from a random byte on, because copying is fast
    enough for any chip and drawing would not be.
    """

    def __init__(
        self, length: int, spec: Spec, below: Mapping[str, int] | None = None, seed: int = 0
    ):
        if length < 1:
            raise DataError("length-not-positive", length=length)
        self.spec = dict(sorted(spec.items()))
        self.below = {name: n for name, n in (below or {}).items() if name in self.spec}
        self.seed = seed
        self._length = length

    @property
    def digest(self) -> str:
        """A text that identifies the data, for a run that resumes."""
        return repr((self.seed, self._length, self.spec, self.below))

    @property
    def classes(self) -> int | None:
        return self.below.get("label")

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> Columns:
        """The examples at `indices` `(n,)`: column to `(n, ...)`. `IndexError` outside `len()`."""
        indices = np.asarray(indices)
        check_indices(indices, self._length)
        sizes = {
            name: 1 if self._window(name) else math.prod(s.shape) for name, s in self.spec.items()
        }
        words = np.empty((len(indices), sum(sizes.values())), np.uint64)
        for row, index in enumerate(indices.tolist()):
            words[row] = _philox(self.seed, index).random_raw(words.shape[1])
        out = {}
        at = 0
        for name, s in self.spec.items():
            drawn = words[:, at : at + sizes[name]]
            at += sizes[name]
            if self._window(name):
                out[name] = self._windows(drawn[:, 0], s)
            else:
                out[name] = _numbers(drawn, s.dtype, self.below.get(name)).reshape(
                    len(indices), *s.shape
                )
        return out

    def _window(self, name: str) -> bool:
        s = self.spec[name]
        large = math.prod(s.shape) * s.dtype.itemsize >= _LARGE
        return large and name not in self.below and s.dtype == np.uint8

    def _windows(self, words: np.ndarray, s: Any) -> np.ndarray:
        out = np.empty((len(words), math.prod(s.shape)), np.uint8)
        noise = _noise(self.seed, -(-(out.shape[1] + _NOISE_BYTES) // 8))
        for row, start in enumerate((words % np.uint64(_NOISE_BYTES)).tolist()):
            out[row] = noise[start : start + out.shape[1]]
        return out.reshape(len(words), *s.shape)


class Absent:
    """Data of known number, shape and range, but without examples.

    *Arguments:* as in `Synthetic`, and `what`: the name of the data.

    Any access raises `DataError`, which says how to give the data.
    """

    def __init__(self, length: int, spec: Spec, what: str, below: Mapping[str, int] | None = None):
        self.spec = dict(spec)
        self.below = dict(below or {})
        self.what = what
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Columns:
        wrong = "{data} is not on this machine: give --data DIR of a packed folder, or --synthetic."
        raise DataError("data-not-given", wrong, data=self.what)

    def take(self, indices: np.ndarray) -> Columns:
        return self[0]


def like(source: Any, classes: int | None = None, seed: int = 0) -> Synthetic:
    """Random examples with the length, shapes and ranges of `source`, which is not read if it has a
    `spec`.

    `classes`: the labels' range, if the source does not have it. Raises `DataError` if it is
    unknown, since random 32-bit labels would give a loss of NaN.
    """
    spec = spec_of(source)
    below = dict(getattr(source, "below", None) or {})
    known = classes if classes is not None else number_of_classes(source)
    if known is not None:
        below.setdefault("label", known)
    if "label" in spec and spec["label"].dtype.kind in "iu" and "label" not in below:
        wrong = "Synthetic labels need the number of classes: give, for example, Task(classes=10)."
        raise DataError("classes-unknown", wrong)
    return Synthetic(len(source), spec, below, seed)


def _numbers(words: np.ndarray, dtype: Any, below: int | None) -> np.ndarray:
    """Converts 64-bit random `words` to `dtype`: integers from the low bits, floats from the high
    bits."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return (words & np.uint64(1)).astype(dtype)
    if dtype.kind in "iu":
        return (words % np.uint64(below) if below is not None else words).astype(dtype)
    return ((words >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)).astype(dtype)


@functools.lru_cache(maxsize=4)
def _noise(seed: int, words: int) -> np.ndarray:
    raw = _philox(seed, 2**64 - 1).random_raw(words)
    return raw.astype("<u8", copy=False).view(np.uint8)  # the same bytes on a big-endian machine


def _philox(seed: int, index: int) -> np.random.Philox:
    # An array, since a list of Python integers beyond int64 would become float64
    return np.random.Philox(key=np.array([seed, index], np.uint64))
