"""Of classes: accuracy, precision, recall, F1 and the confusion matrix, for one label an example or several.

The shape of the labels says which of the two it is:

    (batch,)            whole numbers: one class an example, predicted is the highest logit
    (batch, classes)    0 and 1: several labels an example, predicted are those with a probability
                        `sigmoid(logit)` above `threshold`

A class outside the logits, or a target that is neither 0 nor 1, makes the metric NaN. A NaN among the
logits predicts nothing, so it counts as a miss. Of equal logits the lower class is predicted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import RecipeError, nearest
from .. import losses
from ..arguments import class_labels, floats, same_shape
from ..task import Sum

_AVERAGES = ("micro", "macro", "weighted")


def accuracy(logits: Any, labels: Any, k: int = 1) -> Sum:
    """The share of examples whose label is among the `k` highest logits: see `losses.correct`."""
    return Sum.of(losses.correct(logits, labels, k))


def precision(
    logits: Any, labels: Any, average: str | None = "macro", *, threshold: float | None = None
) -> Sum:
    """Of what was predicted, the share that is right: true positives over predicted. See `f1`."""
    return _score("precision", logits, labels, average, threshold)


def recall(logits: Any, labels: Any, average: str | None = "macro", *, threshold: float | None = None) -> Sum:
    """Of what is there, the share that was predicted: true positives over actual. See `f1`."""
    return _score("recall", logits, labels, average, threshold)


def f1(logits: Any, labels: Any, average: str | None = "macro", *, threshold: float | None = None) -> Sum:
    """The harmonic mean of precision and recall, `2 tp / (predicted + actual)` (van Rijsbergen, 1979).

    *Arguments:* `logits` `(batch, classes)`, any float dtype; `labels`, `(batch,)` whole numbers or
    `(batch, classes)` of 0 and 1, as above; `average`: `"macro"`, the mean over classes; `"weighted"`,
    that mean by how often a class is there; `"micro"`, of all classes' counts together; `None`, an array
    `(classes,)`; `threshold`, for several labels only: a probability, 0.5 when left out.

    0 where nothing was predicted or nothing is there. With one label an example, `"macro"` leaves out
    classes that neither occur nor are predicted; with several it counts them as 0. Both are
    scikit-learn's defaults.

    Raises `RecipeError` for shapes or dtypes that do not fit and an unknown `average`.
    """
    return _score("f1", logits, labels, average, threshold)


def confusion(logits: Any, labels: Any) -> Sum:
    """How often class i was taken for class j: `(classes, classes)`, actual down, predicted across.

    *Arguments:* `logits` `(batch, classes)`; `labels` `(batch,)` whole numbers. The sum is as large as
    the matrix and travels with every step's gradients: with many classes, return it only when
    `not train`.
    Raises `RecipeError` for shapes or dtypes that do not fit.
    """
    logits = floats(logits, "logits", ndim=2)
    predicted, actual = _one_label(logits, jnp.asarray(labels))
    return Sum(actual.T @ predicted, jnp.float32(len(logits)), _counts)


def exact_match(logits: Any, labels: Any, *, threshold: float = 0.5) -> Sum:
    """The share of examples of which every label is right, `(batch, classes)` both: subset accuracy."""
    return Sum.of(jnp.min(_right(logits, labels, threshold), axis=1))


def hamming(logits: Any, labels: Any, *, threshold: float = 0.5) -> Sum:
    """The share of labels that are wrong, `(batch, classes)` both: Hamming loss."""
    return Sum.of(1.0 - jnp.mean(_right(logits, labels, threshold), axis=1))


@dataclass(frozen=True)
class _Score:
    """A ratio of true positives, predicted and actual, `(3, classes)`, and its average over classes."""

    ratio: str
    average: str | None
    several: bool

    def __call__(self, total, count):
        if self.average == "micro":
            total = total.sum(axis=1)
        hits, predicted, actual = total
        over, under = {
            "precision": (hits, predicted),
            "recall": (hits, actual),
            "f1": (2 * hits, predicted + actual),
        }[self.ratio]
        scores = np.where(under == 0, 0.0, over / under)
        if self.average == "macro":
            there = np.ones(scores.shape, bool) if self.several else predicted + actual != 0
            return scores[there].mean()
        if self.average == "weighted":
            return (scores * actual).sum() / actual.sum() if actual.sum() != 0 else 0.0
        return scores


def _counts(total, count):
    return total


def _score(ratio: str, logits: Any, labels: Any, average: str | None, threshold: float | None) -> Sum:
    if average is not None and average not in _AVERAGES:
        raise RecipeError(
            f"{ratio}(average={average!r}): expected None or one of {', '.join(_AVERAGES)}."
            f"{nearest(str(average), _AVERAGES)}"
        )
    logits, labels = floats(logits, "logits", ndim=2), jnp.asarray(labels)
    several = labels.ndim == 2
    if several:
        predicted, actual = _several_labels(logits, labels, 0.5 if threshold is None else threshold)
    elif threshold is not None:
        raise RecipeError(
            f"{ratio}(threshold={threshold!r}) with labels of shape {labels.shape}: expected labels "
            f"{logits.shape}, several an example; the highest logit needs no threshold"
        )
    else:
        predicted, actual = _one_label(logits, labels)
    sums = jnp.stack([jnp.sum(x, axis=0) for x in (predicted * actual, predicted, actual)])
    return Sum(sums, jnp.float32(len(logits)), _Score(ratio, average, several))


def _one_label(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Predicted and actual, `(batch, classes)` of 0 and 1, one 1 a row."""
    labels, classes = class_labels(labels, logits), logits.shape[1]
    predicted = jax.nn.one_hot(jnp.argmax(logits, axis=1), classes, dtype=jnp.float32)
    predicted = jnp.where(jnp.any(jnp.isnan(logits), axis=1, keepdims=True), 0.0, predicted)
    inside = ((labels >= 0) & (labels < classes))[:, None]
    return predicted, jnp.where(inside, jax.nn.one_hot(labels, classes, dtype=jnp.float32), jnp.nan)


def _several_labels(logits: Any, labels: Any, threshold: float) -> tuple[jax.Array, jax.Array]:
    """Predicted and actual, `(batch, classes)` of 0 and 1."""
    if not 0 < threshold < 1:
        raise RecipeError(f"threshold={threshold!r}: expected a probability between 0 and 1, such as 0.5")
    actual = same_shape(labels, "labels", logits, "logits")
    # The logit of the threshold, so that no probability is rounded to the other side of it.
    predicted = logits > math.log(threshold / (1 - threshold))
    return predicted.astype(jnp.float32), jnp.where((actual == 0) | (actual == 1), actual, jnp.nan)


def _right(logits: Any, labels: Any, threshold: float) -> jax.Array:
    """1.0 where a label is as predicted, 0.0 where not, NaN where it is none: `(batch, classes)`."""
    logits = floats(logits, "logits", ndim=2)
    predicted, actual = _several_labels(logits, labels, threshold)
    right = (predicted == actual) & ~jnp.isnan(logits)
    return jnp.where(jnp.isnan(actual), jnp.nan, right.astype(jnp.float32))
