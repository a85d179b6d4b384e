"""Random keys that depend on the seed, the step, the replica and the example, but not on the machine.

So dropout, mixing and augmentation do not depend on the number of devices, and a resumed run continues with
the same keys. A seed is a number below 2^32, or a `()` uint32 array, which gives equal keys.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

# Streams are folded in first, so that no two uses share a key.
_INIT, _REPLICA, _AUGMENT, _EVAL = range(4)


def _stream(seed: int | jax.Array, stream: int) -> jax.Array:
    # The generator is explicit and does not depend on JAX's configuration, since it determines a seed's keys.
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), stream)


def init_key(seed: int | jax.Array) -> jax.Array:
    """The key of `Task.init`, `()`."""
    return _stream(seed, _INIT)


def replica_key(seed: int | jax.Array, step: jax.Array, replica: jax.Array) -> jax.Array:
    """The key of one replica's loss (and `mix`) at one step, `()`."""
    return jax.random.fold_in(jax.random.fold_in(_stream(seed, _REPLICA), step), replica)


def augment_keys(seed: int | jax.Array, epochs: jax.Array, indices: jax.Array) -> jax.Array:
    """One key per example, `(n,)`, from the epoch and the example's index, each `(n,)` int32."""
    stream = _stream(seed, _AUGMENT)
    fold = jax.vmap(lambda epoch, index: jax.random.fold_in(jax.random.fold_in(stream, epoch), index))
    return fold(epochs, indices)


def eval_key(seed: int) -> jax.Array:
    """The key of the loss in evaluation, `()`: the same for every example."""
    return _stream(seed, _EVAL)


# JAX lowers its Threefry hash on the CPU to a loop, since the unrolled form may be fused into several
# consumers and recomputed for each. For one key, recomputing is cheap, but each turn of the loop starts a
# dozen kernels: in the step of a small net with dropout, keys took a fifth of the time. So one key is hashed
# in one kernel, with the same bits.

_ROTATIONS = np.array([13, 15, 26, 6], np.uint32), np.array([17, 29, 16, 24], np.uint32)


def threefry2x32(key1: Any, key2: Any, x1: Any, x2: Any) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
    of `(...)` uint32 arrays that broadcast. A loop unless it is a single value."""
    keys = key1, key2, key1 ^ key2 ^ np.uint32(0x1BD11BDA)
    carry = (x1 + keys[0], x2 + keys[1]), (keys[1], keys[2], keys[0]), _ROTATIONS
    if any(np.shape(x) not in ((), (1,)) for x in (key1, key2, x1, x2)):  # also a symbolic size
        return lax.fori_loop(0, 5, _four_rounds, carry)[0]
    for turn in range(5):
        carry = _four_rounds(turn, carry)
    return carry[0]


def _four_rounds(turn: Any, carry: tuple) -> tuple:
    (a, b), keys, (rotations, others) = carry
    for left in rotations:
        a, b = a + b, b << left | b >> (np.uint32(32) - left)
        b = a ^ b
    x = a + keys[0], b + keys[1] + jnp.asarray(turn + 1, jnp.uint32)
    return x, (*keys[1:], keys[0]), (others, rotations)


mlir.register_lowering(threefry2x32_p, mlir.lower_fun(threefry2x32, multiple_results=True), platform="cpu")
