"""Metrics from sums: values of the whole set, whatever the batch and the number of devices.

Each function takes one replica's batch or a single example, and returns a `cw.Sum`. The library
adds these over examples, replicas, devices and batches. Then it divides, or calls the sum's
`finish`. So F1 is that of the set, not the mean of the batches' F1s. Each but `confusion` states
which way it is better. `docs/metrics.md` has a table with their sums, and how to write your own.

The shape of the labels decides whether an example has one class or several:

    (batch,)            integers: one class for each example; the highest logit is predicted
    (batch, classes)    0 and 1: several labels for each example; those with a probability
                        `sigmoid(logit)` above `threshold` are predicted

A class outside the logits, or a target that is neither 0 nor 1, makes the metric NaN. A NaN among
the logits predicts nothing, so it counts as a miss. Of equal logits the lower class is predicted.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base import fact, invalid, unknown
from ..base.annotations import as_annotated
from . import losses
from .direction import HIGHER, LOWER
from .logits import note
from .losses import as_array, class_labels, floats, same_shape
from .task import Sum

_AVERAGES = ("micro", "macro", "weighted")
# (mean - center)² in variances: up to there 1 - R2 is good to 2e-4, as docs/metrics.md measures
_FAR = 1e3


@as_annotated
def accuracy(logits: Any, labels: Any, k: int = 1) -> Sum:
    """The share of examples whose label is among the `k` highest logits: see `losses.correct`."""
    return Sum.of(losses.correct(logits, labels, k), better=HIGHER)


@as_annotated
def roc_auc(logits: Any, labels: Any, average: str | None = "macro") -> Sum:
    """The area under the receiver operating characteristic. It is the probability that a random
    positive example scores higher than a random negative one, where ties count half (Hanley and
    McNeil, 1982).

    It is exact, from the ranks of all examples' scores (`Sum.of_each`), so it is a metric for
    evaluation only.

    *Arguments:*

    - `logits` `(batch,)` or `(batch, 1)` with `labels` `(batch,)` of 0 and 1: one score each.
    - `logits` `(batch, 2)` with `labels` `(batch,)`: the second class against the first.
    - `logits` `(batch, classes)` with whole numbers `(batch,)`: each class against the rest, by its
      probability.
    - `logits` `(batch, classes)` with `labels` `(batch, classes)` of 0 and 1: each label.
    - `average`: the mean over classes: `"macro"`, or `"weighted"` by how often a class occurs.
      `None` gives an array `(classes,)`.

    A class with only positives, or with none, gives NaN. Equals scikit-learn's `roc_auc_score`.

    Raises `RecipeError` for shapes or dtypes that do not fit and an unknown `average`.
    """
    return _ranked("roc_auc", logits, labels, average)


@as_annotated
def average_precision(logits: Any, labels: Any, average: str | None = "macro") -> Sum:
    """The precision at each threshold, weighted by the recall gained there. It is the area under
    the precision-recall curve, without interpolation. Arguments are those of `roc_auc`. Equals
    scikit-learn's `average_precision_score`."""
    return _ranked("average_precision", logits, labels, average)


@as_annotated
def precision(
    logits: Any, labels: Any, average: str | None = "macro", *, threshold: float | None = None
) -> Sum:
    """The share of predictions that are right: true positives over predicted. See `f1`."""
    return _score("precision", logits, labels, average, threshold)


@as_annotated
def recall(
    logits: Any, labels: Any, average: str | None = "macro", *, threshold: float | None = None
) -> Sum:
    """The share of actual labels that were predicted: true positives over actual. See `f1`."""
    return _score("recall", logits, labels, average, threshold)


@as_annotated
def f1(
    logits: Any, labels: Any, average: str | None = "macro", *, threshold: float | None = None
) -> Sum:
    """The harmonic mean of precision and recall, `2 tp / (predicted + actual)` (van Rijsbergen,
    1979).

    *Arguments:*

    - `logits` `(batch, classes)`, any float dtype.
    - `labels`: `(batch,)` whole numbers or `(batch, classes)` of 0 and 1, as above.
    - `average`: `"macro"` is the mean over classes. `"weighted"` is that mean, weighted by how
      often a class occurs. `"micro"` is the score of all classes' counts together. `None` gives an
      array `(classes,)`.
    - `threshold`: for several labels only, a probability. The default is 0.5.

    The score is 0 where nothing was predicted or nothing occurs. With one label an example,
    `"macro"` leaves out classes that neither occur nor are predicted. With several labels it counts
    them as 0. Both are scikit-learn's defaults.

    Raises `RecipeError` for shapes or dtypes that do not fit and an unknown `average`.
    """
    return _score("f1", logits, labels, average, threshold)


@as_annotated
def confusion(logits: Any, labels: Any) -> Sum:
    """How often class i was taken for class j: `(classes, classes)`, actual down, predicted across.

    *Arguments:* `logits` `(batch, classes)`. `labels` `(batch,)` whole numbers. The sum is as large
    as the matrix and travels with every step's gradients. With many classes, return it only when
    `not train`. Raises `RecipeError` for shapes or dtypes that do not fit.
    """
    logits = floats(logits, "logits", ndim=2)
    predicted, actual = _one_label(logits, as_array(labels, "labels"))
    return Sum(actual.T @ predicted, jnp.float32(len(logits)), _counts)


@as_annotated
def exact_match(logits: Any, labels: Any, *, threshold: float = 0.5) -> Sum:
    """The share of examples whose labels are all right, `(batch, classes)` both: subset
    accuracy."""
    return Sum.of(jnp.min(_right("exact_match", logits, labels, threshold), axis=1), better=HIGHER)


@as_annotated
def hamming(logits: Any, labels: Any, *, threshold: float = 0.5) -> Sum:
    """The share of labels that are wrong, `(batch, classes)` both: Hamming loss."""
    wrong = 1.0 - jnp.mean(_right("hamming", logits, labels, threshold), axis=1)
    return Sum.of(wrong, better=LOWER)


@dataclass(frozen=True)
class _Score:
    """A ratio of true positives, predicted and actual, `(3, classes)`, and its average over
    classes."""

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


@dataclass(frozen=True)
class _ByRank:
    """A metric of the order of scores, from scores and labels of all examples,
    `(examples, 2, classes)`. `one_of`: the scores are logits of classes, and each example has one
    class."""

    metric: str
    average: str | None
    one_of: bool

    def __call__(self, values, count):
        of = {"roc_auc": _area, "average_precision": _step_area}[self.metric]
        scores, actual = np.moveaxis(np.asarray(values, np.float64), 1, 0)
        if self.one_of:
            scores = _log_odds(scores)
            actual = actual[:, -scores.shape[1] :]
        valid = np.isfinite(scores).all(axis=0) & np.isin(actual, (0, 1)).all(axis=0)
        each = np.array(
            [of(scores[:, k], actual[:, k]) if valid[k] else np.nan for k in range(len(valid))]
        )
        if self.average is None:
            return each
        there = actual.sum(axis=0)
        return (each * there).sum() / there.sum() if self.average == "weighted" else each.mean()


def _log_odds(logits):
    """The logarithm of each class's odds against the rest, `(examples, classes)`. For two classes
    it is that of the second alone, `(examples, 1)`.

    It orders examples as the probability does, which is rounded to 1. Equal odds have equal bits,
    because they come from differences of logits, added in the order of their size. A sum in the
    order of the classes would round ties apart.
    """
    if logits.shape[1] == 2:
        return logits[:, 1:] - logits[:, :1]
    falling = -np.sort(-logits, axis=1)
    highest = falling[:, :1]
    second = falling[:, 1:2]
    lower = falling[:, 1:]
    of_highest = highest - second - np.log(np.exp(lower - second).sum(axis=1, keepdims=True))
    whole = 1 + np.exp(lower - highest).sum(axis=1, keepdims=True)
    of_others = logits - highest - np.log(whole - np.exp(logits - highest))
    return np.where(logits == highest, of_highest, of_others)


def _area(scores, actual):
    """The share of pairs of a positive and a negative example that are in order. Ties count
    half."""
    _, place, many = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(many) - (many - 1) / 2)[place]  # of equal scores, their mean
    positive = actual.sum()
    below = ranks[actual == 1].sum() - positive * (positive + 1) / 2
    return below / (positive * (len(actual) - positive))


def _step_area(scores, actual):
    falling = np.argsort(-scores, kind="stable")
    last = np.append(np.flatnonzero(np.diff(scores[falling])), len(scores) - 1)  # of each threshold
    hits = np.cumsum(actual[falling])[last]
    gained = np.diff(hits, prepend=0.0)
    return (gained * hits / (last + 1)).sum() / hits[-1]


def _ranked(metric: str, logits: Any, labels: Any, average: str | None) -> Sum:
    if average not in (None, "macro", "weighted"):
        raise unknown(
            "average-unknown", "average", average, (None, "macro", "weighted"), metric=metric
        )
    logits = floats(logits, "logits")
    labels = as_array(labels, "labels")
    one_of = logits.ndim == 2 and logits.shape[1] > 1 and labels.ndim == 1
    if one_of:
        if logits.shape[1] > 2:  # of two, probabilities have the order of logits
            note(metric, logits)
        scores = logits
        actual = _one_hot(logits, labels)
    else:
        scores = logits if logits.ndim == 2 else logits[:, None]
        actual = same_shape(
            labels[:, None] if labels.ndim == 1 else labels, "labels", scores, "logits"
        )
    finish = _ByRank(metric, average, one_of)
    return Sum.of_each(jnp.stack([scores, actual], axis=1), finish, better=HIGHER)


def _counts(total, count):
    return total


def _score(
    ratio: str, logits: Any, labels: Any, average: str | None, threshold: float | None
) -> Sum:
    if average is not None and average not in _AVERAGES:
        raise unknown("average-unknown", "average", average, (None, *_AVERAGES), metric=ratio)
    logits = floats(logits, "logits", ndim=2)
    labels = as_array(labels, "labels")
    several = labels.ndim == 2
    if several:
        threshold = 0.5 if threshold is None else threshold
        predicted, actual = _several_labels(ratio, logits, labels, threshold)
    elif threshold is not None:
        expected = f"none for labels {labels.shape}; several an example are {logits.shape}"
        raise invalid("threshold-of-one-label", "threshold", threshold, expected, metric=ratio)
    else:
        predicted, actual = _one_label(logits, labels)
    sums = jnp.stack([jnp.sum(x, axis=0) for x in (predicted * actual, predicted, actual)])
    finish = _Score(ratio, average, several)
    return Sum(sums, jnp.float32(len(logits)), finish, better=HIGHER)


def _one_label(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Predicted and actual, `(batch, classes)` of 0 and 1, one 1 a row."""
    actual = _one_hot(logits, labels)
    predicted = jax.nn.one_hot(jnp.argmax(logits, axis=1), logits.shape[1], dtype=jnp.float32)
    predicted = jnp.where(jnp.any(jnp.isnan(logits), axis=1, keepdims=True), 0.0, predicted)
    return predicted, actual


def _one_hot(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """`labels` as `(batch, classes)` of 0 and 1, NaN in the row of one that is no class."""
    labels = class_labels(labels, logits)
    classes = logits.shape[1]
    inside = ((labels >= 0) & (labels < classes))[:, None]
    return jnp.where(inside, jax.nn.one_hot(labels, classes, dtype=jnp.float32), jnp.nan)


def _several_labels(
    metric: str, logits: Any, labels: Any, threshold: float
) -> tuple[jax.Array, jax.Array]:
    """Predicted and actual, `(batch, classes)` of 0 and 1."""
    note(metric, logits)
    if not 0 < threshold < 1:
        raise invalid(
            "threshold-range", "threshold", threshold, "a probability between 0 and 1, such as 0.5"
        )
    actual = same_shape(labels, "labels", logits, "logits")
    # The logit of the threshold, so that no probability is rounded to the other side of it.
    predicted = logits > math.log(threshold / (1 - threshold))
    return predicted.astype(jnp.float32), jnp.where((actual == 0) | (actual == 1), actual, jnp.nan)


def _right(metric: str, logits: Any, labels: Any, threshold: float) -> jax.Array:
    """1.0 where a label is as predicted, 0.0 where not, NaN where it is none: `(batch,
    classes)`."""
    logits = floats(logits, "logits", ndim=2)
    predicted, actual = _several_labels(metric, logits, labels, threshold)
    right = (predicted == actual) & ~jnp.isnan(logits)
    return jnp.where(jnp.isnan(actual), jnp.nan, right.astype(jnp.float32))


@as_annotated
def perplexity(loss: Sum) -> Sum:
    """`exp` of the mean loss: 1 at best, the number of words for a guess among all (Jelinek et al.,
    1977).

    *Arguments:* `loss`, in nats: a total `()` over tokens and their number. The result is not the
    mean of the batches' perplexities, which is larger.
    """
    return Sum(loss.total, loss.count, _exponential, better=LOWER)


def _exponential(total, count):
    return np.exp(total / count)


@as_annotated
def mse(predictions: Any, targets: Any) -> Sum:
    """Mean squared error, over examples and all their values: see `losses.squared_error`."""
    return Sum.of(losses.squared_error(predictions, targets), better=LOWER)


@as_annotated
def mae(predictions: Any, targets: Any) -> Sum:
    """Mean absolute error, over examples and all their values, in the targets' unit."""
    return Sum.of(losses.absolute_error(predictions, targets), better=LOWER)


@as_annotated
def rmse(predictions: Any, targets: Any) -> Sum:
    """Root of the mean squared error, in the targets' unit: one root for each of an example's `m`
    values, then their mean, as scikit-learn's `root_mean_squared_error`.

    *Arguments:* `predictions` and `targets` `(batch, ...)`, of exactly the same shape.
    Raises `RecipeError` for shapes or dtypes that do not fit.
    """
    p, t = _columns(predictions, targets)
    return Sum(jnp.sum((p - t) ** 2, axis=0), jnp.float32(len(p)), _mean_root, better=LOWER)


@as_annotated
def r2(predictions: Any, targets: Any, center: float | Sequence[float] = 0.0) -> Sum:
    """The share of the targets' variance that the predictions explain (coefficient of
    determination). It is 1 at best, 0 for the mean, and below 0 for worse. For several values an
    example, it is the mean of their R2.

    `1 - Σ(t - p)² / Σ(t - mean)²`. The mean is not known before the end, so the sums are those of
    `Σ(t - center)` and `Σ(t - center)²`. The variance about the mean follows from them for any
    `center`, and without cancellation for one near the mean (Chan, Golub and LeVeque, 1983).
    Constant targets give 1 when predicted exactly, else 0, for any `center`. They are recognised by
    counting bits: each bit is set in all of them or in none. A single example gives NaN, as in
    scikit-learn's `r2_score`.

    *Arguments:* `predictions` and `targets` `(batch, ...)`, of exactly the same shape. `center`: a
    number within some deviations of the targets' mean, or one for each of an example's values. 0 is
    right for standardised targets. Otherwise use the mean of the training targets. Beyond 30
    deviations float32 sums lose the variance. The value is then NaN, and a warning names a better
    center.

    Raises `RecipeError` for shapes or dtypes that do not fit.
    """
    p, t = _columns(predictions, targets)
    middle = np.asarray(center, np.float32).reshape(-1)
    if middle.size not in (1, t.shape[1]):
        expected = f"1, or {t.shape[1]}, one for each of an example's values"
        raise invalid("center-values", "the number of values in center", middle.size, expected)
    away = t - jnp.broadcast_to(middle[None], t.shape)
    sums = jnp.stack([jnp.sum(x, axis=0) for x in ((t - p) ** 2, away, away**2)])
    sums = jnp.concatenate([sums, _bits_set(t).astype(sums.dtype)])
    finish = _Explained(tuple(middle.tolist()))
    return Sum(sums, jnp.float32(len(t)), finish, better=HIGHER)


def _bits_set(values: jax.Array) -> jax.Array:
    """How often each bit of float32 `values` `(batch, m)` is set, `(32, m)`. Sums of rounded values
    cannot distinguish constant values from those that vary little."""
    values = jnp.where(values == 0, 0, values).astype(jnp.float32)  # -0 equals 0
    words = jax.lax.bitcast_convert_type(values, jnp.uint32)
    bits = (words[:, None] >> jnp.arange(32, dtype=jnp.uint32)[None, :, None]) & 1
    return jnp.sum(bits.astype(jnp.float32), axis=0)


@dataclass(frozen=True)
class _Explained:
    """R2 from `Σ(t - p)²`, `Σ(t - center)`, `Σ(t - center)²` and how often each bit of t is set:
    `(35, m)` in all."""

    center: tuple[float, ...]

    def __call__(self, total, count):
        if count < 2:
            return np.nan
        left, first, second = total[:3]
        mean = first / count
        constant = np.all((total[3:] == 0) | (total[3:] == count), axis=0)
        spread = np.where(constant, 0, np.maximum(second - first * mean, 0))
        far = (mean**2 * count > _FAR * spread) & ~constant
        if np.any(far):
            worst = int(np.argmax(far))
            center = self.center[worst % len(self.center)]
            note = fact(
                "r2-center-far",
                center=center,
                away=float(abs(mean[worst])),
                deviation=float(np.sqrt(spread[worst] / count)),
                better=center + float(mean[worst]),
            )
            warnings.warn(str(note), RuntimeWarning, stacklevel=2)
        shares = np.where(spread == 0, np.where(left == 0, 1.0, 0.0), 1 - left / spread)
        return np.mean(np.where(far, np.nan, shares))


def _mean_root(total, count):
    return np.mean(np.sqrt(total / count))


def _columns(predictions: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Both as `(batch, m)` float32."""
    predictions = floats(predictions, "predictions")
    targets = same_shape(targets, "targets", predictions, "predictions")
    return predictions.reshape(len(predictions), -1), targets.reshape(len(targets), -1)
