"""One key is hashed without a loop on the CPU; its bits are those that JAX documents for Threefry."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from chipwise.step.keys import threefry2x32

KNOWN = [  # Random123 1.14, kat_vectors, threefry2x32 20
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
@pytest.mark.parametrize(("key", "counter", "hashed"), KNOWN)
def test_published_vectors(key, counter, hashed, shape):
    words = [jnp.full(shape, np.uint32(word)) for word in (*key, *counter)]
    made = jax.jit(threefry2x32)(*words)
    assert [set(np.ravel(x).tolist()) for x in made] == [{hashed[0]}, {hashed[1]}]


@pytest.mark.parametrize("shape", [(), (2,)])
def test_jax_hashes_a_key_without_a_loop_and_keys_in_one(shape):
    text = jax.jit(_folded).lower(_keys(shape)).as_text()
    assert text.count("stablehlo.while") == (1 if shape else 0)


def test_a_batch_of_unknown_size_can_be_exported():
    def noisy(x):
        return x + jax.random.normal(jax.random.key(0), x.shape)

    batch = jax.ShapeDtypeStruct(jax.export.symbolic_shape("batch, 3"), "float32")
    exported = jax.export.export(jax.jit(noisy))(batch)
    x = jnp.zeros((5, 3), "float32")
    np.testing.assert_array_equal(exported.call(x), jax.jit(noisy)(x))


def _keys(shape):
    return jax.random.split(jax.random.key(0), shape)


def _folded(keys):
    fold = jax.vmap(jax.random.fold_in, (0, None)) if keys.shape else jax.random.fold_in
    return jax.random.key_data(fold(keys, 7))
