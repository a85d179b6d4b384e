"""Moves of an image by one matrix, and one gather of four neighbours for each pixel.

Pixels are points: the corner of an image is the centre of its corner pixel, and an image of `n`
pixels has the width `n - 1`. So the identity reads every pixel at its own position.

Positions are multiples of 1/4096 pixel and weights of 1/256 (OpenCV's `warpAffine` has 1/32). So
the interpolation of 8-bit pixels is exact in float32 in any order, and the bits are the same on
every device.

A general map needs a gather. Microseconds for an image of 32×32 and of 224×224, on one core of a
shared Xeon (JAX 0.10.2, uint8, three channels):

- four gathers of whole pixels, as here: 8 and 460
- the four neighbours of a channel packed in one word and gathered once: 14 and 980
- the channels of a pixel packed in one word: 38 and 3,100
- Pillow's `transform`: 19 and 850
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .image import grid, stored

_BITS = 12  # bits of a position after the point
_ONE = 1 << _BITS

Positions = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def positions(matrix: jax.Array, height: int, width: int) -> Positions:
    """The contribution of each column and row to the positions that pixels are read from.

    *Arguments:* `matrix`: `(2, 3)` float32: the pixel at `(x, y)` from the image's centre is read
    at `(a x + b y + c, d x + e y + f)` from the centre, in pixels to the right and down.

    *Returns* for `x` and for `y` the columns' `(width,)` and the rows' `(height,)` part, int32.
    """
    entries = grid(matrix, 16)

    def parts(row: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
        offset = _whole(row[2] + jnp.float32((length - 1) / 2))
        return _steps(row[0], width), _steps(row[1], height) + offset

    return (*parts(entries[0], width), *parts(entries[1], height))


def resample(image: jax.Array, where: Positions, edge: np.ndarray) -> jax.Array:
    """`image` read at `where`, bilinear, with the same shape and type. Positions outside it get the
    pixel `edge`, `(channels,)` or `()`."""
    height, width = image.shape[:2]
    x, y = (columns[None, :] + rows[:, None] for columns, rows in (where[:2], where[2:]))
    x0, x1, right = _between(x, width)
    y0, y1, down = _between(y, height)
    spread = (..., *(None,) * (image.ndim - 2))
    right = right[spread]
    down = down[spread]

    def at(rows, columns):
        return image.at[rows, columns].get(mode="promise_in_bounds").astype(jnp.float32)

    upper = _mixed(at(y0, x0), at(y0, x1), right)
    lower = _mixed(at(y1, x0), at(y1, x1), right)
    pixels = stored(_mixed(upper, lower, down), image.dtype)
    inside = _within(x, width) & _within(y, height)
    return jnp.where(inside[spread], pixels, jnp.broadcast_to(jnp.asarray(edge), pixels.shape))


def nearest(mask: jax.Array, where: Positions, edge: float) -> jax.Array:
    """`mask` read at `where`, the nearest pixel, with the same shape and type. Positions outside it
    get `edge`."""
    height, width = mask.shape[:2]
    x, y = (columns[None, :] + rows[:, None] for columns, rows in (where[:2], where[2:]))
    inside = (_within(x, width) & _within(y, height))[(..., *(None,) * (mask.ndim - 2))]
    right, down = (
        jnp.clip((at + (_ONE >> 1)) >> _BITS, 0, length - 1)
        for at, length in ((x, width), (y, height))
    )
    pixels = mask.at[down, right].get(mode="promise_in_bounds")
    return jnp.where(inside, pixels, jnp.asarray(edge, mask.dtype))


def _steps(entry: jax.Array, length: int) -> jax.Array:
    """`entry` times the distance of each of `length` pixels from their centre."""
    return _whole(entry * jnp.asarray((np.arange(length) - (length - 1) / 2).astype(np.float32)))


def _whole(position: jax.Array) -> jax.Array:
    # Clipped, so that the sum of three does not overflow and stays outside.
    return jnp.rint(jnp.clip(position, -(2.0**17), 2.0**17) * _ONE).astype(jnp.int32)


def _between(position: jax.Array, length: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The two pixels around each position, mirrored into the image, and the weight of the
    second."""
    last = (length - 1) * _ONE
    if not last:
        first = jnp.zeros_like(position)
        return first, first, jnp.zeros_like(position, jnp.float32)
    # Maps two lengths on both sides into the image
    position = last - jnp.abs(last - jnp.abs(position))
    # Positions beyond get the edge. The last pixel is the second of a pair, with weight 1
    position = jnp.clip(position, 0, last)
    first = jnp.minimum(position >> _BITS, length - 2)
    share = (position - (first << _BITS) + (_ONE >> 9)) >> (_BITS - 8)
    return first, first + 1, share.astype(jnp.float32) * np.float32(1 / 256)


def _mixed(first: jax.Array, second: jax.Array, share: jax.Array) -> jax.Array:
    return first + share * (second - first)


def _within(position: jax.Array, length: int) -> jax.Array:
    """Whether a position is inside a pixel, a square around its centre."""
    return (position >= -(_ONE >> 1)) & (position < length * _ONE - (_ONE >> 1))
