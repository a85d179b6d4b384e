"""`max_pool_2x2` is bitwise `reduce_window`, ties and odd sizes included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chipwise.models.layers import _pool, max_pool_2x2


@pytest.mark.parametrize("shape", [(1, 2, 2, 1), (3, 8, 8, 5), (2, 7, 9, 4), (2, 5, 4, 3)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_and_gradient_are_bitwise_equal(shape, dtype):
    # Values from a few integers: most windows hold a tie.
    x = jax.random.randint(jax.random.key(0), shape, 0, 3).astype(dtype)

    def both(function):
        y, back = jax.vjp(function, x)
        return y, *back(jax.random.normal(jax.random.key(1), y.shape, dtype))

    for mine, theirs in zip(both(max_pool_2x2), both(_pool), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


def test_other_platforms_get_the_plain_program():
    traced = jax.jit(jax.grad(lambda x: jnp.sum(max_pool_2x2(x)))).trace(jnp.ones((2, 8, 8, 4)))
    assert "select_and_scatter" in traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "select_and_scatter" not in traced.lower(lowering_platforms=("cpu",)).as_text()
