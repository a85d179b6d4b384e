"""GELU: all bfloat16 numbers against float64, and its slope."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from scipy.special import ndtr

from chipwise.models.gelu import gelu

LEAST = 2.0**-126
"""The least number that no chip rounds to 0."""


def everything():
    """All finite bfloat16 numbers."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    return numbers[np.isfinite(numbers.astype(np.float32))]


def test_every_number_of_bfloat16_gives_the_nearest_to_the_exact_value():
    x = everything()
    found = np.asarray(jax.jit(gelu)(jnp.asarray(x))).astype(np.float64)
    exact = x.astype(np.float64) * ndtr(x.astype(np.float64))
    nearest = exact.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    small = np.abs(exact) < LEAST
    np.testing.assert_array_equal(found[~small], nearest[~small])
    assert np.abs(found - exact)[small].max() <= LEAST


@pytest.mark.parametrize("x, y", [(np.inf, np.inf), (-np.inf, 0.0), (np.nan, np.nan)])
def test_what_is_no_finite_number_has_its_limit(x, y):
    np.testing.assert_equal(np.float32(gelu(jnp.bfloat16(x)[None])[0]), np.float32(y))


def test_the_slope_is_rounded_once():
    """Within half a unit of the last place, and a millionth where the slope crosses 0."""
    x = everything()
    x = x[np.abs(x.astype(np.float32)) < 12]
    wide = x.astype(np.float64)
    exact = ndtr(wide) + wide * np.exp(-wide * wide / 2) / np.sqrt(2 * np.pi)
    slope = jax.jit(jax.vmap(jax.grad(gelu)))(jnp.asarray(x))
    np.testing.assert_allclose(np.asarray(slope, np.float64), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("tanh, dtype", [(True, jnp.bfloat16), (False, jnp.float32), (True, jnp.float32)])
def test_other_forms_are_those_of_jax(tanh, dtype):
    x = jnp.linspace(-6, 6, 1001).astype(dtype)
    np.testing.assert_array_equal(gelu(x, tanh=tanh), jax.nn.gelu(x, approximate=tanh))
