"""A digest finds changed bits and signs, and depends neither on the cut of a vector nor on its padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chipwise.run.state_digest import _APART, word_sums

N = 1001
DIGEST = jax.jit(word_sums)


def digest(*arrays, starts=None):
    starts = [i * _APART % 2**32 for i in range(len(arrays))] if starts is None else starts
    return np.asarray(DIGEST(list(map(jnp.asarray, arrays)), np.asarray(starts, np.uint32)), np.uint64)


@pytest.fixture(scope="module")
def vector():
    return np.random.default_rng(0).normal(size=N).astype(np.float32)


@pytest.mark.parametrize("cut", [1, 500, N - 1])
def test_it_does_not_depend_on_the_cut_or_on_zeros_after_it(vector, cut):
    parts = digest(vector[:cut], vector[cut:], starts=[0, cut]).sum(axis=0) % 2**32
    padded = digest(np.pad(vector, (0, 23)))[0]
    assert (parts == digest(vector)[0]).all() and (padded == digest(vector)[0]).all()


@given(st.integers(0, N - 1), st.integers(0, 31))
def test_both_sums_find_every_flipped_bit(vector, place, bit):
    changed = vector.copy()
    changed.view(np.uint32)[place] ^= np.uint32(1 << bit)
    assert (digest(changed) != digest(vector)).all()


@given(st.lists(st.integers(0, N - 1), min_size=2, max_size=8, unique=True))
def test_it_finds_changed_signs_and_exchanged_values(vector, places):
    changed, moved = vector.copy(), vector.copy()
    changed[places] *= -1
    moved[places] = moved[np.roll(places, 1)]
    assert (digest(changed) != digest(vector)).any() and (digest(moved) != digest(vector)).any()


def test_arrays_of_one_name_have_positions_of_their_own(vector):
    other = vector[::-1].copy()
    a, b = (digest(*pair).sum(axis=0) % 2**32 for pair in ((vector, other), (other, vector)))
    assert (a != b).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "int32", "uint32", "bool"])
def test_every_type_has_words(dtype):
    values = jnp.arange(24).reshape(2, 3, 4).astype(dtype)
    flat = digest(values.reshape(-1))
    assert (digest(values) == flat).all()
    assert (digest(values.at[1, 2, 3].set(jnp.zeros((), dtype))) != flat).any()


def test_random_keys_have_words():
    one, other = (digest(jax.random.split(jax.random.key(seed), 3)) for seed in (0, 1))
    assert (one != other).any()
