"""Derives random keys from the seed, the step, the replica and the example, but not from the
machine.

So dropout, mixing and augmentation do not depend on the number of devices, and a resumed run
continues with the same keys. A seed is a number below 2^32, or a `()` uint32 array with that value,
which gives equal keys.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

# Streams are folded in first, so that no two uses share a key.
_INIT, _REPLICA, _AUGMENT, _EVAL = range(4)


def _stream(seed: int | Array, stream: int) -> Array:
    # The generator is explicit and does not depend on JAX's configuration, since it determines a
    # seed's keys.
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), stream)


def init_key(seed: int | Array) -> Array:
    """The key of `Task.init`, `()`."""
    return _stream(seed, _INIT)


def replica_key(seed: int | Array, step: Array, replica: Array) -> Array:
    """The key of one replica's loss (and `mix`) at one step, `()`."""
    return jax.random.fold_in(jax.random.fold_in(_stream(seed, _REPLICA), step), replica)


def augment_keys(seed: int | Array, epochs: Array, indices: Array) -> Array:
    """One key per example, `(n,)`, from the epoch and the example's index, each `(n,)` int32."""
    stream = _stream(seed, _AUGMENT)
    fold = jax.vmap(
        lambda epoch, index: jax.random.fold_in(jax.random.fold_in(stream, epoch), index)
    )
    return fold(epochs, indices)


def eval_keys(seed: int | Array, positions: Array) -> Array:
    """The keys of the loss in evaluation, `(n,)`, from positions in the source, `(n,)` int32. A
    position is that of the example, or of the first example in each `Task.eval_group`.

    A position has the same key in every evaluation of a run, so that random draws, such as the
    noise of a diffusion net, do not move a metric from one evaluation to the next.
    """
    stream = _stream(seed, _EVAL)
    return jax.vmap(lambda position: jax.random.fold_in(stream, position))(positions)


# JAX lowers its Threefry hash on the CPU to a loop, since the unrolled form may be fused into
# several consumers and recomputed for each. For one key, recomputing is cheap, but each turn of the
# loop starts a dozen kernels: in the step of a small net with dropout, keys took a fifth of the
# time. So one key is hashed in one kernel, with the same bits.

_ROTATIONS = np.array([13, 15, 26, 6], np.uint32), np.array([17, 29, 16, 24], np.uint32)


def threefry2x32(key1: Array, key2: Array, x1: Array, x2: Array) -> tuple[Array, Array]:
    """Computes Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1,
    2, 3", SC 2011), of `(...)` uint32 arrays that broadcast. It is a loop unless all are single
    values."""
    keys = key1, key2, key1 ^ key2 ^ np.uint32(0x1BD11BDA)
    carry = (x1 + keys[0], x2 + keys[1]), (keys[1], keys[2], keys[0]), _ROTATIONS
    if any(np.shape(x) not in ((), (1,)) for x in (key1, key2, x1, x2)):  # also a symbolic size
        return lax.fori_loop(0, 5, _four_rounds, carry)[0]
    for turn in range(5):
        carry = _four_rounds(turn, carry)
    return carry[0]


def _four_rounds(turn: int | Array, carry: tuple) -> tuple:
    (a, b), keys, (rotations, others) = carry
    for left in rotations:
        a, b = a + b, b << left | b >> (np.uint32(32) - left)
        b = a ^ b
    x = a + keys[0], b + keys[1] + jnp.asarray(turn + 1, jnp.uint32)
    return x, (*keys[1:], keys[0]), (others, rotations)


mlir.register_lowering(
    threefry2x32_p, mlir.lower_fun(threefry2x32, multiple_results=True), platform="cpu"
)
