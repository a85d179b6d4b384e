"""Changes that depend only on a pixel's value, of policies: posterize, solarize, autocontrast,
equalize.

They are those of Pillow's `ImageOps` for 8-bit images. Each is a table of 256 entries per channel.
Consecutive ones are merged to one table and one look-up.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .image import expect, with_opacity

LabelTable = jax.Array  # (256, channels) float32, whole numbers from 0 to 255


def eight_bit(image: jax.Array, stage: str) -> jax.Array:
    """The `channels_of` an image. Raises `DataError` for an image that is not uint8."""
    needed = f"uint8 images, got {image.dtype}: put it before stages that make floats"
    expect(image.dtype == jnp.uint8, stage, needed)
    return channels_of(image)


def channels_of(image: jax.Array) -> jax.Array:
    """An image's colours as `(height, width, 1 or 3)`."""
    return image[..., None] if image.ndim == 2 else image[..., :3]


def applied(image: jax.Array, table: LabelTable) -> jax.Array:
    """The colours of `image` looked up in `table`, rounded."""
    colors = channels_of(image)
    channels = jnp.arange(colors.shape[2], dtype=jnp.int32)[None, None, :]
    entries = jnp.rint(table).astype(jnp.uint8)
    changed = entries.at[colors.astype(jnp.int32), channels].get(mode="promise_in_bounds")
    return with_opacity(changed[..., 0] if image.ndim == 2 else changed, image)


def kept_bits(table: LabelTable, bits: jax.Array) -> LabelTable:
    """The table with the highest `bits` `()` float32 kept: 8 keeps all, 0 none."""
    step = jnp.exp2(8 - bits)
    return jnp.floor(table / step) * step


def solarized(table: LabelTable, threshold: jax.Array) -> LabelTable:
    return jnp.where(table < threshold, table, 255 - table)


def extremes(colors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The lowest and highest value of each channel, `(channels,)` float32."""
    low = jnp.min(colors, axis=(0, 1))
    high = jnp.max(colors, axis=(0, 1))
    return low.astype(jnp.float32), high.astype(jnp.float32)


def stretched(low: jax.Array, high: jax.Array) -> LabelTable:
    """The table that maps `low` to black and `high` to white, or the identity if they are equal."""
    values = jnp.arange(256, dtype=jnp.float32)[:, None]
    span = (high - low)[None, :]
    table = jnp.clip(jnp.floor((values - low[None, :]) * 255 / jnp.maximum(span, 1.0)), 0, 255)
    return jnp.where(span > 0, table, values)


def equalized(counts: jax.Array) -> LabelTable:
    """Pillow's equalize table for the histogram `counts` `(256, channels)` int32: the number of
    lower pixels over the average of 255 values, without the highest value that occurs."""
    values = jnp.arange(256, dtype=jnp.int32)[:, None]
    total = jnp.sum(counts, axis=0)
    highest = jnp.max(jnp.where(counts > 0, values, 0), axis=0)
    step = (total - jnp.sum(jnp.where(values == highest[None, :], counts, 0), axis=0)) // 255
    below = jnp.cumsum(counts, axis=0) - counts
    table = jnp.minimum((below + (step // 2)[None, :]) // jnp.maximum(step, 1)[None, :], 255)
    return jnp.where(step[None, :] > 0, table, values).astype(jnp.float32)


@jax.custom_batching.custom_vmap
def counts(colors: jax.Array, needed: jax.Array) -> jax.Array:
    """How often each value occurs in each channel: `(256, channels)` int32. Zeros where not
    `needed`.

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
        places = (
            colors.astype(jnp.int32) * channels
            + jnp.arange(channels, dtype=jnp.int32)[None, None, :]
        )
        flat = jnp.zeros((256 * channels,), jnp.int32).at[places].add(1, mode="promise_in_bounds")
        return flat.reshape(256, channels)

    def multiplied(colors):
        """Counts by the high and the low half of the value, as a matrix product does at once."""
        pixels = colors.reshape(-1, colors.shape[2]).T.astype(jnp.int32)
        high, low = (
            jax.nn.one_hot(half, 16, dtype=jnp.bfloat16) for half in (pixels >> 4, pixels & 15)
        )
        pairs = jnp.einsum("cpi,cpj->ijc", high, low, preferred_element_type=jnp.float32)
        return pairs.reshape(256, -1).astype(jnp.int32)

    return jax.lax.platform_dependent(colors, cpu=added, default=multiplied)
