"""Changes that depend only on a pixel's value: posterize, solarize, invert, autocontrast, equalize.

They are Pillow's `ImageOps` for 8-bit images. Each is a table of 256 entries per channel; consecutive ones
are merged to one table and one look-up.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ...errors import DataError
from .image import Augment, chance, of_image, where_drawn, with_opacity

Table = jax.Array  # (256, channels) float32, whole numbers from 0 to 255


def posterize(bits: int = 4, p: float = 1.0) -> Augment:
    """Keeps the `bits` highest of 8 bits, with probability `p`. 8 changes nothing."""
    if not 0 <= bits <= 8:
        raise DataError("posterize-bits", bits=bits)
    return _by_table("posterize", p, lambda colors, needed: kept_bits(identity(colors), jnp.float32(bits)))


def solarize(threshold: int = 128, p: float = 1.0) -> Augment:
    """Inverts values from `threshold` on, with probability `p`. 256 changes nothing."""
    if not 0 <= threshold <= 256:
        raise DataError("solarize-threshold", threshold=threshold)
    limit = jnp.float32(threshold)
    return _by_table("solarize", p, lambda colors, needed: solarized(identity(colors), limit))


def invert(p: float = 1.0) -> Augment:
    """Inverts all values, with probability `p`."""
    return _by_table("invert", p, lambda colors, needed: 255 - identity(colors))


def autocontrast(p: float = 1.0) -> Augment:
    """Stretches each channel so that its extremes become black and white, with probability `p`."""
    return _by_table("autocontrast", p, lambda colors, needed: stretched(*extremes(colors)))


def equalize(p: float = 1.0) -> Augment:
    """Equalizes the histogram of each channel, with probability `p`."""
    return _by_table("equalize", p, lambda colors, needed: equalized(counts(colors, needed)))


def _by_table(stage: str, p: float, table: Callable[[jax.Array, jax.Array], Table]) -> Augment:
    chance(p, f"{stage}(p={p})")

    def change(image: jax.Array, key: jax.Array) -> jax.Array:
        colors = eight_bit(image, stage)
        if not p:
            return image
        drawn = jax.random.bernoulli(key, p)
        return where_drawn(applied, drawn, image, table(colors, drawn))

    return of_image(stage, change, colors=True)


def eight_bit(image: jax.Array, stage: str) -> jax.Array:
    """The `channels_of` an image. Raises `DataError` for other than uint8."""
    if image.dtype != jnp.uint8:
        raise DataError("augment-not-uint8", stage=stage, dtype=image.dtype.name)
    return channels_of(image)


def channels_of(image: jax.Array) -> jax.Array:
    """An image's colours as `(height, width, 1 or 3)`."""
    return image[..., None] if image.ndim == 2 else image[..., :3]


def applied(image: jax.Array, table: Table) -> jax.Array:
    """The colours of `image` looked up in `table`, rounded."""
    colors = channels_of(image)
    channels = jnp.arange(colors.shape[2], dtype=jnp.int32)[None, None, :]
    entries = jnp.rint(table).astype(jnp.uint8)
    changed = entries.at[colors.astype(jnp.int32), channels].get(mode="promise_in_bounds")
    return with_opacity(changed[..., 0] if image.ndim == 2 else changed, image)


def identity(colors: jax.Array) -> Table:
    values = jnp.arange(256, dtype=jnp.float32)[:, None]
    return jnp.broadcast_to(values, (256, colors.shape[2]))


def kept_bits(table: Table, bits: jax.Array) -> Table:
    """The table with the highest `bits` `()` float32 kept: 8 keeps all, 0 none."""
    step = jnp.exp2(8 - bits)
    return jnp.floor(table / step) * step


def solarized(table: Table, threshold: jax.Array) -> Table:
    return jnp.where(table < threshold, table, 255 - table)


def extremes(colors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The lowest and highest value of each channel, `(channels,)` float32."""
    low, high = jnp.min(colors, axis=(0, 1)), jnp.max(colors, axis=(0, 1))
    return low.astype(jnp.float32), high.astype(jnp.float32)


def stretched(low: jax.Array, high: jax.Array) -> Table:
    """The table that maps `low` to black and `high` to white; the identity if they are equal."""
    values = jnp.arange(256, dtype=jnp.float32)[:, None]
    span = (high - low)[None, :]
    table = jnp.clip(jnp.floor((values - low[None, :]) * 255 / jnp.maximum(span, 1.0)), 0, 255)
    return jnp.where(span > 0, table, values)


def equalized(counts: jax.Array) -> Table:
    """Pillow's equalize table for the histogram `counts` `(256, channels)` int32: the number of lower pixels
    over the average of 255 values, without the highest value that occurs."""
    values = jnp.arange(256, dtype=jnp.int32)[:, None]
    total = jnp.sum(counts, axis=0)
    highest = jnp.max(jnp.where(counts > 0, values, 0), axis=0)
    step = (total - jnp.sum(jnp.where(values == highest[None, :], counts, 0), axis=0)) // 255
    below = jnp.cumsum(counts, axis=0) - counts
    table = jnp.minimum((below + (step // 2)[None, :]) // jnp.maximum(step, 1)[None, :], 255)
    return jnp.where(step[None, :] > 0, table, values).astype(jnp.float32)


@jax.custom_batching.custom_vmap
def counts(colors: jax.Array, needed: jax.Array) -> jax.Array:
    """How often each value comes in each channel: `(256, channels)` int32; zeros where not `needed`.

    Counting costs more than all else that a policy does to an image, and few images draw a change
    that needs it. Mapped over a batch it is therefore a loop, whose turn is empty for the others.
    """
    return jax.lax.cond(needed, _counted, lambda c: jnp.zeros((256, c.shape[2]), jnp.int32), colors)


@counts.def_vmap
def _counts_of_a_batch(size: int, batched: list[bool], colors: jax.Array, needed: jax.Array):
    mapped = [
        x if given else jnp.broadcast_to(x, (size, *x.shape))
        for x, given in zip((colors, needed), batched, strict=True)
    ]
    return jax.lax.map(lambda example: counts(*example), tuple(mapped)), True


def _counted(colors: jax.Array) -> jax.Array:
    def added(colors):
        channels = colors.shape[2]
        places = colors.astype(jnp.int32) * channels + jnp.arange(channels, dtype=jnp.int32)[None, None, :]
        flat = jnp.zeros((256 * channels,), jnp.int32).at[places].add(1, mode="promise_in_bounds")
        return flat.reshape(256, channels)

    def multiplied(colors):
        """By the high and the low half of the value: what a unit for matrix products does at once."""
        pixels = colors.reshape(-1, colors.shape[2]).T.astype(jnp.int32)
        high, low = (jax.nn.one_hot(half, 16, dtype=jnp.bfloat16) for half in (pixels >> 4, pixels & 15))
        pairs = jnp.einsum("cpi,cpj->ijc", high, low, preferred_element_type=jnp.float32)
        return pairs.reshape(256, -1).astype(jnp.int32)

    return jax.lax.platform_dependent(colors, cpu=added, default=multiplied)
