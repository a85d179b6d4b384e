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
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base import RecipeError
from ..base.annotations import as_annotated
from ..recipe import freezing
from ..recipe.source import rows_of, spec_of
from ..recipe.task import Task, Tree
from . import adapter
from .adapter import Arguments, Data, Source, own_promotion, with_loss
from .keras_library import keras_library
from .keras_losses import (
    accuracy_of,
    chosen_judge,
    chosen_loss,
    chosen_metrics,
    is_accuracy,
    of_output,
    shown,
    values_of,
)
from .keras_optimizer import optimizer as optimizer


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
    - `loss`: a Keras loss, its name ("sparse_categorical_crossentropy"), a function
      `(outputs, target)` such as `cw.losses.softmax_cross_entropy`, or a list or dict of these by
      output. None: what the model was compiled with, with its weights. A compiled function is
      called as Keras calls it: with the target first, in float32, and `(b, 1)` if the outputs are.
    - `target`: of several outputs a function that returns a list, or a dict by their names.
    - `metrics`: also a list, as in `model.compile`. None: the metrics that the model was compiled
      with. Keras' own and those of a list are called as Keras calls them, with the target first,
      and leave out what is masked. "accuracy" is the one that Keras takes for the shapes.
    - The others: as in `interop.adapter.Data`. Several inputs are given by their names, in their
      order, or as the model's list or dict.

    Losses that layers add, such as `kernel_regularizer`, are added to the mean loss in training.
    The recipe names the optimizer: the compiled one is `cw.keras.optimizer(model)`. Raises
    `RecipeError` if Keras is missing or does not run on JAX, if losses sum over the batch or do not
    fit the outputs, if a compiled metric is no mean over examples, or if Keras' own loop would do
    what the step does not (`_check_methods`, `_check`).
    """
    keras = keras_library()
    if not isinstance(model, keras.Model):
        raise adapter.not_a_model("keras", repr(model), "a keras.Model")
    _check_methods(keras, model)  # before it is built: it may have no `call`
    _build(keras, model, Data(train, inputs=inputs, target=target))
    _check(keras, model)
    given = chosen_loss(keras, model, loss)
    several = _several(keras, model, given, Data(train, None, inputs, target, {}, augment, mix))
    judge, each = chosen_judge(keras, model, given, compiled=loss is None, several=several)
    metrics = each | chosen_metrics(keras, model, metrics, several)
    columns = Data(train, eval, inputs, target, metrics, augment, mix, classes, better, eval_group)
    trained, other, seeds = variables_of(model)
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
        words = [jax.random.key_data(jax.random.fold_in(key, i)) for i in range(len(seeds))]
        drawn = dict(zip(map(id, seeds), words, strict=True))
        names = {id(v): name for name, v in other.items()}
        fixed = model.non_trainable_variables
        rest = [drawn[id(v)] if id(v) in drawn else held[names[id(v)]] for v in fixed]
        args, kwargs = _arranged(keras, model, given)
        mode = {"training": train} if has_mode else {}
        with _holding(keras, model, names), _in_half(keras, model, weights.values()):
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
    read = {"loss": shown(keras, given)} | _read(keras, columns, built, has_mode)
    read |= _compiled(keras, model, given) if loss is None else {}
    built = adapter.stated(built, kind, of_output(keras, given, several), read)
    return _with_seen(built, seen, metrics, [adapter.name_of(given)] * (judge is given))


@as_annotated
def to_model(model: Any, params: Tree, state: Tree) -> Any:
    """Writes trained weights and statistics into `model` and returns it.

    Raises `RecipeError` if the weights do not fit the model. Then it has written nothing.
    """
    keras_library()
    trained, other, _ = variables_of(model)
    variables = trained | other  # other layers may be frozen than in training
    tree = adapter.flattened(params, "/") | adapter.flattened(state, "/")
    shapes = {name: tuple(v.shape) for name, v in variables.items()}
    values = adapter.fitting(adapter.nested(tree, "/"), "/", shapes, "weights")
    new = [(variable, np.asarray(values[name])) for name, variable in variables.items()]
    for variable, value in new:
        variable.assign(value)
    return model


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


@contextlib.contextmanager
def _in_half(keras: Any, model: Any, weights: Iterable[Any]) -> Iterator[None]:
    """A context in which layers compute in half precision if `weights` have it, as under Keras'
    mixed policy. By the policy float32 they would cast the weights back. A model's last layer of
    softmax or sigmoid stays in float32, as Keras advises."""
    halves = {w.dtype.name for w in weights} & {"bfloat16", "float16"}
    ends = (keras.activations.softmax, keras.activations.sigmoid)
    last = [tensor._keras_history.operation for tensor in getattr(model, "outputs", None) or ()]
    wide = {
        id(one)
        for one in last
        if getattr(one, "activation", None) in ends or isinstance(one, keras.layers.Softmax)
    }
    layers = [
        one
        for one in model._flatten_layers()
        if halves and one.compute_dtype == "float32" and id(one) not in wide
    ]
    before = [layer._dtype_policy for layer in layers]
    try:
        for layer in layers:
            layer._dtype_policy = keras.DTypePolicy(f"mixed_{min(halves)}")
        yield
    finally:
        for layer, policy in zip(layers, before, strict=True):
            layer._dtype_policy = policy


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
        "keras-stateful": [layer.name for layer in layers if getattr(layer, "stateful", False)],
    }
    for code, names in beside.items():
        if names:
            raise RecipeError(code, model=type(model).__name__, names=names)


def _several(keras: Any, model: Any, loss: Any, columns: Data) -> tuple[Any, Any] | None:
    """The target and the outputs, as Keras' shapes of two examples, of a model with several outputs
    or settings by output. Of others it is `None`."""
    by_output = [keras.tree.is_nested(loss), len(getattr(model, "outputs", "")) > 1]
    if (metrics := getattr(model, "_compile_metrics", None)) is not None:
        own = [metrics._user_metrics or (), metrics._user_weighted_metrics or ()]
        by_output += [isinstance(of, Mapping) or any(map(keras.tree.is_nested, of)) for of in own]
    if (losses := getattr(model, "_compile_loss", None)) is not None:
        by_output.append(keras.tree.is_nested(losses._user_loss_weights))
    if not any(by_output):
        return None

    def shaped(tree: Any) -> Any:
        return jax.tree.map(lambda x: keras.KerasTensor(x.shape, x.dtype), tree)

    args, kwargs = _arranged(keras, model, shaped(columns.one(2)))
    outputs = model.compute_output_spec(*args, **kwargs)
    if _is_functional(model) and isinstance(outputs, (list, tuple)) and len(outputs) == 1:
        (outputs,) = outputs  # as its call returns it
    return shaped(columns.judged()), outputs


def _read(keras: Any, columns: Data, built: Task, has_mode: bool) -> dict[str, str]:
    """The mode, and the names of the metrics with the accuracy that "accuracy" is."""
    read = {"mode": "training=True in training"} if has_mode else {}
    metrics = columns.metrics or {}
    if not any(map(is_accuracy, metrics.values())):
        return read
    model = jax.eval_shape(built.init, jax.eval_shape(lambda: jax.random.key(0)))
    rows = rows_of(spec_of(columns.train), 2)
    target = columns.judged()
    inputs = {name: column for name, column in rows.items() if name != "label"}
    assert built.predict is not None  # `Data.task` has made one
    taken = accuracy_of(keras, target, jax.eval_shape(built.predict, *model, inputs))
    names = [f"{n} ({taken})" if is_accuracy(one) else n for n, one in metrics.items()]
    return read | {"metrics": ", ".join(names)}


def _compiled(keras: Any, model: Any, loss: Any) -> dict[str, str]:
    """What was read of a compiled model, and what not."""
    kind = type(model.optimizer).__name__
    optimizer = f"the recipe's; the compiled {kind} is cw.keras.optimizer(model)"
    return {"loss": f"{shown(keras, loss)}, as compiled", "optimizer": optimizer}


def _with_seen(built: Task, seen: set[str], metrics: Mapping[str, Any], own: list[str]) -> Task:
    """`built` with what its call has shown: losses that layers add, in training alone, and a mask,
    which is left to functions of `(outputs, target)`. *Arguments:* `own`: the loss, if it is one.
    """
    own = own + [n for n, one in metrics.items() if getattr(one, "func", None) is not values_of]
    more = {"added losses": "in training alone"} if "added" in seen else {}
    if own and "mask" in seen:  # Keras would leave out what is masked
        more["mask"] = f"left to {', '.join(own)}"
    return dataclasses.replace(built, read={**built.read, **more})


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
    if not _is_functional(model):
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


def _is_functional(model: Any) -> bool:
    """Whether it is no class of the user's, and not Sequential."""
    return any(kind.__name__ == "Functional" for kind in type(model).__mro__)


def variables_of(model: Any) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
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
        own = re.sub("^(for|back)ward_", "", plain)  # of Bidirectional
        if own.replace("_", "") == kind.replace("_", ""):
            number = seen.get(plain, 0)
            seen[plain] = number + 1
            shown.setdefault(layer.name, f"{plain}_{number}" if number else plain)

    def named(variables: list[Any]) -> dict[str, Any]:
        by_name: dict[str, Any] = {}
        for v in variables:
            parts = [
                shown.get(part, part)  # weights without a name are numbered like layers
                for part in re.sub(r"(/variable)_\d+$", r"\1", v.path).split("/")
            ]
            name = "/".join(part for part in parts if part)
            while name in by_name:
                name += "_"
            by_name[name] = v
        return by_name

    seeds = [v for v in model.non_trainable_variables if v.path.endswith("seed_generator_state")]
    drawn = {id(v) for v in seeds}
    others = [v for v in model.non_trainable_variables if id(v) not in drawn]
    return named(model.trainable_variables), named(others), seeds
