"""Random keys that depend on the seed, the step, the replica and the example, but not on the machine.

So dropout, mixing and augmentation do not depend on the number of devices, and a resumed run continues with
the same keys. A seed is a number below 2^32, or a `()` uint32 array, which gives equal keys.
"""

from __future__ import annotations

import jax

from . import threefry  # noqa: F401 (its lowering hashes one key without a loop)

# Streams are folded in first, so that no two uses share a key.
_INIT, _REPLICA, _AUGMENT, _EVAL, _OWN = range(5)


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


def own_keys(seed: int | jax.Array, indices: jax.Array) -> jax.Array:
    """One key per example, `(n,)`, the same in every epoch, from its index `(n,)` int32."""
    stream = _stream(seed, _OWN)
    return jax.vmap(lambda index: jax.random.fold_in(stream, index))(indices)


def eval_key(seed: int) -> jax.Array:
    """The key of the loss in evaluation, `()`: the same for every example."""
    return _stream(seed, _EVAL)
