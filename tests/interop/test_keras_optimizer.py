"""Keras' optimizers: the same updates as Keras' own, 50 steps long."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.recipe.duration import Clock
from refusals import refused

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")

STEPS = 50
SHAPES = {"a": (3, 4), "b": (4,)}
made = keras.optimizers
DECAY = made.schedules.ExponentialDecay(0.1, 10, 0.5)
OPTIMIZERS = {
    "sgd": lambda: made.SGD(0.1),
    "sgd with decay": lambda: made.SGD(0.1, weight_decay=0.1),
    "momentum": lambda: made.SGD(0.1, momentum=0.9, weight_decay=0.1, global_clipnorm=1.0),
    "nesterov": lambda: made.SGD(0.1, momentum=0.9, nesterov=True),
    "momentum with a schedule": lambda: made.SGD(DECAY, momentum=0.9),
    "nesterov with a schedule": lambda: made.SGD(DECAY, momentum=0.9, nesterov=True),
    "adam": lambda: made.Adam(0.01),
    "adam of a large epsilon": lambda: made.Adam(0.01, beta_1=0.8, beta_2=0.95, epsilon=0.1),
    "amsgrad": lambda: made.Adam(0.01, amsgrad=True, global_clipnorm=0.5),
    "adamw": lambda: made.AdamW(made.schedules.CosineDecay(0.01, 40), weight_decay=0.1),
    "rmsprop": lambda: made.RMSprop(0.01, epsilon=1e-3),
    "centered": lambda: made.RMSprop(DECAY, momentum=0.9, centered=True, epsilon=1e-3),
    "adagrad": lambda: made.Adagrad(0.1, weight_decay=0.1),
    "adadelta": lambda: made.Adadelta(1.0),
    "adamax": lambda: made.Adamax(0.01, epsilon=1e-2),
    "nadam": lambda: made.Nadam(0.01),
    "lion": lambda: made.Lion(0.001, weight_decay=0.1),
}


def slope(step, i, shape):
    return np.sin(np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + step * (i + 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.drawn(share=0.25)
def test_the_same_updates(name):
    own = OPTIMIZERS[name]()
    read = cw.keras.optimizer(own, length=STEPS)
    json.dumps(read.describe())
    assert read.elementwise and read.describe()["optimizer"] == f"keras.{type(own).__name__}"
    params = {n: jnp.asarray(slope(7, i, shape)) for i, (n, shape) in enumerate(SHAPES.items())}
    tables = read.tables(Clock.for_run(80, 8, f"{STEPS}st"))
    state, update = read.init(params), jax.jit(read.update)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        theirs = [keras.Variable(x, name=n) for n, x in params.items()]
        for step in range(STEPS):
            grads = {n: slope(step, i, shape) for i, (n, shape) in enumerate(SHAPES.items())}
            hyper = {n: table[step] for n, table in tables.items()}
            params, state = update(grads, state, params, hyper)
            own.apply([jnp.asarray(g) for g in grads.values()], theirs)
            for x, y in zip(params.values(), theirs, strict=True):
                np.testing.assert_allclose(x, y.value, rtol=1e-5, atol=1e-5, err_msg=f"step {step}")


@pytest.mark.slow
@pytest.mark.as_users_compile
@pytest.mark.parametrize("name", ["momentum", "amsgrad", "adamax", "nadam", "centered"])
def test_the_bits_of_one_device_on_three(name):
    recipe = tasks.quick(optimizer=cw.keras.optimizer(OPTIMIZERS[name](), length=8), duration="8st")
    one, three = (cw.fit(recipe, on=cw.On(devices=n, shard_optimizer=n > 1), progress="none") for n in (1, 3))
    assert three.devices["update"] == "sharded" and one.fingerprint == three.fingerprint


def test_a_compiled_model_gives_its_optimizer():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(optimizer="adam", loss="mse")
    read = cw.keras.optimizer(model)
    assert read.describe() == {
        "optimizer": "keras.Adam",
        **{"lr": 0.001, "weight_decay": 0.0, "clip": None},
        **{"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-07, "amsgrad": False},
    }
    assert read.replace(lr=0.5).lr == 0.5


def test_its_settings_are_those_of_keras():
    read = cw.keras.optimizer(made.SGD(0.1, momentum=0.9))
    assert list(read.hyper) == ["lr"]
    changed = read.replace(momentum=0.5, lr=0.2, weight_decay=0.1, clip=1.0)
    own = made.SGD(0.2, momentum=0.5, weight_decay=0.1, global_clipnorm=1.0)
    assert changed == cw.keras.optimizer(own) != read


@pytest.mark.parametrize(
    "settings, code, facts",
    [
        ({"kind": "SGD"}, "no-such-setting", {"name": "kind", "optimizer": "keras.Adam"}),
        ({"given": 3}, "no-such-setting", {"name": "given"}),
        ({"beta_1": 1.0}, "average-range", {"what": "keras.Adam's beta_1"}),
        ({"epsilon": -1.0}, "setting-below-zero", {"name": "epsilon"}),
        ({"beta_2": lambda step: 0.9}, "keras-setting-fixed", {"what": "keras.Adam's beta_2"}),
        ({"amsgrad": "yes"}, "keras-setting-fixed", {"value": "yes"}),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings, code, facts):
    with refused(cw.errors.RecipeError, code, **facts):
        cw.keras.optimizer(made.Adam(0.1)).replace(**settings)


def used():
    optimizer, variable = made.SGD(0.1), keras.Variable(np.ones(2, np.float32))
    optimizer.apply([jnp.ones(2)], [variable])
    return optimizer


@pytest.mark.parametrize("by", ["var_list", "var_names"])
def test_weights_that_do_not_decay_are_refused(by):
    own = made.AdamW(0.1, weight_decay=0.5)
    bias = keras.Variable(np.ones(2, np.float32), name="bias")
    own.exclude_from_weight_decay(**{by: [bias] if by == "var_list" else ["bias"]})
    with refused(cw.errors.RecipeError, "keras-optimizer-setting", names=["exclude_from_weight_decay"]):
        cw.keras.optimizer(own)


@pytest.mark.parametrize(
    "make, code",
    [
        (lambda: made.Ftrl(0.1), "keras-optimizer-unknown"),
        (lambda: type("Own", (made.SGD,), {})(0.1), "keras-optimizer-unknown"),
        (lambda: made.SGD(0.1, clipnorm=1.0), "keras-optimizer-setting"),
        (lambda: made.SGD(0.1, clipvalue=1.0), "keras-optimizer-setting"),
        (lambda: made.Adam(0.1, use_ema=True), "keras-optimizer-setting"),
        (lambda: made.Adam(0.1, gradient_accumulation_steps=2), "keras-optimizer-setting"),
        (lambda: made.Adam(lambda: 0.1), "keras-optimizer-setting"),
        (lambda: made.Adam(DECAY), "keras-schedule-length"),
        (lambda: made.SGD(0.1, momentum=1.0), "average-range"),
        (used, "keras-optimizer-used"),
        (lambda: "adam", "keras-no-optimizer"),
    ],
)
def test_what_has_no_equal_is_refused_by_name(make, code):
    with refused(cw.errors.RecipeError, code):
        cw.keras.optimizer(make())
