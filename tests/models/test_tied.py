"""The loss over a vocabulary in chunks: the value and gradients of the whole logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chipwise.chips.catalogue import named
from chipwise.models import tied
from chipwise.models.chip_traits import traced_for
from chipwise.models.tied import embed, next_token_loss

VOCABULARY, WIDTH = 13, 8


def whole(hidden, table, targets):
    logits = jnp.einsum("...d,vd->...v", hidden, table, precision="highest")
    own = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - own)


def drawn(shape, dtype=jnp.float32):
    a, b, c = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(a, (*shape, WIDTH), dtype)
    table = jax.random.normal(b, (VOCABULARY, WIDTH), dtype)
    return hidden, table, jax.random.randint(c, shape, 0, VOCABULARY)


@pytest.mark.parametrize(
    ("tokens", "chip"),
    [*(pytest.param(n, None, marks=pytest.mark.slow) for n in (1, 3, 4, 5, 9)), (3, "a100"), (9, "a100")],
)
def test_chunks_do_not_show(tokens, chip, monkeypatch):
    monkeypatch.setattr(tied, "_CHUNK", 4)
    monkeypatch.setattr(tied, "_GPU_LOGITS", 4 * VOCABULARY)  # 9 tokens are 3 chunks of 3
    hidden, table, targets = drawn((tokens,))
    with jax.default_matmul_precision("highest"), traced_for(chip and named(chip)):
        ours, grads = jax.jit(jax.value_and_grad(next_token_loss, (0, 1)))(hidden, table, targets)
        alone = jax.jit(next_token_loss)(hidden, table, targets)
    expected, theirs = jax.jit(jax.value_and_grad(whole, (0, 1)))(hidden, table, targets)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    np.testing.assert_allclose(alone, expected, rtol=1e-5)
    for a, b in zip(grads, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_one_pass_over_logits_is_their_logsumexp():
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 200, (5, 31)), jnp.float32)
    logits = logits.at[0, 0].set(-jnp.inf).at[1].set(-1e38)
    found = jax.jit(tied._in_one_pass)(logits)
    np.testing.assert_allclose(found, jax.nn.logsumexp(logits, axis=1, keepdims=True), rtol=1e-6)


@pytest.mark.slow
def test_it_is_scaled_batched_and_mapped_like_any_function(monkeypatch):
    monkeypatch.setattr(tied, "_CHUNK", 4)
    hidden, table, targets = drawn((2, 5))
    with jax.default_matmul_precision("highest"):
        mapped = lambda h: 3 * jnp.sum(jax.vmap(next_token_loss, (0, None, 0))(h, table, targets))  # noqa: E731
        total, ours = jax.jit(jax.value_and_grad(mapped))(hidden)
    expected, theirs = jax.jit(jax.value_and_grad(whole))(hidden, table, targets)
    np.testing.assert_allclose(total, 3 * expected, rtol=1e-5)
    np.testing.assert_allclose(ours, 3 * theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_bfloat16_sums_in_float32():
    hidden, table, targets = drawn((64, 64), jnp.bfloat16)
    ours, (d_hidden, d_table) = jax.jit(jax.value_and_grad(next_token_loss, (0, 1)))(hidden, table, targets)
    wide = (hidden.astype(jnp.float32), table.astype(jnp.float32), targets)
    expected, theirs = jax.jit(jax.value_and_grad(whole, (0, 1)))(*wide)
    assert ours.dtype == jnp.float32 and d_hidden.dtype == d_table.dtype == jnp.bfloat16
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    np.testing.assert_allclose(d_table.astype(jnp.float32), theirs[1], rtol=1e-2, atol=0.5)


@pytest.mark.parametrize("bad", [-1, VOCABULARY])
def test_a_token_outside_the_vocabulary_is_nan_and_not_another_token(bad):
    hidden, table, targets = drawn((3,))
    assert jnp.isnan(next_token_loss(hidden, table, targets.at[1].set(bad)))
    rows = embed(table, jnp.array([0, bad]))
    assert jnp.isfinite(rows[0]).all() and jnp.isnan(rows[1]).all()


def test_the_gradient_of_a_frequent_word_keeps_growing():
    table = jnp.zeros((3, 2), jnp.bfloat16)
    tokens = jnp.ones(1000, jnp.int32)
    grad = jax.grad(lambda t: jnp.sum(embed(t, tokens).astype(jnp.float32)))(table)
    np.testing.assert_array_equal(grad.astype(jnp.float32), [[0, 0], [1000, 1000], [0, 0]])


def test_the_gradient_of_a_float64_table_is_summed_in_float64():
    random = np.random.default_rng(0)
    tokens, g = random.integers(0, VOCABULARY, 40), random.normal(size=(40, WIDTH))
    expected = np.zeros((VOCABULARY, WIDTH))
    np.add.at(expected, tokens, g)
    with jax.enable_x64(True):
        _, back = jax.vjp(lambda table: embed(table, jnp.asarray(tokens)), jnp.ones((VOCABULARY, WIDTH)))
        np.testing.assert_allclose(back(jnp.asarray(g))[0], expected, rtol=1e-13)


@pytest.mark.parametrize("n", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 37))])
def test_sorted_rows_are_added_as_scattered_ones(n):
    # Whole numbers: exact in any order. Tokens repeat, and some are outside the vocabulary.
    rng = np.random.default_rng(n)
    tokens = jnp.asarray(rng.integers(-1, 6, n), jnp.int32)
    rows = jnp.asarray(rng.integers(-9, 9, (n, 3)), jnp.float32)
    np.testing.assert_array_equal(tied._sums_by_sorting(5, tokens, rows), tied._sums(5, tokens, rows))
    many = jax.vmap(tied._sums_by_sorting, (None, 0, 0))(
        5, jnp.stack([tokens, -tokens]), jnp.stack([rows, rows])
    )
    np.testing.assert_array_equal(many[1], tied._sums(5, -tokens, rows))


@pytest.mark.slow
def test_what_is_not_counted_has_no_loss_whatever_its_target(monkeypatch):
    monkeypatch.setattr(tied, "_CHUNK", 4)
    hidden, table, targets = drawn((2, 5))
    counted = jnp.array([[0, 1, 1, 0, 0], [0, 0, 0, 0, 1]], jnp.uint8)
    both = jax.jit(jax.value_and_grad(next_token_loss, (0, 1)))
    found = both(hidden, table, targets, counted)
    for other in ((targets + 1) % VOCABULARY, jnp.full_like(targets, -1)):
        again = both(hidden, table, jnp.where(counted == 1, targets, other), 255 * counted)
        assert all(map(jnp.array_equal, jax.tree.leaves(found), jax.tree.leaves(again)))
    kept = counted == 1
    alone = both(hidden[kept], table, targets[kept])
    np.testing.assert_allclose(found[0], alone[0], rtol=1e-6)
    np.testing.assert_allclose(found[1][1], alone[1][1], rtol=1e-5, atol=1e-6)
    assert not found[1][0][~kept].any()
