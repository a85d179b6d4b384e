"""Counts of classes and labels: what scikit-learn makes of the same, also where it divides by zero."""

import numpy as np
import pytest
import sklearn.metrics as sk
from hypothesis import given, settings
from hypothesis import strategies as st

from chipwise import metrics
from chipwise.base.errors import RecipeError
from chipwise.recipe.task import finished
from refusals import refused

AVERAGES = ["micro", "macro", "weighted", None]
THEIRS = {"precision": sk.precision_score, "recall": sk.recall_score, "f1": sk.f1_score}


def value(metric):
    return finished({"metric": metric})["metric"]


@given(
    pairs=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=5, max_size=5),
    ratio=st.sampled_from(sorted(THEIRS)),
    average=st.sampled_from(AVERAGES),
)
@settings(max_examples=40, deadline=None)
def test_one_label_with_classes_that_do_not_occur(pairs, ratio, average):
    label, chosen = (np.array(column) for column in zip(*pairs, strict=True))
    ours = value(getattr(metrics, ratio)(np.eye(4, dtype=np.float32)[chosen], label, average))
    each = {"labels": range(4)} if average is None else {}
    np.testing.assert_allclose(
        ours, THEIRS[ratio](label, chosen, average=average, zero_division=0, **each), rtol=1e-12
    )


@given(
    rows=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=3, max_size=3),
    ratio=st.sampled_from(sorted(THEIRS)),
    average=st.sampled_from(AVERAGES),
)
@settings(max_examples=40, deadline=None)
def test_several_labels_with_some_never_there_or_never_predicted(rows, ratio, average):
    tags, found = ((np.array(column)[:, None] >> np.arange(3)) & 1 for column in zip(*rows, strict=True))
    scores = np.where(found, 2.0, -2.0).astype(np.float32)
    ours = value(getattr(metrics, ratio)(scores, tags, average))
    np.testing.assert_allclose(ours, THEIRS[ratio](tags, found, average=average, zero_division=0), rtol=1e-12)
    assert value(metrics.exact_match(scores, tags)) == pytest.approx(sk.accuracy_score(tags, found))
    assert value(metrics.hamming(scores, tags)) == pytest.approx(sk.hamming_loss(tags, found), abs=1e-7)


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.9])
def test_a_threshold_is_a_probability(threshold):
    scores = np.linspace(-4, 4, 40, dtype=np.float32).reshape(8, 5)
    tags = np.ones((8, 5), bool)
    expected = np.mean(1 / (1 + np.exp(-scores.astype(np.float64))) > threshold)
    assert value(metrics.recall(scores, tags, "micro", threshold=threshold)) == pytest.approx(expected)
    assert value(metrics.hamming(scores, tags, threshold=threshold)) == pytest.approx(1 - expected)


def test_equal_logits_are_the_lower_class_and_nan_predicts_nothing():
    logits = np.array([[1, 1, 0], [np.nan, 5, 0], [0, 0, 2]], np.float32)
    label = np.array([0, 1, 2])
    np.testing.assert_array_equal(value(metrics.confusion(logits, label)), np.diag([1, 0, 1]))
    np.testing.assert_array_equal(value(metrics.recall(logits, label, None)), [1, 0, 1])
    assert value(metrics.accuracy(logits, label)) == pytest.approx(2 / 3)
    ones = np.ones((3, 3))
    assert value(metrics.recall(logits, ones, "micro")) == pytest.approx(4 / 9)
    assert value(metrics.hamming(logits, ones - 1)) == pytest.approx(5 / 9)  # a NaN is never right


def test_what_is_no_label_makes_the_metric_nan():
    logits, label = np.eye(3, dtype=np.float32), np.array([0, 1, 3])
    for average in AVERAGES:
        assert np.isnan(value(metrics.f1(logits, label, average))).any()
        assert np.isnan(value(metrics.f1(logits, np.array([[0, 1, 2]] * 3), average))).any()
    assert np.isnan(value(metrics.confusion(logits, label))).any()
    assert np.isnan(value(metrics.exact_match(logits, np.full((3, 3), 0.5))))
    assert np.isnan(value(metrics.hamming(logits, np.full((3, 3), np.nan))))


@pytest.mark.parametrize(
    ("call", "code", "facts"),
    [
        (lambda x: metrics.f1(x, np.zeros(4, int), "marco"), "average-unknown", {"near": "macro"}),
        (
            lambda x: metrics.f1(x, np.zeros(4, int), threshold=0.5),
            "threshold-of-one-label",
            {"threshold": 0.5},
        ),
        (lambda x: metrics.f1(x, np.zeros((4, 2), int)), "shapes-differ", {"value": (4, 2)}),
        (
            lambda x: metrics.f1(x, np.zeros((4, 3), int), threshold=1.0),
            "threshold-range",
            {"threshold": 1.0},
        ),
        (lambda x: metrics.recall(x, np.zeros(3, int)), "labels-shape", {"value": (3,)}),
        (lambda x: metrics.precision(x[0], np.zeros(3, int)), "axes-differ", {"value": (3,)}),
        (lambda x: metrics.confusion(x, np.zeros((4, 3), int)), "labels-shape", {"value": (4, 3)}),
        (lambda x: metrics.exact_match(x, np.zeros(4, int)), "shapes-differ", {"value": (4,)}),
        (lambda x: metrics.hamming(x, np.zeros((4, 3)), threshold=0), "threshold-range", {"threshold": 0}),
        (lambda x: metrics.accuracy(x, np.zeros(4, int), k=4), "k-range", {"k": 4, "classes": 3}),
    ],
)
def test_mistakes_are_named_on_one_line(call, code, facts):
    with refused(RecipeError, code, **facts):
        call(np.zeros((4, 3), np.float32))
