"""What sums come to: divided, or finished otherwise, once, on the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import RecipeError
from ..recipe.task import Sum


def finished(sums: Mapping[str, Sum]) -> dict[str, float | np.ndarray]:
    """Metric name to value: a float, or a float64 array. A division by zero gives NaN or an infinity.

    *Arguments:* `sums` of everything that is to be counted, as arrays on the host. The arithmetic is
    float64: float32 would round a ratio that the sums still know exactly.

    Raises `RecipeError` when a task's own `finish` fails, or returns anything but numbers.
    """
    values: dict[str, float | np.ndarray] = {}
    for name, s in sums.items():
        total, count = np.asarray(s.total, np.float64), np.asarray(s.count, np.float64)
        try:
            with np.errstate(all="ignore"):
                value = np.asarray(Sum(total, count, s.finish).value, np.float64)
        except Exception as error:
            what = " ".join(str(error).split())
            raise RecipeError(
                f'The finish of metric "{name}" failed on a total {total.shape} and a count {count.shape}: '
                f"expected a number or an array of numbers, got {type(error).__name__}: {what}"
            ) from error
        values[name] = float(value) if value.ndim == 0 else value
    return values
