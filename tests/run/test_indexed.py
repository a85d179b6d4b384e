"""Labels and other indices outside: refused through every door, wherever they stand, in training and in
evaluation, unless the loss leaves them out."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import chipwise as cw
from chipwise.data import order
from chipwise.data.synthetic import like
from chipwise.run.evaluate import evaluate
from chipwise.run.indexed import in_training
from chipwise.run.session import Session
from refusals import refused

os.environ.setdefault("KERAS_BACKEND", "jax")
CLASSES, FEATURES, ROWS = 10, 6, 48
ONE = cw.On(devices=1)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, FEATURES)).astype(np.float32)
LABEL = RNG.integers(0, CLASSES, ROWS).astype(np.int32)


def init(key):
    return {"w": 0.1 * jax.random.normal(key, (FEATURES, CLASSES), jnp.float32)}, {}


def own(values, **changes):
    """A task of one's own with `values`, a function of logits and a batch."""

    def loss(params, state, batch, key, train):
        made = values(batch["x"] @ params["w"], batch)
        return {"loss": made if isinstance(made, cw.Sum) else cw.Sum.of(made)}, state

    return lambda **data: cw.Task(init=init, loss=loss, **data, **changes)


def of_label(loss):
    return own(lambda logits, batch: loss(logits, batch["label"]))


def gathered(logits, labels):
    return -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels]


def one_hot(logits, labels):
    return -(jax.nn.one_hot(labels, CLASSES) * jax.nn.log_softmax(logits)).sum(1)


def each(logits, labels):
    return jax.vmap(lambda row, label: -jax.nn.log_softmax(row)[label])(logits, labels)


def keras_task(loss=None, last=None, **data):
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES, last)])
    if loss is None:
        model.compile(loss="sparse_categorical_crossentropy")
    else:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, **loss)
    return cw.keras.task(model, loss, **data)


def torch_task(loss, *last, **data):
    nn = torch().nn
    torch().manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES), *(getattr(nn, name)(1) for name in last))
    return cw.torch.task(model, loss(nn), **data, inputs="x")


def torch():
    pytest.importorskip("torchax")
    return pytest.importorskip("torch")


def nnx_task(loss, **data):
    from flax import nnx

    return cw.nnx.task(lambda rngs: nnx.Linear(FEATURES, CLASSES, rngs=rngs), loss, inputs="x", **data)


def linen_task(**data):
    from flax import linen

    return cw.linen.task(linen.Dense(CLASSES), optax.softmax_cross_entropy_with_integer_labels, **data)


def equinox_task(**data):
    eqx = pytest.importorskip("equinox")
    loss = cw.losses.softmax_cross_entropy
    return cw.equinox.task(lambda key: eqx.nn.Linear(FEATURES, CLASSES, key=key), loss, **data)


DOORS = {
    "cw.losses": of_label(cw.losses.softmax_cross_entropy),
    "cw.losses smoothed": of_label(functools.partial(cw.losses.softmax_cross_entropy, smoothing=0.1)),
    "cw.losses weighted": of_label(
        lambda z, y: cw.losses.weighted_softmax_cross_entropy(z, y, np.ones(CLASSES, np.float32))
    ),
    "optax": of_label(optax.softmax_cross_entropy_with_integer_labels),
    "gather": of_label(gathered),
    "one_hot": of_label(one_hot),
    "vmap": of_label(each),
    "nnx": functools.partial(nnx_task, cw.losses.softmax_cross_entropy),
    "linen": linen_task,
    "equinox": equinox_task,
    "keras": functools.partial(keras_task, {}),
    "keras compiled": functools.partial(keras_task, None, "softmax"),
    "torch": functools.partial(torch_task, lambda nn: nn.CrossEntropyLoss()),
    "torch nll": functools.partial(torch_task, lambda nn: nn.NLLLoss(), "LogSoftmax"),
    "torch function": functools.partial(
        torch_task, lambda nn: lambda outputs, y: nn.functional.cross_entropy(outputs, y)
    ),
}


def data(label=LABEL, **columns):
    return cw.Arrays(**{"x": X, "label": label} | columns)


def recipe(task, **changes):
    about = {"batch": 24, "replicas": 3, "duration": "2ep", "optimizer": cw.sgd(lr=0.1)}
    return cw.Recipe(task=task, **about | changes)


def checks(task):
    """What checks training data, and what checks that of an evaluation."""
    with Session(recipe(task), ONE) as session:
        session.read(evaluation=True)
        return session._index, session._opened_evaluator()._indexed


def wrong(row, value):
    label = LABEL.copy()
    label[row] = value
    return {"x": X, "label": label}


@pytest.mark.parametrize("door", DOORS)
def test_a_label_outside_is_refused_through_every_door(door):
    for indexed in checks(DOORS[door](train=data(), eval=data())):
        assert indexed.ranges == {"label": (0, CLASSES - 1)}
        indexed.check({"x": X, "label": LABEL}, "honest")
        for row, value in ((0, CLASSES), (8, -1), (ROWS - 1, 255)):
            facts = {"example": row, "column": "label", "value": value, "least": 0, "last": CLASSES - 1}
            with refused(cw.errors.DataError, "index-outside", data="the data", **facts):
                indexed.check(wrong(row, value), "the data")
        with refused(cw.errors.DataError, "index-outside", example=70 + 8):
            indexed.check(wrong(8, -7), "the data", np.arange(70, 70 + ROWS))


@pytest.mark.parametrize("feed", ["device", "host"])
def test_training_is_refused_before_its_step(feed):
    bad = cw.Arrays(**wrong(ROWS - 1, CLASSES))
    task = DOORS["keras"](train=bad, eval=data())
    facts = {"data": "training", "example": ROWS - 1, "value": CLASSES}
    with refused(cw.errors.DataError, "index-outside", **facts):
        cw.fit(recipe(task), on=cw.On(devices=1, feed=feed), progress="none")


@pytest.mark.parametrize("streamed", [False, True])
def test_an_evaluation_is_refused(streamed, monkeypatch):
    if streamed:
        monkeypatch.setattr("chipwise.run.feed.fits", lambda *_: False)
    task = DOORS["gather"](train=data(), eval=cw.Arrays(**wrong(9, -1)))
    facts = {"data": "evaluation", "example": 9, "value": -1}
    with refused(cw.errors.DataError, "index-outside", **facts):
        evaluate(recipe(task), *task.init(jax.random.key(0)), on=ONE)


def test_a_run_keeps_what_it_trained_before_it_read_the_label(tmp_path):
    examples, steps = 10 * ROWS, 20
    label = np.tile(LABEL, 10)
    label[order.indices(0, (steps - 1) * 24, steps * 24, examples)[5]] = CLASSES
    task = DOORS["optax"](train=cw.Arrays(x=np.tile(X, (10, 1)), label=label))
    made = recipe(task, duration="1ep")
    with refused(cw.errors.DataError, "index-outside", data="training", value=CLASSES):
        cw.fit(made, tmp_path, on=cw.On(devices=1, feed="host"), progress="none")
    assert cw.run.restore_run(made, tmp_path).steps == steps - 1


# ---- what a loss leaves out


PADDED = np.where(np.arange(ROWS) % 3 == 0, -1, LABEL).astype(np.int32)
MASK = (PADDED >= 0).astype(np.float32)


def only(function):
    """A loss of `(losses, batch)` in which some do not count."""

    def values(logits, batch):
        return function(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]), batch)

    return own(values)


LEAVING_OUT = {
    "where": only(lambda losses, batch: jnp.where(batch["label"] == -1, 0.0, losses)),
    "times": only(lambda losses, batch: losses * (batch["label"] >= 0).astype(jnp.float32)),
    "another column": only(lambda losses, batch: losses * batch["mask"]),
    "a safe label": of_label(
        lambda z, y: optax.softmax_cross_entropy_with_integer_labels(z, jnp.where(y < 0, 0, y))
    ),
    "cw.losses": own(
        lambda z, batch: jnp.where(batch["mask"] > 0, cw.losses.softmax_cross_entropy(z, batch["label"]), 0.0)
    ),
    "keras": functools.partial(keras_task, {"ignore_class": -1}, inputs="x"),
    "torch": functools.partial(torch_task, lambda nn: nn.CrossEntropyLoss(ignore_index=-1)),
}


def mean_of_valid(logits, batch):
    valid = batch["label"] >= 0
    labels = jnp.where(valid, batch["label"], 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    mean = jnp.sum(jnp.where(valid, losses, 0.0)) / jnp.sum(valid, dtype=jnp.float32)
    return cw.Sum(len(labels) * mean, jnp.float32(len(labels)))


def torch_mean_of_valid(nn):
    return lambda outputs, y: nn.functional.cross_entropy(outputs, y, ignore_index=-1)


MEANS = {"own": own(mean_of_valid), "torch": functools.partial(torch_task, torch_mean_of_valid)}


@pytest.mark.parametrize("way", MEANS)
def test_a_mean_of_the_labels_that_count_is_allowed(way):
    """Where no label counts, it is NaN."""
    with Session(recipe(MEANS[way](train=data(PADDED))), ONE) as session:
        session.read()
        label = np.where(PADDED < 0, CLASSES, PADDED)
        if way == "torch":
            with refused(cw.errors.DataError, "index-outside", example=0, value=CLASSES):
                session._index.check({"x": X, "label": label}, "the data")


# ---- comparisons with an index outside, which may be meant


@of_label
def background(logits, labels):
    """RetinaNet: -1 is none of the classes."""
    return optax.sigmoid_binary_cross_entropy(logits, jax.nn.one_hot(labels, CLASSES)).sum(1)


@of_label
def until(logits, lengths):
    """The mean before the place where a text ends, or of all of it."""
    places = jnp.arange(CLASSES)
    ended = jnp.cumsum(places[None] == lengths[:, None], axis=1)
    return jnp.where(ended == 0, logits, 0.0).sum(1)


def unknown(params, state, batch, key, train):
    """A category as features, of which -1 is unknown."""
    logits = jax.nn.one_hot(batch["label"], FEATURES) @ params["w"]
    return {"loss": cw.Sum.of(optax.sigmoid_binary_cross_entropy(logits, batch["x"][:, :1]).sum(1))}, state


@pytest.mark.parametrize(
    ("task", "value"),
    [(background, -1), (until, CLASSES), (functools.partial(cw.Task, init=init, loss=unknown), -1)],
    ids=["background", "until", "unknown"],
)
def test_a_zero_row_that_has_a_meaning_is_allowed(task, value):
    given = cw.Arrays(x=X, label=np.where(np.arange(ROWS) % 5, LABEL % FEATURES, value))
    for indexed in checks(task(train=given, eval=given)):
        assert indexed.ranges and list(indexed._left_out["label"]) == [value]


def test_a_zero_row_that_ignores_the_outputs_is_refused_beside_a_penalty():
    def loss(params, state, batch, key, train):
        losses = one_hot(batch["x"] @ params["w"], batch["label"])
        return {"loss": cw.Sum.of(losses + jnp.sum(params["w"] ** 2))}, state

    task = cw.Task(init=init, loss=loss, train=data(), eval=data())
    for indexed in checks(task):
        with refused(cw.errors.DataError, "index-outside", example=4, value=-1):
            indexed.check(wrong(4, -1), "the data")


# ---- the cost of trials


def test_a_column_is_tried_until_many_of_its_values_are_left_out():
    training, _ = checks(LEAVING_OUT["another column"](train=data(mask=MASK), eval=data(mask=MASK)))

    def check(values, mask):
        columns = {"label": values.astype(np.int32), "mask": np.full(ROWS, mask, np.float32)}
        training.check({"x": X, **columns}, "the data")

    for values in (-1 - np.arange(ROWS) % 15, -2 - np.arange(ROWS) % 14):
        check(values, 0)
    with refused(cw.errors.DataError, "index-outside", value=CLASSES):
        check(np.full(ROWS, CLASSES), 1)
    check(np.full(ROWS, CLASSES + 1), 0)
    check(np.full(ROWS, CLASSES), 1)


@pytest.mark.parametrize("limit", [("MOST_FLOPS", {"cpu": 1000}), ("MOST_BYTES", 10)], ids=str)
def test_what_takes_long_is_not_tried(limit, monkeypatch):
    name, most = limit
    monkeypatch.setattr(f"chipwise.run.indexed.{name}", most)
    training, _ = checks(DOORS["optax"](train=data(), eval=data()))
    training.check(wrong(4, -1), "the data")


@pytest.mark.parametrize("way", LEAVING_OUT)
def test_a_value_that_is_left_out_is_allowed_and_no_other(way):
    padded = data(PADDED, mask=MASK)
    for indexed in checks(LEAVING_OUT[way](train=padded, eval=padded)):
        indexed.check(padded.columns, "padded")
        label = PADDED.copy()
        label[ROWS - 2] = CLASSES + 1
        with refused(cw.errors.DataError, "index-outside", example=ROWS - 2, value=CLASSES + 1):
            indexed.check({"x": X, "label": label, "mask": np.ones(ROWS, np.float32)}, "the data")


def test_a_masked_label_of_an_unmasked_example_is_named():
    label, mask = PADDED.copy(), MASK.copy()
    mask[6] = 1
    given = data(label, mask=mask)
    task = LEAVING_OUT["another column"](train=given, eval=given)
    with refused(cw.errors.DataError, "index-outside", data="training", example=6, value=-1):
        checks(task)


# ---- pixels, tokens, and other indices


def pixels(ignored, **data):
    nn = torch().nn
    torch().manual_seed(0)
    loss = nn.CrossEntropyLoss(ignore_index=ignored)
    return cw.torch.task(nn.Conv2d(3, 4, 1), loss, inputs="x", target="mask", **data)


def test_the_classes_of_pixels():
    mask = RNG.integers(0, 4, (ROWS, 5, 5)).astype(np.int32)
    mask[10, 2, 3] = 255
    given = cw.Arrays(x=RNG.normal(size=(ROWS, 3, 5, 5)).astype(np.float32), mask=mask)
    checks(pixels(255, train=given, eval=given))
    facts = {"column": "mask", "example": 10, "value": 255, "last": 3, "size": 4}
    with refused(cw.errors.DataError, "index-outside", data="training", **facts):
        checks(pixels(-100, train=given, eval=given))


VOCABULARY, LENGTH = 11, 6


def language(params, state, batch, key, train):
    """Next tokens, of which those below 0 are padding at the end."""
    tokens = batch["token"]
    hidden = jnp.cumsum(params["embedding"][tokens], axis=1)
    logits = hidden[:, :-1] @ params["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return {"loss": cw.Sum.of(jnp.where(tokens[:, 1:] >= 0, losses, 0.0).sum(1))}, state


def words(key):
    return {"embedding": jnp.ones((VOCABULARY, 3)), "head": jnp.ones((3, VOCABULARY))}, {}


TOKENS = functools.partial(cw.Task, init=words, loss=language)


def test_tokens_whose_padding_no_loss_sees():
    tokens = RNG.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
    tokens[::2, 4:] = -1
    given = cw.Arrays(token=tokens)
    training, _ = checks(TOKENS(train=given, eval=given))
    assert training.ranges == {"token": (0, VOCABULARY - 1)}
    for at, value in ((5, VOCABULARY), (0, -1)):  # as a target, and as an input
        bad = tokens.copy()
        bad[9, at] = value
        with refused(cw.errors.DataError, "index-outside", column="token", example=9, value=value):
            checks(TOKENS(train=cw.Arrays(token=bad), eval=given))


def test_a_shifted_label_has_a_shifted_range():
    task = of_label(lambda z, y: optax.softmax_cross_entropy_with_integer_labels(z, y - 1))
    training, _ = checks(task(train=data(LABEL + 1), eval=data(LABEL + 1)))
    assert training.ranges == {"label": (1, CLASSES)}
    with refused(cw.errors.DataError, "index-outside", example=3, value=0, least=1, last=CLASSES):
        training.check({"x": X, "label": np.where(np.arange(ROWS) == 3, 0, LABEL + 1)}, "the data")


def test_random_values_may_be_any():
    tokens = cw.Arrays(token=np.zeros((ROWS, LENGTH), np.int32))
    training, _ = checks(TOKENS(train=like(tokens), eval=tokens))
    assert training.ranges == {}


def test_a_number_that_is_no_index_may_be_any():
    task = own(lambda z, batch: (z[:, 0] - batch["label"].astype(jnp.float32)) ** 2)
    training, evaluation = checks(task(train=data(LABEL * 1000), eval=data()))
    assert training.ranges == {} == evaluation.ranges
    assert in_training(recipe(task(train=data())))[1].ranges == {}
