"""Muon against optax's, and which parameters it moves how."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from chipwise import adamw
from chipwise.base.errors import RecipeError
from chipwise.recipe import muon
from refusals import refused

RNG = np.random.default_rng(0)
SHAPES = {"dense": {"kernel": (7, 9), "bias": (9,)}, "conv": {"kernel": (3, 3, 2, 4)}, "embedding": (11, 7)}


def arrays():
    return jax.tree.map(
        lambda s: RNG.normal(size=s).astype(np.float32), SHAPES, is_leaf=lambda s: isinstance(s, tuple)
    )


def moved(optimizer, params, gradients):
    state, hyper = optimizer.init(params), {n: s.value for n, s in optimizer.hyper.items()}
    step = jax.jit(functools.partial(optimizer.update, hyper=hyper))
    for gradient in gradients:
        params, state = step(gradient, state, params)
    return params


@pytest.mark.parametrize("rms", [0.2, None])
def test_it_is_optax_s_for_matrices_and_adam_for_the_rest(rms):
    params, gradients = arrays(), [arrays() for _ in range(3)]
    ours = moved(muon(lr=0.02, adam_lr=0.003, rms=rms, weight_decay=0.1), params, gradients)
    number = optax.contrib.MuonDimensionNumbers()
    numbers = {"dense": {"kernel": number, "bias": None}, "conv": {"kernel": None}, "embedding": None}
    theirs = optax.contrib.muon(
        0.02, consistent_rms=rms, weight_decay=0.1, muon_weight_dimension_numbers=numbers
    )
    state, expected = theirs.init(params), params
    with jax.numpy_dtype_promotion("standard"):
        for gradient in gradients:
            updates, state = jax.jit(theirs.update)(gradient, state, expected)
            expected = optax.apply_updates(expected, updates)
    np.testing.assert_allclose(ours["dense"]["kernel"], expected["dense"]["kernel"], 1e-3, 1e-4)
    rest = moved(adamw(lr=0.003, b2=0.95, weight_decay=0.1), params, gradients)
    ours["dense"]["kernel"] = rest["dense"]["kernel"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), ours, rest)


def test_a_step_is_orthogonal_and_as_long_as_its_root_mean_square_says():
    zeros = {"kernel": np.zeros((64, 16), np.float32)}
    gradient = {"kernel": RNG.normal(size=(64, 16)).astype(np.float32)}
    step = np.asarray(moved(muon(lr=1.0), zeros, [gradient])["kernel"])
    values = np.linalg.svd(step, compute_uv=False) / (0.2 * 8)
    assert values.min() > 0.6 and values.max() < 1.3  # Jordan's coefficients: about 1, not exactly
    assert np.sqrt(np.mean(step**2)) == pytest.approx(0.2, rel=0.15)


def test_a_row_of_a_stack_is_a_matrix():
    kernels = RNG.normal(size=(3, 7, 9)).astype(np.float32)
    gradient = RNG.normal(size=(3, 7, 9)).astype(np.float32)
    ours = moved(muon(lr=0.1), {"stack": {"kernel": kernels}}, [{"stack": {"kernel": gradient}}])
    rows = moved(
        muon(lr=0.1), dict(zip("abc", kernels, strict=True)), [dict(zip("abc", gradient, strict=True))]
    )
    np.testing.assert_allclose(ours["stack"]["kernel"], np.stack([rows[n] for n in "abc"]), 1e-4, 1e-5)


def test_ends_of_a_net_and_what_is_no_matrix_get_adam():
    params = {
        "words": {"embedding": (9, 4)}, "head": {"kernel": (4, 9)}, "lm_head.weight": (9, 4), "wte": (9, 4),
        "blocks": {"stack": {"kernel": (2, 4, 4), "bias": (2, 4)}, "multi_head": {"kernel": (4, 4)}},
        "classifier": {"kernel": (4, 2)},
    }  # fmt: skip
    leaves = jax.tree.map(lambda s: jnp.zeros(s), params, is_leaf=lambda s: isinstance(s, tuple))
    kinds = muon(lr=0.1).kinds(leaves)
    assert kinds["blocks"] == {
        "stack": {"kernel": "muon", "bias": "adam"}, "multi_head": {"kernel": "muon"}
    }  # fmt: skip
    del kinds["blocks"]
    assert set(jax.tree.leaves(kinds)) == {"adam"}
    assert muon(lr=0.1, adam_only=()).kinds(leaves)["head"]["kernel"] == "muon"


@pytest.mark.parametrize(
    "path",
    ["emb", "emb/weight", "emb.weight", "tok_emb/kernel", "word.pos_emb.weight", "emb_0/w", "net/emb1/w",
     "Emb_0/w", "TokenEmbed_0/w", "embeddings/table", "wte/w", "wpe/w", "unembed/w"],
)  # fmt: skip
def test_names_of_embeddings_are_words_of_a_path(path):
    assert muon(lr=0.1).kinds({path: jnp.zeros((9, 4))}) == {path: "adam"}


@pytest.mark.parametrize("path", ["member/w", "ensemble/w", "remb/w", "assembly.weight", "emblem/w"])
def test_a_word_with_emb_inside_is_no_embedding(path):
    assert muon(lr=0.1).kinds({path: jnp.zeros((9, 4))}) == {path: "muon"}


def test_mistakes_are_named():
    for made in (lambda: muon(0.1, adam_lr=-1), lambda: muon(0.1, rms=-0.1)):
        with refused(RecipeError, "setting-below-zero"):
            made()
    with refused(RecipeError, "average-range", name="momentum"):
        muon(0.1, momentum=1.0)
    assert "adam_lr" not in muon(0.1).hyper and "adam_lr" in muon(0.1, adam_lr=0.2).hyper


def test_a_rate_of_zero_for_adam_keeps_what_adam_moves():
    before, gradient = arrays(), arrays()
    after = moved(muon(lr=0.1, adam_lr=0.0), before, [gradient])
    held = jax.tree.map(lambda x, y: bool(np.array_equal(x, y)), before, after)
    assert held == {"dense": {"kernel": False, "bias": True}, "conv": {"kernel": True}, "embedding": True}
