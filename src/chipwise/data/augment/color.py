"""Brightness, contrast, saturation, hue, sharpness, and normalisation.

The enhancements are Pillow's `ImageEnhance`: a blend of the image with black, its mean gray, its own gray or
a blurred copy; factors above 1 extrapolate. These round where Pillow truncates. Several in one call are one
pass with one rounding at the end, clipped after each change as a stored image would be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .image import (
    Augment,
    between,
    chance,
    colors_of,
    expect,
    grid,
    of_image,
    span,
    stored,
    white,
    with_opacity,
)

Amount = float | tuple[float, float]
_Change = Callable[[jax.Array, jax.Array, float], jax.Array]  # colours, how much, white


def color_jitter(
    brightness: Amount = 0.0,
    contrast: Amount = 0.0,
    saturation: Amount = 0.0,
    hue: Amount = 0.0,
    p: float = 1.0,
) -> Augment:
    """Changes brightness, contrast, saturation and hue by random amounts, with probability `p`.

    The first three are factors: `(low, high)`, or one number for a range around 1 (not below 0). `hue` is a
    share of the colour circle, a range around 0 of at most 0.5. Each is uniform, and 0 turns it off. The
    parameters are those of torchvision's `ColorJitter`, which also draws their order; here it is fixed.

    Raises `DataError` for invalid ranges, and for images without 1, 3 or 4 channels.
    """
    call = f"color_jitter(brightness={brightness}, contrast={contrast}, saturation={saturation}, hue={hue})"
    chance(p, f"{call}, p={p}")
    factors = [span(amount, call, 1) for amount in (brightness, contrast, saturation)]
    turns = span(hue, call, 0)
    expect(-0.5 <= turns[0] <= turns[1] <= 0.5, call, "a hue from -0.5 to 0.5")
    changes: list[tuple[_Change, tuple[float, float]]] = [
        (change, f) for change, f in zip(_FACTORS, factors, strict=True) if f != (1.0, 1.0)
    ]
    changes += [(shift_hue, turns)] if turns != (0.0, 0.0) else []

    def jitter(image: jax.Array, key: jax.Array) -> jax.Array:
        if not changes or not p:
            return image
        drawn = jax.random.uniform(key, (len(changes) + 1,), jnp.float32)
        top = white(image.dtype)

        def change(colors: jax.Array) -> jax.Array:
            for number, (change_one, limits) in enumerate(changes):
                colors = jnp.clip(change_one(colors, between(drawn[number], *limits), top), 0.0, top)
            return colors

        changed = of_colors(image, change)
        return changed if p == 1 else jnp.where(drawn[-1] < p, changed, image)

    return of_image("color_jitter", jitter, colors=True)


def normalise(mean: float | Sequence[float], std: float | Sequence[float]) -> Augment:
    """`(image - mean) / std` in float32; one value, or one per channel, in the units of the stored image.

    It must be the last stage, since the others work on pixels. `mean=0, std=1` only converts to floats. Not
    needed if the loss normalises, as in the built-in recipes; then evaluation normalises too.

    Raises `DataError` for a `std` not above 0, and for a wrong number of values.
    """
    call = f"normalise(mean={mean}, std={std})"
    middle, scale = np.asarray(mean, np.float32), np.asarray(std, np.float32)
    right = (scale > 0).all() and np.isfinite(middle).all() and max(middle.ndim, scale.ndim) <= 1
    expect(bool(right), call, "finite numbers, and std above 0")

    def normalised(image: jax.Array, key: jax.Array) -> jax.Array:
        right = all(v.size == 1 or v.shape == image.shape[2:] for v in (middle, scale))
        expect(right, call, f"one value, or one for each channel of images {image.shape}")
        shape = (1,) * (image.ndim - 1) + (-1,)
        return (image.astype(jnp.float32) - middle.reshape(shape)) / scale.reshape(shape)

    return of_image("normalise", normalised)


def of_colors(image: jax.Array, change: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Applies `change` to an image's colours in float32, and stores the result; opacity stays."""
    return with_opacity(stored(change(colors_of(image).astype(jnp.float32)), image.dtype), image)


def gray(colors: jax.Array, top: float) -> jax.Array:
    """Luma (ITU-R 601-2) as in Pillow, `(height, width, 1)`, or the only channel; rounded for integers."""
    if colors.ndim == 2 or colors.shape[2] == 1:
        return colors
    # Pillow's weights, in 65,536ths: 8-bit sums of them are exact
    weights = np.array([19595, 38470, 7471], np.float32) / 65536
    luma = sum(weights[c] * colors[..., c : c + 1] for c in range(3))
    return luma if top == 1 else jnp.floor(luma + np.float32(0.5))  # type: ignore[operator,return-value]


def mean_gray(colors: jax.Array, top: float) -> jax.Array:
    """The mean of `gray`, `()`, rounded for integers."""
    luma = gray(colors, top)
    if top == 1:
        return jnp.mean(luma)
    # Sums of rows are exact, and there are so few rows that their sum is exact too
    return jnp.floor(jnp.sum(jnp.sum(luma.astype(jnp.int32), axis=1)).astype(jnp.float32) / luma.size + 0.5)


def blend(other: jax.Array, colors: jax.Array, factor: jax.Array) -> jax.Array:
    """Interpolates from `other` (factor 0) to `colors` (1), and beyond."""
    return factor * colors + (1 - factor) * other


def brighten(colors: jax.Array, factor: jax.Array, top: float) -> jax.Array:
    return factor * colors


def strengthen(colors: jax.Array, factor: jax.Array, top: float) -> jax.Array:
    return blend(mean_gray(colors, top), colors, factor)


def saturate(colors: jax.Array, factor: jax.Array, top: float) -> jax.Array:
    return blend(gray(colors, top), colors, factor)


_FACTORS = (brighten, strengthen, saturate)


def sharpen(colors: jax.Array, factor: jax.Array, top: float) -> jax.Array:
    """Pillow's `Sharpness`: its blur is the mean of the 3 × 3 neighbours, the middle one counted 5 times."""
    height, width, channels = (*colors.shape, 1)[:3]
    if min(height, width) < 3:
        return colors
    # Rows of numbers instead of pixels: vector registers are longer than 3
    lines = colors.reshape(height, width * channels)
    inner = lines[1:-1, channels:-channels]
    rows = lines[:-2] + lines[1:-1] + lines[2:]
    total = rows[:, : -2 * channels] + rows[:, channels:-channels] + rows[:, 2 * channels :] + 4 * inner
    smooth = total / 13 if top == 1 else jnp.floor(total * np.float32(1 / 13) + np.float32(0.5))
    sharp = jnp.clip(blend(smooth, inner, factor), 0.0, top)
    return jax.lax.dynamic_update_slice(lines, sharp, (1, channels)).reshape(colors.shape)


def shift_hue(colors: jax.Array, turn: jax.Array, top: float) -> jax.Array:
    """Turns the hue of hexcone HSV by `turn` of the circle; value and saturation stay.

    A channel falls linearly from the highest to the lowest value with the hue's distance from that channel's
    hue, so one division per pixel gives the hue and none is needed back.
    """
    if colors.ndim == 2 or colors.shape[2] == 1:
        return colors
    red, green, blue = (colors[..., c] for c in range(3))
    high, low = jnp.maximum(jnp.maximum(red, green), blue), jnp.minimum(jnp.minimum(red, green), blue)
    spread = high - low
    per = 1 / jnp.where(spread > 0, spread, 1.0)
    sixths = jnp.where(
        high == red,
        (green - blue) * per,
        jnp.where(high == green, 2 + (blue - red) * per, 4 + (red - green) * per),
    )
    sixths = grid(sixths + 6 * turn)  # -4 to 8

    def channel(own: int) -> jax.Array:
        away = sixths - own
        away = jnp.abs(away - 6 * jnp.rint(away * np.float32(1 / 6)))  # 0 to 3 around the circle
        return high - spread * jnp.clip(away - 1, 0.0, 1.0)

    return jnp.stack([channel(0), channel(2), channel(4)], axis=-1)
