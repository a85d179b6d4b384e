"""ROC AUC, average precision and top-k equal scikit-learn's of the whole set, on any devices."""

import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as sk
from hypothesis import given, settings
from hypothesis import strategies as st

import chipwise as cw
from chipwise.base.errors import RecipeError
from chipwise.recipe.task import finished
from chipwise.run.evaluate import evaluate
from refusals import refused

CLASSES = 4
PAIRS = [("auc", sk.roc_auc_score), ("ap", sk.average_precision_score)]


def loss(params, state, batch, key, train):
    m, of = cw.metrics, {"auc": cw.metrics.roc_auc, "ap": cw.metrics.average_precision}
    made = {"loss": cw.Sum.of(cw.losses.softmax_cross_entropy(batch["logits"], batch["label"]))}
    made["top2"] = m.accuracy(batch["logits"], batch["label"], k=2)
    for name, metric in of.items():
        made[f"{name}_one"] = metric(batch["score"], batch["yes"])
        made[f"{name}_two"] = metric(batch["logits"][:, :2], batch["yes"])
        made[f"{name}_tags"] = metric(batch["scores"], batch["tags"])
        made[f"{name}_each"] = metric(batch["scores"], batch["tags"], None)
        made[f"{name}_rest"] = metric(batch["logits"], batch["label"], "weighted")
    return {**made, "loss": made["loss"]}, state


def data(n, seed=0):
    rng = np.random.default_rng(seed)
    label = rng.integers(0, CLASSES, n).astype(np.int32)
    tags = (rng.random((n, 3)) < 0.3).astype(np.uint8)
    tags[:2] = [[0, 1, 0], [1, 0, 1]]  # both occur
    yes = (rng.random(n) < 0.4).astype(np.int32)
    yes[:2] = [0, 1]
    return {
        "logits": (rng.normal(size=(n, CLASSES)) + np.eye(CLASSES)[label]).astype(np.float32),
        "label": label,
        "scores": np.round(rng.normal(size=(n, 3)) + tags, 1).astype(np.float32),  # many ties
        "tags": tags,
        "score": np.round(rng.normal(size=n) + yes, 1).astype(np.float32),
        "yes": yes,
    }


def made(columns, **settings):
    source = cw.Arrays(**columns)
    init = lambda key: ({"none": jnp.zeros(())}, {})  # noqa: E731
    task = cw.Task(init=init, loss=loss, train=source, eval=source)
    return cw.Recipe(task=task, batch=8, duration="1st", optimizer=cw.sgd(lr=0.1), **settings)


@pytest.mark.slow
@pytest.mark.parametrize("n", [63, 64, 65])
def test_equal_to_scikit_learn(n):
    d = data(n)
    found = evaluate(made(d, eval_block=16), {"none": np.float32(0)}, {}, on=cw.On(devices=1))
    two = d["logits"][:, 1].astype(np.float64) - d["logits"][:, 0]
    wide = d["logits"].astype(np.float64)
    shares = np.exp(wide) / np.exp(wide).sum(1, keepdims=True)
    assert found["top2"] == pytest.approx(sk.top_k_accuracy_score(d["label"], wide, k=2))
    for name, metric in PAIRS:
        one_hot = np.eye(CLASSES)[d["label"]]
        expected = {
            "one": metric(d["yes"], d["score"]), "two": metric(d["yes"], two),
            "tags": metric(d["tags"], d["scores"], average="macro"),
            "each": metric(d["tags"], d["scores"], average=None),
            "rest": metric(one_hot, shares, average="weighted"),
        }  # fmt: skip
        for what, value in expected.items():
            np.testing.assert_allclose(found[f"{name}_{what}"], value, rtol=1e-6, err_msg=f"{name}_{what}")


@pytest.mark.slow
@given(seed=st.integers(0, 9999), classes=st.integers(2, 5), shift=st.sampled_from([0, 0.25, 50]))
@settings(max_examples=60, deadline=None)
def test_odds_that_are_equal_are_ties(seed, classes, shift):
    """Scikit-learn compares probabilities, which are rounded here so that ties are ties there too."""
    rng = np.random.default_rng(seed)
    label = np.append(np.arange(classes), rng.integers(0, classes, 60 - classes))
    logits = rng.integers(-2, 3, (60, classes)) / 2 + shift * rng.integers(0, 2, (60, 1))
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for ours, theirs in (
        (cw.metrics.roc_auc, sk.roc_auc_score),
        (cw.metrics.average_precision, sk.average_precision_score),
    ):
        found = finished({"metric": ours(logits.astype(np.float32), label, None)})["metric"]
        kept = np.eye(classes)[label], shares.round(12)
        expected = theirs(*(x[:, -len(found) :] for x in kept), average=None)
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_odds_beyond_what_a_probability_tells_are_in_order():
    logits = np.array([[0, 0, 99], [0, 0, 98], [-800, -801, 0], [-801, -800, 0]], np.float32)
    found = finished({"auc": cw.metrics.roc_auc(logits, np.array([2, 1, 0, 1]), None)})["auc"]
    assert found.tolist() == [1 / 3, 3 / 4, 1 / 3]


@pytest.mark.slow
def test_any_devices_give_the_same_bits_and_training_leaves_ranks_out():
    columns = data(53)
    alone = cw.fit(made(columns, replicas=8), on=cw.On(devices=1), progress="none")
    eight = cw.fit(made(columns, replicas=8), on=cw.On(devices=8), progress="none")
    for name, value in alone.metrics.items():
        assert np.array_equal(value, eight.metrics[name]), name
    assert "eval/auc_one" in alone.metrics and "train/top2" in alone.metrics
    assert not any(name.startswith(("train/auc", "train/ap")) for name in alone.metrics)


def test_what_has_no_value_is_nan_and_what_does_not_fit_is_refused():
    def value(*given):
        return cw.metrics.roc_auc(*map(jnp.asarray, given)).value

    assert value([0.5, 0.25], [1, 0]) == 1.0 and value([0.5, 0.5], [1, 0]) == 0.5
    with np.errstate(all="ignore"):
        assert np.isnan(value([0.5, 0.25], [1, 1])) and np.isnan(value([0.5, np.nan], [1, 0]))
        assert np.isnan(value([0.5, 0.25], [2, 0]))
        for wide in (2, 3):
            logits, (right, *wrong) = (
                np.eye(wide, dtype=np.float32)[[0, 1, 1]],
                ([0, 1, 1], [0, 1, -1], [0, 1, 3]),
            )
            for metric in (cw.metrics.roc_auc, cw.metrics.average_precision):
                of = [metric(logits, jnp.asarray(labels), None).value for labels in (right, *wrong)]
                assert np.isnan(of[1:]).all() and np.isfinite(of[0]).any(), (wide, metric)
    with refused(RecipeError, "shapes-differ"):
        value([0.5, 0.25], [1, 0, 1])
    with refused(RecipeError, "average-unknown"):
        cw.metrics.average_precision(jnp.zeros((2, 3)), jnp.zeros(2, jnp.int32), "micro")
