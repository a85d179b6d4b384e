"""The max pools are bitwise `reduce_window`, ties and odd sizes included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chipwise.models.pool import _pool, _pool_3x3, max_pool_2x2, max_pool_3x3


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 2, 1), (2, 7, 9, 4), (3, 8, 8, 5), (2, 5, 4, 3)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("pool, plain", [(max_pool_2x2, _pool), (max_pool_3x3, _pool_3x3)])
@pytest.mark.drawn(share=0.25)
def test_values_and_gradient_are_bitwise_equal(shape, dtype, pool, plain):
    # Values from a few integers: most windows hold a tie.
    x = jax.random.randint(jax.random.key(0), shape, 0, 3).astype(dtype)

    def both(function):
        y, back = jax.vjp(function, x)
        return y, *back(jax.random.normal(jax.random.key(1), y.shape, dtype))

    for mine, theirs in zip(both(pool), both(plain), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("pool", [max_pool_2x2, max_pool_3x3])
def test_only_tpus_scatter(pool):
    traced = jax.jit(jax.grad(lambda x: jnp.sum(pool(x)))).trace(jnp.ones((2, 8, 8, 4)))
    for platform in ("tpu", "cpu", "cuda"):
        there = "select_and_scatter" in traced.lower(lowering_platforms=(platform,)).as_text()
        assert there == (platform == "tpu")
