"""Flips, crops, and parts that are painted over.

Images are stored somewhat larger than the net's input, such as 256×256 for 224×224. Training scales
a random crop, evaluation uses the centre.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..base.annotations import as_annotated
from .image import Augment, chance, expect, grid, of_image, paint, pixel, stored


@as_annotated
def flip(p: float = 0.5) -> Augment:
    """Mirrors left and right with probability `p`."""
    chance(p, f"flip(p={p})")

    def change(image, key):
        return jnp.where(jax.random.bernoulli(key, p), image[:, ::-1], image)

    return of_image("flip", change, moves=change)


@as_annotated
def reflect_crop(pad: int = 4, flip: float = 0.0) -> Augment:
    """Mirrors `pad` pixels at each edge, then crops the original size at a random position.

    Both offsets are uniform over the `2 * pad + 1` pixels. With probability `flip` the crop is also
    mirrored left and right, in the same gather. `pad=0` moves nothing. Raises `DataError` if a side
    of the image has fewer than `pad + 1` pixels.
    """
    chance(flip, f"reflect_crop(pad={pad}, flip={flip})")
    expect(pad >= 0, f"reflect_crop(pad={pad})", "at least 0 pixels")

    def cropped(image: jax.Array, key: jax.Array) -> jax.Array:
        height, width = image.shape[:2]
        larger = f"images larger than {pad} pixels, got {image.shape}"
        expect(pad < min(height, width), f"reflect_crop(pad={pad})", larger)
        if not pad and not flip:
            return image
        # Rows are gathered, then columns, by mirrored indices: nothing is padded, and every type
        # keeps its bits. 512 images of 32×32×3 uint8 took 0.4 ms on 2 shared Xeon cores (JAX
        # 0.10.2, best of 7); pad with dynamic_slice 0.4, a ladder of selects 1.0, one-hot products
        # 4.0. For 64 images on a TPU v2 the compiler estimates 0.14 ms; there dynamic_slice becomes
        # a loop over the images.
        down, right = jax.random.randint(key, (2,), 0, 2 * pad + 1)
        rows = image.at[_mirrored(height, down - pad)].get(mode="promise_in_bounds")
        columns = _mirrored(width, right - pad)
        if flip:
            columns = jnp.where(
                jax.random.bernoulli(jax.random.fold_in(key, 1), flip), columns[::-1], columns
            )
        return rows.at[:, columns].get(mode="promise_in_bounds")

    return of_image("reflect_crop", cropped, moves=cropped)


@as_annotated
def resized_crop(
    size: int, area: tuple[float, float] = (0.08, 1.0), ratio: tuple[float, float] = (3 / 4, 4 / 3)
) -> Augment:
    """A random part of the image, scaled to `size` × `size` pixels: the crop of Szegedy et al.
    (2015).

    The part's share of the image is uniform in `area`, its width over height log-uniform in
    `ratio`, its position uniform inside the image. A side longer than the image's is clipped, where
    torchvision draws again. The interpolation is bilinear with antialiasing. Integer images are
    rounded.

    Raises `DataError` for invalid sizes and ranges.
    """
    right = size >= 1 and 0 < area[0] <= area[1] <= 1 and 0 < ratio[0] <= ratio[1]
    call = f"resized_crop(size={size}, area={area}, ratio={ratio})"
    expect(right, call, "size >= 1, 0 < area <= 1 and ratio > 0, each from low to high")

    def part(image: jax.Array, key: jax.Array) -> tuple[Part, Part]:
        height, width = image.shape[:2]
        share, log_ratio, down, right = jax.random.uniform(key, (4,), jnp.float32)
        share = area[0] + share * (area[1] - area[0])
        aspect = jnp.exp(math.log(ratio[0]) + log_ratio * (math.log(ratio[1]) - math.log(ratio[0])))
        tall = jnp.minimum(jnp.sqrt(share * (height * width) / aspect), height)
        wide = jnp.minimum(jnp.sqrt(share * (height * width) * aspect), width)
        return (down * (height - tall), tall), (right * (width - wide), wide)

    def of_mask(mask: jax.Array, key: jax.Array) -> jax.Array:
        rows, columns = (
            jnp.clip(
                jnp.floor(start + (jnp.arange(size, dtype=jnp.float32) + 0.5) * (extent / size)),
                0,
                n - 1,
            )
            for (start, extent), n in zip(part(mask, key), mask.shape[:2], strict=True)
        )
        lines = mask.at[rows.astype(jnp.int32)].get(mode="promise_in_bounds")
        return lines.at[:, columns.astype(jnp.int32)].get(mode="promise_in_bounds")

    return of_image(
        "resized_crop", lambda image, key: scaled(image, *part(image, key), size), moves=of_mask
    )


@as_annotated
def centre(images: jax.Array, size: int) -> jax.Array:
    """The central `size` × `size` pixels of a batch `(batch, height, width, ...)`, for evaluation.

    Raises `DataError` if the images are smaller.
    """
    height, width = images.shape[1:3]
    larger = f"images of at least {size}×{size} pixels, got {height}×{width}: store larger ones"
    expect(min(height, width) >= size, f"centre(size={size})", larger)
    top = (height - size) // 2
    left = (width - size) // 2
    return images[:, top : top + size, left : left + size]


def _mirrored(length: int, start: jax.Array) -> jax.Array:
    """Indices `start` to `start + length - 1`, `(length,)`, mirrored at 0 and `length - 1`.

    The edge itself is not repeated, as in NumPy's and TensorFlow's "reflect".
    """
    inside = jnp.abs(jnp.arange(length, dtype=jnp.int32) + start)
    return (length - 1) - jnp.abs((length - 1) - inside)


Part = tuple[jax.Array, jax.Array]  # begin and length, in fractional pixels


def scaled(image: jax.Array, rows: Part, columns: Part, size: int) -> jax.Array:
    """The part of `image` in `rows` and `columns`, scaled to `size` × `size` pixels, in the image's
    type.

    On accelerators this is two small matrix products per image, so one program serves every crop
    and a TPU uses its matrix unit. From 256×256 to 224×224 they cost 2 % of a forward pass of
    ResNet-50. On a CPU only the few pixels with weights above 0 are summed.
    """
    whole = jnp.issubdtype(image.dtype, jnp.integer)

    def short(values: jax.Array, bits: int) -> jax.Array:
        # 4096ths of a weight, and between the passes 16ths of a level, keep the sums of 8-bit
        # pixels exact
        return grid(values, bits) if whole else values

    def products(pixels, down, right):
        height, width = pixels.shape[:2]
        lines = short(jnp.tensordot(short(_weights(down, height), 12), pixels, 1), 4)
        return jnp.moveaxis(
            jnp.tensordot(short(_weights(right, width), 12), lines, ((1,), (1,))), 0, 1
        )

    def sums(pixels, down, right):
        return along(short(along(pixels, down, 0), 4), right, 1)

    def along(pixels, tracks, axis):
        """Scales along one axis: as many sums as an output pixel can span input pixels."""
        length = pixels.shape[axis]
        at, reach = tracks
        first = jnp.floor(at - reach).astype(jnp.int32) + 1
        taps = (
            first[:, None]
            + jnp.arange(math.ceil(2 * max(1.0, length / size)), dtype=jnp.int32)[None, :]
        )
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
        image.astype(jnp.float32),
        _tracks(*rows, size),
        _tracks(*columns, size),
        cpu=sums,
        default=products,
    )
    return stored(pixels, image.dtype)


def _tracks(start: jax.Array, extent: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The centres of `size` output pixels, spread evenly over `[start, start + extent)`, and the
    width of each one's filter: an output pixel or an input pixel, whichever is larger."""
    step = extent / size
    return start + (jnp.arange(size, dtype=jnp.float32) + 0.5) * step - 0.5, jnp.maximum(step, 1.0)


def _weights(tracks: tuple[jax.Array, jax.Array], length: int) -> jax.Array:
    """The weight of each of `length` input pixels in each output pixel: `(size, length)`, rows sum
    to 1."""
    return _shares(_triangle(jnp.arange(length, dtype=jnp.float32)[None, :], tracks))


def _triangle(taps: jax.Array, tracks: tuple[jax.Array, jax.Array]) -> jax.Array:
    at, reach = tracks
    return jnp.maximum(1 - jnp.abs(taps - at[:, None]) / reach, 0.0)


def _shares(weights: jax.Array) -> jax.Array:
    return weights / jnp.sum(weights, axis=1, keepdims=True)


@as_annotated
def cutout(size: int = 8, fill: float | Sequence[float] = 0.0) -> Augment:
    """Paints a square of `size` × `size` pixels at a random position, entirely inside the image.

    `fill`: one value, or one per channel, in the image's units. It is rounded for integer images.
    `size=0` changes nothing. Raises `DataError` if the square or the values do not fit the image.

    Source: D. Page, "How to train your ResNet" (2018). In DeVries and Taylor (2017,
    arXiv:1708.04552) the square may extend beyond the image, which removes less near its edges.
    """
    expect(size >= 0, f"cutout(size={size})", "at least 0 pixels")

    def cut(image: jax.Array, key: jax.Array) -> jax.Array:
        height, width = image.shape[:2]
        larger = f"images of at least {size}×{size} pixels, got {image.shape}"
        expect(size <= min(height, width), f"cutout(size={size})", larger)
        if not size:
            return image
        color = pixel(fill, image, f"cutout(fill={fill})")
        corner = jax.random.randint(key, (2,), 0, np.array([height, width], np.int32) - (size - 1))
        return paint(image, (corner[0], size), (corner[1], size), color)

    return of_image("cutout", cut)
