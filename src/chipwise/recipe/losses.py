"""Per-example losses and accuracy: (batch,) float32, one value for each example.

Nothing here divides by the batch. A task sums these values and counts the examples. The library
divides once, after summing over replicas and devices, so a masked or uneven batch has the right
weight:

    losses = softmax_cross_entropy(logits, batch["label"])
    return {"loss": Sum(losses.sum(), losses.size), ...}, state

With class weights, the library counts the weights and not the examples, so
`weighted_softmax_cross_entropy` returns the finished Sum and no values:

    return {"loss": weighted_softmax_cross_entropy(logits, batch["label"], weights)}, state

Logits may be of any float dtype. The arithmetic is float32, because bfloat16 keeps 8 bits of a
loss, and float64 for logits of float64. A label outside the classes gives that example a loss of
NaN and a gradient of 0. JAX would count such a label from the end, or clamp it, and silently train
on a wrong class. So a loader may pad with -1, and `jnp.where(mask, losses, 0)` removes the padding
from value and gradient. (`mask * losses` does not: 0 * NaN is NaN.) Unmasked, such a label is
refused when it is read.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..base import RecipeError, invalid
from ..base.annotations import as_annotated
from .logits import note
from .task import Sum


@as_annotated
def softmax_cross_entropy(logits: Any, labels: Any, smoothing: float = 0.0) -> jax.Array:
    """Cross-entropy of one class among `k`, in nats: (b,) float32.

    Arguments:

    - `logits` (b, k), any float dtype.
    - `labels`: (b,) whole numbers 0 to k - 1, or (b, k) probabilities that sum to 1 in each row, as
      from mixup.
    - `smoothing` in [0, 1): the share of each target that is spread evenly over all `k` classes,
      the label's own included (Szegedy et al., 2016, https://arxiv.org/abs/1512.00567), as in
      PyTorch's `CrossEntropyLoss`.

    An example whose label is outside 0 to k - 1 gets a loss of NaN and a gradient of 0. Raises
    `RecipeError` for shapes or dtypes that do not fit.
    """
    logits = floats(logits, "logits", ndim=2)
    note("softmax_cross_entropy", logits)
    labels = as_array(labels, "labels")
    _share(smoothing)
    classes = logits.shape[1]
    if _are_probabilities(labels, logits):
        targets = labels.astype(logits.dtype)
        return optax.softmax_cross_entropy(logits, optax.smooth_labels(targets, smoothing))
    labels = class_labels(labels, logits)
    if smoothing:
        targets = jax.nn.one_hot(labels, classes, dtype=logits.dtype)
        losses = optax.softmax_cross_entropy(logits, optax.smooth_labels(targets, smoothing))
    else:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.where((labels >= 0) & (labels < classes), losses, jnp.nan)


@as_annotated
def weighted_softmax_cross_entropy(
    logits: Any, labels: Any, weights: Any, smoothing: float = 0.0
) -> Sum:
    """Cross-entropy of one class among `k`, each class with its weight, in nats: a `Sum` of two ().

    Its mean over the whole batch or the whole evaluation is PyTorch's
    `CrossEntropyLoss(weight=weights, label_smoothing=smoothing)`. It divides by the sum of the
    labels' weights, or for labels (b, k) by the number of examples. That is why this is a `Sum` and
    not one value for each example: the plain mean of such values would be another loss.

    Arguments:

    - `logits` (b, k), any float dtype.
    - `labels`: (b,) whole numbers 0 to k - 1, or (b, k) probabilities.
    - `weights` (k,), 0 or more, such as `examples / (k * examples_of_class)`.
    - `smoothing` in [0, 1). Its share of each class has that class's weight, as in PyTorch.

    A label outside 0 to k - 1 makes the total NaN and adds no gradient. A weight below 0 makes the
    total NaN. Raises `RecipeError` for shapes or dtypes that do not fit.
    """
    logits = floats(logits, "logits", ndim=2)
    note("weighted_softmax_cross_entropy", logits)
    labels = as_array(labels, "labels")
    weights = as_array(weights, "weights")
    _share(smoothing)
    weights = _class_weights(weights, "weights", logits)
    examples, classes = logits.shape
    weights = jnp.where(weights >= 0, weights.astype(logits.dtype), jnp.nan)
    if _are_probabilities(labels, logits):
        targets = optax.smooth_labels(labels.astype(logits.dtype), smoothing)
        return Sum(
            jnp.sum(optax.softmax_cross_entropy(logits, targets * weights[None])),
            jnp.float32(examples),
        )
    labels = class_labels(labels, logits)
    own = weights[jnp.clip(labels, 0, classes - 1)]
    losses = own * softmax_cross_entropy(logits, labels)
    if smoothing:
        evenly = optax.softmax_cross_entropy(
            logits, jnp.broadcast_to(weights[None] / classes, logits.shape)
        )
        losses = (1.0 - smoothing) * losses + smoothing * evenly
    valid = (labels >= 0) & (labels < classes)
    return Sum(jnp.sum(jnp.where(valid, losses, jnp.nan)), jnp.sum(own))


@as_annotated
def sigmoid_cross_entropy(
    logits: Any, targets: Any, smoothing: float = 0.0, positive_weights: Any = None
) -> jax.Array:
    """Binary cross-entropy of `k` independent questions, in nats: (b,) float32.

    The value is the MEAN over the `k` questions, so the mean over examples is PyTorch's
    `BCEWithLogitsLoss`, and rates do not depend on `k`. Multiply by `k` for the sum.

    Arguments:

    - `logits` (b, k), any float dtype.
    - `targets` (b, k): bool, whole numbers or floats, each from 0 to 1.
    - `smoothing` in [0, 1): the share of each target that moves to 1/2. This is the two-class case
      of `softmax_cross_entropy`.
    - `positive_weights` (k,): multiply the losses of the targets that are 1, as PyTorch's
      `pos_weight` does. Where 1s are rare, use the number of 0s over that of 1s.

    An example with a target outside 0 to 1 gets a loss of NaN and a gradient of 0. Raises
    `RecipeError` for shapes or dtypes that do not fit.
    """
    logits = floats(logits, "logits", ndim=2)
    note("sigmoid_cross_entropy", logits)
    targets = same_shape(targets, "targets", logits, "logits")
    _share(smoothing)
    inside = (targets >= 0) & (targets <= 1)
    # Bad targets are replaced as well: a NaN among them would reach the gradient through 0 * NaN.
    targets = jnp.where(inside, targets, 0.0)
    if smoothing:
        targets = targets * (1.0 - smoothing) + 0.5 * smoothing
    if positive_weights is None:
        losses = optax.sigmoid_binary_cross_entropy(logits, targets)
    else:
        weights = _class_weights(positive_weights, "positive_weights", logits)
        yes = -jax.nn.log_sigmoid(logits)
        no = -jax.nn.log_sigmoid(-logits)
        losses = weights.astype(logits.dtype)[None] * targets * yes + (1.0 - targets) * no
    return jnp.where(jnp.all(inside, axis=1), jnp.mean(losses, axis=1), jnp.nan)


@as_annotated
def squared_error(predictions: Any, targets: Any) -> jax.Array:
    """Squared difference, the MEAN over all axes but the first: (b,) float32.

    Arguments: `predictions` (b, ...), any float dtype. `targets`: exactly the same shape, any
    dtype. A (b, 1) against a (b,) is refused rather than broadcast to (b, b). The unit is that of
    the targets, squared.

    Raises `RecipeError` for shapes or dtypes that do not fit.
    """
    predictions = floats(predictions, "predictions")
    targets = same_shape(targets, "targets", predictions, "predictions")
    return jnp.mean(
        optax.squared_error(predictions, targets), axis=tuple(range(1, predictions.ndim))
    )


@as_annotated
def absolute_error(predictions: Any, targets: Any) -> jax.Array:
    """Absolute difference, the MEAN over all axes but the first: (b,) float32, in the targets'
    unit.

    Arguments and errors as in `squared_error`.
    """
    predictions = floats(predictions, "predictions")
    targets = same_shape(targets, "targets", predictions, "predictions")
    return jnp.mean(jnp.abs(predictions - targets), axis=tuple(range(1, predictions.ndim)))


@as_annotated
def correct(logits: Any, labels: Any, k: int = 1) -> jax.Array:
    """1.0 where the label is among the `k` highest logits, else 0.0: (b,) float32.

    Arguments: `logits` (b, classes), any float dtype. `labels`: (b,) whole numbers, or (b, classes)
    probabilities whose highest one is the label. Of equal logits, the one of the lower class ranks
    higher, as in `argmax`. So constant logits score the share of class 0 and not 100 %. A row with
    a NaN is wrong. A label outside the classes gives NaN.

    Raises `RecipeError` for shapes or dtypes that do not fit, and unless 1 <= k <= classes.
    """
    logits = floats(logits, "logits", ndim=2)
    labels = as_array(labels, "labels")
    classes = logits.shape[1]
    if not 1 <= k <= classes:
        raise invalid("k-range", "k", k, f"1 to {classes}, the classes", classes=classes)
    if _are_probabilities(labels, logits):
        labels = jnp.argmax(labels, axis=1)
    labels = class_labels(labels, logits)
    # The label's rank by counting: no sort, which accelerators do slowly, and no tie left to the
    # backend.
    column = labels[:, None]
    own = jnp.take_along_axis(logits, jnp.clip(column, 0, classes - 1), axis=1)
    lower = jnp.arange(classes, dtype=jnp.int32)[None, :] < column
    rank = jnp.sum((logits > own) | ((logits == own) & lower), axis=1)
    right = (rank < k) & ~jnp.any(jnp.isnan(logits), axis=1)
    return jnp.where((labels >= 0) & (labels < classes), right.astype(jnp.float32), jnp.nan)


def _are_probabilities(labels: jax.Array, logits: jax.Array) -> bool:
    """Whether labels have a probability for each class."""
    return labels.shape == logits.shape and jnp.issubdtype(labels.dtype, jnp.floating)


def _class_weights(values: Any, name: str, logits: jax.Array) -> jax.Array:
    """One weight for each class of `logits` (b, k). Raises `RecipeError` for another shape."""
    weights = as_array(values, name)
    expected = logits.shape[1:]
    if weights.shape != expected:
        raise RecipeError("weights-shape", name=name, shape=weights.shape, expected=expected)
    return weights


def _share(smoothing: float) -> None:
    if not 0.0 <= smoothing < 1.0:
        raise invalid("smoothing-range", "smoothing", smoothing, "0 <= smoothing < 1, such as 0.1")


def as_array(values: Any, name: str) -> jax.Array:
    """`values` as an array of JAX. Raises `RecipeError` for what cannot be one."""
    try:
        return jnp.asarray(values)
    except (TypeError, ValueError, OverflowError, SyntaxError):  # NumPy parses digits
        raise invalid("not-an-array", name, values, "an array of numbers", name=name) from None


def floats(values: Any, name: str, ndim: int | None = None) -> jax.Array:
    """`values` as float32, or unchanged if they are float64. They have `ndim` axes if that is
    given, and at least one.

    Shapes are known while the loss is traced, so a mistake costs one line and no step. Raises
    `RecipeError` for integers and for other shapes.
    """
    values = as_array(values, name)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise invalid(
            "not-floats",
            f"the dtype of {name}",
            str(values.dtype),
            "floats of any width",
            name=name,
        )
    if values.ndim == 0 or (ndim is not None and values.ndim != ndim):
        rows = "(batch, classes); pixels or tokens are rows of it, logits.reshape(-1, classes)"
        expected = rows if ndim == 2 else "(batch, ...)"
        raise invalid("axes-differ", f"the shape of {name}", values.shape, expected, name=name)
    return values if values.dtype == jnp.float64 else values.astype(jnp.float32)


def class_labels(labels: jax.Array, logits: jax.Array) -> jax.Array:
    """(b,) int32 labels that fit `logits` (b, k). A uint32 that is too large turns negative and so
    gives NaN.

    Raises `RecipeError` for other dtypes and shapes.
    """
    if not jnp.issubdtype(labels.dtype, jnp.integer) or labels.shape != logits.shape[:1]:
        expected = f"whole numbers {logits.shape[:1]} or float probabilities {logits.shape}"
        raise invalid("labels-shape", f"the shape of {labels.dtype} labels", labels.shape, expected)
    return labels.astype(jnp.int32)


def same_shape(values: Any, name: str, like: jax.Array, like_name: str) -> jax.Array:
    """`values` in the dtype of `like`. Raises `RecipeError` unless they have exactly its shape."""
    values = as_array(values, name)
    if values.shape != like.shape:
        expected = f"{like.shape}, that of the {like_name}"
        raise invalid("shapes-differ", f"the shape of {name}", values.shape, expected, name=name)
    return values.astype(like.dtype)
