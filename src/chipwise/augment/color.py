"""The changes of colour that `rand_augment` draws, in levels from 0 to 255.

The enhancements are those of Pillow's `ImageEnhance`: a blend of the image with its gray or a
blurred copy. Factors above 1 extrapolate. The functions here round where Pillow truncates.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .image import colors_of, stored, with_opacity


def of_colors(image: jax.Array, change: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Applies `change` to an image's colours in float32, and stores the result. Opacity does not
    change."""
    return with_opacity(stored(change(colors_of(image).astype(jnp.float32)), image.dtype), image)


def gray(colors: jax.Array) -> jax.Array:
    """Luma (ITU-R 601-2) as in Pillow, `(height, width, 1)`, or the only channel. It is not
    rounded."""
    if colors.ndim == 2 or colors.shape[2] == 1:
        return colors
    # Pillow's weights, in 65,536ths: 8-bit sums of them are exact
    weights = np.array([19595, 38470, 7471], np.float32) / 65536
    return sum(weights[c] * colors[..., c : c + 1] for c in range(3))  # type: ignore[return-value]


def blend(other: jax.Array, colors: jax.Array, factor: jax.Array) -> jax.Array:
    """Interpolates from `other` (factor 0) to `colors` (1), and beyond."""
    return factor * colors + (1 - factor) * other


def saturate(colors: jax.Array, factor: jax.Array) -> jax.Array:
    if colors.ndim == 2 or colors.shape[2] == 1:
        return blend(colors, colors, factor)
    return blend(jnp.floor(gray(colors) + np.float32(0.5)), colors, factor)


def sharpen(colors: jax.Array, factor: jax.Array) -> jax.Array:
    """Pillow's `Sharpness`: its blur is the mean of the 3 × 3 neighbours, the middle one counted 5
    times."""
    height, width, channels = (*colors.shape, 1)[:3]
    if min(height, width) < 3:
        return colors
    # Rows of numbers instead of pixels: vector registers are longer than 3
    lines = colors.reshape(height, width * channels)
    inner = lines[1:-1, channels:-channels]
    rows = lines[:-2] + lines[1:-1] + lines[2:]
    total = (
        rows[:, : -2 * channels] + rows[:, channels:-channels] + rows[:, 2 * channels :] + 4 * inner
    )
    smooth = jnp.floor(total * np.float32(1 / 13) + np.float32(0.5))
    sharp = jnp.clip(blend(smooth, inner, factor), 0.0, 255.0)
    return jax.lax.dynamic_update_slice(lines, sharp, (1, channels)).reshape(colors.shape)
