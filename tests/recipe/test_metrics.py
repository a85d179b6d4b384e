"""Every metric equals scikit-learn's of the whole set, through `cw.evaluate`, whatever the cut."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as sk
from hypothesis import example, given, settings
from hypothesis import strategies as st

import chipwise as cw
from chipwise.run.evaluate import evaluate

CLASSES, LABELS = 7, 5
RATIOS = [
    *(("f1", sk.f1_score, average) for average in ("micro", "macro", "weighted", None)),
    ("precision", sk.precision_score, "weighted"),
    ("recall", sk.recall_score, "macro"),
]


def loss(params, state, batch, key, train):
    """Every metric of logits and predictions that are columns of the data."""
    m, logits, label = cw.metrics, batch["logits"], batch["label"]
    scores, tags = batch["scores"], batch["tags"]
    guess, truth = batch["guess"], batch["truth"]
    nats = cw.Sum.of(cw.losses.softmax_cross_entropy(logits, label))
    made = {
        "loss": nats,
        "perplexity": m.perplexity(nats),
        "accuracy": m.accuracy(logits, label),
        "top3": m.accuracy(logits, label, k=3),
        "confusion": m.confusion(logits, label),
        "exact": m.exact_match(scores, tags),
        "hamming": m.hamming(scores, tags, threshold=0.3),
        "mse": m.mse(guess, truth),
        "rmse": m.rmse(guess, truth),
        "mae": m.mae(guess, truth),
        "r2": m.r2(guess, truth, center=(0.0, 50.0)),
    }
    for name, _, average in RATIOS:
        made[f"{name}_{average}"] = getattr(m, name)(logits, label, average)
        made[f"{name}_{average}_tags"] = getattr(m, name)(scores, tags, average, threshold=0.3)
    return made, state


def data(n, seed, classes, rate):
    """Logits that are often right; only the first `classes` occur; tags are there at the given rate."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, classes, n).astype(np.int32)
    logits = rng.normal(size=(n, CLASSES)) + 1.5 * np.eye(CLASSES)[label]
    logits[:, 5] = -9.0  # a class that is never predicted
    tags = rng.random((n, LABELS)) < rate
    tags[:, 0] = False  # a tag that is never there
    scores = rng.normal(-1, 1.5, (n, LABELS)) + 2.0 * tags
    scores[:, 1] = -9.0  # one that is never predicted
    truth = rng.normal([0.0, 55.0], [1.0, 8.0], (n, 2))
    return {
        "logits": logits.astype(np.float32),
        "label": label,
        "scores": scores.astype(np.float32),
        "tags": tags.astype(np.uint8),
        "truth": truth.astype(np.float32),
        "guess": (truth + rng.normal(size=(n, 2))).astype(np.float32),
    }


def by_scikit_learn(d):
    d = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in d.items()}
    label, chosen = d["label"], d["logits"].argmax(1)
    shifted = np.exp(d["logits"] - d["logits"].max(1, keepdims=True))
    shares = shifted / shifted.sum(1, keepdims=True)
    nats = sk.log_loss(label, shares, labels=range(CLASSES))
    found = {t: 1 / (1 + np.exp(-d["scores"])) > t for t in (0.3, 0.5)}
    numbers = d["truth"], d["guess"]
    made = {
        "loss": nats,
        "perplexity": np.exp(nats),
        "accuracy": sk.accuracy_score(label, chosen),
        "top3": sk.top_k_accuracy_score(label, d["logits"], k=3, labels=range(CLASSES)),
        "confusion": sk.confusion_matrix(label, chosen, labels=range(CLASSES)),
        "exact": sk.accuracy_score(d["tags"], found[0.5]),
        "hamming": sk.hamming_loss(d["tags"], found[0.3]),
        "mse": sk.mean_squared_error(*numbers),
        "rmse": sk.root_mean_squared_error(*numbers),
        "mae": sk.mean_absolute_error(*numbers),
        "r2": sk.r2_score(*numbers),
    }
    for name, ratio, average in RATIOS:
        ratio = functools.partial(ratio, average=average, zero_division=0)  # the default, without its warning
        each = {"labels": range(CLASSES)} if average is None else {}
        made[f"{name}_{average}"] = ratio(label, chosen, **each)
        made[f"{name}_{average}_tags"] = ratio(d["tags"], found[0.3])
    return made


def evaluated(columns, batch, devices):
    task = cw.Task(
        init=lambda key: ({"none": jnp.zeros(())}, {}),
        loss=loss,
        train=cw.Arrays(**columns),
        eval=cw.Arrays(**columns),
        classes=CLASSES,
    )
    recipe = cw.Recipe(task=task, batch=8, duration="1st", optimizer=cw.sgd(lr=0.1))
    return evaluate(recipe, {"none": np.float32(0)}, {}, batch=batch, on=cw.On(devices=devices))


@pytest.mark.slow
@given(
    cut=st.sampled_from([(97, 1), (1000, 8)]),
    seed=st.integers(0, 999),
    classes=st.integers(1, CLASSES),
    rate=st.sampled_from([0.0, 0.03, 0.4, 1.0]),
)
@example((97, 1), 0, CLASSES, 0.3)
@example((1000, 8), 0, CLASSES, 0.3)
@settings(max_examples=1, deadline=None)
def test_equal_to_scikit_learn_at_any_batch_on_1_or_8_devices(cut, seed, classes, rate):
    # Each cut compiles for seconds: few examples a session, other ones in each.
    columns = data(10_007, seed, classes, rate)
    ours, theirs = evaluated(columns, *cut), by_scikit_learn(columns)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        np.testing.assert_allclose(ours[name], expected, rtol=1e-6, atol=1e-6, err_msg=name)
    np.testing.assert_array_equal(ours["confusion"], theirs["confusion"])
