"""Brightness, contrast, saturation and hue, sharpness, fastai's lighting, and normalisation.

The enhancements are Pillow's `ImageEnhance`: a blend of the image with black, its mean gray, its own gray or
a blurred copy; factors above 1 extrapolate. These round where Pillow truncates. Several in one call are one
pass with one rounding at the end, clipped after each change as a stored image would be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import DataError
from .image import (
    Augment,
    between,
    chance,
    colors_of,
    grid,
    of_image,
    span,
    stored,
    where_drawn,
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
    if not -0.5 <= turns[0] <= turns[1] <= 0.5:
        raise DataError("hue-range", call=call)
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


def brightness(amount: Amount = 0.2, p: float = 1.0) -> Augment:
    """Blends with black; see `color_jitter`."""
    return color_jitter(brightness=amount, p=p)


def contrast(amount: Amount = 0.2, p: float = 1.0) -> Augment:
    """Blends with the image's mean gray; see `color_jitter`."""
    return color_jitter(contrast=amount, p=p)


def saturation(amount: Amount = 0.2, p: float = 1.0) -> Augment:
    """Blends with the gray image; see `color_jitter`."""
    return color_jitter(saturation=amount, p=p)


def hue(amount: Amount = 0.1, p: float = 1.0) -> Augment:
    """Rotates the colour circle; see `color_jitter`."""
    return color_jitter(hue=amount, p=p)


def sharpness(amount: Amount = 0.2, p: float = 1.0) -> Augment:
    """Blends with a blurred image, by a factor as in `color_jitter`; pixels at the border stay."""
    call = f"sharpness(amount={amount}, p={p})"
    limits, _ = span(amount, call, 1), chance(p, call)

    def sharper(image: jax.Array, key: jax.Array) -> jax.Array:
        if limits == (1.0, 1.0) or not p:
            return image
        drawn = jax.random.uniform(key, (2,), jnp.float32)
        top = white(image.dtype)
        factor = between(drawn[0], *limits)

        def change(image: jax.Array, factor: jax.Array) -> jax.Array:
            return of_colors(image, lambda colors: sharpen(colors, factor, top))

        return where_drawn(change, drawn[1] < p, image, factor)

    return of_image("sharpness", sharper, colors=True)


def lighting(amount: float = 0.2, p: float = 0.75) -> Augment:
    """fastai's brightness and contrast, each with probability `p`: both act on the log-odds of a pixel,
    so that nothing is clipped.

    With `x` from 0 to 1, brightness is `x c / (x c + (1 - x) (1 - c))` for `c` uniform in `(1 - amount) / 2`
    to `(1 + amount) / 2`; contrast `x^s / (x^s + (1 - x)^s)` for `s` log-uniform in `1 - amount` to `1 / (1 -
    amount)`. For 8-bit images this is a table of 256 entries per image.

    Source: Howard and Gugger, fastai 2, `aug_transforms(max_lighting=0.2, p_lighting=0.75)`.
    Raises `DataError` unless 0 <= amount < 1.
    """
    call = f"lighting(amount={amount}, p={p})"
    chance(p, call)
    if not 0 <= amount < 1:
        raise DataError("lighting-amount", call=call)

    def lit(image: jax.Array, key: jax.Array) -> jax.Array:
        if not amount or not p:
            return image
        drawn = jax.random.uniform(key, (4,), jnp.float32)
        share = jnp.where(drawn[2] < p, between(drawn[0], (1 - amount) / 2, (1 + amount) / 2), 0.5)
        power = jnp.exp((2 * drawn[1] - 1) * np.float32(-np.log1p(-amount)))
        power = jnp.where(drawn[3] < p, grid(power), 1.0)
        top = white(image.dtype)

        def light(x: jax.Array) -> jax.Array:
            x = x / top
            bright = x * share
            x = bright / (bright + (1 - x) * (1 - share))
            strong = x**power
            return top * strong / (strong + (1 - x) ** power)

        if image.dtype == jnp.uint8:
            table = stored(light(jnp.arange(256, dtype=jnp.float32)), image.dtype)
            some = (drawn[2] < p) | (drawn[3] < p)
            return where_drawn(_looked_up, some, image, table)
        return of_colors(image, light)

    return of_image("lighting", lit, colors=True)


def normalise(mean: float | Sequence[float], std: float | Sequence[float]) -> Augment:
    """`(image - mean) / std` in float32; one value, or one per channel, in the units of the stored image.

    It must be the last stage, since the others work on pixels. `mean=0, std=1` only converts to floats. Not
    needed if the loss normalises, as in the built-in recipes; then evaluation normalises too.

    Raises `DataError` for a `std` not above 0, and for a wrong number of values.
    """
    call = f"normalise(mean={mean}, std={std})"
    middle, scale = np.asarray(mean, np.float32), np.asarray(std, np.float32)
    if not (scale > 0).all() or not np.isfinite(middle).all() or max(middle.ndim, scale.ndim) > 1:
        raise DataError("normalise-values", call=call)

    def normalised(image: jax.Array, key: jax.Array) -> jax.Array:
        channels = image.shape[2:]
        for values in (middle, scale):
            if values.size != 1 and values.shape != channels:
                raise DataError("augment-values", call=call, values=values.size, shape=image.shape)
        shape = (1,) * (image.ndim - 1) + (-1,)
        return (image.astype(jnp.float32) - middle.reshape(shape)) / scale.reshape(shape)

    return of_image("normalise", normalised)


def of_colors(image: jax.Array, change: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Applies `change` to an image's colours in float32, and stores the result; opacity stays."""
    return with_opacity(stored(change(colors_of(image).astype(jnp.float32)), image.dtype), image)


def _looked_up(image: jax.Array, table: jax.Array) -> jax.Array:
    """The entry of `table` `(256,)` uint8 for each colour of `image`."""
    places = colors_of(image).astype(jnp.int32)
    return with_opacity(table.at[places].get(mode="promise_in_bounds"), image)


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
