"""Rotation, zoom, shear and shift, alone or together: one matrix, and one gather of four neighbours for each
pixel.

Pixels are points: the corner of an image is the centre of its corner pixel, and an image of `n` pixels has
the width `n - 1`. So the identity reads every pixel at its own position, and an image mirrored at its edge
continues with the pixel before the last, as NumPy's "reflect".

Positions are multiples of 1/4096 pixel and weights of 1/256 (OpenCV's `warpAffine` has 1/32). So the
interpolation of 8-bit pixels is exact in float32 in any order, and the bits are the same on every device.

A general map needs a gather. Microseconds for an image of 32×32 and of 224×224, on one core of a shared Xeon
(JAX 0.10.2, uint8, three channels): four gathers of whole pixels, as here, 8 and 460; the four neighbours of
a channel packed in one word and gathered once 14 and 980; the channels of a pixel packed in one word 38 and
3,100; Pillow's `transform` 19 and 850.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .image import Augment, between, chance, expect, grid, of_image, pixel, span, stored, where_drawn

_BITS = 12  # bits of a position after the point
_ONE = 1 << _BITS

Range = float | tuple[float, float]
Edge = str | float | Sequence[float]
Positions = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def affine(
    rotate: Range = 0.0,
    zoom: Range = 0.0,
    shear: Range = 0.0,
    shift: Range = 0.0,
    *,
    p: float = 1.0,
    edge: Edge = "reflect",
) -> Augment:
    """Zooms, shears, rotates and shifts the image by random amounts, in this order, around its centre.

    Every amount is uniform in its range: `(low, high)`, or one number for a range around no change.

    *Arguments:*

    - `rotate`: degrees, counter-clockwise.
    - `zoom`: magnification, `0.1` for 0.9 to 1.1.
    - `shear`: degrees by which vertical lines lean, below 90.
    - `shift`: share of the width to the right and, drawn independently, of the height down.
    - `p`: the probability of each of the four, independently.
    - `edge`: `"reflect"` mirrors the image outside; or a colour, one value or one per channel.

    Without amounts, or with `p=0`, nothing changes. Raises `DataError` for invalid ranges.
    """
    call = f"affine(rotate={rotate}, zoom={zoom}, shear={shear}, shift={shift}, p={p}, edge={edge!r})"
    chance(p, call)
    turns, shears, shifts = span(rotate, call, 0), span(shear, call, 0), span(shift, call, 0)
    zooms = span(zoom, call, 1)
    expect(zooms[0] > 0 and max(map(abs, shears)) < 90, call, "zooms above 0 and shears below 90 degrees")
    reflects = edge == "reflect"
    expect(reflects or not isinstance(edge, str), call, 'edge "reflect", or one value, or one per channel')
    still = not p or (turns == shears == shifts == (0.0, 0.0) and zooms == (1.0, 1.0))

    def moved(image: jax.Array, key: jax.Array) -> jax.Array:
        outside = None if reflects else pixel(edge, image, call)  # type: ignore[arg-type]
        if still:
            return image
        height, width = image.shape[:2]
        u = jax.random.uniform(key, (9,), jnp.float32)
        chosen = u[5:] < p

        def drawn(i: int, which: int, limits: tuple[float, float], neutral: float = 0.0) -> jax.Array:
            return jnp.where(chosen[which], between(u[i], *limits), neutral)

        matrix = lookup(
            rotate=drawn(1, 1, turns),
            zoom=drawn(0, 0, zooms, 1.0),
            shear=drawn(2, 2, shears),
            right=drawn(3, 3, shifts) * width,
            down=drawn(4, 3, shifts) * height,
        )
        # The largest distance of a corner's position from the opposite corner
        half = math.hypot(height, width) / 2
        reach = half * (1 + math.tan(math.radians(max(map(abs, shears))))) / zooms[0]
        reach += half * 2 * max(map(abs, shifts)) / zooms[0]
        lengths = min(0.5 + reach / max(min(height, width) - 1, 1), 64.0)

        def move(image: jax.Array, *where: jax.Array) -> jax.Array:
            return resample(image, where, outside, lengths)  # type: ignore[arg-type]

        where = positions(matrix, height, width)
        return where_drawn(move, jnp.any(chosen), image, *where)

    return of_image("affine", moved)


def lookup(
    rotate: jax.Array, zoom: jax.Array, shear: jax.Array, right: jax.Array, down: jax.Array
) -> jax.Array:
    """The matrix for `positions`, `(2, 3)`: the inverse of zoom, then shear, then rotation, then shift.

    `rotate` and `shear` in degrees, `right` and `down` in pixels, all `()` float32.
    """
    angle = rotate * jnp.float32(math.pi / 180)
    cos, sin, lean = jnp.cos(angle), jnp.sin(angle), jnp.tan(shear * jnp.float32(math.pi / 180))
    return undo_shift(jnp.stack([cos + lean * sin, -sin + lean * cos, sin, cos]) / zoom, right, down)


def undo_shift(linear: jax.Array, right: jax.Array, down: jax.Array) -> jax.Array:
    """The map `(2, 3)` of `linear` `(a, b, d, e)` `(4,)` after a move back by `right` and `down` pixels."""
    a, b, d, e = linear
    return jnp.stack([a, b, -(a * right + b * down), d, e, -(d * right + e * down)]).reshape(2, 3)


def positions(matrix: jax.Array, height: int, width: int) -> Positions:
    """The contribution of each column and row to the positions that pixels are read from.

    *Arguments:* `matrix`: `(2, 3)` float32: the pixel at `(x, y)` from the image's centre is read at `(a x +
    b y + c, d x + e y + f)` from the centre, in pixels to the right and down.

    *Returns* for `x` and for `y` the columns' `(width,)` and the rows' `(height,)` part, int32.
    """
    entries = grid(matrix, 16)

    def parts(row: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
        offset = _whole(row[2] + jnp.float32((length - 1) / 2))
        return _steps(row[0], width), _steps(row[1], height) + offset

    return (*parts(entries[0], width), *parts(entries[1], height))


def resample(
    image: jax.Array, where: Positions, edge: np.ndarray | None = None, lengths: float = 2.0
) -> jax.Array:
    """`image` read at `where`, bilinear, with the same shape and type.

    *Arguments:* `edge`: one pixel to show outside the image, `(channels,)` or `()`, or `None` to mirror it;
    `lengths`: the range of the mirrors, in image lengths.
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
    pixels = stored(_mixed(upper, lower, down, exact), image.dtype)
    if edge is None:
        return pixels
    inside = _within(x, width) & _within(y, height)
    return jnp.where(inside[spread], pixels, jnp.broadcast_to(jnp.asarray(edge), pixels.shape))


def _steps(entry: jax.Array, length: int) -> jax.Array:
    """`entry` times the distance of each of `length` pixels from their centre."""
    return _whole(entry * jnp.asarray((np.arange(length) - (length - 1) / 2).astype(np.float32)))


def _whole(position: jax.Array) -> jax.Array:
    # Clipped, so that the sum of three does not overflow and stays outside.
    return jnp.rint(jnp.clip(position, -(2.0**17), 2.0**17) * _ONE).astype(jnp.int32)


def _between(position: jax.Array, length: int, folds: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The two pixels around each position, mirrored into the image, and the weight of the second."""
    last = (length - 1) * _ONE
    if not last:
        first = jnp.zeros_like(position)
        return first, first, jnp.zeros_like(position, jnp.float32)
    for _ in range(folds):  # each maps two lengths on both sides into the image
        position = last - jnp.abs(last - jnp.abs(position))
    # Beyond is the edge; the last pixel is the second of a pair, of weight 1
    position = jnp.clip(position, 0, last)
    first = jnp.minimum(position >> _BITS, length - 2)
    share = (position - (first << _BITS) + (_ONE >> 9)) >> (_BITS - 8)
    return first, first + 1, share.astype(jnp.float32) * np.float32(1 / 256)


def _mixed(first: jax.Array, second: jax.Array, share: jax.Array, exact: bool) -> jax.Array:
    """Interpolates. `exact`: at an exact position the neighbour has no effect, even if infinite or NaN."""
    mixed = first + share * (second - first)
    return jnp.where(share == 0, first, jnp.where(share == 1, second, mixed)) if exact else mixed


def _within(position: jax.Array, length: int) -> jax.Array:
    """Whether a position is inside a pixel, a square around its centre."""
    return (position >= -(_ONE >> 1)) & (position < length * _ONE - (_ONE >> 1))
