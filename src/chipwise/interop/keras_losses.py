"""The loss and the metrics of a Keras model, as they were given or compiled, for `keras.task`.

Keras' own take the target first, in float32 and of one rank, leave out what a layer masks, and fit
several outputs by lists or dicts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..base import RecipeError
from ..base.figures import one_line
from ..recipe.direction import HIGHER, LOWER
from ..recipe.task import Sum
from . import adapter
from .adapter import own_promotion


def chosen_loss(keras: Any, model: Any, loss: Any) -> Any:
    """The given or compiled loss, as an object or a function."""
    given = loss if loss is not None else getattr(model, "loss", None)
    if given is None:
        raise RecipeError("keras-no-loss", model=type(model).__name__)
    return _named(keras.losses, given, "keras-loss-unknown")


def shown(keras: Any, loss: Any) -> str:
    """Losses as a run shows them."""
    losses = [one for one in keras.tree.flatten(loss) if one is not None]
    return ", ".join(one if isinstance(one, str) else adapter.shown_loss(one) for one in losses)


def of_output(keras: Any, loss: Any, several: tuple[Any, Any] | None) -> Any:
    """The loss of the only output, also from a list or dict. Of several outputs all of `loss`."""
    losses = keras.tree.flatten(loss)
    if several is None or len(losses) != 1 or len(keras.tree.flatten(several[1])) != 1:
        return loss
    return _named(keras.losses, losses[0], "keras-loss-unknown")


def _named(module: Any, given: Any, code: str) -> Any:
    """A loss or metric by its name or class, as Keras makes it, or what is `given`."""
    if not isinstance(given, (str, type)):
        return given
    try:
        return module.get(given)
    except ValueError as error:
        raise RecipeError(code, name=str(given), reason=one_line(error)) from error


_BETTER = {"up": HIGHER, "down": LOWER}
"""The `_direction` of metrics in Keras."""


def chosen_judge(
    keras: Any, model: Any, given: Any, compiled: bool, several: tuple[Any, Any] | None
) -> tuple[Callable, dict[str, Callable]]:
    """The loss as `(outputs, target) -> Sum`, and those of several outputs by name. Keras calls its
    own losses, and those that a model was compiled with, with the target first, both in float32 and
    of one rank. Of several outputs it adds a weighted loss of each."""
    weight = None
    own = isinstance(given, keras.losses.Loss)
    for one in keras.tree.flatten(given):
        if getattr(one, "reduction", None) == "sum":
            raise RecipeError("keras-loss-summed", loss=type(one).__name__)
    if not (compiled or _is_keras(keras, given) or keras.tree.is_nested(given)):
        return given, {}
    weights = model._compile_loss._user_loss_weights if compiled else None
    if several is not None:
        if not compiled:
            given = keras.tree.map_structure(functools.partial(_target_first, keras), given)
        names = getattr(model, "output_names", None)
        added = keras.src.trainers.compile_utils.CompileLoss(given, weights, output_names=names)
        _symbolic(keras, model, added, several)

        def total(of: Any, outputs: Any, target: Any) -> Sum:
            with keras.StatelessScope():  # it keeps an average of each
                value = _summed(keras, added, target, outputs)
                whole = value.count
                return value if of is None else Sum(of.result() * whole, whole, better="lower")

        parts: dict[str, Callable] = {of.name: functools.partial(total, of) for of in added.metrics}
        return functools.partial(total, None), parts
    if compiled:
        weight = weights
    if not own:  # as Keras does: it leaves out what is masked, and (b,) - (b, 1) would be (b, b)
        given = keras.src.losses.losses.LossFunctionWrapper(given)

    def judge(outputs: Any, target: Any) -> Sum:
        if compiled or not own:  # Keras would add the losses of several outputs
            single = keras.tree.flatten((outputs, target))
            if len(single) != 2:
                facts = {"model": type(model).__name__, "reason": "several arrays, one loss"}
                raise RecipeError("keras-loss-of-outputs", **facts)
            outputs, target = single
        value = _summed(keras, given, target, outputs)
        return value if weight is None else Sum(value.total * weight, value.count)

    return judge, {}


def _target_first(keras: Any, loss: Any) -> Any:
    """A given function of `(outputs, target)` in a list or dict as Keras calls it."""
    if not callable(loss) or isinstance(loss, type) or _is_keras(keras, loss):
        return loss

    @functools.wraps(loss)
    def turned(target: Any, outputs: Any) -> Any:
        return loss(outputs, target)

    return turned


def _summed(keras: Any, function: Callable, target: Any, outputs: Any) -> Sum:
    """The `Sum` of a loss. The mean of what one mask leaves counts as often as it leaves some."""
    value = _with_promotion(keras, function, target, outputs)
    mask, *others = map(keras.src.backend.get_keras_mask, jax.tree.leaves(outputs))
    if mask is None or jnp.ndim(value) or any(one is not mask for one in others):
        return adapter.as_sum(value, len(jax.tree.leaves(target)[0]))
    count = jnp.sum(mask, dtype=jnp.float32)
    return Sum(value * count, count)


def _with_promotion(keras: Any, loss: Callable, target: Any, outputs: Any) -> Any:
    def widened(x: Any) -> Any:
        with own_promotion():
            wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        keras.src.backend.set_keras_mask(wide, keras.src.backend.get_keras_mask(x))
        return wide

    wide = jax.tree.map(widened, outputs)
    with own_promotion():
        return loss(target, wide)


def chosen_metrics(
    keras: Any, model: Any, given: Any, several: tuple[Any, Any] | None
) -> dict[str, Callable]:
    """Metrics `given`, else those that the model was compiled with, as `(outputs, target) ->
    values`. Without sample weights the weighted ones are like the others."""
    metrics: dict[str, Callable] = {}
    lists = [given]
    if given is None and (compiled := getattr(model, "_compile_metrics", None)) is not None:
        lists = [compiled._user_metrics, compiled._user_weighted_metrics]
    if several is not None and not isinstance(given, Mapping):
        return _metrics_of_outputs(keras, model, several, *lists)
    lists = [one if isinstance(one, (list, tuple)) else [one] for one in lists if one is not None]
    listed: list[Any] = [
        (one if isinstance(one, str) else None, one) for one in itertools.chain(*lists)
    ]
    for name, one in given.items() if isinstance(given, Mapping) else listed:
        if isinstance(given, Mapping) and not _is_keras(keras, one):
            metrics[name] = one  # of (outputs, target)
            continue
        if str(one).lower() in ("accuracy", "acc"):
            one = functools.partial(_accuracy, keras)
        one = _named(keras.metrics, one, "keras-metric-unknown")
        name = name or getattr(one, "name", adapter.name_of(one))
        metrics[name] = _metric(keras, model, one, name)
    return metrics


def _metric(keras: Any, model: Any, one: Any, name: str | None = None) -> functools.partial:
    """A metric of Keras, or a function of the target and the outputs, as
    `(outputs, target) -> Sum`."""
    better = _BETTER.get(getattr(one, "_direction", ""))
    mean = keras.metrics.MeanMetricWrapper
    call = one
    if isinstance(one, mean) and type(one).update_state is mean.update_state:
        call = functools.partial(one._fn, **one._fn_kwargs)
    if not callable(call) or isinstance(call, keras.metrics.Metric):
        raise RecipeError("keras-metric", model=type(model).__name__, metric=name or one.name)
    return functools.partial(values_of, keras, call, better)


def _metrics_of_outputs(
    keras: Any, model: Any, several: tuple[Any, Any], given: Any, weighted: Any = None
) -> dict[str, Callable]:
    """The metrics of a model with several outputs, fitted to them and named as Keras does."""
    names = getattr(model, "output_names", None)
    fitted = keras.src.trainers.compile_utils.CompileMetrics(given, weighted, output_names=names)
    _symbolic(keras, model, fitted.update_state, several)

    def one(number: int, metric: Callable, outputs: Any, target: Any) -> Sum:
        return metric(*(fitted._flatten_y(tree)[number] for tree in (outputs, target)))

    return {
        "_".join(filter(None, (of.output_name, metric.name))): functools.partial(
            one, number, _metric(keras, model, metric)
        )
        for lists in (fitted._flat_metrics, fitted._flat_weighted_metrics)
        for number, of in enumerate(lists)
        for metric in (of.metrics if of else ())
    }


def _symbolic(keras: Any, model: Any, called: Callable, several: tuple[Any, Any]) -> None:
    """Has Keras fit its losses or metrics to the outputs, by a call without values."""
    try:
        keras.src.backend.compute_output_spec(called, *several)
    except (ValueError, KeyError, TypeError) as error:
        facts = {"model": type(model).__name__, "reason": one_line(error)}
        raise RecipeError("keras-loss-of-outputs", **facts) from error


def _is_keras(keras: Any, one: Any) -> bool:
    """Whether a loss or metric is Keras' own, which takes the target first, or a partial of it."""
    while isinstance(one, functools.partial):
        one = one.func
    own = isinstance(one, (keras.metrics.Metric, keras.losses.Loss))
    return own or str(getattr(one, "__module__", "")).partition(".")[0] == "keras"


def _accuracy(keras: Any, target: Any, outputs: Any) -> Any:
    return getattr(keras.metrics, accuracy_of(keras, target, outputs))(target, outputs)


def accuracy_of(keras: Any, target: Any, outputs: Any) -> str:
    """The accuracy that Keras takes for these shapes: the binary, categorical or sparse one."""
    choose = keras.src.trainers.compile_utils.is_binary_or_sparse_categorical
    binary, sparse = choose(target, outputs)
    kind = "binary" if binary else "sparse_categorical" if sparse else "categorical"
    return f"{kind}_accuracy"


def is_accuracy(metric: Any) -> bool:
    """Whether it is a metric of `chosen_metrics` whose kind follows from the shapes."""
    inner = metric.args[1] if getattr(metric, "func", None) is values_of else None
    return getattr(inner, "func", None) is _accuracy


def values_of(keras: Any, metric: Callable, better: str | None, outputs: Any, target: Any) -> Sum:
    """The sum of a metric's values over what is not masked, as Keras counts them."""
    if len(keras.tree.flatten(outputs)) > 1:  # a mean of both would hide one behind the other
        facts = {"model": "The model", "reason": "several outputs, one metric"}
        raise RecipeError("keras-loss-of-outputs", **facts)
    mask = keras.src.backend.get_keras_mask(outputs) if hasattr(outputs, "dtype") else None
    if mask is None:
        return dataclasses.replace(_summed(keras, metric, target, outputs), better=better)
    values = _with_promotion(keras, metric, target, outputs)
    with own_promotion():
        values, weights = keras.src.metrics.reduction_metrics.reduce_to_samplewise_values(
            values, mask, keras.ops.mean, "float32"
        )
    return Sum(jnp.sum(values), jnp.sum(weights), better=better)
