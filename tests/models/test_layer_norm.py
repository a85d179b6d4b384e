"""Layer norm and both of its gradients against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from chipwise.chips.catalogue import named
from chipwise.models.chip_traits import traced_for
from chipwise.models.layer_norm import LayerNorm, by_rows_and_columns

EPSILON = 1e-6


def exact(x, scale, bias, slope):
    """The result, and the gradients of `x`, scale and bias, in float64."""
    x, scale, bias, slope = (np.asarray(one, np.float64) for one in (x, scale, bias, slope))
    rate = 1 / np.sqrt(x.var(-1, keepdims=True) + EPSILON)
    y = (x - x.mean(-1, keepdims=True)) * rate
    inner = slope * scale
    along = (inner * y).mean(-1, keepdims=True)
    d_x = (inner - inner.mean(-1, keepdims=True) - y * along) * rate
    rows = tuple(range(x.ndim - 1))
    return y * scale + bias, d_x, (slope * y).sum(rows), slope.sum(rows)


def drawn(shape, dtype, mean):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(mean, 1, shape), *rng.normal(size=(2, shape[-1])), rng.normal(size=shape)]
    return [jnp.asarray(one, dtype) for one in arrays]


@pytest.mark.parametrize("shape", [(5, 1), (7, 16), (2, 3, 31), (2, 3, 32), (2, 3, 33)])
@pytest.mark.parametrize("dtype, near", [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("chip", ["cpu", "h100"])
def test_it_is_the_textbook_one_and_so_is_its_gradient(shape, dtype, near, chip):
    x, scale, bias, slope = drawn(shape, dtype, 0)

    def called(x, scale, bias):
        layer = LayerNorm(shape[-1], epsilon=EPSILON)
        layer.scale, layer.bias = nnx.Param(scale), nnx.Param(bias)
        return layer(x)

    with traced_for(named(chip)):
        out, pull = jax.vjp(called, x, scale, bias)
        found = out, *pull(slope)
    assert [one.dtype for one in found] == 4 * [dtype]
    for ours, theirs in zip(found, exact(x, scale, bias, slope), strict=True):
        atol = near * max(1.0, np.abs(theirs).max())
        np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, rtol=near, atol=atol)


@pytest.mark.parametrize("mean", [0.0, 1e3, 1e5])
def test_no_digits_are_lost_to_a_large_mean(mean):
    """The best that centred values give: what rounding `x` itself, and its mean, costs."""
    x, scale, bias, slope = drawn((4, 96), jnp.float32, mean)
    pull = jax.vjp(lambda *given: by_rows_and_columns(*given, EPSILON), x, scale, bias)[1]
    for ours, theirs in zip(pull(slope), exact(x, scale, bias, slope)[1:], strict=True):
        near = 1e-5 + 4 * mean * 2**-24
        np.testing.assert_allclose(ours, theirs, rtol=near, atol=near * np.abs(theirs).max())


def test_the_gradient_is_mapped_over_replicas():
    x, scale, bias, slope = drawn((3, 4, 16), jnp.float32, 0)

    def loss(scale, bias, x, slope):
        return jnp.sum(by_rows_and_columns(x, scale, bias, EPSILON) * slope)

    def mapped(scale, bias):
        return jnp.sum(jax.vmap(loss, (None, None, 0, 0))(scale, bias, x, slope))

    for ours, whole in zip(
        jax.grad(mapped, (0, 1))(scale, bias), jax.grad(loss, (0, 1))(scale, bias, x, slope), strict=True
    ):
        np.testing.assert_allclose(ours, whole, rtol=1e-5, atol=1e-5)
