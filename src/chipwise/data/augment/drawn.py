"""Changes that not every image draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def where_drawn(
    change: Callable[..., jax.Array], drawn: jax.Array, image: jax.Array, *settings: Any
) -> jax.Array:
    """`change(image, *settings)`, of the image's shape and type, where `drawn` `()` bool, else `image`.

    Mapped over a batch it is left out when no image drew it. A branch is also where a compiler stops
    fusing: what is looked up many times, an image or a table, is computed once, before it. (On CPUs XLA
    drops `optimization_barrier`, and worked out a table of 256 entries again for every pixel.)
    """

    def one(drawn, image, *settings):
        return jax.lax.cond(drawn, change, lambda image, *_: image, image, *settings)

    one = jax.custom_batching.custom_vmap(one)

    @one.def_vmap
    def batch(size: int, batched: list, drawn: jax.Array, image: jax.Array, *settings: jax.Array):
        if not batched[0]:
            drawn = jnp.broadcast_to(drawn, (size,))
        if not batched[1]:
            image = jnp.broadcast_to(image, (size, *image.shape))
        axes = (0, *(0 if given else None for given in batched[2:]))

        def some(drawn, images, *settings):
            made = jax.vmap(change, in_axes=axes)(images, *settings)
            return jnp.where(drawn.reshape((-1,) + (1,) * (images.ndim - 1)), made, images)

        made = jax.lax.cond(
            jnp.any(drawn), some, lambda drawn, images, *settings: images, drawn, image, *settings
        )
        return made, True

    return one(drawn, image, *settings)
