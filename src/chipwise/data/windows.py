"""Windows of one long array, which is in memory once."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ..base import DataError, RecipeError
from ..base.annotations import as_annotated
from ..recipe.source import Columns, Spec, narrow
from .sources import ByBatch, check_indices


@as_annotated
class Windows(ByBatch):
    """The windows of a series: what is seen, and what follows it.

        hours = np.sin(np.arange(10_000) / 24)
        train = cw.data.Windows(hours, length=168, horizon=24, stop=8_000)
        test = cw.data.Windows(hours, length=168, horizon=24, start=8_000)

    An example has `x` `(length, ...)`, and `y` `(horizon, ...)`, which follows it. `start` and
    `stop` are of `y` alone: it never reaches out of `[start, stop)`, while `x` may begin before
    `start`. So what is forecast in an evaluation is in no example of the training. Walking forward
    is a loop that moves both.

    *Arguments:* `series`: `(n, ...)`, one value or row for each moment. float64 and int64 become
    float32 and int32, other types are used without a copy. `stride`: the moments between the
    beginnings of two windows.

    Raises `RecipeError` for sizes below 1 and for `start` or `stop` below 0, and `DataError` if no
    window fits.
    """

    def __init__(
        self,
        series: Any,
        length: int,
        horizon: int,
        stride: int = 1,
        *,
        start: int = 0,
        stop: int | None = None,
    ):
        for name, size in {"length": length, "horizon": horizon, "stride": stride}.items():
            if size < 1:
                wrong = "{name}={size}: expected at least 1."
                raise RecipeError("windows-size", wrong, name=name, size=size)
        self.series = narrow("series", series)
        if not self.series.ndim:
            raise DataError("column-single-value", "The series is a single value.", column="series")
        for name, given in {"start": start, "stop": stop or 0}.items():
            if given < 0:
                raise RecipeError("windows-negative", name=name, given=given, back=-given)
        self.length = length
        self.horizon = horizon
        self.stride = stride
        last = len(self.series) if stop is None else min(stop, len(self.series))
        self._first = max(start, length) - length  # where the first window begins
        self._count = (last - horizon - length - self._first) // stride + 1
        if self._count < 1:
            raise DataError(
                "windows-none",
                moments=len(self.series),
                length=length,
                horizon=horizon,
                start=start,
                stop=last,
            )

    @property
    def where(self) -> tuple[int, ...]:
        """What tells these windows from others of the series."""
        return self.length, self.horizon, self.stride, self._first, self._count

    @property
    def spec(self) -> Spec:
        """Column to the shape and type of one example."""
        rest = self.series.shape[1:]
        dtype = self.series.dtype
        sizes = {"x": self.length, "y": self.horizon}
        return {n: jax.ShapeDtypeStruct((size, *rest), dtype) for n, size in sizes.items()}

    def __len__(self) -> int:
        return self._count

    def fill(self, indices: np.ndarray, out: Columns) -> None:
        """Writes the examples at `indices` `(n,)` to `out`. Several threads may do so at once."""
        indices = np.asarray(indices)
        check_indices(indices, len(self))
        begins = self._first + indices.astype(np.int64) * self.stride
        for name, after, size in (("x", 0, self.length), ("y", self.length, self.horizon)):
            np.take(
                self.series,
                begins[:, None] + np.arange(after, after + size),
                axis=0,
                out=out[name],
                mode="clip",  # checked above; otherwise NumPy copies through a buffer
            )
