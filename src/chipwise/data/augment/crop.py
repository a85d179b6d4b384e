"""Flips, crops, and parts that are painted over.

Images are stored somewhat larger than the net's input, such as 256×256 for 224×224. Training scales a random
crop, evaluation uses the centre.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import DataError
from .image import (
    BY_EPOCH,
    Augment,
    Example,
    by_epoch,
    chance,
    grid,
    of_image,
    paint,
    pixel,
    stored,
    white,
    within,
)


def flip(p: float = 0.5) -> Augment:
    """Mirrors left and right with probability `p`."""
    chance(p, f"flip(p={p})")
    return of_image("flip", lambda image, key: jnp.where(jax.random.bernoulli(key, p), image[:, ::-1], image))


def alternating_flip() -> Augment:
    """Mirrors a fixed random half of the examples left and right in one epoch, and the other half in the
    next. So two epochs show each example both ways; with independent flips half of them would repeat.

    Pass it to `Task.augment` directly or in `compose`, which give it the epoch. Source: Jordan, "94% on
    CIFAR-10 in 3.29 seconds on a single GPU" (2024, arXiv:2404.00498).
    """

    def flipped(example: Example, key: jax.Array) -> Example:
        odd = example[BY_EPOCH[0]] % 2 == 1
        mirrored = jnp.logical_xor(jax.random.bernoulli(example[BY_EPOCH[1]], 0.5), odd)
        change = lambda image, _: jnp.where(mirrored, image[:, ::-1], image)  # noqa: E731
        return of_image("alternating_flip", change)(example, key)

    return by_epoch(flipped, "alternating_flip")


def flip_up_down(p: float = 0.5) -> Augment:
    """Mirrors top and bottom with probability `p`."""
    chance(p, f"flip_up_down(p={p})")
    return of_image(
        "flip_up_down", lambda image, key: jnp.where(jax.random.bernoulli(key, p), image[::-1], image)
    )


def reflect_crop(pad: int = 4, flip: float = 0.0) -> Augment:
    """Mirrors `pad` pixels at each edge, then crops the original size at a random position.

    Both offsets are uniform over the `2 * pad + 1` pixels. With probability `flip` the crop is also mirrored
    left and right, in the same gather. `pad=0` moves nothing. Raises `DataError` if a side of the image has
    fewer than `pad + 1` pixels.
    """
    chance(flip, f"reflect_crop(pad={pad}, flip={flip})")
    if pad < 0:
        raise DataError("crop-pad", pad=pad)

    def cropped(image: jax.Array, key: jax.Array) -> jax.Array:
        height, width = image.shape[:2]
        if pad >= min(height, width):
            raise DataError("crop-pad-large", pad=pad, shape=image.shape)
        if not pad and not flip:
            return image
        # Rows are gathered, then columns, by mirrored indices: nothing is padded, and every type keeps its
        # bits. 512 images of 32×32×3 uint8 took 0.4 ms on 2 shared Xeon cores (JAX 0.10.2, best of 7); pad
        # with dynamic_slice 0.4, a ladder of selects 1.0, one-hot products 4.0. For 64 images on a TPU v2 the
        # compiler estimates 0.14 ms; there dynamic_slice becomes a loop over the images.
        down, right = jax.random.randint(key, (2,), 0, 2 * pad + 1)
        rows = image.at[_mirrored(height, down - pad)].get(mode="promise_in_bounds")
        columns = _mirrored(width, right - pad)
        if flip:
            columns = jnp.where(
                jax.random.bernoulli(jax.random.fold_in(key, 1), flip), columns[::-1], columns
            )
        return rows.at[:, columns].get(mode="promise_in_bounds")

    return of_image("reflect_crop", cropped)


def resized_crop(
    size: int, area: tuple[float, float] = (0.08, 1.0), ratio: tuple[float, float] = (3 / 4, 4 / 3)
) -> Augment:
    """A random part of the image, scaled to `size` × `size` pixels: the crop of Szegedy et al. (2015).

    The part's share of the image is uniform in `area`, its width over height log-uniform in `ratio`, its
    position uniform inside the image. A side longer than the image's is clipped; torchvision draws again.
    Bilinear, with antialiasing; rounded for integer images.

    Raises `DataError` for invalid sizes and ranges.
    """
    if size < 1 or not 0 < area[0] <= area[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
        raise DataError("resized-crop-range", call=f"resized_crop(size={size}, area={area}, ratio={ratio})")

    def cropped(image: jax.Array, key: jax.Array) -> jax.Array:
        height, width = image.shape[:2]
        share, log_ratio, down, right = jax.random.uniform(key, (4,), jnp.float32)
        share = area[0] + share * (area[1] - area[0])
        aspect = jnp.exp(math.log(ratio[0]) + log_ratio * (math.log(ratio[1]) - math.log(ratio[0])))
        tall = jnp.minimum(jnp.sqrt(share * (height * width) / aspect), height)
        wide = jnp.minimum(jnp.sqrt(share * (height * width) * aspect), width)
        return scaled(image, (down * (height - tall), tall), (right * (width - wide), wide), size)

    return of_image("resized_crop", cropped)


def centre_crop(size: int) -> Augment:
    """The central `size` × `size` pixels of one image. Raises `DataError` if it is smaller."""
    if size < 1:
        raise DataError("centre-size", size=size)
    return of_image("centre_crop", lambda image, key: centre(image[None], size)[0])


def centre(images: jax.Array, size: int) -> jax.Array:
    """The central `size` × `size` pixels of a batch `(batch, height, width, ...)`, for evaluation.

    Raises `DataError` if the images are smaller.
    """
    height, width = images.shape[1:3]
    if min(height, width) < size:
        raise DataError("centre-large", height=height, width=width, size=size)
    top, left = (height - size) // 2, (width - size) // 2
    return images[:, top : top + size, left : left + size]


def _mirrored(length: int, start: jax.Array) -> jax.Array:
    """Indices `start` to `start + length - 1`, `(length,)`, mirrored at 0 and `length - 1`.

    The edge itself is not repeated, as in NumPy's and TensorFlow's "reflect".
    """
    inside = jnp.abs(jnp.arange(length, dtype=jnp.int32) + start)
    return (length - 1) - jnp.abs((length - 1) - inside)


Part = tuple[jax.Array, jax.Array]  # begin and length, in fractional pixels


def scaled(image: jax.Array, rows: Part, columns: Part, size: int) -> jax.Array:
    """The part of `image` in `rows` and `columns`, scaled to `size` × `size` pixels, in the image's type.

    On accelerators this is two small matrix products per image, so one program serves every crop and a TPU
    uses its matrix unit; from 256×256 to 224×224 they cost 2 % of a forward pass of ResNet-50. On a CPU only
    the few pixels with weights above 0 are summed.
    """
    whole = jnp.issubdtype(image.dtype, jnp.integer)

    def short(values: jax.Array, bits: int) -> jax.Array:
        # 4096ths of a weight, and between the passes 16ths of a level, keep the sums of 8-bit pixels exact
        return grid(values, bits) if whole else values

    def products(pixels, down, right):
        height, width = pixels.shape[:2]
        lines = short(jnp.tensordot(short(_weights(down, height), 12), pixels, 1), 4)
        return jnp.moveaxis(jnp.tensordot(short(_weights(right, width), 12), lines, ((1,), (1,))), 0, 1)

    def sums(pixels, down, right):
        return along(short(along(pixels, down, 0), 4), right, 1)

    def along(pixels, tracks, axis):
        """Scales along one axis: as many sums as an output pixel can span input pixels."""
        length = pixels.shape[axis]
        at, reach = tracks
        first = jnp.floor(at - reach).astype(jnp.int32) + 1
        taps = first[:, None] + jnp.arange(math.ceil(2 * max(1.0, length / size)), dtype=jnp.int32)[None, :]
        weights = _triangle(taps.astype(jnp.float32), tracks)
        weights = short(_shares(jnp.where((taps >= 0) & (taps < length), weights, 0.0)), 12)
        taps = jnp.clip(taps, 0, length - 1)
        others = [i for i in range(pixels.ndim) if i != axis]

        def add(k, total):
            near = pixels.at[(slice(None),) * axis + (taps[:, k],)].get(mode="promise_in_bounds")
            return total + near * jnp.expand_dims(weights[:, k], others)

        # A loop, since XLA would compute the weights of unrolled sums again for every pixel
        shape = (*pixels.shape[:axis], size, *pixels.shape[axis + 1 :])
        return jax.lax.fori_loop(0, taps.shape[1], add, jnp.zeros(shape, jnp.float32))

    pixels = jax.lax.platform_dependent(
        image.astype(jnp.float32), _tracks(*rows, size), _tracks(*columns, size), cpu=sums, default=products
    )
    return stored(pixels, image.dtype)


def _tracks(start: jax.Array, extent: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The centres of `size` output pixels, spread evenly over `[start, start + extent)`, and the width of
    each one's filter: an output pixel or an input pixel, whichever is larger."""
    step = extent / size
    return start + (jnp.arange(size, dtype=jnp.float32) + 0.5) * step - 0.5, jnp.maximum(step, 1.0)


def _weights(tracks: tuple[jax.Array, jax.Array], length: int) -> jax.Array:
    """The weight of each of `length` input pixels in each output pixel: `(size, length)`, rows sum to 1."""
    return _shares(_triangle(jnp.arange(length, dtype=jnp.float32)[None, :], tracks))


def _triangle(taps: jax.Array, tracks: tuple[jax.Array, jax.Array]) -> jax.Array:
    at, reach = tracks
    return jnp.maximum(1 - jnp.abs(taps - at[:, None]) / reach, 0.0)


def _shares(weights: jax.Array) -> jax.Array:
    return weights / jnp.sum(weights, axis=1, keepdims=True)


def cutout(size: int = 8, fill: float | Sequence[float] = 0.0) -> Augment:
    """Paints a square of `size` × `size` pixels at a random position, entirely inside the image.

    `fill`: one value, or one per channel, in the image's units; rounded for integer images. `size=0` changes
    nothing. Raises `DataError` if the square or the values do not fit the image.

    Source: D. Page, "How to train your ResNet" (2018). In DeVries and Taylor (2017, arXiv:1708.04552) the
    square may extend beyond the image, which removes less near its edges.
    """
    if size < 0:
        raise DataError("cutout-size", size=size)

    def cut(image: jax.Array, key: jax.Array) -> jax.Array:
        height, width = image.shape[:2]
        if size > min(height, width):
            raise DataError("cutout-large", size=size, shape=image.shape)
        if not size:
            return image
        color = pixel(fill, image, f"cutout(fill={fill})")
        corner = jax.random.randint(key, (2,), 0, np.array([height, width], np.int32) - (size - 1))
        return paint(image, (corner[0], size), (corner[1], size), color)

    return of_image("cutout", cut)


def random_erasing(
    p: float = 0.5,
    area: tuple[float, float] = (0.02, 0.33),
    ratio: tuple[float, float] = (0.3, 3.3),
    fill: float | Sequence[float] | str = 0.0,
) -> Augment:
    """Paints over one random rectangle with probability `p`.

    Its share of the image is uniform in `area`, its height over width log-uniform in the part of `ratio` that
    fits, its position uniform inside the image; sides are rounded to pixels. `fill`: one value, or one per
    channel, in the image's units; `"color"`: a uniform random colour; `"noise"`: another colour for every
    pixel.

    Source: Zhong et al. (2017, arXiv:1708.04896), who paint `"noise"`; the defaults are torchvision's
    `RandomErasing`. The paper draws areas from 0.02 to 0.4, timm areas to 1 / 3 and `ratio` to 1 / 0.3. All
    of them draw size and shape again, 10 or 100 times, if the rectangle does not fit. If no shape in `ratio`
    fits, as in a wide or tall image, a side is clipped.

    Raises `DataError` for invalid ranges, and values that do not fit the image.
    """
    call = f"random_erasing(p={p}, area={area}, ratio={ratio})"
    chance(p, call)
    if not 0 < area[0] <= area[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
        raise DataError("erasing-range", call=call)
    if isinstance(fill, str) and fill not in ("color", "noise"):
        raise DataError("erasing-fill", fill=fill)

    def erase(image: jax.Array, key: jax.Array) -> jax.Array:
        if not p:
            return image
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
            return jnp.where(inside, _color(key, image.shape, image.dtype), image)
        if isinstance(fill, str):
            return paint(image, rows, columns, _color(key, image.shape[2:], image.dtype))
        return paint(image, rows, columns, pixel(fill, image, f"random_erasing(fill={fill})"))

    return of_image("random_erasing", erase)


def _place(share: jax.Array, last: jax.Array) -> jax.Array:
    """0 to `last`, uniform when `share` is uniform in [0, 1)."""
    return jnp.minimum((share * (last + 1).astype(jnp.float32)).astype(jnp.int32), last)


def _color(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Uniform random pixels from black to white."""
    key = jax.random.fold_in(key, 1)
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(key, shape, 0, int(white(dtype)) + 1, jnp.int32).astype(dtype)
    return jax.random.uniform(key, shape, jnp.float32).astype(dtype)
