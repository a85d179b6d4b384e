"""Painting over a part of the image."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import DataError
from .image import Augment, Example, chance, image_of, paint, pixel, white, within


def cutout(size: int = 8, fill: float | Sequence[float] = 0.0) -> Augment:
    """Paints a square of `size` × `size` pixels at a random place, always wholly inside the image.

    `fill`: one value, or one a channel, in the image's units; rounded for integer images. `size=0`
    changes nothing. Raises `DataError` when the square or the values do not fit the image.

    Source: D. Page, "How to train your ResNet" (2018). DeVries and Taylor (2017, arXiv:1708.04552) let
    the square stick out of the image, which takes less away near its edges.
    """
    if size < 0:
        raise DataError("cutout-size", size=size)

    def augment(example: Example, key: jax.Array) -> Example:
        image = image_of(example, "cutout")
        height, width = image.shape[:2]
        if size > min(height, width):
            raise DataError("cutout-large", size=size, shape=image.shape)
        if not size:
            return example
        color = pixel(fill, image, f"cutout(fill={fill})")
        corner = jax.random.randint(key, (2,), 0, np.array([height, width], np.int32) - (size - 1))
        return {**example, "image": paint(image, (corner[0], size), (corner[1], size), color)}

    return augment


def random_erasing(
    p: float = 0.5,
    area: tuple[float, float] = (0.02, 0.33),
    ratio: tuple[float, float] = (0.3, 3.3),
    fill: float | Sequence[float] | str = 0.0,
) -> Augment:
    """Paints over one random rectangle with probability `p`.

    Its share of the image is uniform in `area`, its height over width log-uniform in that part of `ratio`
    with which it fits, its place uniform among all that lie inside; sides are rounded to whole pixels.
    `fill`: one value, or one a channel, in the image's units; `"color"`, one uniform random colour;
    `"noise"`, another for every pixel.

    Source: Zhong et al. (2017, arXiv:1708.04896), who paint `"noise"`; the defaults are torchvision's
    `RandomErasing`. The paper draws areas from 0.02 to 0.4, timm areas to 1 / 3 and `ratio` to 1 / 0.3. All
    of them draw size and shape again, 10 or 100 times, where the rectangle does not fit. In a wide or
    tall image a share may fit with no shape in `ratio`: then a side is cut to the image's.

    Raises `DataError` for ranges that are none, and values that do not fit the image.
    """
    call = f"random_erasing(p={p}, area={area}, ratio={ratio})"
    chance(p, call)
    if not 0 < area[0] <= area[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
        raise DataError("erasing-range", call=call)
    if isinstance(fill, str) and fill not in ("color", "noise"):
        raise DataError("erasing-fill", fill=fill)

    def augment(example: Example, key: jax.Array) -> Example:
        image = image_of(example, "random_erasing")
        if not p:
            return example
        height, width = image.shape[:2]
        drawn, share, log_ratio, down, right = jax.random.uniform(key, (5,), jnp.float32)
        pixels = (area[0] + share * (area[1] - area[0])) * (height * width)
        # Tall, sqrt(pixels * aspect), is at most the height; wide, sqrt(pixels / aspect), the width
        low = jnp.maximum(jnp.log(pixels / width**2), math.log(ratio[0]))
        high = jnp.minimum(jnp.log(height**2 / pixels), math.log(ratio[1]))
        aspect = jnp.exp(low + log_ratio * jnp.maximum(high - low, 0.0))
        tall = jnp.clip(jnp.rint(jnp.sqrt(pixels * aspect)), 1, height).astype(jnp.int32)
        wide = jnp.clip(jnp.rint(jnp.sqrt(pixels / aspect)), 1, width).astype(jnp.int32)
        tall = jnp.where(drawn < p, tall, 0)
        rows, columns = (_place(down, height - tall), tall), (_place(right, width - wide), wide)
        if fill == "noise":
            inside = within(height, rows)[:, None] & within(width, columns)[None, :]
            inside = inside.reshape(inside.shape + (1,) * (image.ndim - 2))
            return {**example, "image": jnp.where(inside, _color(key, image.shape, image.dtype), image)}
        if isinstance(fill, str):
            return {
                **example,
                "image": paint(image, rows, columns, _color(key, image.shape[2:], image.dtype)),
            }
        color = pixel(fill, image, f"random_erasing(fill={fill})")
        return {**example, "image": paint(image, rows, columns, color)}

    return augment


def _place(share: jax.Array, last: jax.Array) -> jax.Array:
    """0 to `last`, uniform when `share` is uniform in [0, 1)."""
    return jnp.minimum((share * (last + 1).astype(jnp.float32)).astype(jnp.int32), last)


def _color(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Uniform random pixels from black to white."""
    key = jax.random.fold_in(key, 1)
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(key, shape, 0, int(white(dtype)) + 1, jnp.int32).astype(dtype)
    return jax.random.uniform(key, shape, jnp.float32).astype(dtype)
