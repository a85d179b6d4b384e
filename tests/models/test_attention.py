"""Every form of attention against the plain one in float64, and what each chip gets."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import chipwise as cw
from chipwise.chips.catalogue import CHIPS, named
from chipwise.compile.exports import cudnn_assumed
from chipwise.models import llama
from chipwise.models.attention import attention, form_for, saveable
from chipwise.models.attention_blocks import blocks
from chipwise.models.attention_fused import block_of, in_fixed_order
from chipwise.models.attention_mask import Mask, pairs, visited
from chipwise.models.chip_traits import ChipTraits, traced_for, traits
from chipwise.models.remat import inside
from chipwise.models.transformer import Attention
from refusals import refused

MASKS = [Mask(), Mask(causal=True), Mask(causal=True, window=3), Mask(window=5)]


def plain(query, key, value, mask):
    """In float64, with all weights at once."""
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.einsum("btnd,bsnd->bnts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(seen(q.shape[1], k.shape[1], mask), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnts,bsnd->btnd", weights / weights.sum(-1, keepdims=True), v)


def seen(t, s, mask):
    at, of = np.arange(t)[:, None], np.arange(s)[None]
    visible = np.ones((t, s), bool)
    if mask.causal:
        visible &= of <= at
    if mask.window is not None:
        visible &= abs(at - of) < mask.window
    return visible


def slopes(query, key, value, gradient, mask):
    """The gradients of `sum(plain * gradient)`, by hand in float64."""
    q, k, v, g = (np.asarray(x, np.float64) for x in (query, key, value, gradient))
    (b, s, shared, d), group = k.shape, q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.einsum("btnd,bsnd->bnts", q, k) / np.sqrt(d)
    scores = np.where(seen(q.shape[1], s, mask), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    by_weight = np.einsum("btnd,bsnd->bnts", g, v)
    slope = weights * (by_weight - (weights * by_weight).sum(-1, keepdims=True)) / np.sqrt(d)
    dq, dk = np.einsum("bnts,bsnd->btnd", slope, k), np.einsum("bnts,btnd->bsnd", slope, q)
    dv = np.einsum("bnts,btnd->bsnd", weights, g)
    return dq, *(x.reshape(b, s, shared, group, d).sum(3) for x in (dk, dv))


def drawn(t, s=None, heads=2, shared=2, d=8, dtype=jnp.float32):
    shapes = [(2, t, heads, d), (2, s or t, shared, d), (2, s or t, shared, d), (2, t, heads, d)]
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def compare(function, arrays, mask, near):
    query, key, value, _ = arrays
    with jax.default_matmul_precision("highest"):

        @jax.jit
        def both(query, key, value, gradient):
            out, pull = jax.vjp(lambda *x: function(*x, mask), query, key, value)
            return out, *pull(gradient)

        out, *found = both(*arrays)
    expected = slopes(*arrays, mask)
    for ours, theirs in zip((out, *found), (plain(query, key, value, mask), *expected), strict=True):
        assert ours.dtype == query.dtype and ours.shape == theirs.shape
        np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, rtol=near, atol=near)


@pytest.mark.drawn
@pytest.mark.parametrize(
    "mask", [MASKS[2], *(pytest.param(m, marks=pytest.mark.slow) for m in (*MASKS[:2], MASKS[3]))]
)
@pytest.mark.parametrize("t", [*(pytest.param(t, marks=pytest.mark.slow) for t in (1, 15, 16)), 17])
def test_blocks_are_the_plain_form(t, mask):
    compare(functools.partial(blocks, block=16), drawn(t, heads=4), mask, 2e-5)


@pytest.mark.parametrize("mask", MASKS[:2])
def test_blocks_in_bfloat16_round_like_one_product(mask):
    compare(functools.partial(blocks, block=8), drawn(17, dtype=jnp.bfloat16), mask, 3e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "t, s", [(7, 20), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((20, 7), (16, 16)))]
)
def test_blocks_of_unequal_lengths(t, s):
    compare(functools.partial(blocks, block=8), drawn(t, s, heads=6), Mask(), 2e-5)


@pytest.mark.slow
def test_float64_stays_float64():
    with jax.enable_x64(True):
        compare(functools.partial(blocks, block=8), drawn(9, dtype=jnp.float64), Mask(causal=True), 1e-12)


@pytest.mark.slow
def test_large_scores_do_not_overflow():
    query, key, value, _ = drawn(12)
    ours = blocks(300 * query, key, value, Mask(causal=True), block=4)
    np.testing.assert_allclose(ours, plain(300 * query, key, value, Mask(causal=True)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("t, s, block", [(16, 16, 4), (17, 17, 4), (3, 3, 8)])
def test_pairs_are_the_blocks_with_something_to_see(t, s, block, mask):
    visible = seen(t, s, mask)
    n, m = -(-t // block), -(-s // block)
    expected = [
        (i, j)
        for i, j in itertools.product(range(n), range(m))
        if visible[i * block : (i + 1) * block, j * block : (j + 1) * block].any()
    ]
    assert list(map(tuple, pairs(t, s, mask, block).tolist())) == expected
    assert visited(t, s, mask) == visible.mean()


@pytest.mark.parametrize(("t", "s"), [(10**8, 10**8), (10**12, 1), (10**7, 10**7)])
def test_lengths_without_end_are_refused_by_their_shapes(t, s):
    with refused(cw.errors.RecipeError, "attention-too-long"):
        pairs(t, s, Mask(causal=t == s), 256)


def test_memory_grows_with_the_length_and_not_with_its_square():
    def temporary(t):
        shape = jax.ShapeDtypeStruct((1, t, 1, 8), jnp.float32)
        loss = lambda q, k, v: jnp.sum(blocks(q, k, v, Mask(causal=True), block=64))  # noqa: E731
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(4096) < 6 * temporary(1024)
    assert temporary(4096) < 4096 * 4096  # a quarter of the weights in float32


@pytest.mark.slow
def test_a_mapped_example_is_the_example():
    """Evaluation maps over batches of one."""
    query, key, value, _ = drawn(9)
    form = jax.jit(functools.partial(attention, causal=True))
    one = jax.vmap(lambda *x: form(*(y[None] for y in x))[0])(query, key, value)
    np.testing.assert_allclose(one, form(query, key, value), rtol=1e-6, atol=1e-6)


def test_a_checkpoint_keeps_what_the_forward_pass_made():
    """Or its loop would run twice: one forwards, one backwards."""
    query, key, value, _ = drawn(9)
    loss = lambda q: jnp.sum(jnp.sin(attention(q, key, value)))  # noqa: E731
    text = {}
    for name, policy in (("kept", saveable), ("nothing", None)):
        program = jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy)))(query)
        text[name] = str(program).count("scan[")
    assert text == {"kept": 2, "nothing": 3}


@pytest.mark.slow
def test_a_window_as_long_as_the_text_is_none():
    query, key, value, _ = drawn(6)
    np.testing.assert_array_equal(attention(query, key, value, window=6), attention(query, key, value))


@pytest.mark.parametrize(
    "change, code",
    [
        ({"key": (2, 6, 3, 8)}, "attention-shapes"),
        ({"query": (2, 6, 8)}, "attention-shapes"),
        ({"value": (2, 5, 2, 8)}, "attention-shapes"),
        ({"key": (1, 6, 2, 8), "value": (1, 6, 2, 8)}, "attention-shapes"),
        ({"window": 0}, "attention-window"),
        ({"window": True}, "wrong-kind"),
        ({"query": (2, 5, 4, 8), "causal": True}, "attention-lengths"),
        ({"query": (2, 5, 4, 8), "window": 2}, "attention-lengths"),
    ],
)
def test_what_does_not_fit_is_refused(change, code):
    given = {"query": (2, 6, 4, 8), "key": (2, 6, 2, 8), "value": (2, 6, 2, 8)} | change
    arrays = {name: jnp.zeros(x) if isinstance(x, tuple) else x for name, x in given.items()}
    with refused(cw.errors.RecipeError, code):
        cw.models.attention(**arrays)


def test_mixed_dtypes_are_refused():
    query, key, value, _ = drawn(3)
    with refused(cw.errors.RecipeError, "attention-dtypes", value=["bfloat16", "float32", "float32"]):
        attention(query.astype(jnp.bfloat16), key, value)


# ---- which chip gets what


def query(dtype=jnp.bfloat16, d=64, t=258):
    return jax.ShapeDtypeStruct((2, t, 4, d), dtype)


def test_each_chip_of_the_catalogue_has_its_form():
    forms = {chip.name: form_for(ChipTraits.of(chip), query(), query(), Mask(causal=True)) for chip in CHIPS}
    assert {name for name, form in forms.items() if form == "splash"} == {
        chip.name for chip in CHIPS if chip.kind == "TPU" and chip.name not in ("TPU v2", "TPU v3")
    }
    assert {name for name, form in forms.items() if form == "blocks"} >= {"T4", "V100-SXM2", "CPU (generic)"}
    assert {forms[name] for name in ("A100-SXM4-40GB", "L4", "H100-SXM5-80GB")} == {"cudnn"}


@pytest.mark.parametrize(
    "chip, given, mask, form",
    [
        ("a100", query(jnp.float32), Mask(), "blocks"),
        ("a100", query(jnp.float16), Mask(), "cudnn"),
        ("a100", query(d=128), Mask(), "cudnn"),
        ("a100", query(d=136), Mask(), "blocks"),
        ("a100", query(d=60), Mask(), "blocks"),
        ("a100", query(t=257), Mask(), "cudnn"),
        ("a100", query(), Mask(causal=True, window=4), "cudnn"),
        ("a100", query(), Mask(window=4), "blocks"),
        ("v5e", query(jnp.float16), Mask(), "blocks"),
        ("v5e", query(jnp.float32), Mask(), "blocks"),
        ("v5e", query(d=256), Mask(), "splash"),
        ("v5e", query(d=192), Mask(), "blocks"),
        ("v5e", query(t=256), Mask(), "blocks"),
        ("v3", query(), Mask(), "blocks"),
    ],
)
def test_what_a_kernel_does_not_take_goes_to_the_blocks(chip, given, mask, form):
    assert form_for(ChipTraits.of(named(chip)), given, given, mask) == form


def test_a_trace_is_for_the_chip_that_is_named():
    @jax.jit
    def f():
        return int(traits().fuses), len(traits().platform)

    assert traits() == ChipTraits.of(jax.devices()[0]) == ChipTraits("cpu")
    assert f() == (0, 3)
    with traced_for(named("v5e")):
        assert f() == (1, 3)
        with traced_for(named("t4")):
            assert f() == (0, 4)
    assert f() == (0, 3)


class Device(NamedTuple):
    platform: str
    device_kind: str
    compute_capability: str = ""


@pytest.mark.parametrize(
    "device, expected",
    [
        (Device("tpu", "TPU v3"), ("tpu", False, True)),
        (Device("tpu", "TPU v5 lite"), ("tpu", True, True)),
        (Device("tpu", "TPU7x"), ("tpu", True, False)),
        (Device("gpu", "Tesla T4", "7.5"), ("cuda", False, False)),
        (Device("gpu", "NVIDIA H100", "9.0"), ("cuda", True, False)),
        (Device("gpu", "NVIDIA B200", "10.0"), ("cuda", True, False)),
        (Device("gpu", "gfx942", "gfx942"), ("rocm", False, False)),
        (Device("cpu", "cpu"), ("cpu", False, False)),
    ],
)
def test_a_device_that_is_here(device, expected):
    assert tuple(ChipTraits.of(device)) == expected


@pytest.mark.parametrize(
    "length, block",
    [
        (1, 128),
        (128, 128),
        (197, 256),
        (640, 128),
        (1024, 512),
        (1100, 256),
        (4095, 512),
        (4096, 1024),
        (4400, 512),
    ],
)
def test_splash_fills_up_little(length, block):
    assert block_of(length, 128) == block
    assert block_of(length, 256) == block_of(length, 128, window=4095) == min(block, 512)
    assert block_of(length, 64, window=5000) == block


CASES = [(130, Mask(causal=True)), (100, Mask()), (130, Mask(window=20))]


@pytest.mark.slow
@pytest.mark.parametrize("t, mask", CASES)
def test_splash_is_the_plain_form(t, mask):
    """Its kernels interpreted, on the CPU."""
    from jax.experimental import pallas as pl

    from chipwise.models.attention_fused import splash

    with pytest.MonkeyPatch.context() as patch:
        call = pl.pallas_call
        patch.setattr(pl, "pallas_call", lambda *a, **k: call(*a, **{**k, "interpret": True}))
        compare(splash, drawn(t, heads=2, shared=1, d=16), mask, 2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "v4", "v3"])
def test_for_an_absent_tpu_the_weights_are_never_there(chip, monkeypatch, tmp_path):
    """By its own compiler: temporary memory, and the time of kernels that it states none for."""
    monkeypatch.setenv("CHIPWISE_CACHE", str(tmp_path))
    shape = jax.ShapeDtypeStruct((8, 1024, 12, 64), jnp.bfloat16)
    loss = lambda q, k, v: jnp.sum(attention(q, k, v, causal=True).astype(jnp.float32))  # noqa: E731
    made = cw.compile.on(chip, jax.grad(loss, (0, 1, 2)), *[shape] * 3)
    weights = 4 * 8 * 12 * 1024 * 1024
    assert made.memory_bytes["temporary"] < weights / 2  # the plain form holds two of them
    assert "program-custom-call" not in [note.code for note in made.notes]


def gpt_layer():
    normal = nnx.initializers.normal(0.5)
    layer = Attention(16, 2, causal=True, init=normal, out_init=normal, rngs=nnx.Rngs(0))
    layer.qkv.bias[...] += 0.3
    layer.out.bias[...] += 0.2
    return layer


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [gpt_layer, lambda: llama.GroupedQueryAttention(16, 4, 2, 1e4, rngs=nnx.Rngs(0))]
)
def test_products_by_heads_are_the_layer_that_tpus_run(make):
    graph, state = nnx.split(make())
    x = jax.random.normal(jax.random.key(1), (3, 8, 16))

    def loss(state, x):
        return jnp.sum(nnx.merge(graph, state)(x) ** 2)

    made, traced = {}, {}
    for name in ("v4", "t4"):
        with traced_for(named(name)):
            made[name] = jax.jit(jax.value_and_grad(functools.partial(loss), (0, 1)))(state, x)  # traced anew
            traced[name] = str(jax.make_jaxpr(functools.partial(loss))(state, x))
    assert traced["v4"] != traced["t4"]

    def near(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * (1 + np.abs(b).max()))

    jax.tree.map(near, *made.values())


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_every_backward_pass_of_cudnn_is_asked_for_a_fixed_order(layers, documents):
    ids = jnp.zeros((2, 128), jnp.int32) if documents else None

    def loss(x):
        for _ in range(layers):
            x = x + attention(x, x, x, causal=True, document=ids)
        return jnp.sum(x.astype(jnp.float32))

    shape = jax.ShapeDtypeStruct((2, 128, 4, 32), jnp.bfloat16)
    with traced_for(named("a100")), cudnn_assumed(False):
        lowered = jax.jit(jax.grad(loss)).trace(shape).lower(lowering_platforms=("cuda",))
    before, after = lowered.as_text(), in_fixed_order(lowered).as_text()
    name = "fmhaScaleBiasSoftmaxBackward(" if documents else "fmhaSoftmaxBackward("
    assert before.count(name) == after.count(name) == layers
    assert ("force_deterministic" in before, after.count("force_deterministic")) == (False, layers)


@pytest.mark.parametrize("t", [196, 197, 198])
@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_gets_even_lengths_and_the_number_of_positions_that_count(causal, t):
    shape = jax.ShapeDtypeStruct((2, t, 4, 64), jnp.bfloat16)
    with traced_for(named("h100")), cudnn_assumed(False):
        made = jax.make_jaxpr(lambda x: attention(x, x, x, causal=causal))(shape)
    assert [v.shape for v in made.out_avals] == [shape.shape]
    (kernel,) = (
        one
        for inner in inside(made.jaxpr)
        for one in inner.eqns
        if one.primitive.name.startswith("dot_product_attention")
    )
    assert kernel.invars[0].aval.shape[1] == t + t % 2
    masked = [kernel.invars[i].aval.shape for i in (4, 5)]
    assert masked == ([(2,), (2,)] if t % 2 and not causal else [(0,), (0,)])


@pytest.mark.parametrize("t", [197, 198])
def test_cudnn_is_mapped_over_replicas_and_blocks_of_the_evaluation(t):
    shape = jax.ShapeDtypeStruct((3, 1, t, 4, 64), jnp.bfloat16)
    with traced_for(named("h100")), cudnn_assumed(False):
        made = jax.make_jaxpr(jax.vmap(lambda x: attention(x, x, x)))(shape)
    assert [v.shape for v in made.out_avals] == [shape.shape]


@pytest.mark.parametrize("chip", ["cpu", "v6e"])
@pytest.mark.parametrize("keys", [1, 4, 5, 6])
def test_keys_behind_their_number_are_not_seen_and_have_no_gradient(keys, chip):
    arrays = drawn(6)
    short = [arrays[0], *(x[:, :keys] for x in arrays[1:3]), arrays[3]]
    with traced_for(named(chip)):
        compare(lambda q, k, v, mask: attention(q, k, v), short, Mask(), 1e-4)
        out, pull = jax.vjp(lambda *given: attention(*given, keys=keys), *arrays[:3])
        expected, other = jax.vjp(attention, *short[:3])
    np.testing.assert_array_equal(out, expected)
    for ours, theirs in zip(pull(arrays[3]), other(arrays[3]), strict=True):
        np.testing.assert_array_equal(ours[:, : theirs.shape[1]], theirs)
        assert not ours[:, theirs.shape[1] :].any()


@pytest.mark.parametrize("t, keys, masked", [(198, 197, True), (198, 198, False), (197, 196, True)])
def test_cudnn_gets_the_number_of_keys_and_pads_only_what_is_odd(t, keys, masked):
    shape = jax.ShapeDtypeStruct((2, t, 4, 64), jnp.bfloat16)
    with traced_for(named("h100")), cudnn_assumed(False):
        made = jax.make_jaxpr(lambda x: attention(x, x, x, keys=keys))(shape)
    names = [one.primitive.name for inner in inside(made.jaxpr) for one in inner.eqns]
    (kernel,) = (
        one
        for inner in inside(made.jaxpr)
        for one in inner.eqns
        if one.primitive.name.startswith("dot_product_attention")
    )
    assert ("pad" in names) == bool(t % 2)
    assert [kernel.invars[i].aval.shape for i in (4, 5)] == 2 * [(2,) if masked else (0,)]


@pytest.mark.parametrize("given", [{"keys": 0}, {"keys": 9}, {"keys": 4, "causal": True}])
def test_keys_that_are_none_are_refused(given):
    x = jnp.zeros((1, 8, 2, 4))
    with refused(cw.errors.RecipeError, "attention-keys", value=given["keys"]):
        attention(x, x, x, **given)
