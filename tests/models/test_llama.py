"""Rotary positions, and their stretch to longer contexts."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from chipwise.models.llama import TURNED, rotated


def angles(half, theta, position, factor=1.0):
    """What a vector of ones is turned by at `position`: `(half,)` radians."""
    x = jnp.concatenate([jnp.ones((1, 1, 1, half)), jnp.zeros((1, 1, 1, half))], axis=-1)
    y = np.asarray(rotated(x, theta, jnp.full((1, 1), position), factor), np.float64)[0, 0, 0]
    return np.arctan2(y[half:], y[:half])


def published(half, theta, factor, low=1.0, high=4.0):
    """The frequencies as `apply_scaling` of Llama 3.1 makes them, one at a time in float64."""
    found = []
    for i in range(half):
        one = theta ** (-i / half)
        length = 2 * math.pi / one
        if length > TURNED / low:
            one /= factor
        elif length >= TURNED / high:
            smooth = (TURNED / length - low) / (high - low)
            one = (1 - smooth) * one / factor + smooth * one
        found.append(one)
    return np.array(found)


@pytest.mark.parametrize("factor", [1.0, 8.0, 32.0])
@pytest.mark.parametrize("half,theta", [(64, 500_000.0), (2, 500_000.0), (32, 1e6)])
def test_slow_frequencies_are_divided_and_fast_ones_stay(half, theta, factor):
    expected = published(half, theta, factor)
    np.testing.assert_allclose(angles(half, theta, 1, factor), expected, rtol=1e-5)
    slow = expected < 2 * math.pi / TURNED
    assert slow.any() or half == 2
    position = 3000  # where a wrong frequency has turned far
    turned = np.exp(1j * angles(half, theta, position, factor))
    np.testing.assert_allclose(turned, np.exp(1j * position * expected), atol=2e-3)


@pytest.mark.slow  # with what `make test-slow` installs
def test_transformers_makes_the_same_frequencies():
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    stretch = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0}
    stretch |= {"high_freq_factor": 4.0, "original_max_position_embeddings": TURNED}
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=stretch)
    theirs = rope.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    np.testing.assert_allclose(angles(32, 5e5, 1, 32.0), theirs, rtol=1e-5)
