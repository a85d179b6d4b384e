"""The parts that the adapters of all frameworks share: a model's columns, any loss as a `Sum`, and
the `Task`.

A framework's module provides `init(key) -> (params, state)` and a function `Scored`. The rest is
the same for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from ..base import RecipeError, invalid, near
from ..models.last_activation import PROBABILITIES, last_activation
from ..recipe.source import Source, number_of_classes, rows_of, spec_of
from ..recipe.task import Sum, Task, Tree
from ..recipe.user_code import reason_of, user_code, where_of

Batch = Mapping[str, jax.Array]


class Arguments(NamedTuple):
    """The arguments of a call of a model, each with a batch axis."""

    args: tuple = ()
    kwargs: Mapping[str, Any] = {}


Scored = Callable[..., tuple[Sum, Any, Tree]]
"""`(params, state, given, target, key, train) -> (loss, outputs, state)`. With `target` None
there is no loss (`Sum` of nothing), and `key` may be None."""


Judging = Annotated[
    Callable, "a function of (outputs, target), such as cw.losses.softmax_cross_entropy"
]


@dataclass(frozen=True)
class Data:
    """The data of a task, and the columns that the model and the loss read.

    *Fields:*

    - `train`, `eval`, `augment`, `mix`, `classes`, `better`, `eval_group`: as in `Task`.
    - `inputs`: the model's arguments. One of a column's name, a tuple or list of names in the order
      of the arguments, a dict of an argument's name to a column's, or a function of the batch (a
      dict of arrays) that returns an array, a tuple of arguments or a dict of keyword arguments.
      None means every column but the target, by name if there are several. If `target` is a
      function, every column but `label`.
    - `target`: the second argument of the loss and the metrics: a column's name or a function of
      the batch. In bf16 and f16 it keeps its digits.
    - `metrics`: name to `(outputs, target) -> values (batch,)` or a `Sum`, such as
      `{"accuracy": cw.losses.correct}`.
    """

    train: Source
    eval: Source | None = None
    inputs: Any = None
    target: Any = "label"
    metrics: Mapping[str, Callable] | None = None
    augment: Callable | None = None
    mix: Callable | None = None
    classes: int | None = None
    better: Mapping[str, str] = dataclasses.field(default_factory=dict)
    eval_group: int = 1

    def arguments(self, batch: Batch, params: Tree) -> Arguments:
        """The model's arguments. Casts floating-point arrays to the dtype of its parameters."""
        names = self.inputs
        if names is None:
            target = self.target if isinstance(self.target, str) else "label"
            names = tuple(name for name in sorted(batch) if name != target)
            if len(names) > 1:
                return Arguments(kwargs=_in_dtype({name: batch[name] for name in names}, params))
        if isinstance(names, str):
            names = (names,)
        if isinstance(names, (tuple, list)):
            given: Any = tuple(_column(batch, name) for name in names)
        elif isinstance(names, Mapping):
            given = {name: _column(batch, column) for name, column in names.items()}
        else:
            given = _read(names, batch, "inputs")
        if isinstance(given, Mapping | tuple | list) and not given:
            expected = f"some of the columns {sorted(batch)}"
            raise invalid("adapter-no-inputs", "inputs", names, expected)
        if isinstance(given, Mapping):
            if wrong := [name for name in given if not isinstance(name, str)]:
                expected = "a dict of the names of the model's arguments, {'x': 'column'}"
                raise invalid("adapter-argument-names", "inputs", wrong, expected)
            return Arguments(kwargs=_in_dtype(dict(given), params))
        several = isinstance(given, (tuple, list))
        return Arguments(_in_dtype(tuple(given) if several else (given,), params))

    def wanted(self, batch: Batch) -> Any:
        """The target that the outputs are compared with."""
        named = isinstance(self.target, str)
        return _column(batch, self.target) if named else _read(self.target, batch, "target")

    def prepared(self, batch: Mapping[str, Any]) -> Batch:
        """A batch after `augment` and `mix`, with keys that are always the same."""
        batch = {name: jnp.asarray(column) for name, column in batch.items()}
        keys = jax.random.split(jax.random.key(0), 1 + len(next(iter(batch.values()))))
        if self.augment is not None:
            with user_code("Task.augment", batch):
                batch = jax.vmap(self.augment)(batch, keys[1:])
        if self.mix is not None:
            with user_code("Task.mix", batch):
                batch = self.mix(batch, keys[0])
        return batch

    def read(self) -> dict[str, str]:
        """The columns and the metrics, as a run shows and stores them."""
        names = self.inputs
        if names is None:
            target = self.target if isinstance(self.target, str) else "label"
            names = [name for name in sorted(spec_of(self.train)) if name != target]
        shown = {"inputs": names, "target": self.target, "metrics": list(self.metrics or ())}
        return {name: text for name, one in shown.items() if (text := _shown(one))}

    def one(self, rows: int = 1) -> Arguments:
        """The shapes of the model's arguments for one example, or several."""
        self.judged()  # if its column is not there, the model would get it
        batch = rows_of(spec_of(self.train), rows)
        return jax.eval_shape(lambda batch: self.arguments(batch, {}), batch)

    def judged(self) -> Any:
        """The shapes of the target of two examples in training."""
        two = rows_of(spec_of(self.train), 2)
        return jax.eval_shape(lambda batch: self.wanted(self.prepared(batch)), two)

    def task(self, framework: str, model: str, init: Callable, scored: Scored) -> Task:
        """The `Task`. Messages and comparisons of runs name it by the framework and the model's
        class."""
        metrics = {} if self.metrics is None else self.metrics
        if (
            not isinstance(metrics, Mapping)
            or "loss" in metrics
            or not all(map(callable, metrics.values()))
        ):
            expected = "functions of (outputs, target) by name, {'accuracy': f}, none called loss"
            given = sorted(metrics) if isinstance(metrics, Mapping) else metrics
            raise invalid("adapter-metrics", "metrics", given, expected)

        def loss(params: Tree, state: Tree, batch: Batch, key: Any, train: bool):
            given = self.arguments(batch, params)
            target = self.wanted(batch)
            value, outputs, state = scored(params, state, given, target, key, train)
            count = examples(given)
            sums = {"loss": value}
            for name, metric in metrics.items():
                with user_code(f"metrics['{name}']"):
                    sums[name] = as_sum(metric(outputs, target), count)
            return sums, state

        def predict(params: Tree, state: Tree, inputs: Batch) -> Any:
            if "label" not in inputs and "label" in _named(self.inputs):
                raise RecipeError("adapter-label-input", model=model, inputs=str(self.inputs))
            given = self.arguments(inputs, params)
            return scored(params, state, given, None, None, False)[1]

        loss.__qualname__ = f"{framework}.{model}.loss"
        init.__qualname__ = f"{framework}.{model}.init"
        # Which columns a function reads is not known. `arguments` casts what the model gets.
        targets = (self.target,) if isinstance(self.target, str) else spec_of(self.train)
        classes = self.classes if self.classes is not None else number_of_classes(self.train)
        return Task(
            init=init,
            loss=loss,
            predict=predict,
            train=self.train,
            eval=self.eval,
            augment=self.augment,
            mix=self.mix,
            classes=classes,
            better=self.better,
            eval_group=self.eval_group,
            class_names=tuple(getattr(self.train, "class_names", ())),
            framework=framework,
            uncast=("label", *targets),
            read={"model": f"{model} of {framework}", **self.read()},
        )


def stated(task: Task, model: str, loss: Any, read: Mapping[str, str] = {}) -> Task:
    """`task` with the kind of values that its `predict` returns, derived from its last operation
    and from the values that `loss` takes. `read`: what else was read, for `Task.read`.

    Raises `RecipeError` if the model ends in a softmax or sigmoid and the loss applies one again,
    or in logits where the loss takes probabilities. Both would train, and badly.
    """
    spec = {name: s for name, s in spec_of(task.train).items() if name != "label"}
    first = jax.eval_shape(task.init, jax.eval_shape(lambda: jax.random.key(0)))
    assert task.predict is not None  # `Data.task` has made one
    traced = jax.make_jaxpr(task.predict)(*first, rows_of(spec, 2)).jaxpr
    last = last_activation(traced)
    takes = _takes(loss)
    facts = {"model": model, "last": last, "loss": name_of(loss)}
    if last in PROBABILITIES and takes in PROBABILITIES:
        raise RecipeError("activation-twice", **facts)
    if last in ("linear", "log-softmax") and takes == "probabilities":
        raise RecipeError("loss-of-probabilities", **facts)
    if last in ("linear", *PROBABILITIES) and takes == "log-softmax":
        raise RecipeError("loss-of-log-probabilities", **facts)
    returns: str | None = "values"
    if last in PROBABILITIES or takes == "probabilities":
        returns = "probabilities"
    elif takes is not None:
        returns = "logits"
    elif [v.aval.shape for v in traced.outvars] == [(2, task.classes)]:
        # Otherwise only the outputs themselves say it, in `predict`
        returns = "logits" if last in ("linear", "log-softmax") else None
    read = {**task.read, "loss": shown_loss(loss), **read, "outputs": returns or "not stated"}
    return dataclasses.replace(task, returns=returns, read=read)


_TAKES = {
    "softmax": (
        "crossentropyloss crossentropy softmaxcrossentropy softmaxcrossentropywithintegerlabels "
        "weightedsoftmaxcrossentropy safesoftmaxcrossentropy"
    ),
    "sigmoid": (
        "bcewithlogitsloss binarycrossentropywithlogits sigmoidbinarycrossentropy "
        "sigmoidcrossentropy sigmoidfocalloss"
    ),
    "log-softmax": "nllloss",
    "probabilities": (
        "bceloss binarycrossentropy categoricalcrossentropy sparsecategoricalcrossentropy "
        "binaryfocalcrossentropy categoricalfocalcrossentropy"
    ),
}
"""The activation that losses of PyTorch, Keras, optax and chipwise apply to the outputs themselves,
"log-softmax" or "probabilities" for losses of what these give."""


def _takes(loss: Any) -> str | None:
    from_logits = getattr(loss, "from_logits", False)  # of Keras
    while isinstance(loss, functools.partial):
        from_logits = loss.keywords.get("from_logits", from_logits)
        loss = loss.func
    name = name_of(loss).lower().replace("_", "")
    if from_logits is True:
        return "sigmoid" if name.startswith("binary") else "softmax"
    library = str(getattr(loss, "__module__", "")).partition(".")[0]
    known = library in ("torch", "keras", "optax", "chipwise")
    return next((takes for takes, names in _TAKES.items() if known and name in names.split()), None)


def with_loss(forward: Callable, loss: Callable, model: str) -> Scored:
    """`Scored` for a `model` in JAX.

    *Arguments:* `forward`:
    `(params, state, given, key, train) -> (outputs, state, penalty)`. In training, `penalty`
    is added to the mean loss unless it is None. `loss`: `(outputs, target) ->` a `Sum`, a value for
    each example, or their mean `()`.
    """
    if not callable(loss):
        raise RecipeError("adapter-loss", given=repr(loss))

    def scored(params, state, given, target, key, train):
        with own_promotion(), user_code(called_with(model, given)):
            outputs, state, penalty = forward(params, state, given, key, train)
        if target is None:
            return Sum(0.0, 0.0), outputs, state
        with user_code(f"The loss of {model}"):
            value = as_sum(loss(outputs, target), examples(given))
        if penalty is not None:
            value = Sum(value.total + penalty.astype(value.total.dtype) * value.count, value.count)
        return value, outputs, state

    return scored


def as_sum(value: Any, examples: int) -> Sum:
    """The `Sum` of a loss: a `Sum` as it is, values `(batch, ...)` summed, a mean `()` times
    `examples`."""
    if isinstance(value, Sum):
        return value
    value = jnp.asarray(value)
    if value.ndim == 0:
        return Sum(value * examples, jnp.float32(examples))
    return Sum(jnp.sum(value), jnp.float32(value.size))


@contextlib.contextmanager
def own_promotion() -> Iterator[None]:
    """Allows JAX's default promotion of dtypes and ranks, which frameworks rely on, if the program
    forbids it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def nested(flat: Mapping[str, Any], separator: str) -> Tree:
    """Turns `{"a.b": 1}` into `{"a": {"b": 1}}`."""
    return unflatten_dict(flat, sep=separator)


def flattened(tree: Tree, separator: str) -> dict[str, Any]:
    """The inverse of `nested`."""
    return flatten_dict(tree, sep=separator)


def fitting(
    tree: Tree, separator: str, expected: Mapping[str, tuple[int, ...]], what: str
) -> dict[str, Any]:
    """The leaves of `tree` by name. Raises `RecipeError` if names or shapes differ from
    `expected`."""
    given = flattened(tree, separator)
    for name, shape in expected.items():
        if name not in given:
            raise RecipeError(
                "adapter-weight-missing", what=what, name=name, near=near(name, given)
            )
        if (own := tuple(np.shape(given[name]))) != tuple(shape):
            raise RecipeError(
                "adapter-weight-shape", what=what, name=name, shape=own, expected=tuple(shape)
            )
    if unknown := sorted(set(given) - set(expected)):
        raise RecipeError("adapter-weight-unknown", what=what, names=unknown)
    return {name: given[name] for name in expected}


def examples(given: Arguments) -> int:
    """How many examples these arguments of a model have."""
    return jax.tree.leaves(given)[0].shape[0]  # of any size in an export


def not_a_model(framework: str, given: Any, expected: str) -> RecipeError:
    """The error for a `given` that is no model."""
    return RecipeError("adapter-no-model", framework=framework, given=given, expected=expected)


def uncalled(model: str, given: Arguments, error: Exception) -> RecipeError:
    """The error for a model that fails in its own framework."""
    called = called_with(model, given)
    facts = {"reason": reason_of(error), "where": where_of(error)}
    return RecipeError("adapter-call-fails", model=called, **facts)


def name_of(loss: Any) -> str:
    """How messages call a loss."""
    return getattr(loss, "__name__", type(loss).__name__)


def shown_loss(loss: Any) -> str:
    """A loss as a run shows it, such as "BinaryCrossentropy(from_logits=True)"."""
    logits = getattr(loss, "from_logits", None)  # of Keras
    return name_of(loss) + ("" if logits is None else f"(from_logits={logits})")


def unjudged(loss: Any, outputs: Any, target: Any, error: Exception) -> RecipeError:
    """The error for a `loss` that fails in its own framework, at what the model returns."""
    return RecipeError(
        "adapter-loss-fails",
        loss=name_of(loss),
        outputs=_shapes(outputs),
        target=_shapes(target),
        reason=reason_of(error),
        where=where_of(error),
    )


def called_with(model: str, given: Arguments) -> str:
    """How messages call a model with its arguments."""
    return f"{model}, called with {_shapes(given)},"


def _shown(columns: Any) -> str:
    """Names of columns, or the function that reads them, in a line."""
    if isinstance(columns, Mapping):
        return ", ".join(f"{name}={_shown(one)}" for name, one in columns.items())
    if isinstance(columns, (tuple, list)):
        return ", ".join(map(_shown, columns))
    return columns if isinstance(columns, str) else f"by {name_of(columns)}"


def _shapes(arrays: Any) -> str:
    """The dtype and shape of each array, of any framework: "float32[8, 3], int32[8]"."""
    return ", ".join(
        f"{str(x.dtype).rpartition('.')[2]}{list(x.shape)}" if hasattr(x, "dtype") else repr(x)
        for x in jax.tree.leaves(arrays)
    )


def _named(inputs: Any) -> list[Any]:
    """The columns that `inputs` names."""
    if isinstance(inputs, Mapping):
        return list(inputs.values())
    return list(inputs) if isinstance(inputs, tuple | list) else [inputs]


def _column(batch: Batch, name: Any) -> jax.Array:
    if not isinstance(name, str) or name not in batch:
        raise _absent(batch, name)
    return batch[name]


def _absent(batch: Batch, name: Any) -> RecipeError:
    known = sorted(batch)
    facts = {"column": str(name), "columns": known, "near": near(str(name), known)}
    return RecipeError("adapter-column", **facts)


def _read(function: Any, batch: Batch, what: str) -> Any:
    if not callable(function):
        expected = (
            "a column's name or a function of the batch, such as lambda batch: batch['image']"
        )
        raise invalid("adapter-columns-expected", what, function, expected)
    with own_promotion(), user_code(f"{what}="):
        try:
            given = function(batch)
        except KeyError as error:
            if not error.args or error.args[0] in batch:  # of a dict of the user's own
                raise
            raise _absent(batch, error.args[0]) from error
    leaves = jax.tree.leaves(given) or [given]
    # A model takes arrays. A loss may also read a number of its target, or nothing
    kinds = (int, float, complex, dict, tuple, list) if what == "target" else ()
    for leaf in leaves:
        if not (hasattr(leaf, "dtype") or isinstance(leaf, kinds)):
            raise RecipeError("adapter-returned", what=what, kind=type(leaf).__name__)
    return given


def _in_dtype(given: Any, params: Tree) -> Any:
    floats = [p.dtype for p in jax.tree.leaves(params) if jnp.issubdtype(p.dtype, jnp.floating)]
    if not floats:
        return given

    def one(x: Any) -> Any:
        return x.astype(floats[0]) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(one, given)
