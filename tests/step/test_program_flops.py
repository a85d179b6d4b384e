"""FLOPs are those of the arithmetic, whatever runs it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import chipwise as cw
from chipwise.chips.targets import named
from chipwise.compile.exports import cudnn_assumed
from chipwise.data.synthetic import Synthetic
from chipwise.models.attention import attention
from chipwise.models.chip_traits import traced_for
from chipwise.run.session import Session
from chipwise.step.program_flops import program_flops


def counted(function, *shapes, dtype=jnp.float32):
    return program_flops(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes)).jaxpr)


def test_a_product_a_convolution_and_their_gradients():
    assert counted(jnp.dot, (3, 5), (5, 7)) == 2 * 3 * 5 * 7
    assert counted(lambda x: x + 1, (3, 5)) == 0

    def conv(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    once = 2 * (2 * 8 * 8 * 6) * (3 * 3 * 4)
    assert counted(conv, (2, 8, 8, 4), (3, 3, 4, 6)) == once
    both = jax.grad(lambda x, w: conv(x, w).sum(), (0, 1))
    assert counted(both, (2, 8, 8, 4), (3, 3, 4, 6)) >= 2 * once  # the first one's result is not needed


def test_every_turn_of_a_loop_and_the_larger_branch_count():
    def loop(x, w):
        return lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    assert counted(loop, (3, 5), (11, 5, 5)) == 11 * 2 * 3 * 5 * 5

    def branch(x):
        return lax.cond(x.sum() > 0, lambda x: x, lambda x: x @ x.T @ x, x)

    assert counted(branch, (3, 5)) == 2 * (2 * 3 * 5 * 3)


@pytest.mark.parametrize("t", [63, 64, 65])
@pytest.mark.parametrize(("causal", "share"), [(True, 0.5), (False, 1.0)])
def test_cudnns_attention_counts_as_two_products_and_five_of_the_gradient(causal, share, t):
    shape, even = (2, t, 4, 64), t + t % 2

    def loss(*qkv):
        return attention(*qkv, causal=causal).astype(jnp.float32).sum()

    with traced_for(named("h100")), cudnn_assumed(False):
        found = counted(jax.grad(loss, (0, 1, 2)), shape, shape, shape, dtype=jnp.bfloat16)
    assert found == 7 * share * 2 * (2 * 4) * even * even * 64


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "shards"), [(2, 1), (1, 2)])
def test_a_step_counts_all_replicas_and_all_layers(devices, shards):
    """Six FLOPs a weight and token, as everybody counts, and those of attention."""
    sizes = ["context=32", "vocabulary=256", "depth=3", "width=64", "heads=2", "batch=8", "replicas=4"]
    recipe = cw.load("gpt2-124m", [*sizes, "precision=f32", f"shards={shards}"], synthetic=True)
    many = recipe.task.train
    few = Synthetic(16, many.spec, many.below)
    recipe = dataclasses.replace(recipe, task=dataclasses.replace(recipe.task, train=few))
    with Session(recipe, cw.On(devices=devices * shards)) as session:
        session.begin()
        session.compile()
        found = session.programs.flops_per_step_per_device * devices * shards
    weights = 3 * 12 * 64 * 64 + 256 * 64
    np.testing.assert_allclose(found, 6 * weights * 8 * 32, rtol=0.35)
