"""Documents that are packed into one row do not see each other, to the last bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.base.errors import RecipeError
from chipwise.chips.targets import named
from chipwise.compile.exports import cudnn_assumed
from chipwise.data.pack.packing import pack
from chipwise.data.pack.tokenise import TextForm
from chipwise.models.attention import attention, document_numbers, form_for, places_in
from chipwise.models.attention_mask import Mask
from chipwise.models.chip_traits import ChipTraits, traced_for
from chipwise.models.remat import inside
from chipwise.recipes.tokens import start_of
from refusals import refused

pytestmark = pytest.mark.as_users_compile

END, KINDS, CONTEXT = 31, 32, 24
SIZES = [f"context={CONTEXT}", f"vocabulary={KINDS}", "depth=1", "width=16", "heads=2", "precision=f32"]
NETS = {"gpt2-124m": SIZES, "llama-8b": [*SIZES, "kv_heads=1", "hidden=24", "shards=1"]}
each = pytest.mark.parametrize("name", ["gpt2-124m", "llama-8b"])


def arrays(t, seed=0):
    keys = jax.random.split(jax.random.key(seed), 5)
    ids = jnp.cumsum(jax.random.bernoulli(keys[4], 0.1, (2, t)), axis=1)
    return [jax.random.normal(key, (2, t, 2, 8)) for key in keys[:4]], ids


def plain(query, key, value, ids, causal, window):
    """With all scores."""
    at = jnp.arange(query.shape[1])
    behind = (at[:, None] - at[None])[None]
    seen = (ids[:, :, None] == ids[:, None]) & ((behind >= 0) | (not causal))
    seen = seen & (jnp.abs(behind) < (window or len(at)))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30)), value)


@pytest.mark.parametrize("t", [9, *(pytest.param(t, marks=pytest.mark.slow) for t in (255, 256, 257))])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 7)])
def test_one_document_changes_no_bit_of_another(t, causal, window):
    (*qkv, gradient), ids = arrays(t)

    def both(*given):
        made, pull = jax.vjp(lambda *x: attention(*x, causal=causal, window=window, document=ids), *given[:3])
        return [made, *pull(given[3])]

    both = jax.jit(both)
    changed = (ids == 1)[:, :, None, None]
    assert changed.any() and not changed.all()
    before = both(*qkv, gradient)
    after = both(*(jnp.where(changed, 5 * x + 1, x) for x in (*qkv, gradient)))
    for old, new in zip(before, after, strict=True):
        assert jnp.array_equal(jnp.where(changed, 0, old), jnp.where(changed, 0, new))
        assert not jnp.array_equal(old, new)
    wanted, pull = jax.vjp(lambda *x: plain(*x, ids, causal, window), *qkv)
    for found, expected in zip(before, (wanted, *pull(gradient)), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_ignored_keys_and_documents_go_together():
    (q, k, v, _), ids = arrays(40)
    seen = jnp.arange(40)[None] < jnp.array([[40], [33]])
    found = attention(q, k, v, seen=seen, document=ids)
    wanted = plain(q, k, v, jnp.where(seen, ids, -1), False, None)
    np.testing.assert_allclose(jnp.where(seen[..., None, None], found - wanted, 0), 0, atol=1e-5)


def test_numbers_that_do_not_fit_are_refused():
    (q, k, v, _), ids = arrays(9)
    for wrong in (ids[:, 1:], ids[:1], ids.astype(jnp.float32)):
        with refused(RecipeError, "attention-document"):
            attention(q, k, v, document=wrong)
    with refused(RecipeError, "attention-document"):
        attention(q, k[:, 1:], v[:, 1:], document=ids)


def test_a_document_begins_with_the_end_of_the_one_before():
    tokens = jnp.array([[4, 5, END, 6, END, END, 7]])
    numbers = document_numbers(tokens, END)
    assert numbers.tolist() == [[0, 0, 1, 1, 2, 3, 3]]
    assert places_in(numbers).tolist() == [[0, 1, 0, 1, 0, 0, 1]]


@pytest.mark.parametrize("t", [64, 65])
def test_cudnn_reads_which_pairs_are_of_one_document(t):
    shape = jax.ShapeDtypeStruct((2, t, 2, 64), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2, t), jnp.int32)
    with traced_for(named("h100")), cudnn_assumed(False):
        made = jax.make_jaxpr(lambda x, ids: attention(x, x, x, causal=True, document=ids))(shape, ids)
    found = [one for inner in inside(made.jaxpr) for one in inner.eqns]
    (kernel,) = (one for one in found if one.primitive.name.startswith("dot_product_attention"))
    even = t + t % 2
    assert kernel.params["variadic_args"][0] and kernel.invars[3].aval.shape == (2, 2, even, even)
    long = jax.ShapeDtypeStruct((2, 2049, 2, 64), jnp.bfloat16)
    chip, mask = ChipTraits.of(named("h100")), Mask(causal=True)
    assert [form_for(chip, long, long, mask, one) for one in (True, False)] == ["blocks", "cudnn"]


@pytest.mark.parametrize("t", [512, 500])
def test_splash_gets_the_numbers_as_segments(t):
    shape = jax.ShapeDtypeStruct((2, t, 2, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2, t), jnp.int32)

    def loss(x, ids):
        return attention(x, x, x, causal=True, document=ids).astype(jnp.float32).sum()

    with traced_for(named("v5e")):
        traced = jax.jit(jax.grad(loss)).trace(shape, ids)
        lowered = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert lowered.count("tpu_custom_call") == 3
    found = [one for inner in inside(traced.jaxpr.jaxpr) for one in inner.eqns]
    kernels = [one for one in found if one.primitive.name == "pallas_call"]
    assert kernels and all(
        any(v.aval.dtype == jnp.int32 and v.aval.ndim >= 2 for v in one.invars) for one in kernels
    )


def losses(name, rows):
    """The summed loss of rows of tokens, and its gradient."""
    task = cw.load(name, [*NETS[name], "documents=true"], synthetic=True).task
    params, state = task.init(jax.random.key(3))
    params = jax.tree.map(lambda x: x * 10, params)  # as large as it takes to say different things

    def loss(params, row):
        return task.loss(params, state, {"token": row}, None, False)[0]["loss"].total

    return jax.jit(jax.value_and_grad(loss))(params, jnp.asarray(rows, jnp.uint16))


@pytest.mark.slow
@each
def test_packed_documents_are_learnt_as_alone(name):
    texts = [np.random.default_rng(i).integers(0, END, n) for i, n in enumerate((13, 9))]
    packed = np.concatenate([np.append(END, text) for text in texts] + [[END]])
    assert len(packed) == CONTEXT + 1
    together, gradient = losses(name, [packed])
    apart = [losses(name, [np.append(np.append(END, text), END)]) for text in texts]
    np.testing.assert_allclose(together, sum(value for value, _ in apart), rtol=1e-5)
    total = jax.tree.map(lambda *x: sum(x), *(gradient for _, gradient in apart))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4 * jnp.abs(b).max()), gradient, total)


@pytest.mark.slow
@each
def test_training_has_one_fingerprint(name, tmp_path):
    def trained(**on):
        recipe = cw.load(name, [*NETS[name], "documents=true", "batch=8", "replicas=4"], synthetic=True)
        many = recipe.task.train
        few = cw.Arrays(
            token=np.random.default_rng(0).integers(0, KINDS, (16, CONTEXT + 1)).astype(np.uint16)
        )
        task = dataclasses.replace(recipe.task, train=few, eval=None)
        assert many.spec == few.spec
        recipe = dataclasses.replace(recipe, task=task, duration="4st", optimizer=cw.adamw(lr=0.01))
        return cw.fit(recipe, on=cw.On(**on), progress="none").fingerprint

    assert trained(devices=1) == trained(devices=3, feed="host")


def test_the_end_is_that_of_the_pack(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be " * 40)
    pack(tmp_path / "text.txt", tmp_path / "packed", text=TextForm(tokens=17))
    assert start_of(tmp_path / "packed", 257) == 256
    assert start_of(None, KINDS) == END
