"""ResNet-50, EfficientNet-Lite0, ViT and GPT-2: sizes, initial values, arithmetic against float64."""

import runpy
from functools import partial
from math import erf, pi
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chipwise.chips.catalogue import named
from chipwise.interop.nnx import functional
from chipwise.models.bert import BERT
from chipwise.models.chip_traits import traced_for
from chipwise.models.remat import inside
from chipwise.models.resnet50 import Bottleneck, ResNet50
from chipwise.models.tied import next_token_loss
from chipwise.models.transformer import GPT2, KEPT, Blocks, ViT, kernels
from chipwise.recipe.optimizers import decays

EXAMPLES = Path(__file__).parents[2] / "examples"
EfficientNetLite0 = runpy.run_path(str(EXAMPLES / "efficientnet_lite0.py"))["EfficientNetLite0"]
TINY_GPT = partial(GPT2, vocabulary=11, context=6, depth=2, width=8, heads=2)
TINY_VIT = partial(ViT, image=8, patch=4, depth=2, width=8, heads=2, classes=5)
TINY_RESNET = partial(ResNet50, blocks=(1, 1), width=8, classes=5)


def made(net, key=0):
    return jax.jit(functional(lambda rngs: net(rngs=rngs))[0])(jax.random.key(key))


def applied(net, params, state, x, train=False):
    apply = functional(lambda rngs: net(rngs=rngs))[1]
    return jax.jit(apply, static_argnums=4)(params, state, x, None, train)


@pytest.mark.parametrize(
    "net, count",
    [
        pytest.param(ResNet50, 25_557_032, marks=pytest.mark.slow),
        pytest.param(EfficientNetLite0, 4_652_008, marks=pytest.mark.slow),
        (ViT, 22_050_664),
        (GPT2, 124_439_808),
    ],
)
def test_parameter_count(net, count):
    init, _ = functional(lambda rngs: net(rngs=rngs))
    params, _ = jax.eval_shape(init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count


@pytest.mark.slow
@pytest.mark.parametrize("keep", [KEPT, "nothing_saveable"])
def test_blocks_are_unrolled_on_gpus_and_compute_the_same(keep):
    init, apply = functional(lambda rngs: TINY_GPT(keep=keep, rngs=rngs))
    params, state = init(jax.random.key(0))
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6) % 11

    def loss(params):
        states = apply(params, state, tokens, None, True)[0]
        return next_token_loss(states, params["words"]["embedding"], tokens)

    def turns(chip):
        with traced_for(named(chip)):
            traced = jax.make_jaxpr(jax.value_and_grad(loss))(params)
            loops = [e for one in inside(traced.jaxpr) for e in one.eqns if e.primitive.name == "scan"]
            layers = {e.params["unroll"] for e in loops if e.params["length"] == 2}
            return layers, jax.jit(jax.value_and_grad(loss))(params)

    looped, expected = turns("cpu")
    unrolled, found = turns("a100")
    assert (looped, unrolled) == ({1}, {2})
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("net, shape", [(TINY_VIT, (8, 8, 3)), (TINY_RESNET, (33, 40, 3))])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("train", [True, False])
def test_computes_in_the_dtype_given(net, shape, dtype, train):
    params, state = jax.eval_shape(lambda: made(net))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)
    x = jax.ShapeDtypeStruct((3, *shape), dtype)
    logits, new = jax.eval_shape(lambda *given: applied(net, *given, train), params, state, x)
    assert logits.shape == (3, 5) and logits.dtype == dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(new)} <= {jnp.dtype("float32")}


@pytest.mark.slow
def test_efficientnet_begins_with_kernels_that_keep_the_size_of_what_they_see():
    params, _ = made(partial(EfficientNetLite0, classes=10))
    block = params["blocks"]["13"]
    for layer, reached in (("conv0", 1152), ("conv1", 25), ("conv2", 192)):
        np.testing.assert_allclose(jnp.std(block[layer]["kernel"]), (2 / reached) ** 0.5, rtol=0.02)


@pytest.mark.slow
def test_resnet_begins_as_its_shortcuts_and_puts_the_stride_on_the_3x3():
    net = partial(Bottleneck, 16, 4, stride=1)
    params, state = made(net)
    x = jax.random.normal(jax.random.key(1), (2, 6, 6, 16))
    y, _ = applied(net, params, state, x)
    np.testing.assert_array_equal(y, jax.nn.relu(x))
    strided = partial(Bottleneck, 8, 4, stride=2)
    params, state = jax.eval_shape(lambda: made(strided))
    shapes = [params[layer]["kernel"].shape for layer in ("conv1", "conv2", "conv3", "conv0")]
    assert shapes == [(1, 1, 8, 4), (3, 3, 4, 4), (1, 1, 4, 16), (1, 1, 8, 16)]
    y, _ = jax.eval_shape(lambda p, s: applied(strided, p, s, jnp.ones((1, 7, 7, 8))), params, state)
    assert y.shape == (1, 4, 4, 16)


@pytest.mark.slow
def test_a_bottleneck_is_the_textbook_one():
    """Against sums over shifted images, in float64: padding, stride and the order of the layers."""
    net = partial(Bottleneck, 6, 4, stride=2)
    params, state = made(net)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), params)
    x = rng.normal(size=(2, 8, 8, 6))
    ours, _ = applied(net, params, state, jnp.asarray(x, jnp.float32))
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def conv(x, layer, stride):
        kernel = p[layer]["kernel"]
        pad = (kernel.shape[0] - 1) // 2
        wide = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        h = -(-x.shape[1] // stride)
        return sum(
            wide[:, i : i + stride * h : stride, j : j + stride * h : stride][:, :h, :h] @ kernel[i, j]
            for i in range(kernel.shape[0])
            for j in range(kernel.shape[0])
        )

    def norm(x, layer):
        return x / np.sqrt(1 + 1e-5) * p[layer]["scale"] + p[layer]["bias"]

    y = np.maximum(norm(conv(x, "conv1", 1), "norm1"), 0)
    y = np.maximum(norm(conv(y, "conv2", 2), "norm2"), 0)
    y = norm(conv(y, "conv3", 1), "norm3") + norm(conv(x, "conv0", 2), "norm0")
    np.testing.assert_allclose(ours, np.maximum(y, 0), rtol=2e-4, atol=2e-4)


def blocks(x, p, heads, causal, gelu, epsilon):
    """The transformer's blocks in NumPy, `x` `(b, t, width)` float64."""
    b, t, width = x.shape
    for layer in range(len(p["norm1"]["scale"])):
        q = jax.tree.map(lambda leaf: leaf[layer], p)
        y = norm(x, q["norm1"], epsilon) @ q["attention"]["qkv"]["kernel"] + q["attention"]["qkv"]["bias"]
        query, key, value = (
            part.reshape(b, t, heads, -1).transpose(0, 2, 1, 3) for part in np.split(y, 3, axis=-1)
        )
        weights = query @ key.transpose(0, 1, 3, 2) / np.sqrt(width // heads)
        if causal:
            weights = np.where(np.tril(np.ones((t, t), bool)), weights, -np.inf)
        weights = np.exp(weights - weights.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        y = (weights @ value).transpose(0, 2, 1, 3).reshape(b, t, width)
        x = x + y @ q["attention"]["out"]["kernel"] + q["attention"]["out"]["bias"]
        y = norm(x, q["norm2"], epsilon) @ q["hidden"]["kernel"] + q["hidden"]["bias"]
        x = x + gelu(y) @ q["out"]["kernel"] + q["out"]["bias"]
    return x


def norm(x, p, epsilon):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * p["scale"] + p["bias"]


def drawn(net):
    """Random values for every parameter, in float32 and, alike, in float64."""
    rng = np.random.default_rng(0)
    params, state = made(net)
    params = jax.tree.map(lambda leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape), jnp.float32), params)
    return params, state, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


@pytest.mark.slow
def test_gpt2_is_the_textbook_one():
    params, state, p = drawn(TINY_GPT)
    tokens = np.array([[1, 10, 0, 3, 3], [7, 7, 2, 9, 4]], np.int32)
    with jax.default_matmul_precision("highest"):
        ours, _ = applied(TINY_GPT, params, state, tokens)
    x = p["words"]["embedding"][tokens] + p["places"]["embedding"][:5]
    tanh = lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / pi) * (x + 0.044715 * x**3)))  # noqa: E731
    expected = norm(blocks(x, p["blocks"]["stack"], 2, True, tanh, 1e-5), p["norm"], 1e-5)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_vit_is_the_textbook_one():
    params, state, p = drawn(TINY_VIT)
    images = np.random.default_rng(1).normal(size=(2, 8, 8, 3)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        ours, _ = applied(TINY_VIT, params, state, images)
    cut = images.reshape(2, 2, 4, 2, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(2, 4, 48)
    x = cut @ p["patches"]["kernel"].reshape(48, 8) + p["patches"]["bias"]
    x = np.concatenate([np.broadcast_to(p["token"], (2, 1, 8)), x], axis=1) + p["places"]
    gelu = lambda x: 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2)))  # noqa: E731
    x = norm(blocks(x, p["blocks"]["stack"], 2, False, gelu, 1e-6)[:, 0], p["norm"], 1e-6)
    np.testing.assert_allclose(
        ours, x @ p["classifier"]["kernel"] + p["classifier"]["bias"], rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
def test_blocks_begin_different_from_each_other_and_gpt2_as_it_should():
    params, _ = made(partial(GPT2, vocabulary=64, context=8, depth=8, width=64, heads=2))
    stack = params["blocks"]["stack"]
    kernel = np.asarray(stack["hidden"]["kernel"])
    assert kernel.shape == (8, 64, 256)
    assert len({layer.tobytes() for layer in kernel}) == 8
    assert kernel.std() == pytest.approx(0.02, rel=0.05)
    assert np.asarray(stack["out"]["kernel"]).std() == pytest.approx(0.02 / 4, rel=0.05)


def test_only_matrices_decay():
    """Stacked biases have two axes, so counting axes would not tell them from kernels."""
    params, _ = jax.eval_shape(functional(lambda rngs: TINY_VIT(rngs=rngs))[0], jax.random.key(0))
    chosen = jax.tree_util.tree_leaves_with_path(decays(params, kernels))
    names = {jax.tree_util.keystr(path, simple=True, separator="/") for path, yes in chosen if yes}
    stack = "blocks/stack/"
    assert names == {
        "classifier/kernel",
        "patches/kernel",
        *(f"{stack}{n}/kernel" for n in ("attention/qkv", "attention/out", "hidden", "out")),
    }


TINY_BERT = partial(BERT, vocabulary=11, context=8, depth=2, width=8, heads=2, classes=3)
GIVEN = {
    TINY_VIT: np.random.default_rng(1).normal(size=(2, 8, 8, 3)).astype(np.float32),
    TINY_BERT: np.array([[3, 1, 4, 0, 0], [1, 5, 9, 2, 6]], np.int32),
}


def slopes(net, chip, **sizes):
    """The outputs and gradients of a net with random parameters, traced for a chip."""
    params, state, _ = drawn(partial(net, **sizes))
    apply = functional(lambda rngs: net(**sizes, rngs=rngs))[1]

    def loss(params):
        outputs = apply(params, state, jnp.asarray(GIVEN[net]), None, False)[0]
        return jnp.sum(outputs**2), outputs

    with traced_for(named(chip)), jax.default_matmul_precision("highest"):
        return jax.value_and_grad(loss, has_aux=True)(params)


def near(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4 * np.abs(theirs).max())


@pytest.mark.slow
@pytest.mark.parametrize("net", [TINY_VIT, TINY_BERT])
@pytest.mark.parametrize("chip", ["t4", "v4"])
def test_nets_of_each_kind_of_chip_compute_the_same_with_equal_gradients(net, chip):
    jax.tree.map(near, slopes(net, chip), slopes(net, "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("more", [1, 2, 3])
@pytest.mark.parametrize("chip", ["cpu", "t4", "v4"])
def test_positions_that_are_appended_once_change_nothing(more, chip, monkeypatch):
    expected = slopes(TINY_VIT, chip)
    monkeypatch.setattr("chipwise.models.transformer.padding", lambda x, heads: more)
    jax.tree.map(near, slopes(TINY_VIT, chip), expected)


@pytest.mark.slow
@pytest.mark.parametrize("net", [TINY_VIT, TINY_BERT])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("chip", ["cpu", "t4", "v4"])
def test_the_last_block_computes_one_position_as_if_all(net, depth, chip, monkeypatch):
    found = slopes(net, chip, depth=depth)
    called = Blocks.__call__
    monkeypatch.setattr(Blocks, "__call__", lambda self, *given, first: called(self, *given))
    jax.tree.map(near, found, slopes(net, chip, depth=depth))


def test_the_last_block_has_products_for_one_position():
    """Of queries, of what attention found, and of the hidden layer's two; not of keys and values."""
    params, state = jax.eval_shape(lambda: made(TINY_VIT))
    apply = functional(lambda rngs: TINY_VIT(rngs=rngs))[1]
    with traced_for(named("t4")):
        traced = jax.make_jaxpr(lambda *x: apply(*x, None, False))(params, state, GIVEN[TINY_VIT])
    equations = [one for part in inside(traced.jaxpr) for one in part.eqns]
    of_parameters = [
        one for one in equations if one.primitive.name == "dot_general" and len(one.invars[1].aval.shape) == 2
    ]
    assert [one.outvars[0].aval.shape[1] for one in of_parameters].count(1) == 4
