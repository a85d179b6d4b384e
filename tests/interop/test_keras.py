"""Keras models with several inputs, and what they were compiled with."""

import functools
import os
import re

import jax
import numpy as np
import pytest

import chipwise as cw
from chipwise.interop.keras import variables_of
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


@pytest.mark.slow
def test_compiled_metrics_are_those_of_keras():
    top = keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top")
    model = compiled(["accuracy", top])
    data = cw.Arrays(x=A, label=LABEL, classes=3)
    task = cw.keras.task(model, train=data)
    sums, _ = task.loss(*task.init(jax.random.key(0)), {"x": A, "label": LABEL.astype(np.int32)}, None, False)
    assert set(sums) == {"loss", "accuracy", "top"} and sums["top"].better == "higher"
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        own = model.evaluate(A, LABEL, verbose=0, return_dict=True)
    for name, value in own.items():
        np.testing.assert_allclose(sums[name].total / sums[name].count, value, rtol=1e-5)
    listed = cw.keras.task(compiled(None), train=data, metrics=["accuracy", top])
    again, _ = listed.loss(*listed.init(jax.random.key(0)), {"x": A, "label": LABEL}, None, False)
    assert {name: float(s.total) for name, s in again.items()} == {n: float(s.total) for n, s in sums.items()}
    own = cw.keras.task(model, train=data, metrics={"right": cw.losses.correct}, better={"right": "higher"})
    assert own.better == {"right": "higher"}
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


# ---- what Keras' own loop does around the network: done, or refused by name


def sequential(*layers, of=keras.Sequential, batch=None, **compile):
    keras.utils.set_random_seed(0)
    model = of([keras.Input((4,), batch), *layers, keras.layers.Dense(3, "softmax")])
    model.compile(**{"loss": "sparse_categorical_crossentropy", **compile})
    return model


def by_the_target(y_true, y_pred):
    """A loss that tells the target from the outputs."""
    return keras.ops.mean(y_pred**2, axis=-1) * keras.ops.cast(y_true, "float32")


def overriding(name):
    return type("Own", (keras.Sequential,), {name: lambda self, *args, **kwargs: 3.0})


class Adding(keras.layers.Layer):
    def __init__(self, added):
        super().__init__()
        self.added = added

    def call(self, x):
        self.add_loss(self.added(x**2))
        return x


class Measuring(keras.Sequential):
    def __init__(self, layers):
        super().__init__(layers)
        self.size = keras.metrics.Mean(name="size")


def under_a_policy():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return sequential()
    finally:
        keras.config.set_dtype_policy("float32")


def of_outputs(number, **compile):
    x = keras.Input((4,))
    model = keras.Model(x, [keras.layers.Dense(3)(x) for _ in range(number)])
    model.compile(**compile)
    return model


DONE = {
    "loss_weights": lambda: sequential(loss_weights=0.1),
    "loss_weights in a list": lambda: sequential(loss_weights=[0.1]),
    "a function that takes the target first": lambda: sequential(loss=by_the_target),
    "such a function with a weight": lambda: sequential(loss=by_the_target, loss_weights=0.5),
    "a loss in a list": lambda: sequential(loss=["sparse_categorical_crossentropy"]),
    "metrics in a list of lists": lambda: sequential(metrics=[["accuracy"]]),
    "weighted_metrics": lambda: sequential(weighted_metrics=["accuracy"]),
    "both metrics": lambda: sequential(
        metrics=["accuracy"], weighted_metrics=["sparse_categorical_crossentropy"]
    ),
    "steps_per_execution": lambda: sequential(steps_per_execution=4),
    "an activity regularizer": lambda: sequential(
        keras.layers.Dense(5, activity_regularizer=keras.regularizers.L2(10.0))
    ),
    "a kernel regularizer": lambda: sequential(
        keras.layers.Dense(5, kernel_regularizer=keras.regularizers.L2(10.0))
    ),
    "add_loss of a mean": lambda: sequential(Adding(keras.ops.mean)),
}


@pytest.mark.parametrize("made", DONE.values(), ids=DONE)
def test_what_keras_does_around_the_network_is_done(made):
    model, data = made(), cw.Arrays(x=A, label=LABEL, classes=3)
    task = cw.keras.task(model, train=data)
    sums, _ = task.loss(*task.init(jax.random.key(0)), {"x": A, "label": LABEL}, jax.random.key(0), True)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        own = model.evaluate(A, LABEL, batch_size=24, verbose=0, return_dict=True)
    assert sums.keys() == own.keys()
    for name, value in own.items():
        np.testing.assert_allclose(sums[name].total / sums[name].count, value, rtol=1e-5)


REFUSED = {
    "train_step": (lambda: sequential(of=overriding("train_step")), "keras-own-step"),
    "test_step": (lambda: sequential(of=overriding("test_step")), "keras-own-step"),
    "compute_loss": (lambda: sequential(of=overriding("compute_loss")), "keras-own-step"),
    "compute_metrics": (lambda: sequential(of=overriding("compute_metrics")), "keras-own-step"),
    "size": (lambda: sequential(of=Measuring), "keras-own-metrics"),
    "dense/kernel": (
        lambda: sequential(keras.layers.Dense(5, kernel_constraint="max_norm", name="dense")),
        "keras-constraint",
    ),
    "dense/bias": (
        lambda: sequential(keras.layers.Dense(5, bias_constraint="non_neg", name="dense")),
        "keras-constraint",
    ),
    "one": (
        lambda: sequential(keras.layers.Dense(5, dtype="mixed_bfloat16", name="one")),
        "keras-mixed-precision",
    ),
    "run_eagerly": (lambda: sequential(run_eagerly=True), "keras-eager"),
    "memory": (
        lambda: sequential(
            keras.layers.Reshape((2, 2)), keras.layers.GRU(3, stateful=True, name="memory"), batch=24
        ),
        "keras-stateful",
    ),
}


@pytest.mark.parametrize("name, case", REFUSED.items(), ids=REFUSED)
@pytest.mark.parametrize("loss", [None, LOSS], ids=["compiled", "given"])
def test_what_only_keras_does_is_refused_by_name(name, case, loss):
    made, code = case
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        model = made()
    with refused(cw.errors.RecipeError, code) as found:
        cw.keras.task(model, loss, train=cw.Arrays(x=A, label=LABEL, classes=3))
    (named,) = found.value.facts["names"]
    assert named.endswith(name)


def test_a_model_of_its_own_step_alone_is_refused_before_it_is_called():
    """As Keras' examples of adversarial nets are: parts, a `train_step`, and no `call`."""
    kind = type("Adversarial", (keras.Model,), {"train_step": lambda self, data: {}})
    with refused(cw.errors.RecipeError, "keras-own-step", model="Adversarial", names=["train_step"]):
        cw.keras.task(kind(), LOSS, train=cw.Arrays(x=A, label=LABEL, classes=3))


@pytest.mark.parametrize(
    "made, code",
    [
        (under_a_policy, "keras-mixed-precision"),
        (lambda: of_outputs(2, loss=["mse", "mae", "mae"]), "keras-loss-of-outputs"),
        (lambda: of_outputs(2, loss={"wrong": "mse"}), "keras-loss-of-outputs"),
        (lambda: of_outputs(2, loss="mse", metrics={"wrong": ["mae"]}), "keras-loss-of-outputs"),
        (lambda: sequential(loss_weights=[0.1, 0.2]), "keras-loss-of-outputs"),
        (lambda: sequential(Adding(lambda x: keras.ops.mean(x, axis=1))), "keras-added-loss"),
    ],
)
def test_what_cannot_be_read_from_a_compiled_model_is_refused(made, code):
    with refused(cw.errors.RecipeError, code):
        cw.keras.task(made(), train=cw.Arrays(x=A, label=LABEL, classes=3))


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, p: keras.ops.square(y - p),
        lambda y, p: keras.ops.full_like(y, 0.5),
        "binary_crossentropy",
        "hinge",
    ],
    ids=["square", "of the target's type", "binary_crossentropy", "hinge"],
)
def test_a_compiled_function_gets_the_target_as_keras_gives_it(loss):
    """In float32 and of one rank: `(b,) - (b, 1)` would be `(b, b)`."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
    model.compile(loss=loss)
    label = (LABEL > 0).astype(np.int32)
    task = cw.keras.task(model, train=cw.Arrays(x=A, label=label))
    sums, _ = task.loss(*task.init(jax.random.key(0)), {"x": A, "label": label}, None, False)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        own = model.evaluate(A, label, batch_size=24, verbose=0)
    np.testing.assert_allclose(sums["loss"].total / sums["loss"].count, own, rtol=1e-5)


@pytest.mark.parametrize("loss", ["mae", lambda y, p: keras.ops.square(y - p)], ids=["name", "function"])
def test_a_compiled_function_leaves_out_what_is_masked(loss):
    keras.utils.set_random_seed(0)
    embedding = keras.layers.Embedding(4, 3, mask_zero=True)
    model = keras.Sequential([keras.Input((5,), dtype="int32"), embedding, keras.layers.Dense(1)])
    model.compile(loss=loss)
    tokens = np.random.default_rng(1).integers(0, 4, (24, 5)).astype(np.int32)
    batch = {"x": tokens, "y": np.where(tokens, 1, 9).astype(np.float32)[..., None]}
    task = cw.keras.task(model, train=cw.Arrays(**batch), target="y")
    sums, _ = task.loss(*task.init(jax.random.key(0)), batch, None, False)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        own = model.evaluate(tokens, batch["y"], batch_size=24, verbose=0)
    np.testing.assert_allclose(sums["loss"].total / sums["loss"].count, own, rtol=1e-5)


@pytest.mark.parametrize("loss", [None, "mse"], ids=["compiled", "given"])
def test_a_list_of_one_output_is_that_output(loss):
    batch = {"x": A, "y": A[:, :3]}
    one = of_outputs(1, loss="mse")
    task = cw.keras.task(one, loss, train=cw.Arrays(**batch), target="y")
    lost = task.loss(*task.init(jax.random.key(0)), batch, None, False)[0]["loss"]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        own = one.evaluate(A, batch["y"], batch_size=24, verbose=0)
    np.testing.assert_allclose(lost.total / lost.count, own, rtol=1e-5)


class OfNone(keras.Model):
    """Keras does not know its outputs beforehand."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return [self.dense(x), self.dense(x)]


def test_one_loss_of_outputs_that_nothing_names_is_refused():
    model, batch = OfNone(), {"x": A, "y": A[:, :3]}
    model.compile(loss="mse")
    task = cw.keras.task(model, train=cw.Arrays(**batch), target="y")
    with refused(cw.errors.RecipeError, "keras-loss-of-outputs"):
        task.loss(*task.init(jax.random.key(0)), batch, None, False)


def by_twice(y_true, y_pred):
    return keras.ops.mean(2 * (y_pred - y_true) ** 2, axis=-1)


EACH = {"kind": "sparse_categorical_crossentropy", "where": "mse"}
BY_OUTPUT = {
    "a dict": {"loss": EACH},
    "a list": {"loss": [*EACH.values()], "loss_weights": [0.3, 2.0]},
    "weights": {"loss": EACH, "loss_weights": {"kind": 0.3, "where": 2.0}},
    "metrics": {"loss": EACH, "metrics": {"kind": ["accuracy"], "where": ["mae", "mse"]}},
    "metrics in a list": {"loss": EACH, "metrics": [["accuracy"], ["mae"]]},
    "weighted metrics": {"loss": EACH, "weighted_metrics": {"where": ["mae"]}},
    "objects": {"loss": {"kind": keras.losses.SparseCategoricalCrossentropy(), "where": by_twice}},
    "of one output alone": {"loss": {"kind": EACH["kind"], "where": None}},
    "one for all": {"loss": "mae", "metrics": {"where": "mse"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["list", "dict"])
@pytest.mark.parametrize("outputs", ["list", "dict", "turned"])
@pytest.mark.parametrize("name", BY_OUTPUT)
@pytest.mark.drawn(share=0.25)
def test_losses_and_metrics_of_each_output_are_those_of_keras(name, outputs, target):
    keras.utils.set_random_seed(0)
    x = keras.Input((4,), name="x")
    kind = keras.layers.Dense(3, "softmax", name="kind")(x)
    where = keras.layers.Dense(2, name="where")(x)
    returned = {"list": [kind, where], "dict": {"kind": kind, "where": where}}
    model = keras.Model(x, returned.get(outputs, {"where": where, "kind": kind}))
    model.compile(**BY_OUTPUT[name])
    first = ONE_HOT if name == "one for all" else LABEL
    targets = [first, C] if target == "list" else {"kind": first, "where": C}

    def wanted(batch):
        both = [batch["kind"], batch["where"]]
        return both if target == "list" else dict(zip(("kind", "where"), both, strict=True))

    batch = {"x": A, "kind": first, "where": C}
    task = cw.keras.task(model, train=cw.Arrays(**batch), inputs="x", target=wanted)
    sums, _ = task.loss(*task.init(jax.random.key(0)), batch, None, False)
    ours = {name: float(s.total / s.count) for name, s in sums.items()}
    assert ours == pytest.approx(own_numbers(model, A, targets), rel=1e-5)
    assert {s.better for n, s in sums.items() if n.endswith("_loss")} <= {"lower"}


def test_given_losses_of_each_output():
    model = of_outputs(2)
    task = cw.keras.task(
        model,
        [keras.losses.MeanSquaredError(), "mae"],
        train=cw.Arrays(x=A, y=A[:, :3]),
        inputs="x",
        target=lambda batch: (batch["y"], batch["y"]),
    )
    sums, _ = task.loss(*task.init(jax.random.key(0)), {"x": A, "y": A[:, :3]}, None, False)
    first, second = (layer.weights for layer in model.layers[1:])
    outputs = [A @ np.asarray(w.value) + np.asarray(b.value) for w, b in (first, second)]
    expected = np.mean((outputs[0] - A[:, :3]) ** 2) + np.mean(np.abs(outputs[1] - A[:, :3]))
    np.testing.assert_allclose(sums["loss"].total / sums["loss"].count, expected, rtol=1e-5)
    with refused(cw.errors.RecipeError, "keras-loss-summed"):
        cw.keras.task(
            model,
            ["mse", keras.losses.MeanSquaredError(reduction="sum")],
            train=cw.Arrays(x=A, y=A[:, :3]),
            inputs="x",
            target=lambda batch: (batch["y"], batch["y"]),
        )


def uneven(outputs, target):
    """A loss of the user's own, which tells the outputs from the target."""
    return jax.numpy.mean((3 * outputs - target) ** 2, axis=-1)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("by", [list, dict])
def test_given_functions_of_each_output_get_the_outputs_first(number, by):
    model, batch = of_outputs(number), {"x": A, "y": A[:, :3]}
    given = [uneven] if number == 1 else ["mse", uneven]
    losses = given if by is list else dict(zip(model.output_names, given, strict=True))
    target = {1: "y", 2: both}[number]
    task = cw.keras.task(model, losses, train=cw.Arrays(**batch), inputs="x", target=target)
    sums, _ = task.loss(*task.init(jax.random.key(0)), batch, None, False)
    weights = [[np.asarray(w.value) for w in layer.weights] for layer in model.layers[1:]]
    *first, own = (A @ kernel + bias for kernel, bias in weights)
    expected = np.mean((3 * own - batch["y"]) ** 2) + sum(np.mean((y - batch["y"]) ** 2) for y in first)
    np.testing.assert_allclose(sums["loss"].total / sums["loss"].count, expected, rtol=1e-5)
    assert task.read["loss"] == ("uneven" if number == 1 else "mse, uneven")


def both(batch):
    return batch["y"], batch["y"]


def test_given_metrics_of_each_output():
    batch = {"x": A, "y": A[:, :3]}
    model = of_outputs(2, loss="mse")
    task = cw.keras.task(model, train=cw.Arrays(**batch), inputs="x", target=both, metrics=[["mae"], ["mse"]])
    sums, _ = task.loss(*task.init(jax.random.key(0)), batch, None, False)
    first, second = model.output_names
    assert set(sums) == {"loss", *(f"{n}_loss" for n in (first, second)), f"{first}_mae", f"{second}_mse"}
    np.testing.assert_allclose(sums[f"{second}_mse"].total, sums[f"{second}_loss"].total, rtol=1e-5)


@pytest.mark.parametrize(
    "metrics, code",
    [
        ({"mine": keras.metrics.MeanSquaredError()}, "keras-loss-of-outputs"),  # of which output?
        ([["AUC"], []], "keras-metric"),
        (["mae", "mae", "mae"], "keras-loss-of-outputs"),
    ],
)
def test_metrics_that_do_not_fit_the_outputs_are_refused(metrics, code):
    batch = {"x": A, "y": A[:, :3]}
    with refused(cw.errors.RecipeError, code):
        task = cw.keras.task(
            of_outputs(2, loss="mse"), train=cw.Arrays(**batch), inputs="x", target=both, metrics=metrics
        )
        task.loss(*task.init(jax.random.key(0)), batch, None, False)


@pytest.mark.slow
@pytest.mark.as_users_compile
def test_several_outputs_train_to_the_bits_of_one_device_on_three():
    keras.utils.set_random_seed(0)
    x = keras.Input((4,), name="x")
    outputs = [keras.layers.Dense(3, "softmax", name="kind")(x), keras.layers.Dense(2, name="where")(x)]
    model = keras.Model(x, outputs)
    model.compile(loss=EACH, metrics={"kind": ["accuracy"]})
    data = cw.Arrays(x=A, kind=LABEL.astype(np.int32), where=C)
    task = cw.keras.task(
        model, train=data, eval=data, inputs="x", target=lambda batch: (batch["kind"], batch["where"])
    )
    recipe = cw.Recipe(task=task, batch=12, replicas=4, duration="5st", optimizer=cw.sgd(lr=0.1))
    one, three = (cw.fit(recipe, on=cw.On(devices=n), progress="none") for n in (1, 3))
    assert one.fingerprint == three.fingerprint and one.metrics == three.metrics
    own = own_numbers(one.to_keras(model), A, [LABEL, C])
    assert {n: one.metrics[f"eval/{n}"] for n in own} == pytest.approx(own, rel=1e-4)


# ---- names within the model, and weights that come back


WRAPPED = {
    "bidirectional": lambda of: of.Bidirectional(of.GRU(3)),
    "two cells": lambda of: of.Bidirectional(of.RNN([of.GRUCell(3), of.LSTMCell(2)])),
    "another way back": lambda of: of.Bidirectional(of.LSTM(3), backward_layer=of.GRU(3, go_backwards=True)),
    "time distributed": lambda of: of.TimeDistributed(of.Dense(3)),
    "a model": lambda of: of.TimeDistributed(keras.Sequential([of.Dense(3), of.Dense(2)])),
    "spectral": lambda of: of.SpectralNormalization(of.Conv1D(3, 2)),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_layers_in_wrappers_are_numbered_within_the_model(name):
    def make():
        layers = [WRAPPED[name](keras.layers), keras.layers.Dense(3)]
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return keras.Sequential([keras.Input((7, 4)), *layers, keras.layers.Flatten()])

    data = cw.Arrays(x=RNG.normal(size=(4, 7, 4)).astype(np.float32), label=np.zeros((4, 1), np.float32))

    def begun(model):
        task = cw.keras.task(model, lambda p, y: keras.ops.mean((p - y) ** 2), train=data)
        return task.init(jax.random.key(0))

    first, second = begun(make()), begun(make())
    assert jax.tree.structure(first) == jax.tree.structure(second)
    back = cw.keras.to_model(make(), *first)
    jax.tree.map(np.testing.assert_array_equal, begun(back), first)


@pytest.mark.parametrize("frozen, after", [(True, False), (False, True), (True, True)])
def test_layers_come_back_whatever_was_frozen(frozen, after):
    def make(holds):
        layers = keras.layers
        body = keras.Sequential([layers.Dense(5), layers.BatchNormalization()])
        model = keras.Sequential([keras.Input((4,)), body, layers.Dense(3)])
        body.trainable = not holds
        return model

    model = make(frozen)
    task = cw.keras.task(model, LOSS, train=cw.Arrays(x=A, label=LABEL, classes=3))
    params, state = (jax.tree.map(lambda x: x + 1, tree) for tree in task.init(jax.random.key(0)))
    back = cw.keras.to_model(make(after), params, state)
    for ours, theirs in zip(back.variables, model.variables, strict=True):
        np.testing.assert_array_equal(ours.value, np.asarray(theirs.value) + 1)


def test_a_given_loss_does_not_take_the_compiled_weight():
    model = sequential(loss_weights=0.1)
    task = cw.keras.task(model, "sparse_categorical_crossentropy", train=cw.Arrays(x=A, label=LABEL))
    plain = cw.keras.task(sequential(), train=cw.Arrays(x=A, label=LABEL))
    ours, theirs = (
        t.loss(*t.init(jax.random.key(0)), {"x": A, "label": LABEL}, None, False)[0]["loss"].total
        for t in (task, plain)
    )
    assert ours == theirs


@pytest.mark.as_users_compile
def test_three_devices_give_the_bits_of_one():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, "relu"), layers.BatchNormalization(), layers.Dense(3)]
    )
    task = cw.keras.task(model, LOSS, train=cw.Arrays(x=A, label=LABEL, classes=3))
    begun = jax.device_get(task.init(jax.random.key(0))[0])
    recipe = cw.Recipe(task=task, batch=12, replicas=4, duration="5st", optimizer=cw.sgd(lr=0.1))
    one, three = (cw.fit(recipe, on=cw.On(devices=n), progress="none") for n in (1, 3))
    assert one.devices["count"] == 1 and three.devices["count"] == 3
    assert one.fingerprint == three.fingerprint
    assert not np.array_equal(one.params["dense"]["kernel"], begun["dense"]["kernel"])


# ---- metrics: which one "accuracy" is, which way its arguments are, and what is masked


def own_numbers(model, x, y):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return model.evaluate(x, y, batch_size=24, verbose=0, return_dict=True)


def our_numbers(task, x, y):
    sums, _ = task.loss(*task.init(jax.random.key(0)), {"x": x, "y": y}, None, False)
    return {name: float(s.total / s.count) for name, s in sums.items()}


ONE_HOT, YES = np.eye(3, dtype=np.float32)[LABEL], (LABEL > 0).astype(np.int32)


@pytest.mark.parametrize("name", ["accuracy", "acc"])
@pytest.mark.parametrize(
    ("loss", "last", "target"),
    [
        ("binary_crossentropy", (1, "sigmoid"), YES),
        ("mse", (1, None), YES[:, None]),
        ("hinge", (1, "tanh"), YES),
        ("binary_crossentropy", (3, "sigmoid"), (RNG.random((24, 3)) < 0.5).astype(np.float32)),
        ("mse", (3, "softmax"), ONE_HOT),
        ("kl_divergence", (3, "softmax"), ONE_HOT),
        ("categorical_focal_crossentropy", (3, "softmax"), ONE_HOT),
        ("sparse_categorical_crossentropy", (3, "softmax"), LABEL[:, None]),
        (lambda y, p: keras.ops.mean(p**2, axis=-1), (3, "softmax"), LABEL),
    ],
)
def test_accuracy_is_the_one_that_keras_takes(name, loss, last, target):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(*last)])
    model.compile(loss=loss, metrics=[name])
    task = cw.keras.task(model, train=cw.Arrays(x=A, y=target), target="y")
    own = own_numbers(model, A, target)
    assert our_numbers(task, A, target) == pytest.approx(own, rel=1e-5) and name in own


@pytest.mark.parametrize(
    "metric",
    [
        keras.metrics.sparse_categorical_accuracy,
        keras.metrics.SparseCategoricalAccuracy(),
        keras.metrics.SparseTopKCategoricalAccuracy(k=2),
        keras.losses.SparseCategoricalCrossentropy(),
    ],
    ids=["function", "metric", "top-k", "loss"],
)
def test_a_metric_of_keras_by_a_name_gets_the_target_first(metric):
    model = compiled([metric])
    data = cw.Arrays(x=A, y=LABEL.astype(np.int32))
    task = cw.keras.task(model, train=data, target="y", metrics={"mine": metric})
    expected = [v for n, v in own_numbers(model, A, LABEL).items() if n != "loss"]
    assert our_numbers(task, A, LABEL.astype(np.int32))["mine"] == pytest.approx(expected[0], rel=1e-5)


def settled(function, **settings):
    return functools.partial(functools.partial(function), **settings)


@pytest.mark.parametrize("by", [lambda one: one, lambda one: [one]], ids=["one", "list"])
def test_a_partial_of_a_function_of_keras_gets_the_target_first(by):
    loss = settled(keras.losses.binary_crossentropy, from_logits=True)
    metric = settled(keras.metrics.top_k_categorical_accuracy, k=1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(loss=loss, metrics=[metric])
    metrics = {"top": metric} if by(loss) is loss else None
    task = cw.keras.task(model, by(loss), train=cw.Arrays(x=A, y=ONE_HOT), target="y", metrics=metrics)
    assert list(our_numbers(task, A, ONE_HOT).values()) == pytest.approx(
        list(own_numbers(model, A, ONE_HOT).values()), rel=1e-5
    )


@pytest.mark.parametrize("function", [uneven, settled(uneven)], ids=["function", "partial"])
def test_a_function_of_a_module_called_like_keras_gets_the_outputs_first(function, monkeypatch):
    monkeypatch.setattr(uneven, "__module__", "keras_utils")
    model = sequential()
    data = cw.Arrays(x=A, y=ONE_HOT)
    task = cw.keras.task(model, function, train=data, target="y", metrics={"mine": function})
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        expected = float(np.mean(uneven(model(A), ONE_HOT)))
    assert our_numbers(task, A, ONE_HOT) == pytest.approx({"loss": expected, "mine": expected}, rel=1e-5)


@pytest.mark.parametrize("metric", [keras.metrics.Precision(), keras.metrics.AUC()], ids=str)
def test_a_metric_of_keras_by_a_name_that_is_no_mean_is_refused(metric):
    with refused(cw.errors.RecipeError, "keras-metric", metric="mine"):
        cw.keras.task(compiled(None), train=cw.Arrays(x=A, label=LABEL), metrics={"mine": metric})


TOKENS = RNG.integers(0, 4, (24, 5)).astype(np.int32)
MASKED = {
    "mae": np.where(TOKENS, 1, 9).astype(np.float32)[..., None],
    "mse": np.where(TOKENS, 1, 9).astype(np.float32)[..., None],
    "accuracy": (TOKENS > 1).astype(np.float32)[..., None],
}


@pytest.mark.parametrize("given", ["compiled", "listed", "named"])
@pytest.mark.parametrize("name", MASKED)
def test_metrics_leave_out_what_is_masked(name, given):
    keras.utils.set_random_seed(0)
    embedding = keras.layers.Embedding(4, 3, mask_zero=True)
    model = keras.Sequential([keras.Input((5,), dtype="int32"), embedding, keras.layers.Dense(1)])
    object_of = {"mae": "MeanAbsoluteError", "mse": "MeanSquaredError", "accuracy": "BinaryAccuracy"}
    metric = name if given != "named" else getattr(keras.metrics, object_of[name])()
    model.compile(loss="mse", metrics=[metric])
    (expected,) = [v for n, v in own_numbers(model, TOKENS, MASKED[name]).items() if n != "loss"]
    metrics = {"compiled": None, "listed": [name], "named": {name: metric}}[given]
    data = cw.Arrays(x=TOKENS, y=MASKED[name])
    task = cw.keras.task(model, train=data, target="y", metrics=metrics)
    ours = our_numbers(task, TOKENS, MASKED[name])
    assert ours[name] == pytest.approx(expected, rel=1e-5)
    held = jax.tree.map(lambda x: x.astype("bfloat16"), task.init(jax.random.key(0)))
    sums, _ = task.loss(*held, {"x": TOKENS, "y": MASKED[name]}, None, False)  # as precision="bf16" has it
    assert {n: float(s.total / s.count) for n, s in sums.items()} == pytest.approx(ours, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["mae", keras.losses.MeanAbsoluteError(reduction="mean_with_sample_weight")])
@pytest.mark.parametrize("given", ["given", "compiled", "two outputs"])
def test_a_masked_loss_counts_each_position_once(loss, given):
    """However many the examples, replicas and evaluated examples have."""
    keras.utils.set_random_seed(0)
    x = keras.Input((5,), dtype="int32")
    words = keras.layers.Embedding(4, 3, mask_zero=True)(x)
    outputs = [keras.layers.Dense(1)(words) for _ in range(1 + (given == "two outputs"))]
    model = keras.Model(x, outputs if len(outputs) > 1 else outputs[0])
    several = (lambda one: [one] * 2) if len(outputs) > 1 else (lambda one: one)
    model.compile(loss=several(loss), metrics=several(["mae"]))
    tokens = np.where((np.arange(24) % 3 == 0)[:, None] | (np.arange(5) == 0), 1 + TOKENS % 3, 0)
    tokens[:4] = 0  # the whole of a replica
    columns = {"x": tokens, "y": np.arange(120, dtype=np.float32).reshape(24, 5, 1)}
    data = cw.Arrays(**columns)
    target, own = lambda batch: several(batch["y"]), loss if given == "given" else None
    task = cw.keras.task(model, own, train=data, eval=data, inputs="x", target=target)
    recipe = cw.Recipe(task=task, batch=24, replicas=6, duration="1st", optimizer=cw.sgd(lr=0.0))
    metrics = cw.fit(recipe, on=cw.On(devices=1), progress="none").metrics
    expected = own_numbers(model, tokens, several(columns["y"]))
    for part in ("train", "eval"):
        ours = {name: metrics[f"{part}/{name}"] for name in expected}
        assert ours == pytest.approx(expected, rel=1e-5), part


@pytest.mark.parametrize("metric", [keras.metrics.SparseCategoricalAccuracy, keras.metrics.MeanSquaredError])
def test_a_class_is_the_metric_that_keras_makes_of_it(metric):
    target = LABEL[:, None] if metric is keras.metrics.SparseCategoricalAccuracy else ONE_HOT
    model = compiled([metric], loss=keras.losses.MeanSquaredError)
    task = cw.keras.task(model, train=cw.Arrays(x=A, y=target), target="y")
    assert our_numbers(task, A, target) == pytest.approx(own_numbers(model, A, target), rel=1e-5)


@pytest.mark.parametrize("name", ["crossentropy", "acuracy", "ce"])
def test_a_metric_or_loss_that_keras_lacks_is_refused_by_name(name):
    data = cw.Arrays(x=A, label=LABEL, classes=3)
    with refused(cw.errors.RecipeError, "keras-metric-unknown", name=name):
        cw.keras.task(compiled(None), train=data, metrics=[name])
    with refused(cw.errors.RecipeError, "keras-loss-unknown", name=name):
        cw.keras.task(compiled(None), name, train=data)


@pytest.mark.parametrize(
    ("zero", "loss", "metrics", "left"),
    [
        (True, lambda p, y: keras.ops.mean((p - y) ** 2), None, "<lambda>"),
        (True, "mse", {"near": lambda p, y: keras.ops.abs(p - y)}, "near"),
        (True, "mse", ["mae"], None),
        (False, lambda p, y: keras.ops.mean((p - y) ** 2), None, None),
    ],
)
def test_a_mask_that_is_left_to_own_functions_is_told(zero, loss, metrics, left):
    """Those of `(outputs, target)`. Keras would leave out what is masked for a compiled one."""
    keras.utils.set_random_seed(0)
    embedding = keras.layers.Embedding(4, 3, mask_zero=zero)
    model = keras.Sequential([keras.Input((5,), dtype="int32"), embedding, keras.layers.Dense(1)])
    data = cw.Arrays(x=TOKENS, y=MASKED["mse"])
    task = cw.keras.task(model, loss, train=data, target="y", metrics=metrics)
    assert task.read.get("mask") == (f"left to {left}" if left else None)


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (keras.layers.Dense(5, kernel_regularizer="l2"), True),
        (keras.layers.Dense(5, activity_regularizer="l1"), True),
        (keras.layers.Dense(5), False),
    ],
)
def test_losses_that_layers_add_in_training_alone_are_told(layer, told):
    """Keras' evaluation has them too, so its loss is another number."""
    read = cw.keras.task(sequential(layer), train=cw.Arrays(x=A, label=LABEL, classes=3)).read
    assert read.get("added losses") == ("in training alone" if told else None)
    assert read["optimizer"] == "the recipe's; the compiled RMSprop is cw.keras.optimizer(model)"


def test_weights_without_a_name_come_back_to_a_model_that_is_made_again():
    class Scale(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(1, shape[-1]), initializer="ones")
            self.shift = self.add_weight(shape=(1, shape[-1]), initializer="zeros")

        def call(self, x):
            return x * self.scale + self.shift

    def make():
        return keras.Sequential([keras.Input((4,)), Scale(), Scale(), keras.layers.Dense(3)])

    first, second = (variables_of(make())[0] for _ in range(2))
    assert len(first) == 6 and list(first) == list(second)


def layered():
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 3), dtype="uint8")
    x = keras.layers.Conv2D(6, 3)(keras.layers.Rescaling(1 / 255)(image))
    x = keras.layers.Reshape((36, 6))(keras.layers.BatchNormalization()(x))
    x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(2, 3)(x, x))
    return keras.Model(image, keras.layers.Dense(3)(keras.layers.GRU(5)(x)))


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("train", [True, False])
@jax.numpy_rank_promotion("allow")
@jax.numpy_dtype_promotion("standard")
def test_half_precision_computes_as_under_a_mixed_policy(half, train):
    images, labels = RNG.integers(0, 256, (8, 8, 8, 3)).astype(np.uint8), LABEL[:8]
    model = layered()
    task = cw.keras.task(model, LOSS, train=cw.Arrays(image=images, label=labels, classes=3))
    params, state = task.init(jax.random.key(0))
    halves = jax.tree.map(lambda x: x.astype(half), params)
    loss = lambda params: task.loss(params, state, {"image": images, "label": labels}, None, train)  # noqa: E731
    ours, (sums, new) = products(loss, halves), loss(halves)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(new)} == {"float32"}
    assert all(layer.dtype_policy.name == "float32" for layer in model._flatten_layers())
    exact = loss(params)[0]["loss"]
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(f"mixed_{half}")
    try:
        mixed = layered()
        expected = LOSS(labels, mixed(images, training=train))
        rest = [v.value for v in mixed.non_trainable_variables]
        called = lambda weights: mixed.stateless_call(weights, rest, images, training=train)[0]  # noqa: E731
        theirs = products(called, [v.value for v in mixed.trainable_variables])
    finally:
        keras.config.set_dtype_policy(policy)
    assert ours == theirs and len(ours) == 10
    assert float(sums["loss"].total / sums["loss"].count) == pytest.approx(float(expected), rel=1e-6)
    assert float(exact.total / exact.count) == pytest.approx(float(expected), rel=0.05)


def products(function, weights):
    """The types and shapes of all products."""
    text = str(jax.make_jaxpr(function)(weights))
    return sorted(re.findall(r"(\w+\[[\d,]*\]) = (?:dot_general|conv_general)", text))


@pytest.mark.parametrize("last", ["activation", "layer"])
@jax.numpy_dtype_promotion("standard")
def test_a_last_softmax_stays_in_float32(last):
    end = "softmax" if last == "activation" else None
    x = keras.Input((4,))
    y = keras.layers.Dense(3, end)(keras.layers.Dense(5, "sigmoid")(x))
    model = keras.Model(x, keras.layers.Softmax()(y) if last == "layer" else y)
    task = cw.keras.task(model, "sparse_categorical_crossentropy", train=cw.Arrays(x=A, label=LABEL))
    params, state = task.init(jax.random.key(0))
    outputs = task.predict(jax.tree.map(lambda x: x.astype("bfloat16"), params), state, {"x": A})
    assert outputs.dtype == "float32"
