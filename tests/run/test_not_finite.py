"""A loss that is not finite from the start says what made it so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.run import not_finite
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


def diverging(data, loss=cw.losses.softmax_cross_entropy, last=lambda x: x, classes=3, lr=0.1, **more):
    def init(key):
        return {"w": jnp.ones((4, classes))}, {}

    def forward(params, state, inputs):
        return last(inputs["x"] @ params["w"])

    def task_loss(params, state, batch, key, train):
        return {"loss": cw.Sum.of(loss(forward(params, state, batch), batch["label"]))}, state

    task = cw.Task(**{"init": init, "loss": task_loss, "predict": forward, "train": data, **more})
    return cw.Recipe(task=task, batch=8, replicas=1, duration="4st", optimizer=cw.sgd(lr=lr))


def diverged(*data, **how):
    recipe = diverging(*data, **how)
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


def squares(out, label):
    return jnp.sum(jnp.square(out), axis=1)


@pytest.mark.parametrize("trained", [False, True])
def test_only_what_was_trained_is_looked_at(trained):
    x, bad = X.copy(), np.arange(32) % 2 == 0
    x[bad] = np.nan
    data = cw.data.Weighted(cw.Arrays(x=x, label=LABEL), np.where(bad == trained, 1, 0))
    why = diverged(data, squares, lr=1e30)
    assert why["count"] == why["examples"] == 16 and bad[why["example"]] if trained else why is None


@pytest.mark.slow
def test_a_search_that_fails_hides_no_divergence():
    data = cw.Arrays(x=X, label=LABEL)
    assert diverged(data, squares, lr=1e30, predict=lambda p, s, b: b["label"] * 1.0) is None


class Counted(list):
    read = 0

    def __getitem__(self, i):
        self.read += 1
        return super().__getitem__(i)


def test_large_examples_are_not_all_read(monkeypatch):
    source = Counted({"x": X[i], "label": LABEL[i]} for i in range(32))
    recipe = diverging(source)
    assert not_finite.cause(recipe, 2, 4) is None and source.read >= 24
    source.read = 0
    monkeypatch.setattr(not_finite, "_READ_BYTES", 4 * X[0].nbytes)
    assert not_finite.cause(recipe, 2, 4) is None and 0 < source.read < 8
