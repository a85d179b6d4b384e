"""Traced programs against sums done by hand: multiply-adds, bytes, kernels, memory."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from chipwise.interop.nnx import functional
from chipwise.models.davidnet import DavidNet
from chipwise.models.resnet50 import ResNet50
from chipwise.models.transformer import GPT2
from chipwise.planner.operations import trace

F32 = jnp.float32


def spec(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def kinds(traced):
    return [op.kind for op in traced.operations]


def image_net(make, batch, pixels, dtype=jnp.bfloat16):
    """`(loss, specs)` of a net on images, parameters and images in `dtype`."""
    init, apply = functional(make)
    params, state = jax.eval_shape(init, jax.random.key(0))
    params = jax.tree.map(lambda p: spec(*p.shape, dtype=dtype), params)

    def loss(params, state, x):
        return jnp.sum(apply(params, state, x, jax.random.key(0), True)[0].astype(F32))

    return loss, (params, state, spec(batch, pixels, pixels, 3, dtype=dtype))


# ---- fusion


def test_chain_of_elementwise_operations_is_one_kernel():
    traced = trace(lambda x: jnp.tanh(x * 2.0 + 1.0).reshape(-1), spec(1000, 1000))
    assert kinds(traced) == ["elementwise"]
    assert traced.operations[0].bytes_read == traced.operations[0].bytes_written == 4e6
    assert traced.peak_temp_bytes == 0


def test_softmax_over_rows_is_one_kernel_that_reads_once():
    traced = trace(lambda x: jax.nn.softmax(x, axis=-1), spec(4096, 1024))
    assert len(traced.operations) == 1
    assert traced.operations[0].bytes_read == 4 * 4096 * 1024


def test_sums_of_one_array_are_one_kernel():
    def moments(x):
        return jnp.sum(x, axis=0), jnp.sum(x * x, axis=0)

    traced = trace(moments, spec(100_000, 64))
    assert kinds(traced) == ["reduce"]
    assert traced.operations[0].bytes_read == 4 * 64 * 100_000


def test_value_with_many_readers_is_written_once():
    def many(a, b, c, d, w):
        x = jnp.tanh(a + b + c + d)
        return x @ w, (x * 2.0) @ w

    traced = trace(many, *[spec(4096, 4096)] * 4, spec(4096, 512))
    assert kinds(traced).count("matmul") == 2
    assert sum(op.bytes_read > 4 * 4 * 4096**2 - 1 for op in traced.operations) == 1  # the four once


def test_products_take_nothing_in():
    traced = trace(lambda x, w: jax.nn.relu(jnp.exp(x) @ w), spec(512, 256), spec(256, 128))
    assert kinds(traced) == ["elementwise", "matmul", "elementwise"]
    product = traced.operations[1].product
    assert (product.m, product.n, product.k, product.groups) == (512, 128, 256, 1)
    assert traced.operations[1].bytes_read == 4 * (512 * 256 + 256 * 128)
    assert traced.peak_temp_bytes == 4 * (512 * 256 + 512 * 128)


def test_layout_changes_cost_nothing():
    traced = trace(lambda x, w: (x.T.reshape(64, -1) @ w).T, spec(100, 64), spec(100, 8))
    assert kinds(traced) == ["matmul"]


def test_small_updates_are_launched_together():
    params = [spec(64, 64)] * 40
    traced = trace(lambda p, g: [a - b * 0.1 for a, b in zip(p, g, strict=True)], params, params)
    assert len(traced.operations) == 1
    assert traced.operations[0].bytes_written == 40 * 4 * 64 * 64


def test_dead_code_is_not_counted():
    def f(x, w):
        _ = x @ w
        return lax.scan(lambda c, r: (c + r, jnp.sum(r) @ w if False else w @ w), jnp.zeros(8), x)[0]

    assert "matmul" not in kinds(trace(f, spec(5, 8), spec(8, 8)))


# ---- products


@pytest.mark.parametrize("stride", [1, 2])
def test_convolution_and_its_gradients_do_equal_work(stride):
    def conv(x, k):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, k, (stride, stride), "SAME", dimension_numbers=numbers)

    x, k = spec(4, 56, 56, 64), spec(3, 3, 64, 128)
    out = (56 // stride) ** 2
    forward = trace(conv, x, k).flops
    assert forward == 2 * 4 * out * 9 * 64 * 128
    both = trace(jax.grad(lambda x, k: jnp.sum(conv(x, k) ** 2), (0, 1)), x, k)
    each = [op.flops for op in both.operations if op.flops]
    assert each == pytest.approx([forward] * 3, rel=0.02)
    assert {op.product.channels for op in both.operations if op.flops} == {(64, 128), (128, 64)}


def test_depthwise_convolution_is_its_own_kind():
    def conv(x, k):
        return lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=96
        )

    traced = trace(
        jax.grad(lambda x, k: jnp.sum(conv(x, k) ** 2), (0, 1)), spec(8, 28, 28, 96), spec(3, 3, 1, 96)
    )
    products = [op for op in traced.operations if op.flops]
    assert {op.kind for op in products} == {"depthwise"}
    assert all(op.flops == 2 * 8 * 28 * 28 * 9 * 96 for op in products)


def test_batched_product():
    traced = trace(lambda a, b: jnp.einsum("bthd,bshd->bhts", a, b), spec(2, 128, 4, 64), spec(2, 96, 4, 64))
    product = traced.operations[0].product
    assert sorted((product.m, product.n)) == [96, 128]
    assert (product.k, product.groups) == (64, 8)


def test_attention_weights_are_recognised():
    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    traced = trace(attend, *[spec(2, 256, 4, 64)] * 3)
    scores = [op for op in traced.operations if op.score_bytes]
    assert {op.kind for op in scores} >= {"matmul"}
    assert all(op.masked for op in scores)


# ---- known nets


def test_resnet50_needs_4_1_billion_multiply_adds():
    loss, specs = image_net(lambda rngs: ResNet50(rngs=rngs), 2, 224)
    forward = trace(loss, *specs)
    assert forward.flops / 2 / 2 == pytest.approx(4.09e9, rel=0.01)
    backward = trace(jax.grad(loss), *specs)
    assert backward.flops / forward.flops == pytest.approx(3, rel=0.02)  # less the images' own gradient
    assert {op.dtype for op in backward.operations if op.kind == "convolution"} == {"bfloat16"}


def test_gpt_needs_six_flops_a_parameter_and_token():
    init, apply = functional(lambda rngs: GPT2(depth=6, width=512, heads=8, context=128, rngs=rngs))
    params, state = jax.eval_shape(init, jax.random.key(0))
    tokens = spec(4, 128, dtype=jnp.int32)

    def loss(params, state, tokens):
        return jnp.sum(apply(params, state, tokens, jax.random.key(0), True)[0])

    traced = trace(jax.grad(loss), params, state, tokens)
    blocks = 6 * 12 * 512 * 512  # the embeddings multiply nothing
    attention = 4 * 128 * 512 * 6 * (3 + 1)  # forward, computed again, backward twice; per token
    assert traced.flops == pytest.approx(4 * 128 * (6 * blocks + attention), rel=0.05)
    assert max(op.count for op in traced.operations) == 6


def test_davidnet_takes_the_gpus_form_unless_the_chip_is_a_cpu():
    loss, specs = image_net(lambda rngs: DavidNet(rngs=rngs), 8, 32, F32)
    gpu, cpu = (trace(jax.grad(loss), *specs, platform=p) for p in ("cuda", "cpu"))
    assert gpu.flops == pytest.approx(3 * 2 * 379e6 * 8, rel=0.02)
    assert kinds(gpu).count("convolution") == 23  # 8 layers, three each but the first
    assert kinds(cpu).count("convolution") < 12  # as products there
    assert "pool" in kinds(gpu) and "pool" not in kinds(cpu)


# ---- control flow


def test_scan_counts_its_trips_and_reads_slices():
    def f(x, w):
        return lax.scan(lambda c, layer: (jnp.tanh(c @ layer), None), x, w)[0]

    traced = trace(f, spec(32, 64), spec(7, 64, 64))
    product = next(op for op in traced.operations if op.kind == "matmul")
    assert product.count == 7
    assert product.bytes_read == 4 * (32 * 64 + 64 * 64)
    assert traced.flops == 7 * 2 * 32 * 64 * 64


def test_checkpoint_computes_again_and_keeps_less():
    def block(x, w):
        return jnp.sin(jnp.sin(x @ w) @ w)

    def loss(wrap, w, x):
        for _ in range(4):
            x = wrap(block)(x, w)
        return jnp.sum(x)

    specs = spec(256, 256), spec(4096, 256)
    kept, again = (
        trace(jax.grad(lambda w, x, wrap=wrap: loss(wrap, w, x)), *specs)
        for wrap in (lambda f: f, jax.checkpoint)
    )
    products = [sum(op.kind == "matmul" for op in t.operations) for t in (kept, again)]
    assert products[0] == 4 * 2 * 3 - 1  # no gradient of the input
    assert products[1] >= products[0] + 4
    assert again.peak_temp_bytes < kept.peak_temp_bytes


def test_loops_of_unknown_length_branches_and_callbacks_are_noted():
    def f(x):
        x = lax.while_loop(lambda x: jnp.sum(x) < 100, lambda x: x * 2.0 + 1.0, x)
        x = lax.cond(jnp.sum(x) > 0, lambda x: x @ x, lambda x: x, x)
        jax.debug.callback(lambda s: None, jnp.sum(x))
        return x

    traced = trace(f, spec(16, 16))
    codes = ["trace-loop-on-data", "trace-branch-on-data", "trace-host-callback"]
    assert [note.code for note in traced.notes] == codes
    assert traced.flops == 2 * 16**3  # the costlier branch


def test_memory_of_a_chain_is_what_its_gradient_keeps():
    def loss(w, x):
        for _ in range(8):
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    traced = trace(jax.grad(loss), spec(128, 128), spec(8192, 128))
    one = 4 * 8192 * 128
    assert 8 * one <= traced.peak_temp_bytes <= 12 * one
