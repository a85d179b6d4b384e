"""Losses: equal to PyTorch's, in float32 whatever comes in, and NaN rather than a wrong class."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chipwise.base.errors import RecipeError
from chipwise.recipe import losses as module
from chipwise.recipe.task import Sum
from refusals import refused

# Compiled as in a step, which is also quicker than to compile every operation by itself
absolute_error, squared_error = map(jax.jit, (module.absolute_error, module.squared_error))
correct = jax.jit(module.correct, static_argnames="k")
softmax_cross_entropy, weighted_softmax_cross_entropy, sigmoid_cross_entropy = (
    jax.jit(one, static_argnames="smoothing")
    for one in (
        module.softmax_cross_entropy,
        module.weighted_softmax_cross_entropy,
        module.sigmoid_cross_entropy,
    )
)

rng = np.random.default_rng(0)
LOGITS = rng.normal(size=(7, 10)).astype(np.float32) * 3
LABELS = rng.integers(0, 10, size=7)


def test_float64_stays_float64():
    logits, k = LOGITS.astype(np.float64), np.arange(10)
    log = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    with jax.enable_x64(True):
        near = dict(rtol=1e-13, atol=0)
        losses = softmax_cross_entropy(logits, LABELS, 0.1)
        target = 0.9 * (LABELS[:, None] == k) + 0.01
        np.testing.assert_allclose(losses, -(target * log).sum(1), **near)
        np.testing.assert_allclose(Sum.of(losses).total, -(target * log).sum(), **near)
        weighted = weighted_softmax_cross_entropy(logits, LABELS, k + 1.0)
        np.testing.assert_allclose(weighted.total, -(log[np.arange(7), LABELS] * (LABELS + 1)).sum(), **near)
        np.testing.assert_allclose(
            sigmoid_cross_entropy(logits, np.zeros((7, 10), np.int32), positive_weights=np.ones(10)),
            np.log1p(np.exp(logits)).mean(1), **near,
        )  # fmt: skip
        np.testing.assert_allclose(squared_error(logits, LOGITS * 0), (logits**2).mean(1), **near)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.2, 0.9])
def test_softmax_equals_torch(smoothing):
    torch = pytest.importorskip("torch")
    theirs = torch.nn.CrossEntropyLoss(label_smoothing=smoothing, reduction="none")
    tensor = torch.tensor(LOGITS, requires_grad=True)
    losses = theirs(tensor, torch.tensor(LABELS))
    losses.sum().backward()
    np.testing.assert_allclose(softmax_cross_entropy(LOGITS, LABELS, smoothing), losses.detach(), rtol=2e-6)
    gradient = jax.grad(lambda x: softmax_cross_entropy(x, LABELS, smoothing).sum())(jnp.asarray(LOGITS))
    np.testing.assert_allclose(gradient, tensor.grad, atol=1e-6)


def test_soft_labels_equal_torch():
    torch = pytest.importorskip("torch")
    soft = rng.dirichlet(np.ones(10), size=7).astype(np.float32)
    for smoothing in (0.0, 0.1):
        theirs = torch.nn.CrossEntropyLoss(label_smoothing=smoothing, reduction="none")
        expected = theirs(torch.tensor(LOGITS), torch.tensor(soft))
        np.testing.assert_allclose(softmax_cross_entropy(LOGITS, soft, smoothing), expected, rtol=2e-6)
    hot = np.eye(10, dtype=np.float32)[LABELS]
    np.testing.assert_allclose(
        softmax_cross_entropy(LOGITS, hot), softmax_cross_entropy(LOGITS, LABELS), rtol=1e-6
    )


def test_sigmoid_and_squared_error_equal_torch():
    torch = pytest.importorskip("torch")
    targets = rng.integers(0, 2, size=(7, 10))
    bce = torch.nn.BCEWithLogitsLoss()(torch.tensor(LOGITS), torch.tensor(targets, dtype=torch.float32))
    assert float(sigmoid_cross_entropy(LOGITS, targets).mean()) == pytest.approx(float(bce), rel=1e-6)
    np.testing.assert_array_equal(
        sigmoid_cross_entropy(LOGITS, targets.astype(bool)), sigmoid_cross_entropy(LOGITS, targets)
    )
    mse = torch.nn.MSELoss()(torch.tensor(LOGITS), torch.tensor(targets, dtype=torch.float32))
    assert float(squared_error(LOGITS, targets).mean()) == pytest.approx(float(mse), rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("soft", [False, True], ids=["labels", "probabilities"])
def test_class_weights_equal_torch_however_the_batch_is_cut(soft, smoothing):
    torch = pytest.importorskip("torch")
    weights = np.asarray([0, 0.1, 0.5, 1, 1, 2, 3, 7, 20, 0.3], np.float32)
    labels = rng.dirichlet(np.ones(10), size=7).astype(np.float32) if soft else LABELS
    tensor = torch.tensor(LOGITS, requires_grad=True)
    theirs = torch.nn.CrossEntropyLoss(weight=torch.tensor(weights), label_smoothing=smoothing)
    expected = theirs(tensor, torch.tensor(labels))
    expected.backward()

    def ours(logits):
        parts = [
            weighted_softmax_cross_entropy(logits[cut], labels[cut], weights, smoothing)
            for cut in (slice(0, 1), slice(1, 7))
        ]
        return Sum(sum(p.total for p in parts), sum(p.count for p in parts)).value

    value, gradient = jax.jit(jax.value_and_grad(ours))(jnp.asarray(LOGITS))
    assert float(value) == pytest.approx(expected.item(), rel=2e-6)
    np.testing.assert_allclose(gradient, tensor.grad, atol=1e-6)


@pytest.mark.slow
def test_equal_weights_are_no_weights():
    made = weighted_softmax_cross_entropy(LOGITS, LABELS, np.full(10, 3, np.float32), 0.1)
    plain = softmax_cross_entropy(LOGITS, LABELS, 0.1).mean()
    assert made.count == 21 and float(made.value) == pytest.approx(float(plain), rel=1e-6)
    with refused(RecipeError, "sum-of-a-sum"):
        Sum.of(made)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [-1, 10])
def test_a_bad_label_or_weight_makes_the_weighted_sum_nan(bad):
    labels, ones = np.where(np.arange(7) == 3, bad, LABELS), np.ones(10, np.float32)

    def total(logits):
        return weighted_softmax_cross_entropy(logits, labels, ones, 0.1).total

    value, gradient = jax.value_and_grad(total)(jnp.asarray(LOGITS))
    assert np.isnan(value) and not gradient[3].any() and np.isfinite(gradient).all()
    assert np.isnan(weighted_softmax_cross_entropy(LOGITS, LABELS, -ones).total)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_positive_weights_and_smoothing_equal_torch(smoothing):
    torch = pytest.importorskip("torch")
    targets = rng.integers(0, 2, size=(7, 10)).astype(np.float32)
    weights = rng.uniform(0.1, 30, size=10).astype(np.float32)
    smoothed = torch.tensor(targets * (1 - smoothing) + smoothing / 2)
    tensor = torch.tensor(LOGITS, requires_grad=True)
    expected = torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor(weights))(tensor, smoothed)
    expected.backward()
    value, gradient = jax.value_and_grad(
        lambda x: sigmoid_cross_entropy(x, targets, smoothing, weights).mean()
    )(jnp.asarray(LOGITS))
    assert float(value) == pytest.approx(expected.item(), rel=2e-6)
    np.testing.assert_allclose(gradient, tensor.grad, atol=1e-6)
    np.testing.assert_allclose(
        sigmoid_cross_entropy(LOGITS, targets, smoothing, np.ones(10)),
        sigmoid_cross_entropy(LOGITS, targets, smoothing),
        rtol=1e-6,
    )


def test_the_absolute_error_equals_torch():
    torch = pytest.importorskip("torch")
    targets = rng.normal(size=(7, 10)).astype(np.float32)
    ours = absolute_error(LOGITS, targets).mean()
    theirs = torch.nn.L1Loss()(torch.tensor(LOGITS), torch.tensor(targets))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("labels", [LABELS.astype(t) for t in ("int32", "uint8", "int64", "uint32")], ids=str)
def test_values_are_float32_one_for_each_example(dtype, labels):
    logits = jnp.asarray(LOGITS, dtype)
    for values in (
        softmax_cross_entropy(logits, labels),
        jax.jit(softmax_cross_entropy, static_argnums=2)(logits, labels, 0.1),
        sigmoid_cross_entropy(logits, LOGITS > 0),
        sigmoid_cross_entropy(logits, LOGITS > 0, 0.1, np.ones(10, np.int32)),
        squared_error(logits, LOGITS),
        absolute_error(logits, LOGITS),
        squared_error(logits[:, 0], LABELS),
        correct(logits, labels),
        jax.jit(correct, static_argnames="k")(logits, labels, k=5),
    ):
        assert values.shape == (7,) and values.dtype == jnp.float32
        assert np.isfinite(values).all()
    exact = softmax_cross_entropy(logits.astype(jnp.float32), labels)
    np.testing.assert_array_equal(softmax_cross_entropy(logits, labels), exact)


@pytest.mark.parametrize("bad", [-1, -10, 10, 11, 2**31 - 1])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_label_outside_the_classes_is_nan(bad, smoothing):
    labels = LABELS.copy()
    labels[3] = bad
    losses = np.asarray(softmax_cross_entropy(LOGITS, labels, smoothing))
    assert np.isnan(losses[3]) and np.isfinite(np.delete(losses, 3)).all()
    assert np.isnan(correct(LOGITS, labels)[3])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_padding_can_be_masked_out_of_value_and_gradient(smoothing):
    mask = np.arange(7) != 3
    labels = np.where(mask, LABELS, -1)

    def total(logits, labels):
        return jnp.where(mask, softmax_cross_entropy(logits, labels, smoothing), 0).sum()

    value, gradient = jax.value_and_grad(total)(jnp.asarray(LOGITS), labels)
    expected_value, expected = jax.value_and_grad(total)(jnp.asarray(LOGITS), LABELS)
    assert value == expected_value and not gradient[3].any()
    np.testing.assert_array_equal(gradient, expected)
    targets = np.where(mask[:, None], LOGITS > 0, np.nan)
    gradient = jax.grad(lambda x: jnp.where(mask, sigmoid_cross_entropy(x, targets), 0).sum())(LOGITS)
    assert np.isfinite(gradient).all() and not gradient[3].any()


@pytest.mark.slow
def test_labels_of_uint8_know_more_than_255_classes_and_256_of_them():
    labels = np.array([0, 255], np.uint8)
    for classes in (255, 256, 1000):
        losses = np.asarray(softmax_cross_entropy(np.zeros((2, classes), np.float32), labels))
        assert losses[0] == pytest.approx(np.log(classes))
        assert np.isnan(losses[1]) == (classes == 255)
    assert np.isnan(softmax_cross_entropy(LOGITS[:1], np.array([2**32 - 1], np.uint32)))


@pytest.mark.parametrize("bad", [-0.1, 1.1, np.nan])
def test_a_target_that_is_no_probability_is_nan(bad):
    targets = np.full((2, 10), 0.5, np.float32)
    targets[1, 4] = bad
    losses = sigmoid_cross_entropy(LOGITS[:2], targets)
    assert np.isfinite(losses[0]) and np.isnan(losses[1])


def test_extreme_logits_stay_finite():
    logits = np.array([[1e30, -1e30, 0.0]], np.float32)
    assert softmax_cross_entropy(logits, [0]).item() == 0
    assert np.isfinite(softmax_cross_entropy(logits, [1]).item())
    assert np.isfinite(sigmoid_cross_entropy(logits, [[1, 0, 1]]).item())
    assert np.isfinite(sigmoid_cross_entropy(logits, [[1, 0, 1]], 0.0, [2.0, 2.0, 2.0]).item())
    assert np.isfinite(weighted_softmax_cross_entropy(logits, [1], [1.0, 2.0, 3.0]).total)
    masked = np.array([[0.0, -np.inf, 0.0]], np.float32)  # a class ruled out by the model
    assert softmax_cross_entropy(masked, [0]).item() == pytest.approx(np.log(2))
    assert weighted_softmax_cross_entropy(masked, [0], [2.0, 1.0, 1.0]).value == pytest.approx(np.log(2))


def test_matches_optax_bit_for_bit_in_range():
    expected = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(LOGITS), jnp.asarray(LABELS))
    np.testing.assert_array_equal(softmax_cross_entropy(LOGITS, LABELS), expected)


@given(data=st.data(), classes=st.sampled_from([1, 2, 5]))
@settings(max_examples=60, deadline=None)
def test_correct_is_membership_in_a_stable_sort(data, classes):
    # Few distinct values, so that most rows have ties.
    row = data.draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=classes, max_size=classes))
    label = data.draw(st.integers(0, classes - 1))
    order = sorted(range(classes), key=lambda c: -row[c])  # Python's sort keeps the lower class first
    for k in range(1, classes + 1):
        expected = float(label in order[:k])
        assert correct(np.array([row], np.float32), np.array([label]), k=k).item() == expected
    assert correct(np.array([row], np.float32), np.array([int(np.argmax(row))])).item() == 1


def test_constant_and_nan_logits_score_nothing():
    labels = np.arange(10)
    assert correct(np.zeros((10, 10), np.float32), labels).sum() == 1
    assert correct(np.full((10, 10), np.nan, np.float32), labels).sum() == 0
    soft = np.eye(10, dtype=np.float32) * 0.6 + 0.04
    assert correct(np.eye(10, dtype=np.float32), soft).sum() == 10


@pytest.mark.parametrize(
    ("call", "code", "facts"),
    [
        (lambda: softmax_cross_entropy(LOGITS, LABELS[:, None]), "labels-shape", {"value": (7, 1)}),
        (
            lambda: softmax_cross_entropy(LOGITS, LABELS[:1]),
            "labels-shape",
            {"value": (1,)},
        ),
        (
            lambda: softmax_cross_entropy(LOGITS, LABELS.astype(np.float32)),
            "labels-shape",
            {"what": "the shape of float32 labels"},
        ),
        (lambda: softmax_cross_entropy(LOGITS[0], LABELS), "axes-differ", {"value": (10,)}),
        (lambda: softmax_cross_entropy(LOGITS.astype(np.int32), LABELS), "not-floats", {"value": "int32"}),
        (lambda: softmax_cross_entropy(LOGITS, LABELS, 1.0), "smoothing-range", {"smoothing": 1.0}),
        (
            lambda: weighted_softmax_cross_entropy(LOGITS, LABELS, np.ones(9)),
            "weights-shape",
            {"shape": (9,), "expected": (10,)},
        ),
        (lambda: weighted_softmax_cross_entropy(LOGITS, LABELS, np.ones(10), 1.0), "smoothing-range", {}),
        (lambda: weighted_softmax_cross_entropy(LOGITS, LABELS, np.ones(9), 1.0), "smoothing-range", {}),
        (
            lambda: weighted_softmax_cross_entropy(LOGITS, LABELS[1:], np.ones(10)),
            "labels-shape",
            {"value": (6,)},
        ),
        (lambda: sigmoid_cross_entropy(LOGITS, LABELS), "shapes-differ", {"value": (7,)}),
        (lambda: sigmoid_cross_entropy(LOGITS, LOGITS > 0, -0.1), "smoothing-range", {"smoothing": -0.1}),
        (
            lambda: sigmoid_cross_entropy(LOGITS, LOGITS > 0, 0.0, 2.0),
            "weights-shape",
            {"name": "positive_weights", "expected": (10,)},
        ),
        (lambda: absolute_error(LOGITS[:, :1], LOGITS[:, 0]), "shapes-differ", {"value": (7,)}),
        (lambda: squared_error(LOGITS[:, :1], LOGITS[:, 0]), "shapes-differ", {"value": (7,)}),
        (lambda: squared_error(np.float32(1), np.float32(1)), "axes-differ", {"expected": "(batch, ...)"}),
        (lambda: correct(LOGITS, LABELS, k=0), "k-range", {"k": 0, "classes": 10}),
        (lambda: correct(LOGITS, LABELS, k=11), "k-range", {"k": 11}),
    ],
)
def test_mistakes_are_named(call, code, facts):
    with refused(RecipeError, code, **facts):
        call()
