"""What a model's outputs are: logits, probabilities or values; and losses that do not fit them."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import chipwise as cw
from chipwise.models.last_activation import last_activation
from chipwise.run.evaluate import evaluation
from chipwise.step.state import abstract_state
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
        (lambda x, w: jax.nn.log_softmax(x @ w), "log-softmax"),
        (lambda x, w: x @ w - jnp.log(x), None),
        (lambda x, w: jax.nn.softmax(x @ w) @ w, "linear"),
        (lambda x, w: jnp.exp(x) / jnp.sum(w), None),
        (lambda x, w: x, None),
        (lambda x, w: jnp.mean(x[:, None] @ w, axis=1), "linear"),
        (lambda x, w: jnp.sum((x[:, None] @ w + 1.0).astype(jnp.bfloat16), axis=(0, 1)), "linear"),
        (lambda x, w: jax.jit(jnp.mean)(x @ w), "linear"),
        (lambda x, w: lax.reduce_window(x @ w, 0.0, lax.add, (1, 3), (1, 1), "valid") / 3.0, "linear"),
        (lambda x, w: jnp.mean(jax.nn.relu(x @ w), axis=0), None),
        (lambda x, w: jnp.mean(jax.nn.softmax(x @ w), axis=0), None),
        (lambda x, w: jnp.mean(x, axis=0), None),
        (lambda x, w: jnp.sum(x @ w, axis=0) / x[0], None),
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
@pytest.mark.parametrize("given", ["itself", "in a list", "compiled in a list"])
def test_a_keras_loss_that_does_not_fit_the_last_layer(last, from_logits, code, given):
    keras = pytest.importorskip("keras")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)
    loss = loss if given == "itself" else [loss]
    net = keras_net(*last)
    if given == "compiled in a list":
        net.compile(loss=loss)
        loss = None
    if code is None:
        expected = "probabilities" if last else "logits"
        assert cw.keras.task(net, loss, train=DATA).returns == expected
        return
    with refused(cw.errors.RecipeError, code):
        cw.keras.task(net, loss, train=DATA)


def test_the_name_of_a_keras_loss_in_a_list_is_its_loss():
    with refused(cw.errors.RecipeError, "loss-of-probabilities", loss="sparse_categorical_crossentropy"):
        cw.keras.task(keras_net(), ["sparse_categorical_crossentropy"], train=DATA)


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


# ---- what takes logits is not given probabilities, whoever made the model

MANY = cw.Arrays(x=DATA.columns["x"], label=RNG.integers(0, 2, (40, 3)))
OF_ONE = {
    "softmax_cross_entropy": cw.losses.softmax_cross_entropy,
    "weighted_softmax_cross_entropy": lambda p, y: cw.losses.weighted_softmax_cross_entropy(
        p, y, jnp.ones(3)
    ),
    "roc_auc": cw.metrics.roc_auc,
    "average_precision": lambda p, y: cw.metrics.average_precision(p, y, "weighted"),
}
OF_MANY = {
    "sigmoid_cross_entropy": cw.losses.sigmoid_cross_entropy,
    "f1": cw.metrics.f1,
    "precision": cw.metrics.precision,
    "recall": lambda p, y: cw.metrics.recall(p, y, threshold=0.3),
    "exact_match": cw.metrics.exact_match,
    "hamming": cw.metrics.hamming,
}


def judged_by(function, last, data, train_too=True):
    """A task of plain functions whose outputs `last(x @ w)` a loss or a metric judges."""

    def loss(params, state, batch, key, train):
        outputs = last(batch["x"] @ params["w"])
        sums = {"loss": cw.Sum.of(jnp.mean(outputs, axis=1))}
        if train_too or not train:
            value = function(outputs, batch["label"])
            sums["judged"] = value if isinstance(value, cw.Sum) else cw.Sum.of(value)
        return sums, state

    task = cw.Task(init=lambda key: ({"w": jnp.ones((4, 3))}, {}), loss=loss, train=data, eval=data)
    return cw.Recipe(task=task, batch=8, replicas=1, duration="2st", optimizer=cw.sgd(lr=0.1))


@pytest.mark.parametrize("last", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", [*OF_ONE, *OF_MANY])
def test_what_takes_logits_refuses_probabilities(name, last):
    function, data = (OF_ONE.get(name) or OF_MANY[name]), DATA if name in OF_ONE else MANY
    activation = getattr(jax.nn, last)
    with refused(cw.errors.RecipeError, "probabilities-as-logits", takes=name, last=last):
        abstract_state(judged_by(function, activation, data))
    with refused(cw.errors.RecipeError, "probabilities-as-logits", takes=name, last=last):
        recipe = judged_by(function, activation, data, train_too=False)
        evaluation(recipe, recipe.task.eval)
    for fine in (lambda x: x, lambda x: jnp.log(activation(x)), jax.nn.relu):
        assert "judged" in evaluation(judged_by(function, fine, data), data).sums


@pytest.mark.parametrize("function", [cw.metrics.accuracy, cw.losses.correct, cw.metrics.confusion])
def test_what_reads_the_order_alone_takes_probabilities(function):
    assert "judged" in evaluation(judged_by(function, jax.nn.softmax, DATA), DATA).sums


def linen_net(last):
    from flax import linen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return last(linen.Dense(3)(x))

    return Net()


def test_a_metric_of_logits_through_a_framework():
    def mean(outputs, target):
        return jnp.mean(outputs, axis=1)

    task = cw.linen.task(linen_net(jax.nn.sigmoid), mean, train=MANY, metrics={"f1": cw.metrics.f1})
    recipe = cw.Recipe(task=task, batch=8, replicas=1, duration="2st", optimizer=cw.sgd(lr=0.1))
    with refused(cw.errors.RecipeError, "probabilities-as-logits", takes="f1", last="sigmoid"):
        abstract_state(recipe)


@pytest.mark.parametrize(
    ("last", "loss", "code"),
    [
        (jax.nn.softmax, cw.losses.softmax_cross_entropy, "activation-twice"),
        (jax.nn.sigmoid, cw.losses.softmax_cross_entropy, "activation-twice"),
        (jax.nn.log_softmax, cw.losses.softmax_cross_entropy, None),
    ],
)
def test_a_loss_of_logits_under_an_activation(last, loss, code):
    if code is None:
        assert cw.linen.task(linen_net(last), loss, train=DATA).returns == "logits"
        return
    with refused(cw.errors.RecipeError, code):
        cw.linen.task(linen_net(last), loss, train=DATA)


@pytest.mark.slow
@pytest.mark.parametrize("last", ["Softmax", "Sigmoid", None])
def test_a_loss_of_log_probabilities(last):
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchax")
    nn = torch.nn
    ends = {None: (), "Softmax": (nn.Softmax(1),), "Sigmoid": (nn.Sigmoid(),)}[last]
    net = nn.Sequential(nn.Linear(4, 3), *ends)
    for loss in (nn.NLLLoss(), nn.functional.nll_loss):
        with refused(
            cw.errors.RecipeError, "loss-of-log-probabilities", last=last.lower() if last else "linear"
        ):
            cw.torch.task(net, loss, train=DATA)
    right = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1))
    assert cw.torch.task(right, nn.NLLLoss(), train=DATA).returns == "logits"


def test_a_partial_keras_loss_says_what_it_takes():
    keras = pytest.importorskip("keras")
    loss = functools.partial(keras.losses.sparse_categorical_crossentropy, from_logits=True)
    assert cw.keras.task(keras_net(), loss, train=DATA).returns == "logits"
    with refused(cw.errors.RecipeError, "activation-twice"):
        cw.keras.task(keras_net("softmax"), loss, train=DATA)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [None, ".csv", ".jsonl"])
def test_outputs_of_which_nothing_says_what_they_are(tmp_path, suffix):
    """A mixture of two softmaxes has the shape of logits, and is none. The answer depends on the
    program, and on no output."""

    def mixed(x):
        return (jax.nn.softmax(x) + jax.nn.softmax(2 * x)) / 2

    def mean(outputs, target):
        return jnp.mean(outputs**2, axis=1)

    out = {} if suffix is None else {"out": tmp_path / f"p{suffix}"}
    task = cw.linen.task(linen_net(mixed), mean, train=DATA, eval=DATA)
    result = fit(task)
    shifted = fit(cw.linen.task(linen_net(lambda x: 3 * jnp.tanh(x)), mean, train=DATA, eval=DATA))
    for one in (result, shifted):
        for data in (None, cw.Arrays(x=DATA.columns["x"][:1])):
            said = []
            found = cw.predict(one, data, **out, fresh=True, say=said.append)
            assert found.returns == "logits"
            assert [fact.code for fact in said].count("outputs-unstated") == 1
    for returns in ("probabilities", "logits", "values"):
        stated = dataclasses.replace(task, returns=returns)
        recipe = dataclasses.replace(result.trained, task=stated)
        model = dataclasses.replace(result, trained=recipe)
        said = []
        assert cw.predict(model, **out, fresh=True, say=said.append).returns == returns
        assert "outputs-unstated" not in [fact.code for fact in said]
