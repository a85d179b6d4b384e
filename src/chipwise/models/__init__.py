"""The built-in models, Flax NNX modules, and the layers that they share."""

import jax.numpy as jnp
import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def wide(dtype) -> jnp.dtype:
    """The dtype to add up in: float32 for half-precision floats, `dtype` itself for float32 and
    float64.

    Not `jnp.promote_types(dtype, float32)`, which strict dtype promotion refuses.
    """
    return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else jnp.dtype(dtype)
