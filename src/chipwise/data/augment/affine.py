"""Rotation, zoom, shear and shift, alone or together: one matrix, one look-up (`resample`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ...errors import DataError
from .drawn import where_drawn
from .image import Augment, Example, between, chance, image_of, pixel, span
from .resample import positions, resample

Range = float | tuple[float, float]


def affine(
    rotate: Range = 0.0,
    zoom: Range = 0.0,
    shear: Range = 0.0,
    shift: Range = 0.0,
    *,
    p: float = 1.0,
    anywhere: bool = False,
    edge: str | float | Sequence[float] = "reflect",
) -> Augment:
    """Zooms, shears, rotates and shifts the image by random amounts, in this order, around its centre.

    Every amount is uniform in its range: one number reaches as far to both sides of no change, or
    `(low, high)`.

    *Arguments:*

    - `rotate`: degrees, counter-clockwise.
    - `zoom`: magnification, `0.1` for 0.9 to 1.1.
    - `shear`: degrees by which upright lines lean, below 90.
    - `shift`: share of the width to the right and, drawn by itself, of the height down.
    - `p`: the chance of each of the four, by itself.
    - `anywhere`: the part that a zoom above 1 shows lies anywhere in the image, not in the middle.
    - `edge`: `"reflect"` mirrors the image outside of it; or a colour, one value or one a channel.

    No amounts, or `p=0`, change nothing. Raises `DataError` for ranges that are none.
    """
    call = f"affine(rotate={rotate}, zoom={zoom}, shear={shear}, shift={shift}, p={p}, edge={edge!r})"
    chance(p, call)
    turns, shears, shifts = span(rotate, call, 0), span(shear, call, 0), span(shift, call, 0)
    zooms = span(zoom, call, 1)
    if zooms[0] <= 0 or max(map(abs, shears)) >= 90:
        raise DataError(f"{call}: expected zooms above 0 and shears below 90 degrees.")
    if isinstance(edge, str) and edge != "reflect":
        raise DataError(f'{call}: expected edge "reflect", or one value or one a channel.')
    still = not p or (turns == shears == shifts == (0.0, 0.0) and zooms == (1.0, 1.0))

    def augment(example: Example, key: jax.Array) -> Example:
        image = image_of(example, "affine")
        outside = None if isinstance(edge, str) else pixel(edge, image, call)
        if still:
            return example
        height, width = image.shape[:2]
        u = jax.random.uniform(key, (11,), jnp.float32)
        chosen = u[7:] < p

        def drawn(i: int, which: int, limits: tuple[float, float], neutral: float = 0.0) -> jax.Array:
            return jnp.where(chosen[which], between(u[i], *limits), neutral)

        scale = drawn(0, 0, zooms, 1.0)
        matrix = lookup(
            rotate=drawn(1, 1, turns),
            zoom=scale,
            shear=drawn(2, 2, shears),
            right=drawn(3, 3, shifts) * width,
            down=drawn(4, 3, shifts) * height,
        )
        if anywhere:
            room = jnp.maximum(1 - 1 / scale, 0.0)
            free = jnp.stack([(u[5] - 0.5) * (width - 1), (u[6] - 0.5) * (height - 1)])
            matrix = matrix.at[:, 2].add(room * free)
        # The farthest that a corner is looked up, from the image's other corner
        half = math.hypot(height, width) / 2
        reach = half * (1 + math.tan(math.radians(max(map(abs, shears))))) / zooms[0]
        reach += half * 2 * max(map(abs, shifts)) / zooms[0]
        lengths = min(0.5 + reach / max(min(height, width) - 1, 1), 64.0)

        def move(image: jax.Array, *where: jax.Array) -> jax.Array:
            return resample(image, where, outside, lengths)  # type: ignore[arg-type]

        where = positions(matrix, height, width)
        return {**example, "image": where_drawn(move, jnp.any(chosen), image, *where)}

    return augment


def rotate(degrees: Range = 10.0, p: float = 1.0, edge: str | float | Sequence[float] = "reflect") -> Augment:
    """Turns the image by up to `degrees` either way; as `affine`."""
    return affine(rotate=degrees, p=p, edge=edge)


def zoom(
    amount: Range = (1.0, 1.1),
    p: float = 1.0,
    anywhere: bool = False,
    edge: str | float | Sequence[float] = "reflect",
) -> Augment:
    """Magnifies the image; as `affine`."""
    return affine(zoom=amount, p=p, anywhere=anywhere, edge=edge)


def shear(degrees: Range = 10.0, p: float = 1.0, edge: str | float | Sequence[float] = "reflect") -> Augment:
    """Leans the image by up to `degrees` either way; as `affine`."""
    return affine(shear=degrees, p=p, edge=edge)


def shift(share: Range = 0.1, p: float = 1.0, edge: str | float | Sequence[float] = "reflect") -> Augment:
    """Moves the image by up to `share` of its sides; as `affine`."""
    return affine(shift=share, p=p, edge=edge)


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
    """`(a, b, d, e)` `(4,)` with a look-up moved back by `right` and `down` pixels before it: `(2, 3)`."""
    a, b, d, e = linear
    return jnp.stack([a, b, -(a * right + b * down), d, e, -(d * right + e * down)]).reshape(2, 3)
