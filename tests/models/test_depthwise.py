"""Convolutions of single channels, against XLA's own in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chipwise.models.chip_traits import traced_for
from chipwise.models.depthwise import _plain, depthwise


def given(height, width, kernel, dtype=np.float64, channels=3, batch=2):
    draw = np.random.RandomState(height + width).randn
    x, weights = draw(batch, channels, height, width), draw(channels, 1, *kernel)
    return jnp.asarray(x, dtype), jnp.asarray(weights, dtype)


def value_and_slopes(function, x, kernel):
    shape = jax.eval_shape(function, x, kernel).shape
    weights = jnp.asarray(np.random.RandomState(1).randn(*shape), x.dtype)
    return jax.jit(jax.value_and_grad(lambda x, k: (function(x, k) * weights).sum(), (0, 1)))(x, kernel)


@pytest.mark.parametrize("size", [(7, 7), (8, 5), (9, 11)])
@pytest.mark.parametrize(
    "kernel, strides, pads",
    [
        ((3, 3), (1, 1), ((1, 1), (1, 1))),
        ((3, 3), (2, 2), ((1, 1), (1, 1))),
        ((3, 5), (2, 1), ((0, 0), (2, 2))),
        ((5, 2), (3, 2), ((4, 1), (0, 3))),
        ((1, 1), (2, 2), ((0, 0), (0, 0))),
        ((2, 2), (3, 3), ((0, 0), (0, 0))),
    ],
)
def test_it_is_the_convolution_and_its_gradients(size, kernel, strides, pads):
    with jax.enable_x64(True):
        x, k = given(*size, kernel)
        ours, slopes = value_and_slopes(lambda x, k: depthwise(x, k, strides, pads), x, k)
        theirs, expected = value_and_slopes(lambda x, k: _plain(x, k, strides=strides, pads=pads), x, k)
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
        for one, other in zip(slopes, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def test_half_precision_is_added_up_in_single_precision():
    x, k = given(9, 9, (3, 3), jnp.bfloat16)
    pads = ((1, 1), (1, 1))
    ours = depthwise(x, k, (1, 1), pads)
    exact = _plain(x.astype(jnp.float32), k.astype(jnp.float32), strides=(1, 1), pads=pads)
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(ours, exact.astype(jnp.bfloat16))


def test_other_chips_have_their_own_convolution():
    x, k = given(8, 8, (3, 3), np.float32)
    traced = jax.jit(jax.grad(lambda x, k: depthwise(x, k, (1, 1), ((1, 1), (1, 1))).sum(), (0, 1)))
    with traced_for(jax.devices("cpu")[0]):
        assert "conv_general_dilated" not in str(traced.trace(x, k).jaxpr)
    from chipwise.chips.catalogue import named

    with traced_for(named("h100")):
        assert "conv_general_dilated" in str(traced.trace(x, k).jaxpr)
