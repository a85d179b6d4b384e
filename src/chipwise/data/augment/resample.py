"""Any affine change of one image by one look-up of four neighbours a pixel.

Pixels are points: the corner of an image is the centre of its corner pixel, and an image `n` pixels
wide is `n - 1` long. So the identity looks every pixel up where it is, and an image mirrored at its
edge goes on with the pixel before the last, as NumPy's "reflect".

Positions are whole numbers of 1/4096 pixel and weights of 1/256 pixel (OpenCV's `warpAffine` has 1/32):
the interpolation of 8-bit pixels is then exact in float32 in any order, so the result is the same
bits on every device.

A general map needs a gather. Measured on one core of a shared Xeon (JAX 0.10.2, uint8, three channels),
microseconds an image of 32×32 and of 224×224: four gathers of whole pixels 8 and 460, as here; the four
neighbours of a channel packed in one word and gathered once 14 and 980; the channels of a
pixel packed in one word 38 and 3,100; Pillow's `transform` 19 and 850.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from .image import grid, stored

_BITS = 12  # of a position, after the point
_ONE = 1 << _BITS


Positions = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def positions(matrix: jax.Array, height: int, width: int) -> Positions:
    """What each column and row adds to where a pixel is looked up, for images of `height` × `width`.

    *Arguments:* `matrix`: `(2, 3)` float32: the pixel at `(x, y)` from the image's centre is looked up at
    `(a x + b y + c, d x + e y + f)` from the centre, in pixels to the right and down.

    *Returns* of `x` and of `y`, the columns' `(width,)` and the rows' `(height,)` part, int32.
    """
    entries = grid(matrix, 16)

    def parts(row: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
        offset = _whole(row[2] + jnp.float32((length - 1) / 2))
        return _steps(row[0], width), _steps(row[1], height) + offset

    return (*parts(entries[0], width), *parts(entries[1], height))


def resample(
    image: jax.Array, where: Positions, edge: np.ndarray | None = None, lengths: float = 2.0
) -> jax.Array:
    """`image` as looked up at `where`, bilinear, of the same shape and type.

    *Arguments:* `edge`: one pixel to show outside of the image, `(channels,)` or `()`, or `None` to
    mirror it there; `lengths`: how far outside the mirrors must go on, in image lengths.
    """
    height, width = image.shape[:2]
    x, y = (columns[None, :] + rows[:, None] for columns, rows in (where[:2], where[2:]))
    folds = max(1, math.ceil(lengths / 2))
    x0, x1, right = _between(x, width, folds)
    y0, y1, down = _between(y, height, folds)
    spread = (..., *(None,) * (image.ndim - 2))
    right, down = right[spread], down[spread]

    def at(rows, columns):
        return image.at[rows, columns].get(mode="promise_in_bounds").astype(jnp.float32)

    exact = not jnp.issubdtype(image.dtype, jnp.integer)
    upper = _mixed(at(y0, x0), at(y0, x1), right, exact)
    lower = _mixed(at(y1, x0), at(y1, x1), right, exact)
    made = stored(_mixed(upper, lower, down, exact), image.dtype)
    if edge is None:
        return made
    inside = _within(x, width) & _within(y, height)
    return jnp.where(inside[spread], made, jnp.broadcast_to(jnp.asarray(edge), made.shape))


def _steps(entry: jax.Array, length: int) -> jax.Array:
    """`entry` times the distance of each of `length` pixels from their centre."""
    return _whole(entry * jnp.asarray((np.arange(length) - (length - 1) / 2).astype(np.float32)))


def _whole(position: jax.Array) -> jax.Array:
    # Three of these are added: far outside stays far outside, and no sum overflows.
    return jnp.rint(jnp.clip(position, -(2.0**17), 2.0**17) * _ONE).astype(jnp.int32)


def _between(position: jax.Array, length: int, folds: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The two pixels around each position, mirrored into the image, and the weight of the second."""
    last = (length - 1) * _ONE
    if not last:
        first = jnp.zeros_like(position)
        return first, first, jnp.zeros_like(position, jnp.float32)
    for _ in range(folds):  # each brings two lengths on both sides into the image
        position = last - jnp.abs(last - jnp.abs(position))
    # Beyond is the edge; the last pixel is the second of a pair, of weight 1
    position = jnp.clip(position, 0, last)
    first = jnp.minimum(position >> _BITS, length - 2)
    share = (position - (first << _BITS) + (_ONE >> 9)) >> (_BITS - 8)
    return first, first + 1, share.astype(jnp.float32) * np.float32(1 / 256)


def _mixed(first: jax.Array, second: jax.Array, share: jax.Array, exact: bool) -> jax.Array:
    """`exact`: so that an infinity or a NaN beside a pixel that is met exactly stays out of it."""
    made = first + share * (second - first)
    return jnp.where(share == 0, first, jnp.where(share == 1, second, made)) if exact else made


def _within(position: jax.Array, length: int) -> jax.Array:
    """Whether a position falls on a pixel, each being a square around its centre."""
    return (position >= -(_ONE >> 1)) & (position < length * _ONE - (_ONE >> 1))
