"""Common parts of augmentations.

An image is `(height, width)` or `(height, width, channels)`. Integers go from 0 to the type's
maximum, floats from 0 to 1. It has one channel of gray, three of red, green and blue, or these and
a fourth of opacity, which changes of colour leave alone.

A change is computed in float32 and rounded once, when it is stored in the image's type. Random
factors and positions have so few binary digits (`grid`) that products and sums with 8-bit pixels
are exact. So neither fused multiply-adds nor the cut of a batch change a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..base import DataError

Example = dict[str, jax.Array]
Augment = Callable[[Example, jax.Array], Example]
ImageChange = Callable[[jax.Array, jax.Array], jax.Array]  # a function of an image and a key


def expect(right: bool, call: str, expected: str) -> None:
    """Raises `DataError` unless `right`, with the `call` as it was written and what is `expected`
    there."""
    if not right:
        raise DataError(
            "augment-expects", "{call}: expected {expected}.", call=call, expected=expected
        )


class Roles(NamedTuple):
    """The columns beside `image` that have its height and width: `masks`, which move with it, and
    `fixed`, which stay."""

    masks: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()


_NONE = Roles()
ROLES: ContextVar[Roles] = ContextVar("roles", default=_NONE)
"""The roles that `compose` sets while its stages are traced, since a stage is a function of an
example and a key alone."""


def of_image(
    stage: str, change: ImageChange, colors: bool = False, moves: ImageChange | None = None
) -> Augment:
    """An augmentation that applies `change(image, key)` to the column `image` of an unbatched
    example.

    *Arguments:* `moves`: if pixels move, the same change of a mask, which takes the nearest pixel.

    It raises `DataError` if there is no such column. With `colors`, it also raises it if the image
    does not have 1, 3 or 4 channels. With `moves`, also if another column has the image's height
    and width and no role.
    """

    def augment(example: Example, key: jax.Array) -> Example:
        image = example.get("image")
        shapes = {name: jnp.shape(value) for name, value in example.items()}
        needed = f"a column 'image' (height, width) or (height, width, channels), got {shapes}"
        expect(image is not None and jnp.ndim(image) in (2, 3), stage, needed)
        assert image is not None
        gray_or_color = jnp.ndim(image) == 2 or image.shape[2] in (1, 3, 4)
        expect(
            not colors or gray_or_color,
            stage,
            f"images of 1, 3 or 4 channels, got {shapes['image']}",
        )
        moved = (
            {} if moves is None else {n: moves(m, key) for n, m in _masks(stage, example).items()}
        )
        return {**example, "image": change(jnp.asarray(image), key), **moved}

    return augment


def _masks(stage: str, example: Example) -> Example:
    """The masks of an example. Raises `DataError` for one that is missing, or of another height and
    width than the image, and for a column that may be one."""
    masks, fixed = ROLES.get()
    sides = jnp.shape(example["image"])[:2]
    for name in masks:
        if name not in example or jnp.shape(example[name])[:2] != sides:
            shape = list(jnp.shape(example[name])) if name in example else "missing"
            raise DataError("mask-size", stage=stage, column=name, shape=shape, sides=list(sides))
    for name, value in example.items():
        if jnp.shape(value)[:2] == sides and name not in ("image", *masks, *fixed):
            raise DataError(
                "column-without-role", stage=stage, column=name, shape=list(value.shape)
            )
    return {name: jnp.asarray(example[name]) for name in masks}


def colors_of(image: jax.Array) -> jax.Array:
    """An image without its opacity."""
    return image[..., :3] if image.ndim == 3 else image


def with_opacity(colors: jax.Array, image: jax.Array) -> jax.Array:
    """`colors` with the opacity of `image`, if it has any."""
    return (
        colors if colors.shape == image.shape else jnp.concatenate([colors, image[..., 3:]], axis=2)
    )


def chance(p: float, call: str) -> float:
    """`p`. Raises `DataError` if it is not a probability."""
    expect(0 <= p <= 1, call, "p from 0 to 1")
    return p


def stored(pixels: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Float32 `pixels` in the image's type. For integers they are rounded to the nearest and
    clipped."""
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        pixels = jnp.clip(jnp.rint(pixels), limits.min, limits.max)
    return pixels.astype(dtype)


def grid(value: jax.Array, bits: int = 12) -> jax.Array:
    """`value` rounded to a multiple of `2**-bits`."""
    return jnp.rint(value * jnp.float32(2**bits)) * jnp.float32(2**-bits)


def pixel(fill: float | Sequence[float], image: jax.Array, call: str) -> np.ndarray:
    """`fill` as one pixel of `image`, `(channels,)` or `()`, rounded for integers.

    Raises `DataError` unless it has one value, or one per channel, in the range of the image's
    type.
    """
    values = np.asarray(fill, np.float64)
    channels = image.shape[2:]
    # One value is a scalar or a list of one: a gray data set's mean has one entry
    right = values.ndim <= 1 and (values.size == 1 or values.shape == channels)
    expect(right, call, f"one value, or one for each channel of images {image.shape}")
    if jnp.issubdtype(image.dtype, jnp.integer):
        values = np.rint(values)
        limits = jnp.iinfo(image.dtype)
        right = bool(((values >= limits.min) & (values <= limits.max)).all())
        expect(right, call, f"values from {limits.min} to {limits.max} for {image.dtype}")
    color = np.broadcast_to(values.reshape(channels if values.size != 1 else ()), channels)
    return color.astype(image.dtype)


Extent = tuple[jax.Array, jax.Array | int]  # first row or column, and their number


def paint(
    image: jax.Array, rows: Extent, columns: Extent, color: jax.Array | np.ndarray
) -> jax.Array:
    """`image` with `color`, `(channels,)` or `()`, in a rectangle that may extend beyond it.

    It works on the numbers of a row instead of pixels, since vector registers are longer than 3.
    """
    height, width, channels = (*image.shape, 1)[:3]
    left, wide = columns
    inside = (
        within(height, rows)[:, None]
        & within(width * channels, (left * channels, wide * channels))[None, :]
    )
    line = jnp.tile(jnp.asarray(color, image.dtype).reshape(channels), width)[None, :]
    return jnp.where(inside, line, image.reshape(height, width * channels)).reshape(image.shape)


def within(length: int, extent: Extent) -> jax.Array:
    """A mask of the `length` positions that are in `extent`: `(length,)` bool."""
    at = jnp.arange(length, dtype=jnp.int32) - extent[0]
    return (at >= 0) & (at < extent[1])


def where_drawn(
    change: Callable[..., jax.Array], drawn: jax.Array, image: jax.Array, *settings: Any
) -> jax.Array:
    """`change(image, *settings)`, of the image's shape and type, where `drawn` `()` bool, else
    `image`.

    In a batch it is skipped if no image drew it. A branch also ends fusion: an image or a table
    that is read many times is computed once, before the branch. (On CPUs XLA drops
    `optimization_barrier`, and computed a table of 256 entries again for every pixel.)
    """

    def choose(drawn, image, *settings):
        return jax.lax.cond(drawn, change, lambda image, *_: image, image, *settings)

    choose = jax.custom_batching.custom_vmap(choose)

    @choose.def_vmap
    def batch(size: int, batched: list, drawn: jax.Array, image: jax.Array, *settings: jax.Array):
        if not batched[0]:
            drawn = jnp.broadcast_to(drawn, (size,))
        if not batched[1]:
            image = jnp.broadcast_to(image, (size, *image.shape))
        axes = (0, *(0 if given else None for given in batched[2:]))

        def some(drawn, images, *settings):
            changed = jax.vmap(change, in_axes=axes)(images, *settings)
            return jnp.where(drawn.reshape((-1,) + (1,) * (images.ndim - 1)), changed, images)

        changed = jax.lax.cond(
            jnp.any(drawn), some, lambda drawn, images, *settings: images, drawn, image, *settings
        )
        return changed, True

    return choose(drawn, image, *settings)
