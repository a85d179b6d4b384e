"""Which columns are indices, and of what size: read from traced functions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from chipwise.step.index_ranges import index_ranges, with_outside
from chipwise.step.program_flops import program_flops

TABLE = jnp.arange(12.0).reshape(4, 3)


def at_two(w, a, b):
    return TABLE[a, b]


def larger_and_smaller(w, a, b):
    return w[a] + TABLE[a].sum(1)


def as_rows(w, a, b):
    return w[a.reshape(2, -1)[:, :1] + 2]


def clipped(w, a, b):
    return w[jnp.clip(a, 0, 5)]


def remainder(w, a, b):
    return w[a % 6]


def compared(w, a, b):
    return jnp.where(a[:, None] < jnp.arange(6)[None], 1.0, 0.0)


def of_floats(w, a, b):
    return w[(b.astype(jnp.float32)).astype(jnp.int32)]


def remapped(w, a, b):
    return w[jnp.array([0, 5])[a]]


def last(w, a, b):
    return w.at[a].get(mode="clip")


def zero(w, a, b):
    return jnp.take(w, a, mode="fill", fill_value=0)


def taken(w, a, b):
    return jnp.take_along_axis(w, a, axis=0) + jnp.take(jnp.arange(5), b).astype(w.dtype)


def each(w, a, b):
    return jax.vmap(lambda at: w[at])(a)


def window(w, a, b):
    return jax.vmap(lambda at: jax.lax.dynamic_slice(w, (at,), (2,)))(a)


@pytest.mark.parametrize(
    ("function", "ranges"),
    [
        (at_two, {"a": (0, 3), "b": (0, 2)}),
        (larger_and_smaller, {"a": (0, 3)}),
        (as_rows, {"a": (-2, 3)}),
        (clipped, {}),
        (remainder, {}),
        (compared, {}),
        (of_floats, {"b": (0, 5)}),
        (remapped, {"a": (0, 1)}),
        (last, {}),
        (zero, {}),
        (taken, {"a": (0, 5), "b": (0, 4)}),
        (each, {"a": (0, 5)}),
        (window, {}),
    ],
)
def test_the_range_of_a_column_is_that_of_its_narrowest_axis(function, ranges):
    columns = [jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.int8)]
    traced = jax.make_jaxpr(function)(jnp.ones(6), *columns)
    assert index_ranges(traced, ["a", "b"]) == ranges


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("outside", [-1, 5, 7])
def test_what_is_outside_matters_unless_it_is_masked(outside, masked):
    def loss(w, x, label):
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, label)
        inside = (label >= 0) & (label < 5)
        return jnp.where(inside, losses, 0.0).sum() if masked else losses.sum()

    x, label = np.ones((4, 3), np.float32), np.array([0, 4, 1, 2], np.int32)
    traced = jax.make_jaxpr(loss)(jnp.ones((3, 5)), x, label)
    for row in range(4):
        given = np.where(np.arange(4) == row, np.int32(outside), label)
        one, two = (np.asarray(with_outside(traced, [x, given], (seed, 0, 2), 1)) for seed in (0, 1))
        assert np.isfinite([one, two]).all() and (one == two) == masked
    one, two = (np.asarray(with_outside(traced, [x, label], (seed, 0, 2), 1)) for seed in (0, 1))
    assert one == two


def masked_language(w, tokens, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(w[tokens] @ w.T, labels)
    return jnp.where(labels == -100, 0.0, losses).sum()


@pytest.mark.parametrize(("tried", "flops"), [(0, 2 * 4 * 3 * 5), (1, 0)])
def test_no_net_is_computed_for_a_column_that_it_does_not_read(tried, flops):
    tokens = labels = jnp.zeros(4, jnp.int32)
    traced = jax.make_jaxpr(masked_language)(jnp.ones((5, 3)), tokens, labels)
    trial = jax.make_jaxpr(lambda *columns: with_outside(traced, columns, (0, 0, 2), tried))
    assert program_flops(trial(tokens, labels).jaxpr) == flops
