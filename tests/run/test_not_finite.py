"""A loss that is not finite from the start says what made it so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from refusals import refused

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
LABEL = np.arange(32) % 3


def of_probabilities(p, label):
    return -jnp.log(jnp.take_along_axis(p, label[:, None], 1))[:, 0]


def of_clipped(out, label):
    losses = cw.losses.softmax_cross_entropy(out, jnp.clip(label, 0, 2))
    return jnp.where(label == jnp.clip(label, 0, 2), losses, jnp.nan)


def halves(p, label):
    return jnp.sum(p, axis=1) / jnp.where(label == 1, 0.0, 1.0)


def diverged(data, loss=cw.losses.softmax_cross_entropy, last=lambda x: x, classes=3, lr=0.1):
    def init(key):
        return {"w": jnp.ones((4, classes))}, {}

    def forward(params, state, inputs):
        return last(inputs["x"] @ params["w"])

    def task_loss(params, state, batch, key, train):
        return {"loss": cw.Sum.of(loss(forward(params, state, batch), batch["label"]))}, state

    task = cw.Task(init=init, loss=task_loss, predict=forward, train=data)
    recipe = cw.Recipe(task=task, batch=8, replicas=1, duration="4st", optimizer=cw.sgd(lr=lr))
    with refused(cw.errors.DivergedError, "loss-not-finite") as caught:
        cw.fit(recipe, on=cw.On(devices=1), run=None, progress="none", log_every="2st")
    return caught.value.facts.get("why")


def test_a_value_in_the_data():
    x = X.copy()
    x[[5, 9], 2] = np.nan, np.inf
    why = diverged(cw.Arrays(x=x, label=LABEL))
    assert (why.code, why["column"]) == ("cause-input", "x") and why["example"] in (5, 9)


@pytest.mark.parametrize("wrong", [3, -1])
def test_a_label_that_no_output_has(wrong):
    label = LABEL.copy()
    label[::2] = wrong
    why = diverged(cw.Arrays(x=X, label=label), of_clipped)  # any other is refused when it is read
    assert (why.code, why["label"], why["last"]) == ("cause-label", wrong, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "last", "operation"),
    [(of_probabilities, jax.nn.relu, "log"), (halves, lambda x: x, "div")],
)
def test_an_operation_of_the_first_step(loss, last, operation):
    why = diverged(cw.Arrays(x=-np.abs(X), label=LABEL), loss, last)
    line = loss.__code__.co_firstlineno + 1
    assert (why.code, why["operation"]) == ("cause-operation", operation)
    assert why["where"] == f" at test_not_finite.py:{line}"


def test_what_only_the_rate_explains_is_left_to_the_usual_advice():
    data = cw.Arrays(x=X, label=LABEL)
    assert diverged(data, lambda out, label: jnp.sum(jnp.square(out), axis=1), lr=1e30) is None
