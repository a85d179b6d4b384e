"""Of numbers: squared and absolute errors, and the share of the variance explained."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import RecipeError
from .. import losses
from ..arguments import floats, same_shape
from ..task import Sum

_FAR = 1e3  # (mean - center)² in variances: up to there 1 - R2 is good to 2e-4, as docs/metrics.md measures


def mse(predictions: Any, targets: Any) -> Sum:
    """Mean squared error, over examples and all their values: see `losses.squared_error`."""
    return Sum.of(losses.squared_error(predictions, targets))


def mae(predictions: Any, targets: Any) -> Sum:
    """Mean absolute error, over examples and all their values, in the targets' unit."""
    return Sum.of(losses.absolute_error(predictions, targets))


def rmse(predictions: Any, targets: Any) -> Sum:
    """Root of the mean squared error, in the targets' unit: one root for each of an example's `m` values,
    then their mean, as scikit-learn's `root_mean_squared_error`.

    *Arguments:* `predictions` and `targets` `(batch, ...)`, of exactly the same shape.
    Raises `RecipeError` for shapes or dtypes that do not fit.
    """
    p, t = _columns(predictions, targets)
    return Sum(jnp.sum((p - t) ** 2, axis=0), jnp.float32(len(p)), _mean_root)


def r2(predictions: Any, targets: Any, center: float | Sequence[float] = 0.0) -> Sum:
    """The share of the targets' variance that the predictions explain (coefficient of determination): 1 at
    best, 0 for the mean, below 0 for worse; for several values an example, the mean of their R2.

    `1 - Σ(t - p)² / Σ(t - mean)²`. The mean is not known before the end, so what is added up is
    `Σ(t - center)` and `Σ(t - center)²`, from which the variance about the mean follows for any `center`;
    for one near the mean without cancellation (Chan, Golub and LeVeque, 1983). Constant targets give 1
    when predicted exactly, else 0; a single example NaN: scikit-learn's `r2_score`.

    *Arguments:* `predictions` and `targets` `(batch, ...)`, of exactly the same shape; `center`, a number
    within some deviations of the targets' mean, or one for each of an example's values: 0 is right for
    standardised targets, else the mean of the training targets. Beyond 30 deviations float32 sums lose
    the variance: the value is NaN, and a warning names a better center.

    Raises `RecipeError` for shapes or dtypes that do not fit.
    """
    p, t = _columns(predictions, targets)
    middle = np.asarray(center, np.float32).reshape(-1)
    if middle.size not in (1, t.shape[1]):
        raise RecipeError(
            f"r2(center=...) has {middle.size} values: expected one number, or {t.shape[1]}, one for each of "
            f"an example's values"
        )
    away = t - jnp.broadcast_to(middle[None], t.shape)
    sums = jnp.stack([jnp.sum(x, axis=0) for x in ((t - p) ** 2, away, away**2)])
    return Sum(sums, jnp.float32(len(t)), _Explained(tuple(middle.tolist())))


@dataclass(frozen=True)
class _Explained:
    """R2 from `Σ(t - p)²`, `Σ(t - center)` and `Σ(t - center)²`, `(3, m)`."""

    center: tuple[float, ...]

    def __call__(self, total, count):
        if count < 2:
            return np.nan
        left, first, second = total
        mean = first / count
        spread = np.maximum(second - first * mean, 0)
        far = mean**2 * count > _FAR * spread
        if np.any(far):
            worst = int(np.argmax(far))
            center = self.center[worst % len(self.center)]
            warnings.warn(
                f"r2(center={center:g}) is NaN: the targets' mean is {abs(mean[worst]):.3g} away, their "
                f"deviation {np.sqrt(spread[worst] / count):.3g}; give center={center + mean[worst]:.6g}.",
                RuntimeWarning,
                stacklevel=2,
            )
        constant = np.where(left == 0, 1.0, 0.0)
        shares = np.where(spread == 0, constant, 1 - left / spread)
        return np.mean(np.where(far, np.nan, shares))


def _mean_root(total, count):
    return np.mean(np.sqrt(total / count))


def _columns(predictions: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Both as `(batch, m)` float32."""
    predictions = floats(predictions, "predictions")
    targets = same_shape(targets, "targets", predictions, "predictions")
    return predictions.reshape(len(predictions), -1), targets.reshape(len(targets), -1)
