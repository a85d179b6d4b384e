"""Examples of different lengths, padded to one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..base import DataError, RecipeError, unknown
from ..base.annotations import as_annotated
from ..recipe.source import Columns, Spec, read_example
from .draws import Wrapped


@as_annotated
class Padded(Wrapped):
    """Examples of different lengths, such as texts, each padded to `length`, with a mask.

        texts = [{"token": [5, 2, 9], "label": 1}, {"token": [7], "label": 0}]
        train = cw.data.Padded(texts, 64)  # token (64,), label (), seen (64,)

    A step has one program for examples of one shape, so there is one length. Longer examples are
    cut after it. The column `seen` `(length,)`, bool, is true for the values of the example and
    false for the padding. A loss or a model must use it, as in `jnp.where(seen, values, 0)`.

    *Arguments:* `columns`: the columns to pad along their first axis, by default all that have one.
    `value`: the value of the padding.

    Raises `DataError` for examples whose columns differ in length.
    """

    def __init__(
        self, source: Any, length: int, columns: Sequence[str] | None = None, value: float = 0
    ):
        super().__init__(source)
        if length < 1:
            raise RecipeError(
                "padded-length", "length={length}: expected at least 1.", length=length
            )
        self.length = length
        self.columns = columns
        self.value = value

    @property
    def spec(self) -> Spec:
        return {name: jax.ShapeDtypeStruct(c.shape, c.dtype) for name, c in self[0].items()}

    def __getitem__(self, index: int) -> Columns:
        example = read_example(self.source[index], index)
        known = [name for name, column in example.items() if column.ndim]
        if missing := [name for name in self.columns or () if name not in known]:
            raise unknown("padded-column", "column to pad", missing[0], known)
        ragged = self.columns or known
        lengths = {name: len(example[name]) for name in ragged}
        if len(set(lengths.values())) != 1:
            raise DataError("padded-lengths", example=index, lengths=str(lengths))
        seen = np.arange(self.length) < lengths[ragged[0]]
        for name in ragged:
            column = example[name][: self.length]
            rest = np.full((self.length - len(column), *column.shape[1:]), self.value, column.dtype)
            example[name] = np.concatenate([column, rest])
        return {**example, "seen": seen}
