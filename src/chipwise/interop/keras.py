"""Train a Keras model with `cw.keras.task(model, loss, train=data)`. `result.to_keras(model)`
returns the weights.

    model = keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Conv2D(16, 3), ...])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task = cw.keras.task(model, loss, train=train)
    result = cw.fit(cw.Recipe(task=task, ...))
    result.to_keras(model)

Keras runs on JAX here (`KERAS_BACKEND=jax`). The states of its seed generators are replaced by
values folded from the step's key, so dropout depends only on the seed, the step and the replica.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base import RecipeError, invalid, library
from ..base.annotations import as_annotated
from ..base.figures import one_line
from ..recipe import freezing
from ..recipe.direction import HIGHER, LOWER
from ..recipe.source import rows_of, spec_of
from ..recipe.task import Sum, Task, Tree
from . import adapter
from .adapter import Arguments, Data, Source, own_promotion, with_loss

INSTALL = "pip install 'chipwise[keras]'"


@as_annotated
def task(
    model: Any,
    loss: Any = None,
    *,
    train: Source,
    eval: Source | None = None,
    inputs: Any = None,
    target: Any = "label",
    metrics: Mapping[str, Callable] | Sequence[Any] | None = None,
    augment: Callable | None = None,
    mix: Callable | None = None,
    classes: int | None = None,
    better: Mapping[str, str] = {},
    eval_group: int = 1,
) -> Task:
    """Makes a `Task` of a Keras model and a loss.

    *Arguments:*

    - `model`: its weights are the initial values for every seed. An unbuilt model is built for the
      data's shapes.
    - `loss`: a Keras loss, its name ("sparse_categorical_crossentropy"), or a function
      `(outputs, target)` such as `cw.losses.softmax_cross_entropy`. None: the loss that the model
      was compiled with, with its weight. A function that the model was compiled with is called as
      Keras calls it: with the target first, in float32, and `(b, 1)` if the outputs are.
    - `metrics`: also a list, as in `model.compile`. None: the metrics that the model was compiled
      with. Keras' own and those of a list are called as Keras calls them, with the target first,
      and leave out what is masked. "accuracy" is the one that Keras takes for the shapes.
    - The others: as in `interop.adapter.Data`. Several inputs are given by their names, in their
      order, or as the model's list or dict.

    Losses that layers add, such as `kernel_regularizer`, are added to the mean loss in training.
    The compiled optimizer is not used, since the recipe has its own. Raises `RecipeError` if Keras
    is missing or does not run on JAX, if the loss sums over the batch, if a compiled metric is no
    mean over examples, or if Keras' own loop would do what the step does not (`_check_methods`,
    `_check`). Its loss raises it for several outputs if Keras would add a loss of each.
    """
    keras = keras_library()
    if not isinstance(model, keras.Model):
        raise adapter.not_a_model("keras", repr(model), "a keras.Model")
    _check_methods(keras, model)  # before it is built: it may have no `call`
    _build(keras, model, Data(train, inputs=inputs, target=target))
    _check(keras, model)
    given = _loss(keras, model, loss)
    judge = _judge(keras, model, given, compiled=loss is None)
    metrics = _metrics(keras, model, metrics)
    columns = Data(train, eval, inputs, target, metrics, augment, mix, classes, better, eval_group)
    trained, other, seeds = _variables(model)
    seen: set[str] = set()
    has_mode = "training" in inspect.signature(model.call).parameters
    start = {name: np.asarray(v.value) for name, v in {**trained, **other}.items()}

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        params, state = ({name: jnp.asarray(start[name]) for name in of} for of in (trained, other))
        return adapter.nested(params, "/"), adapter.nested(state, "/")

    def forward(params, state, given, key, train):
        weights = adapter.flattened(params, "/")
        held = adapter.flattened(state, "/")
        key = jax.random.key(0) if key is None else key
        drawn = {
            id(v): jax.random.key_data(jax.random.fold_in(key, i)) for i, v in enumerate(seeds)
        }
        names = {id(v): name for name, v in other.items()}
        fixed = model.non_trainable_variables
        rest = [drawn[id(v)] if id(v) in drawn else held[names[id(v)]] for v in fixed]
        args, kwargs = _arranged(keras, model, given)
        mode = {"training": train} if has_mode else {}
        with _holding(keras, model, names):
            trainable = [weights[name] for name in trained]
            outputs, new, added = model.stateless_call(
                trainable, rest, *args, **kwargs, **mode, return_losses=True
            )
        seen.update({"mask"} if keras.src.backend.get_keras_mask(outputs) is not None else ())
        seen.update({"added"} if added else ())
        if shapes := [shape for term in added if (shape := jnp.shape(term))]:
            raise RecipeError("keras-added-loss", model=kind, shape=shapes[0])
        values = {id(v): x for v, x in zip(fixed, new, strict=True)}
        if train:
            state = adapter.nested({name: values[id(v)] for name, v in other.items()}, "/")
        return outputs, state, sum(added) if added and train else None

    kind = type(model).__name__
    built = columns.task("keras", kind, init, with_loss(forward, judge, kind))
    read = _read(keras, columns, built, has_mode)
    if loss is None:
        read["loss"] = f"{adapter.shown_loss(given)}, as compiled"
        read["optimizer"] = f"the recipe's, not the compiled {type(model.optimizer).__name__}"
    built = adapter.stated(built, kind, given, read)
    return _with_seen(built, seen, metrics, [adapter.name_of(given)] * (judge is given))


@as_annotated
def to_model(model: Any, params: Tree, state: Tree) -> Any:
    """Writes trained weights and statistics into `model` and returns it.

    Raises `RecipeError` if the weights do not fit the model. Then it has written nothing.
    """
    keras_library()
    trained, other, _ = _variables(model)
    new = []
    for kind, variables, tree in (("parameters", trained, params), ("state", other, state)):
        values = adapter.fitting(tree, "/", {n: tuple(v.shape) for n, v in variables.items()}, kind)
        new += [(variable, np.asarray(values[name])) for name, variable in variables.items()]
    for variable, value in new:
        variable.assign(value)
    return model


def keras_library() -> Any:
    """Keras on JAX. Raises `RecipeError` if it is missing or runs on another backend."""
    if "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = library("keras", "adapter-library", command=INSTALL)
    if (backend := keras.backend.backend()) != "jax":
        expected = "jax: set KERAS_BACKEND=jax before keras is imported"
        raise invalid("keras-backend", "the backend of Keras", backend, expected)
    return keras


@contextlib.contextmanager
def _holding(keras: Any, model: Any, names: dict[int, str]) -> Iterator[None]:
    """A context in which batch norm with frozen statistics uses them, as in a Keras layer that is
    not trainable. *Arguments:* `names` of the variables by their `id`."""
    norms = [
        one for one in model._flatten_layers() if isinstance(one, keras.layers.BatchNormalization)
    ]
    held = [n for n in norms if n.trainable and freezing.holds([names.get(id(n.moving_mean), "")])]
    try:
        for norm in held:
            norm._trainable = False  # the property would turn parameters into statistics
        yield
    finally:
        for norm in held:
            norm._trainable = True


def _check_methods(keras: Any, model: Any) -> None:
    """Raises `RecipeError` if the model's class overrides a method of Keras' own loop."""
    methods = ("train_step", "test_step", "compute_loss", "compute_metrics")
    kind = type(model)
    if names := [n for n in methods if getattr(kind, n) is not getattr(keras.Model, n)]:
        raise RecipeError("keras-own-step", model=kind.__name__, names=names)


def _check(keras: Any, model: Any) -> None:
    """Raises `RecipeError` for what Keras' own loop does around the model's `call`, and the step
    does not."""
    layers = model._flatten_layers()
    beside = {
        "keras-own-metrics": [metric.name for layer in layers for metric in layer._metrics],
        "keras-constraint": [v.path for v in model.trainable_variables if v.constraint is not None],
        "keras-mixed-precision": [
            layer.name for layer in layers if layer.compute_dtype != layer.variable_dtype
        ],
        "keras-eager": ["run_eagerly"] * model.run_eagerly,
    }
    for code, names in beside.items():
        if names:
            raise RecipeError(code, model=type(model).__name__, names=names)


def _loss(keras: Any, model: Any, loss: Any) -> Any:
    """The given or compiled loss, as an object or a function."""
    given = loss if loss is not None else getattr(model, "loss", None)
    if given is None:
        raise RecipeError("keras-no-loss", model=type(model).__name__)
    return _named(keras.losses, given, "keras-loss-unknown")


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


def _metrics(keras: Any, model: Any, given: Any) -> dict[str, Callable]:
    """Metrics `given`, else those that the model was compiled with, as `(outputs, target) ->
    values`. Without sample weights the weighted ones are like the others."""
    metrics: dict[str, Callable] = {}
    lists = [given]
    if given is None and (compiled := getattr(model, "_compile_metrics", None)) is not None:
        lists = [compiled._user_metrics, compiled._user_weighted_metrics]
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
        better = _BETTER.get(getattr(one, "_direction", ""))
        mean = keras.metrics.MeanMetricWrapper
        if isinstance(one, mean) and type(one).update_state is mean.update_state:
            one = functools.partial(one._fn, **one._fn_kwargs)
        if not callable(one) or isinstance(one, keras.metrics.Metric):
            raise RecipeError("keras-metric", model=type(model).__name__, metric=str(name))
        metrics[name] = functools.partial(_values, keras, one, better)
    return metrics


def _is_keras(keras: Any, one: Any) -> bool:
    """Whether a loss or metric is Keras' own, which takes the target first."""
    own = isinstance(one, (keras.metrics.Metric, keras.losses.Loss))
    return own or str(getattr(one, "__module__", "")).startswith("keras")


def _accuracy(keras: Any, target: Any, outputs: Any) -> Any:
    return getattr(keras.metrics, _accuracy_of(keras, target, outputs))(target, outputs)


def _accuracy_of(keras: Any, target: Any, outputs: Any) -> str:
    """The accuracy that Keras takes for these shapes: the binary, categorical or sparse one."""
    choose = keras.src.trainers.compile_utils.is_binary_or_sparse_categorical
    binary, sparse = choose(target, outputs)
    kind = "binary" if binary else "sparse_categorical" if sparse else "categorical"
    return f"{kind}_accuracy"


def _read(keras: Any, columns: Data, built: Task, has_mode: bool) -> dict[str, str]:
    """The mode, and the names of the metrics with the accuracy that "accuracy" is."""
    read = {"mode": "training=True in training"} if has_mode else {}
    metrics = columns.metrics or {}
    if not any(map(_is_accuracy, metrics.values())):
        return read
    model = jax.eval_shape(built.init, jax.eval_shape(lambda: jax.random.key(0)))
    rows = rows_of(spec_of(columns.train), 2)
    target = columns.judged()
    inputs = {name: column for name, column in rows.items() if name != "label"}
    assert built.predict is not None  # `Data.task` has made one
    taken = _accuracy_of(keras, target, jax.eval_shape(built.predict, *model, inputs))
    names = [f"{n} ({taken})" if _is_accuracy(one) else n for n, one in metrics.items()]
    return read | {"metrics": ", ".join(names)}


def _with_seen(built: Task, seen: set[str], metrics: Mapping[str, Any], own: list[str]) -> Task:
    """`built` with what its call has shown: losses that layers add, in training alone, and a mask,
    which is left to functions of `(outputs, target)`. *Arguments:* `own`: the loss, if it is one.
    """
    own = own + [n for n, one in metrics.items() if getattr(one, "func", None) is not _values]
    more = {"added losses": "in training alone"} if "added" in seen else {}
    if own and "mask" in seen:  # Keras would leave out what is masked
        more["mask"] = f"left to {', '.join(own)}"
    return dataclasses.replace(built, read={**built.read, **more})


def _is_accuracy(metric: Any) -> bool:
    """Whether it is a metric of `_metrics` whose kind follows from the shapes."""
    inner = metric.args[1] if getattr(metric, "func", None) is _values else None
    return getattr(inner, "func", None) is _accuracy


def _values(keras: Any, metric: Callable, better: str | None, outputs: Any, target: Any) -> Sum:
    """The sum of a metric's values over what is not masked, as Keras counts them."""
    mask = keras.src.backend.get_keras_mask(outputs) if hasattr(outputs, "dtype") else None
    if mask is None:
        return dataclasses.replace(_summed(keras, metric, target, outputs), better=better)
    values = _with_promotion(keras, metric, target, outputs)
    with own_promotion():
        values, weights = keras.src.metrics.reduction_metrics.reduce_to_samplewise_values(
            values, mask, keras.ops.mean, "float32"
        )
    return Sum(jnp.sum(values), jnp.sum(weights), better=better)


def _judge(keras: Any, model: Any, given: Any, compiled: bool) -> Callable:
    """The loss as `(outputs, target) -> Sum`. Keras calls its own losses, and those that a model
    was compiled with, with the target first, both in float32 and of one rank."""
    weight = None
    own = isinstance(given, keras.losses.Loss)
    if own and given.reduction == "sum":
        raise RecipeError("keras-loss-summed", loss=type(given).__name__)
    if not (compiled or _is_keras(keras, given)):
        return given
    if compiled:
        weights = keras.tree.flatten(model._compile_loss._user_loss_weights)
        if not callable(given) or len(weights) != 1:
            raise RecipeError("keras-loss-of-outputs", model=type(model).__name__)
        (weight,) = weights
    if not own:  # as Keras does: it leaves out what is masked, and (b,) - (b, 1) would be (b, b)
        given = keras.src.losses.losses.LossFunctionWrapper(given)

    def judge(outputs: Any, target: Any) -> Sum:
        if compiled or not own:  # Keras would add the losses of several outputs
            single = keras.tree.flatten((outputs, target))
            if len(single) != 2:
                raise RecipeError("keras-loss-of-outputs", model=type(model).__name__)
            outputs, target = single
        value = _summed(keras, given, target, outputs)
        return value if weight is None else Sum(value.total * weight, value.count)

    return judge


def _summed(keras: Any, function: Callable, target: Any, outputs: Any) -> Sum:
    examples = len(jax.tree.leaves(target)[0])
    return adapter.as_sum(_with_promotion(keras, function, target, outputs), examples)


def _with_promotion(keras: Any, loss: Callable, target: Any, outputs: Any) -> Any:
    def widened(x: Any) -> Any:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        keras.src.backend.set_keras_mask(wide, keras.src.backend.get_keras_mask(x))
        return wide

    wide = jax.tree.map(widened, outputs)
    with own_promotion():
        return loss(target, wide)


def _build(keras: Any, model: Any, columns: Data) -> None:
    """Builds a model that has no variables yet, for the shapes of the data."""
    if model.built and (model.weights or not model.layers):
        return
    given = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), columns.one())
    given = _arranged(keras, model, given)
    try:
        with own_promotion():
            model(*given.args, **given.kwargs)
    except (TypeError, ValueError) as error:
        raise adapter.uncalled(model.name, given, error) from error


def _arranged(keras: Any, model: Any, given: Arguments) -> Arguments:
    """Arranges arguments for the call of the model. Keras' models take one argument, which may be a
    list or a dict of arrays.

    *Arguments:* `given`: `args` in the order of the model's inputs, or `kwargs` by their names.
    Columns that the model does not read are left out.
    """
    args, kwargs = given
    # The user's class, or Sequential
    if all(kind.__name__ != "Functional" for kind in type(model).__mro__):
        known = [
            n for n in inspect.signature(model.call).parameters if n not in ("training", "mask")
        ]
        if kwargs and set(known) <= set(kwargs):
            return Arguments(args, {name: kwargs[name] for name in known})
        if len(known) != 1:
            return given
        return Arguments((kwargs or (args if len(args) > 1 else args[0]),))
    if len(args) == 1 and isinstance(args[0], (list, tuple, Mapping)):
        (whole,) = args
        args, kwargs = ((), dict(whole)) if isinstance(whole, Mapping) else (tuple(whole), {})
    names = [tensor.name for tensor in model.inputs]
    if kwargs:
        args = tuple(kwargs[name] for name in names if name in kwargs)
    if len(args) != len(names):
        columns = sorted(kwargs) or [f"{len(args)} without names"]
        raise RecipeError(
            "keras-inputs", model=type(model).__name__, names=names, columns=columns, first=names[0]
        )
    return Arguments((keras.tree.pack_sequence_as(model.input, list(args)),))


def _variables(model: Any) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """The trained variables and the others by name, and the states of seed generators.

    Keras numbers layers over the whole process ("conv2d_7"). Here they are numbered within the
    model, so that names do not depend on what ran before.
    """
    seen: dict[str, int] = {}
    shown = {model.name: ""}
    for layer in model._flatten_layers(include_self=False):
        kind = re.sub(
            r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(layer).__name__
        ).lower()
        plain = re.sub(r"_\d+$", "", layer.name)
        if plain.replace("_", "") == kind.replace("_", ""):
            number = seen.get(plain, 0)
            seen[plain] = number + 1
            shown.setdefault(layer.name, f"{plain}_{number}" if number else plain)

    def named(variables: list[Any]) -> dict[str, Any]:
        by_name: dict[str, Any] = {}
        for v in variables:
            parts = [shown.get(part, part) for part in v.path.split("/")]
            name = "/".join(part for part in parts if part)
            while name in by_name:
                name += "_"
            by_name[name] = v
        return by_name

    seeds = [v for v in model.non_trainable_variables if v.path.endswith("seed_generator_state")]
    drawn = {id(v) for v in seeds}
    others = [v for v in model.non_trainable_variables if id(v) not in drawn]
    return named(model.trainable_variables), named(others), seeds
