"""Stored pixels to what a net takes."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import DataError
from .image import Augment, Example, image_of


def normalise(mean: float | Sequence[float], std: float | Sequence[float]) -> Augment:
    """`(image - mean) / std` in float32; one value, or one a channel, in the units of the stored image.

    The last stage: the others work on pixels. `mean=0, std=1` only makes them floats. A task that
    normalises in its loss, as the built-in recipes do, evaluates the same way and needs no stage for it.

    Raises `DataError` for a `std` not above 0, and values that are neither one nor one a channel.
    """
    middle, scale = np.asarray(mean, np.float32), np.asarray(std, np.float32)
    if not (scale > 0).all() or not np.isfinite(middle).all() or max(middle.ndim, scale.ndim) > 1:
        raise DataError(f"normalise(mean={mean}, std={std}): expected finite numbers, and std above 0.")

    def augment(example: Example, key: jax.Array) -> Example:
        image = image_of(example, "normalise")
        channels = image.shape[2:]
        for values in (middle, scale):
            if values.size != 1 and values.shape != channels:
                raise DataError(
                    f"normalise(mean={mean}, std={std}) has {values.size} values, the image {image.shape}: "
                    f"one, or one a channel."
                )
        shape = (1,) * (image.ndim - 1) + (-1,)
        made = (image.astype(jnp.float32) - middle.reshape(shape)) / scale.reshape(shape)
        return {**example, "image": made}

    return augment
