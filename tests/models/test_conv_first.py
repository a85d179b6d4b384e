"""Convolutions with a form of their own on the CPU, against XLA's in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chipwise.models.chip_traits import traced_for
from chipwise.models.conv_first import _plain, conv_first, has_form

ONES = ((1, 1), (1, 1))


def given(height, width, kernel, dtype=np.float64, channels=3, batch=2, out=None):
    """Images and a kernel for each channel, or kernels for `out` channels."""
    draw = np.random.RandomState(height + width).randn
    rows = (channels, 1) if out is None else (out, channels)
    x, weights = draw(batch, channels, height, width), draw(*rows, *kernel)
    return jnp.asarray(x, dtype), jnp.asarray(weights, dtype)


def value_and_slopes(function, x, kernel):
    shape = jax.eval_shape(function, x, kernel).shape
    weights = jnp.asarray(np.random.RandomState(1).randn(*shape), x.dtype)
    return jax.jit(jax.value_and_grad(lambda x, k: (function(x, k) * weights).sum(), (0, 1)))(x, kernel)


def alike(x, k, strides, pads):
    ours, slopes = value_and_slopes(lambda x, k: conv_first(x, k, strides, pads), x, k)
    theirs, expected = value_and_slopes(lambda x, k: _plain(strides, pads, x, k), x, k)
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    for one, other in zip(slopes, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


CASES = [
    ((3, 3), (1, 1), ONES),
    ((3, 3), (2, 2), ONES),
    ((3, 5), (2, 1), ((0, 0), (2, 2))),
    ((5, 2), (3, 2), ((4, 1), (0, 3))),
    ((1, 1), (2, 2), ((0, 0), (0, 0))),
    ((2, 2), (3, 3), ((0, 0), (0, 0))),
]


@pytest.mark.parametrize("size", [(7, 7), (8, 5), (9, 11)])
@pytest.mark.parametrize("kernel, strides, pads", CASES)
def test_a_kernel_for_each_channel_is_the_convolution_and_its_gradients(size, kernel, strides, pads):
    with jax.enable_x64(True):
        alike(*given(*size, kernel), strides, pads)


@pytest.mark.parametrize("size", [(3, 3), (4, 2), (5, 6)])
@pytest.mark.parametrize("kernel, strides, pads", [*CASES, ((1, 1), (1, 1), ((1, 0), (0, 2)))])
def test_products_are_the_convolution_and_its_gradients(size, kernel, strides, pads):
    with jax.enable_x64(True):
        alike(*given(*size, kernel, out=4), strides, pads)


@pytest.mark.parametrize("out", [None, 4])
def test_half_precision_is_added_up_in_single_precision(out):
    x, k = given(9, 9, (3, 3), jnp.bfloat16, out=out)
    ours = conv_first(x, k, (1, 1), ONES)
    exact = _plain((1, 1), ONES, x.astype(jnp.float32), k.astype(jnp.float32))
    assert ours.dtype == jnp.bfloat16
    if out is None:
        np.testing.assert_array_equal(ours, exact.astype(jnp.bfloat16))
    np.testing.assert_allclose(ours.astype(np.float32), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("out", [None, 4])
def test_other_chips_have_their_own_convolution(out):
    x, k = given(2, 2, (3, 3), np.float32, out=out)
    traced = jax.jit(jax.grad(lambda x, k: conv_first(x, k, (1, 1), ONES).sum(), (0, 1)))
    with traced_for(jax.devices("cpu")[0]):
        assert "conv_general_dilated" not in str(traced.trace(x, k).jaxpr)
    from chipwise.chips.catalogue import named

    with traced_for(named("h100")):
        assert "conv_general_dilated" in str(traced.trace(x, k).jaxpr)


def test_vmap_over_images_and_kernels():
    x, k = given(2, 3, (3, 3), np.float32, out=4)
    x, k = jnp.stack([x, 2 * x]), jnp.stack([k, k + 1])
    each = jnp.stack([conv_first(a, b, (1, 1), ONES) for a, b in zip(x, k, strict=True)])
    together = jax.vmap(lambda a, b: conv_first(a, b, (1, 1), ONES))(x, k)
    np.testing.assert_allclose(together, each, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "size, kernel, stride, groups, expected",
    [
        (9, 1, 1, 1, True),
        (9, 1, 2, 1, True),
        (2, 3, 1, 1, True),
        (3, 3, 1, 1, False),
        (4, 3, 2, 1, True),  # its output is 2x2
        (5, 3, 2, 1, False),
        (5, 7, 1, 1, True),
        (7, 8, 1, 1, False),  # too many positions
        (9, 3, 1, 4, True),
        (9, 3, 1, 2, False),
    ],
)
def test_the_form_is_chosen_by_the_sizes(size, kernel, stride, groups, expected):
    x, k = jnp.ones((1, 4, size, size)), jnp.ones((4, 4 // groups, kernel, kernel))
    low = kernel // 2
    assert has_form(x, k, (stride, stride), ((low, low), (low, low)), groups) is expected


def test_a_loop_computes_the_bits_of_single_calls():
    def gradients(x, k):
        return jax.grad(lambda x, k: (conv_first(x, k, (1, 1), ONES) ** 2).sum(), (0, 1))(x, k)

    x, k = given(2, 2, (3, 3), np.float32, channels=64, out=64, batch=16)
    x = x.reshape(2, 8, *x.shape[1:])
    looped = jax.jit(lambda x, k: jax.lax.map(lambda one: gradients(one, k), x))(x, k)
    alone = [jax.jit(gradients)(one, k) for one in x]
    for together, each in zip(looped, zip(*alone, strict=True), strict=True):
        np.testing.assert_array_equal(together, jnp.stack(each))
