"""The built-in nets: their sizes, dtypes, initial values and modes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chipwise.interop.nnx import functional
from chipwise.models.conv_layers import BatchNorm
from chipwise.models.davidnet import DavidNet
from chipwise.models.small import DigitsNet, MnistNet

NETS = {
    MnistNet: (250_698, (28, 28, 1)),
    DavidNet: (6_573_120, (32, 32, 3)),
    DigitsNet: (9_048, (8, 8, 1)),
}
SMALL = [
    (MnistNet, (28, 28, 1)),
    (partial(DavidNet, width=4), (32, 32, 3)),
    (DigitsNet, (8, 8, 1)),
]


@pytest.mark.parametrize("net", NETS)
def test_parameter_count(net):
    init, _ = functional(lambda rngs: net(rngs=rngs))
    params, _ = jax.eval_shape(init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == NETS[net][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "net, shape", [*(pytest.param(*one, marks=pytest.mark.slow) for one in SMALL[:-1]), SMALL[-1]]
)
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16])
@pytest.mark.parametrize("train", [True, False])
def test_computes_in_the_dtype_given_and_keeps_statistics_float32(net, shape, dtype, train):
    init, apply = functional(lambda rngs: net(rngs=rngs))
    params, state = init(jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    x = jax.random.uniform(jax.random.key(1), (3, *shape), dtype)
    logits, new = jax.jit(apply, static_argnums=4)(params, state, x, jax.random.key(2), train)
    assert logits.shape == (3, 10) and logits.dtype == dtype
    assert bool(jnp.isfinite(logits.astype(jnp.float32)).all())
    assert {leaf.dtype for leaf in jax.tree.leaves(new)} == {jnp.dtype("float32")}
    changed = [
        bool((a != b).any()) for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True)
    ]
    assert all(changed) if train else not any(changed)


@pytest.mark.slow
def test_davidnet_starts_within_pytorch_bounds():
    params, _ = functional(lambda rngs: DavidNet(width=16, rngs=rngs))[0](jax.random.key(0))
    kernel = params["block2"]["conv"]["conv"]["kernel"]
    bound = (3 * 3 * 32) ** -0.5
    assert 0.99 * bound < float(jnp.abs(kernel).max()) <= bound


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
def test_batch_norm_normalises_and_follows_with_momentum(dtype, tolerance):
    init, apply = functional(lambda rngs: BatchNorm(4, momentum=0.75, epsilon=0.0))
    params, state = init(jax.random.key(0))
    x = (3 + 2 * jax.random.normal(jax.random.key(1), (64, 5, 5, 4))).astype(dtype)
    y, new = apply(params, state, x, None, True)
    y, x = y.astype(jnp.float32), x.astype(jnp.float32)
    np.testing.assert_allclose(y.mean((0, 1, 2)), jnp.zeros(4), atol=tolerance)
    np.testing.assert_allclose(y.std((0, 1, 2)), jnp.ones(4), atol=tolerance)
    np.testing.assert_allclose(new["mean"], 0.25 * x.mean((0, 1, 2)), rtol=1e-4)
    np.testing.assert_allclose(new["var"], 0.75 + 0.25 * x.var((0, 1, 2)), rtol=1e-4)
