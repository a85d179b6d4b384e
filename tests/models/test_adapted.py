"""Adapted matrices of our blocks: the values and gradients of merged ones, without these."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

import chipwise as cw
from chipwise.chips.catalogue import named
from chipwise.interop.nnx import functional
from chipwise.models import adapted
from chipwise.models.adapted import Adapted, Linear, by_parts, made_of
from chipwise.models.bert import BERT
from chipwise.models.chip_traits import traced_for
from chipwise.models.llama import Llama
from chipwise.models.remat import remat
from chipwise.models.transformer import GPT2, Blocks, ViT
from chipwise.recipe.low_rank import Adapter
from chipwise.step.freeze import parts_of, split, whole_params
from chipwise.step.replica import ReplicaBatch, ReplicaInput, contribution
from chipwise.step.state import abstract_state

TOKENS = np.random.default_rng(0).integers(1, 11, (2, 6)).astype(np.int32)
PIXELS = np.random.default_rng(0).normal(size=(2, 8, 8, 3))
NETS = {
    "llama": (Llama, {"vocabulary": 11, "kv_heads": 1, "hidden": 12, "keep": "nothing_saveable"}, TOKENS),
    "gpt2": (GPT2, {"vocabulary": 11, "context": 6}, TOKENS),
    "bert": (BERT, {"vocabulary": 11, "context": 6, "dropout": 0.0}, TOKENS),
    "vit": (ViT, {"image": 8, "patch": 4, "classes": 5}, PIXELS),
}
EVERY = cw.recipe.lora(rank=2, alpha=5, on="blocks/stack/*kernel")


def is_adapter(x):
    return isinstance(x, Adapter)


def halves(params, adapters=EVERY):
    """Both parts of `params`, with adapters whose B is no zero."""
    trained, frozen = split(params, ("*",), {}, adapters, jax.random.key(1))
    return jax.tree.map(lambda x: x + jnp.linspace(-1, 1, x.size).reshape(x.shape), trained), frozen


@pytest.fixture
def products(monkeypatch):
    """The shapes and types of what is multiplied apart, as it is traced."""
    seen = []
    again = adapted._again

    def noted(product, thin, b):
        seen.append((thin.shape, b.shape, thin.dtype, b.dtype))
        return again(product, thin, b)

    monkeypatch.setattr(adapted, "_again", noted)
    return seen


@pytest.mark.slow
@pytest.mark.drawn(share=0.25)
@pytest.mark.parametrize("chip", ["cpu", "t4", "v4"])
@pytest.mark.parametrize("net", NETS)
def test_values_and_gradients_are_those_of_merged_matrices(net, chip, products):
    kind, sizes, given = NETS[net]
    with jax.enable_x64(True):
        init, apply = functional(lambda rngs: kind(**sizes, depth=3, width=8, heads=2, rngs=rngs))
        params, state = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), jax.jit(init)(jax.random.key(0)))
        trained, frozen = halves(params)

        def loss(trained, apart):
            whole = whole_params(trained, frozen)
            with made_of(parts_of(trained, frozen, whole) if apart else []):
                states = apply(whole, state, jnp.asarray(given), jax.random.key(2), True)[0]
            return jnp.sum(jnp.sin(states) * jnp.arange(1.0, states.size + 1).reshape(states.shape))

        with traced_for(named(chip)):
            apart, merged = (jax.value_and_grad(partial(loss, apart=one)) for one in (True, False))
            wanted = jax.jit(merged)(trained)
            assert not products
            got = jax.jit(apart)(trained)
            matrices = sum(isinstance(one, Adapter) for one in jax.tree.leaves(trained, is_leaf=is_adapter))
            assert len(products) >= matrices  # of queries, keys and values there may be three
    error = 1e-5 if net == "llama" else 1e-9  # whose rotary positions are float32
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=error * np.abs(other).max())


def test_a_product_is_exact_and_takes_a_bias():
    with jax.enable_x64(True):
        x, w, a, b, bias = (
            jax.random.normal(jax.random.key(i), shape, jnp.float64)
            for i, shape in enumerate([(2, 3, 8), (8, 6), (8, 2), (2, 6), (6,)])
        )
        layer = Linear(8, 6, rngs=nnx.Rngs(0))
        layer.bias = nnx.Param(bias)
        layer.kernel = nnx.Param(Adapted(w, a, b))
        np.testing.assert_allclose(layer(x), x @ (w + a @ b) + bias[None, None], rtol=1e-12)


@pytest.mark.parametrize("heads, each", [(2, 3), (1, 6), (6, 1), (1, 1)])
def test_a_product_of_heads_is_exact_whatever_their_sizes(heads, each):
    with jax.enable_x64(True):
        x, y, w, a, b = (
            jax.random.normal(jax.random.key(i), shape, jnp.float64)
            for i, shape in enumerate(
                [(2, 3, 8), (2, 3, heads, each), (8, heads * each), (8, 2), (2, heads * each)]
            )
        )
        into, back = Adapted(w, a, b), Adapted(w.T, b.T, a.T)
        made = adapted.einsum("btw,whd->bthd", x, into.reshape(8, heads, each))
        wanted = (x @ (w + a @ b)).reshape(2, 3, heads, each)
        np.testing.assert_allclose(made, wanted, rtol=1e-12)
        made = adapted.einsum("bthd,hdw->btw", y, back.reshape(heads, each, 8))
        np.testing.assert_allclose(made, y.reshape(2, 3, -1) @ (w + a @ b).T, rtol=1e-12)


@pytest.mark.parametrize("of", ["matmul", "einsum"])
def test_thin_matrices_are_rounded_to_what_they_are_multiplied_with_alone(of, products):
    kernel = Adapted(jnp.ones((8, 6), jnp.bfloat16), jnp.ones((8, 2)), jnp.ones((2, 6)))
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.ones((3, 8), dtype)
        made = x @ kernel if of == "matmul" else adapted.einsum("tw,wh->th", x, kernel)
        assert made.dtype == dtype and products.pop()[2:] == (dtype, dtype)


class Own(nnx.Module):
    """A block of a user's: a layer of NNX, and one of ours."""

    def __init__(self, rngs):
        self.theirs, self.ours = nnx.Linear(8, 8, rngs=rngs), Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.ours(jnp.tanh(self.theirs(x)))


@pytest.mark.parametrize("change", ["nothing", "copied", "turned"])
def test_only_our_layers_get_the_parts_of_an_array_that_was_merged(change):
    blocks = Blocks(3, lambda rngs: Own(rngs), rngs=nnx.Rngs(0))
    graph, params = nnx.split(blocks.stack)
    trained, frozen = halves(nnx.to_pure_dict(params), dataclasses.replace(EVERY, on="*kernel", stacked="*"))
    if change == "turned":
        trained["ours"]["kernel"] = dataclasses.replace(trained["ours"]["kernel"], turned=True)

    def kinds(trained):
        whole = whole_params(trained, frozen)
        given = jax.tree.map(jnp.sin, whole) if change == "copied" else whole
        nnx.replace_by_pure_dict(params, given)
        with made_of(parts_of(trained, frozen, whole)):
            state = by_parts(nnx.merge(graph, params), params)
        found.extend(isinstance(state[name]["kernel"].get_value(), Adapted) for name in ("theirs", "ours"))

    found = []
    jax.eval_shape(kinds, trained)
    assert found == [False, change == "nothing"]


def language(depth, **changes):
    settings = [
        "vocabulary=32",
        "context=24",
        f"depth={depth}",
        "width=64",
        "heads=4",
        "kv_heads=2",
        "hidden=96",
    ]
    settings += ["precision=f32", "batch=16", "replicas=8", "shards=1"]
    made = cw.load("llama-8b", settings, synthetic=True)
    token = np.random.default_rng(0).integers(0, 32, (57, 25)).astype(np.uint16)
    train, held_out = cw.Arrays(token=token[:48]), cw.Arrays(token=token[48:])
    task = dataclasses.replace(made.task, train=train, eval=held_out)
    return dataclasses.replace(
        made, task=task, optimizer=cw.adamw(lr=0.02), adapters=EVERY, **{"duration": "2st"} | changes
    )


def compiled(recipe):
    """The program of a replica's gradient, and the bytes of the frozen weights of its blocks."""
    state = abstract_state(recipe)
    n = recipe.batch // recipe.replicas
    shape = jax.ShapeDtypeStruct
    inputs = ReplicaInput.of(state, {"seed": shape((), jnp.uint32)}, None, None)
    columns = {"token": shape((n, 25), jnp.uint16)}
    batch = ReplicaBatch(columns, *[shape((n,), jnp.int32)] * 2, shape((), jnp.int32))
    program = jax.jit(partial(contribution, recipe)).lower(inputs, batch).compile()
    return program, sum(x.size * 4 for x in jax.tree.leaves(state.frozen["blocks"]))


@pytest.mark.slow
@pytest.mark.as_users_compile
def test_a_step_holds_no_second_weights_and_computes_no_gradient_of_a_whole_matrix():
    program, weights = compiled(language(8, batch=8))
    assert program.memory_analysis().temp_size_in_bytes < weights / 2
    made = set(re.findall(r"f32\[([\d,]+)\]\S* dot\(", program.as_text()))
    matrices = {f"{a},{b}" for a, b in [(64, 64), (64, 32), (64, 96), (96, 64), (32, 64)]}
    assert made and not made & matrices


@pytest.mark.slow
@pytest.mark.as_users_compile
@pytest.mark.parametrize("shards, counts", [(1, (1, 3, 8)), (2, (2, 4))])
def test_the_same_bits_on_any_devices(shards, counts):
    settings = {"progress": "none", "eval_every": None, "log_every": "1st"}
    results = [cw.fit(language(2, shards=shards), on=cw.On(devices=n), **settings) for n in counts]
    assert len({one.fingerprint for one in results}) == 1
    assert all(one.metrics == results[0].metrics for one in results)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dots_with_no_batch_dims_saveable", "mlpwi_1"])
def test_a_block_keeps_no_second_array_of_a_product(policy, capsys):
    def block(kernel, x):
        return jnp.tanh(checkpoint_name(x @ kernel, "mlpwi_1"))

    x = jnp.ones((5, 8))
    kernel = Adapted(jnp.ones((8, 6)), jnp.ones((8, 2)), jnp.ones((2, 6)))
    print_saved_residuals(remat(block, policy), kernel, x)
    assert capsys.readouterr().out.count("f32[5,6]") == 1
