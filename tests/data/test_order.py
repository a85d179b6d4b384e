import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chipwise.data.order import indices, permutation

sizes = st.integers(1, 50)


@given(st.integers(0, 2**32 - 1), st.integers(0, 100), sizes)
def test_an_epoch_is_a_permutation_of_all_examples(seed, epoch, n):
    assert sorted(permutation(seed, epoch, n)) == list(range(n))


@pytest.mark.slow
@given(st.integers(0, 5), sizes, st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_any_cut_of_the_stream_gives_the_same_stream(seed, n, a, b, c):
    a, b, c = sorted((a, b, c))
    whole = indices(seed, a, c, n)
    parts = np.concatenate([indices(seed, a, b, n), indices(seed, b, c, n)])
    np.testing.assert_array_equal(whole, parts)


def test_every_epoch_holds_every_example_once_whatever_the_batch():
    n, batch = 10, 3
    stream = np.concatenate([indices(1, s * batch, (s + 1) * batch, n) for s in range(10)])
    for epoch in range(3):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_epochs_and_seeds_differ():
    first = permutation(0, 0, 100)
    assert not np.array_equal(first, permutation(0, 1, 100))
    assert not np.array_equal(first, permutation(1, 0, 100))


def test_the_order_is_fixed_for_ever():
    # A stored run resumes on this: these numbers may never change.
    assert permutation(0, 0, 8).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert permutation(7, 3, 8).tolist() == [2, 5, 7, 3, 0, 6, 4, 1]
