"""What a model's outputs are: logits, probabilities or values; and losses that do not fit them."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.models.last_activation import last_activation
from refusals import refused

os.environ.setdefault("KERAS_BACKEND", "jax")
RNG = np.random.default_rng(0)
DATA = cw.Arrays(x=RNG.normal(size=(40, 4)).astype(np.float32), label=RNG.integers(0, 3, 40), classes=3)


def fit(task):
    recipe = cw.Recipe(task=task, batch=8, replicas=1, duration="2st", optimizer=cw.sgd(lr=0.1))
    return cw.fit(recipe, on=cw.On(devices=1), run=None, progress="none")


@pytest.mark.parametrize(
    ("function", "last"),
    [
        (lambda x, w: jax.nn.softmax(x @ w), "softmax"),
        (lambda x, w: jax.jit(jax.nn.softmax)((x @ w).astype(jnp.bfloat16)).astype(jnp.float32), "softmax"),
        (lambda x, w: jax.nn.sigmoid(x @ w).reshape(-1), "sigmoid"),
        (lambda x, w: x @ w + 1.0, "linear"),
        (lambda x, w: x @ w, "linear"),
        (lambda x, w: jax.nn.relu(x @ w), None),
        (lambda x, w: jax.nn.log_softmax(x @ w), None),
        (lambda x, w: jax.nn.softmax(x @ w) @ w, "linear"),
        (lambda x, w: jnp.exp(x) / jnp.sum(w), None),
        (lambda x, w: x, None),
    ],
)
def test_the_last_operation_of_a_program(function, last):
    x, w = jnp.ones((2, 3)), jnp.ones((3, 3))
    assert last_activation(jax.make_jaxpr(function)(x, w).jaxpr) == last


def keras_net(*last):
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, *last)])


@pytest.mark.slow
def test_probabilities_of_keras_stay_what_they_are(tmp_path):
    model = keras_net("softmax")
    result = fit(cw.keras.task(model, "sparse_categorical_crossentropy", train=DATA, eval=DATA))
    assert result.trained.task.returns == "probabilities"
    found = cw.predict(result)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        own = np.asarray(result.to_keras(model)(DATA.columns["x"]))
    np.testing.assert_allclose(found.probabilities, own, rtol=1e-5, atol=1e-6)
    assert found.returns == "probabilities" and np.array_equal(found.labels, own.argmax(1))
    cw.predict(result, out=tmp_path / "p.csv")
    best = [float(line.split(",")[3]) for line in (tmp_path / "p.csv").read_text().splitlines()[1:]]
    np.testing.assert_allclose(best, own.max(1), rtol=1e-5)


@pytest.mark.parametrize(
    ("last", "from_logits", "code"),
    [
        (("softmax",), True, "activation-twice"),
        ((), False, "loss-of-probabilities"),
        ((), True, None),
        (("softmax",), False, None),
    ],
)
def test_a_keras_loss_that_does_not_fit_the_last_layer(last, from_logits, code):
    keras = pytest.importorskip("keras")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)
    if code is None:
        expected = "probabilities" if last else "logits"
        assert cw.keras.task(keras_net(*last), loss, train=DATA).returns == expected
        return
    with refused(cw.errors.RecipeError, code):
        cw.keras.task(keras_net(*last), loss, train=DATA)


@pytest.mark.slow
def test_a_torch_net_that_ends_in_a_softmax():
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchax")
    nn = torch.nn
    net = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))
    with refused(cw.errors.RecipeError, "activation-twice", last="softmax"):
        cw.torch.task(net, nn.CrossEntropyLoss(), train=DATA)
    task = cw.torch.task(net, lambda p, y: nn.functional.nll_loss(torch.log(p), y), train=DATA)
    assert task.returns == "probabilities"
    assert cw.torch.task(net[0], nn.CrossEntropyLoss(), train=DATA).returns == "logits"
    rows = cw.Arrays(x=DATA.columns["x"], label=DATA.columns["x"][:, :1])
    assert cw.torch.task(nn.Linear(4, 1), nn.MSELoss(), train=rows).returns == "values"


@pytest.mark.slow
def test_a_task_of_plain_functions_is_seen_through():
    def logits(params, x):
        return x @ params["w"]

    def loss(params, state, batch, key, train):
        return {
            "loss": cw.Sum.of(cw.losses.softmax_cross_entropy(logits(params, batch["x"]), batch["label"]))
        }, {}

    def task(last, **more):
        return cw.Task(
            init=lambda key: ({"w": jnp.ones((4, 3)) * jnp.arange(3.0)[None]}, {}), loss=loss, train=DATA,
            eval=DATA, predict=lambda p, s, inputs: last(logits(p, inputs["x"])), classes=3, **more,
        )  # fmt: skip

    plain, softmaxed = (cw.predict(fit(task(last))) for last in (lambda x: x, jax.nn.softmax))
    assert (plain.returns, softmaxed.returns) == ("logits", "probabilities")
    np.testing.assert_allclose(plain.probabilities, softmaxed.probabilities, rtol=1e-5)
    values = cw.predict(fit(task(lambda x: x, returns="values")))
    assert values.returns == "values" and values.accuracy is None and values.class_names == ()
    with refused(cw.errors.RecipeError, "task-returns"):
        task(lambda x: x, returns="odds")
