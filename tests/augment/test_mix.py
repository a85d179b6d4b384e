"""Mixup: labels keep their mass and say how much of each image there is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import betainc

from chipwise import losses
from chipwise.augment import mix as mix_module
from chipwise.augment import mixup
from chipwise.base.errors import DataError
from refusals import refused

KEY = jax.random.key(0)
N, CLASSES = 64, 100


def batch(n=N, shape=(6, 8, 3), dtype=np.uint8):
    """Image `i` is all `i`, and its class too."""
    images = np.broadcast_to(np.arange(n).reshape(n, *(1,) * len(shape)), (n, *shape)).astype(dtype)
    return {"image": jnp.asarray(images), "label": jnp.arange(n, dtype=jnp.int32), "more": jnp.arange(n)}


@functools.cache
def made(mix, shape=(6, 8, 3), dtype=np.uint8):
    out = jax.jit(mix)(batch(shape=shape, dtype=dtype), KEY)
    assert out["image"].shape == (N, *shape) and out["image"].dtype == dtype
    assert out["label"].dtype == jnp.float32 and out["label"].shape == (N, CLASSES)
    np.testing.assert_array_equal(out["more"], np.arange(N))
    return np.asarray(out["image"]), np.asarray(out["label"])


def own(labels):
    """Each example's share of itself, after checking that the rest is its neighbour's."""
    i = np.arange(N)
    np.testing.assert_allclose(labels.sum(axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(labels[i, i] + labels[i, (i - 1) % N], 1, atol=1e-6)
    return labels[i, i]


def test_mixup_s_labels_are_the_shares_of_the_pixels():
    images, labels = made(mixup(CLASSES, 1.0), dtype=np.float32)
    share, i = own(labels), np.arange(N)
    np.testing.assert_allclose(images[:, 0, 0, 0], share * i + (1 - share) * ((i - 1) % N), rtol=1e-5)
    assert (images == images[:, :1, :1, :1]).all()
    assert 0.5 <= share.min() < 0.6 and 0.9 < share.max() <= 1 and 0.68 < share.mean() < 0.82


@pytest.mark.slow
def test_a_small_alpha_leaves_most_examples_nearly_alone():
    _, labels = made(mixup(CLASSES, 0.2))
    assert np.median(own(labels)) > 0.93


@pytest.mark.parametrize("alpha", [0.2, 0.8, 4.0])
def test_shares_are_of_the_beta_distribution_and_drawn_without_a_loop(alpha):
    def draw(key):
        return mix_module._shares(key, alpha, 20_000, True)

    assert "while" not in str(jax.make_jaxpr(draw)(KEY))
    shares = np.sort(np.asarray(draw(KEY)))
    np.testing.assert_array_equal(shares * 4096, np.rint(shares * 4096))
    # Kolmogorov's distance of so many draws is below 1.63 / sqrt(n) in 99 of 100 cases; a point is as wide
    # as what is rounded to it.
    expected = betainc(alpha, alpha, np.minimum(shares + 0.5 / 4096, 1))
    assert np.max(np.abs(np.searchsorted(shares, shares, "right") / len(shares) - expected)) < 0.0116


def test_one_share_for_the_batch():
    _, labels = made(mixup(CLASSES, 1.0, each=False), shape=(6, 8))
    assert len(np.unique(own(labels))) == 1


def test_no_alpha_only_makes_probabilities():
    mix, given = mixup(CLASSES, 0), batch()
    out = mix(given, KEY)
    assert out["image"] is given["image"]
    np.testing.assert_array_equal(out["label"], np.eye(CLASSES)[:N])
    np.testing.assert_array_equal(mix(out, KEY)["label"], out["label"])  # as they are


def test_a_label_outside_of_the_classes_is_a_loss_of_nan():
    given = batch(4) | {"label": jnp.asarray([0, -1, 100, 3], jnp.int32)}
    labels = mixup(CLASSES, 0)(given, KEY)["label"]
    found = losses.softmax_cross_entropy(jnp.zeros((4, CLASSES)), labels)
    assert np.isnan(found).tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: mixup(0), "augment-expects"),
        (lambda: mixup(10, -1), "augment-expects"),
        (lambda: mixup(10, float("nan")), "augment-expects"),
        (lambda: mixup(10)({"image": jnp.zeros((2, 3, 3))}, KEY), "augment-expects"),
        (
            lambda: mixup(10)({"image": jnp.zeros((2, 3, 3)), "label": jnp.zeros((2, 9))}, KEY),
            "augment-expects",
        ),
    ],
)
def test_what_is_refused(call, code):
    with refused(DataError, code):
        call()
