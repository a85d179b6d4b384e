"""Keras models with several inputs, and what they were compiled with."""

import os

import jax
import numpy as np
import pytest

import chipwise as cw
from refusals import refused

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")

RNG = np.random.default_rng(0)
A, C = RNG.normal(size=(24, 4)).astype(np.float32), RNG.normal(size=(24, 2)).astype(np.float32)
LABEL = RNG.integers(0, 3, 24)
DATA = cw.Arrays(a=A, c=C, id=np.arange(24), label=LABEL, classes=3)
RENAMED = cw.Arrays(left=A, right=C, label=LABEL, classes=3)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def functional(structure):
    keras.utils.set_random_seed(0)
    a, c = keras.Input((4,), name="a"), keras.Input((2,), name="c")
    out = keras.layers.Dense(3)(keras.layers.Concatenate()([a, c]))
    return keras.Model(structure(a, c), out)


class OfOne(keras.Model):
    """One argument, as Keras has it: a dict, a tuple or a list."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, inputs, training=False):
        a, c = (inputs["a"], inputs["c"]) if isinstance(inputs, dict) else inputs
        return self.dense(keras.ops.concatenate([a, c], axis=1))


class OfTwo(OfOne):
    def call(self, a, c):
        return self.dense(keras.ops.concatenate([a, c], axis=1))


MODELS = {
    "list": lambda: functional(lambda a, c: [a, c]),
    "turned": lambda: functional(lambda a, c: [c, a]),
    "tuple": lambda: functional(lambda a, c: (a, c)),
    "dict": lambda: functional(lambda a, c: {"a": a, "c": c}),
    "class of one": OfOne,
    "class of two": OfTwo,
}


def expected(kind, model):
    inputs = {"turned": [C, A], "dict": {"a": A, "c": C}}.get(kind, [A, C])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return np.asarray(model(*inputs) if kind == "class of two" else model(inputs))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("data", "inputs"),
    [
        (DATA, None),  # by name, without the columns that the model does not read
        (RENAMED, ("left", "right")),
        (RENAMED, ["left", "right"]),
        (RENAMED, {"a": "left", "c": "right"}),
        (RENAMED, lambda batch: (batch["left"], batch["right"])),
        (RENAMED, lambda batch: {"a": batch["left"], "c": batch["right"]}),
    ],
    ids=["names", "tuple", "list", "dict", "function", "function of a dict"],
)
def test_several_inputs(kind, data, inputs):
    model = MODELS[kind]()
    if kind == "turned" and isinstance(inputs, (tuple, list)):
        inputs = tuple(reversed(inputs))
    elif callable(inputs) and kind == "turned":
        inputs = {"c": "right", "a": "left"}
    task = cw.keras.task(model, LOSS, train=data, inputs=inputs)
    params, state = task.init(jax.random.key(0))
    ours = task.predict(params, state, {n: c for n, c in data.columns.items() if n != "label"})
    np.testing.assert_allclose(ours, expected(kind, model), rtol=1e-5, atol=1e-6)


def test_inputs_that_the_data_lacks_are_named():
    with refused(cw.errors.RecipeError, "keras-inputs", names=["a", "c"], columns=["left", "right"]):
        cw.keras.task(MODELS["list"](), LOSS, train=RENAMED)
    with refused(cw.errors.RecipeError, "keras-inputs", names=["a", "c"]):
        cw.keras.task(MODELS["dict"](), LOSS, train=RENAMED, inputs="left")


def compiled(metrics, loss="sparse_categorical_crossentropy", last="softmax"):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, last)])
    model.compile(optimizer="adam", loss=loss, metrics=metrics)
    return model


def test_compiled_metrics_are_those_of_keras():
    top = keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top")
    model = compiled(["accuracy", top])
    data = cw.Arrays(x=A, label=LABEL, classes=3)
    task = cw.keras.task(model, train=data)
    sums, _ = task.loss(*task.init(jax.random.key(0)), {"x": A, "label": LABEL.astype(np.int32)}, None, False)
    assert set(sums) == {"loss", "accuracy", "top"}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        own = model.evaluate(A, LABEL, verbose=0, return_dict=True)
    for name, value in own.items():
        np.testing.assert_allclose(sums[name].total / sums[name].count, value, rtol=1e-5)
    listed = cw.keras.task(compiled(None), train=data, metrics=["accuracy", top])
    again, _ = listed.loss(*listed.init(jax.random.key(0)), {"x": A, "label": LABEL}, None, False)
    assert {name: float(s.total) for name, s in again.items()} == {n: float(s.total) for n, s in sums.items()}
    own = cw.keras.task(model, train=data, metrics={"right": cw.losses.correct})
    assert set(own.loss(*own.init(jax.random.key(0)), {"x": A, "label": LABEL}, None, False)[0]) == {
        "loss",
        "right",
    }


@pytest.mark.parametrize("metric", ["AUC", keras.metrics.Precision()])
def test_a_compiled_metric_that_is_no_mean_is_refused_by_name(metric):
    name = metric if isinstance(metric, str) else metric.name
    with refused(cw.errors.RecipeError, "keras-metric", metric=name):
        cw.keras.task(compiled([metric]), train=cw.Arrays(x=A, label=LABEL, classes=3))
    with refused(cw.errors.RecipeError, "keras-metric", metric=name):
        cw.keras.task(compiled(None), train=cw.Arrays(x=A, label=LABEL, classes=3), metrics=[metric])
