"""RandAugment, and named sets of changes.

The policy draws a few of many changes for each image. Under `vmap`, a `switch` would compute every
change for every image. Here an image has one set of settings, most of them neutral, and all drawn
changes are computed together, whatever the number of layers. All moves are one matrix and one
gather. All changes of tone are one table and one look-up. A pass for sharpness and saturation is
between them. So changes are applied in a fixed order, not in the drawn one: moves, sharpness,
saturation, autocontrast or equalize, contrast, brightness, solarize_add, posterize, solarize,
invert, cutout. Two of a kind add up. Only histograms are limited to images that drew equalize.
Shears and rotations are around the centre, and bilinear.

A space is a function of the image's height and width to `{change: Levels}`. Units: `shear_x` and
`shear_y` slopes, `shift_x` and `shift_y` pixels, `rotate` degrees, `saturation`, `contrast`,
`brightness` and `sharpness` factors, `posterize` bits kept, `solarize` a threshold, `solarize_add`
levels added below 128, `cutout` half the side of a square in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..base.annotations import as_annotated
from . import color, tone
from .affine import nearest, positions, resample
from .crop import cutout, flip, reflect_crop, resized_crop
from .image import ROLES, Augment, Example, Roles, expect, grid, of_image, paint, pixel, where_drawn

BINS = 31  # magnitudes 0 to 30
_MOVES = ("shear_x", "shear_y", "shift_x", "shift_y", "rotate")
Strengths = dict[str, jax.Array]  # the strength of each change, () float32


@as_annotated
def rand_augment(
    layers: int = 2,
    magnitude: int = 9,
    space: str = "standard",
    fill: float | Sequence[float] = 128,
    mask_fill: float = 0,
) -> Augment:
    """RandAugment: `layers` changes drawn uniformly from a `space`, all with one `magnitude`, for
    8-bit images.

    *Arguments:*

    - `magnitude`: 0 to 30.
    - `space`: `"standard"`, torchvision's, or `"original"`, the authors', in which 10 is strong.
    - `fill`: the colour outside the image and of cutouts, one value or one per channel
      (torchvision: 0).
    - `mask_fill`: the value of masks (see `compose`) outside the image.

    Source: Cubuk et al. (2020, arXiv:1909.13719). Raises `DataError` for invalid settings.
    """
    call = f"rand_augment(layers={layers}, magnitude={magnitude}, space={space!r})"
    right = layers >= 0 and 0 <= magnitude < BINS
    expect(right, call, f"layers of at least 0, and a magnitude from 0 to {BINS - 1}")
    expect(space in SPACES, call, f"a space of {' or '.join(SPACES)}")

    def drawn(
        image: jax.Array, key: jax.Array
    ) -> tuple[Mapping[str, Levels], jax.Array, list[Strengths]]:
        levels = SPACES[space](*image.shape[:2])
        u = jax.random.uniform(key, (layers, 5), jnp.float32)
        return levels, u, [_draw(levels, magnitude, u[layer]) for layer in range(layers)]

    def move_mask(mask: jax.Array, key: jax.Array) -> jax.Array:
        if not layers:
            return mask
        where = positions(_matrix(drawn(mask, key)[2]), *mask.shape[:2])
        return nearest(mask, where, mask_fill)

    def change(image: jax.Array, key: jax.Array) -> jax.Array:
        colors = tone.eight_bit(image, call)
        outside = pixel(fill, image, f"{call}, fill={fill}")
        if not layers:
            return image
        levels, u, strengths = drawn(image, key)

        def some(*changes: str) -> jax.Array:
            return jnp.any(
                jnp.stack([layer[c] != levels[c].neutral for layer in strengths for c in changes])
            )

        def factor(name: str) -> jax.Array:
            return grid(jnp.prod(jnp.stack([layer[name] for layer in strengths])))

        def move(image: jax.Array, *where: jax.Array) -> jax.Array:
            return resample(image, where, outside)  # type: ignore[arg-type]

        where = positions(_matrix(strengths), *image.shape[:2])
        image = where_drawn(move, some(*_MOVES), image, *where)
        for name, change in (("sharpness", color.sharpen), ("saturation", color.saturate)):
            image = where_drawn(_blended(change), some(name), image, factor(name))
        colors = tone.channels_of(image)
        tones = [
            name for name in levels if name not in (*_MOVES, "sharpness", "saturation", "identity")
        ]
        image = where_drawn(tone.applied, some(*tones), image, _table(colors, strengths))
        if "cutout" in levels:
            for layer, places in zip(strengths, u[:, 3:], strict=True):
                image = _cut(image, layer["cutout"], places, outside)
        return image

    return of_image(call, change, colors=True, moves=move_mask)


def _blended(change: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda image, factor: color.of_colors(image, lambda colors: change(colors, factor))


def _draw(levels: Mapping[str, Levels], magnitude: int, u: jax.Array) -> Strengths:
    """The strengths of one drawn change. All others are neutral."""
    names = list(levels)
    values = np.stack([levels[name].values for name in names]).astype(np.float32)
    neutral = np.array([levels[name].neutral for name in names], np.float32)
    signed = np.array([levels[name].signed for name in names])
    strength = jnp.asarray(values[:, magnitude])
    strength = jnp.where(jnp.asarray(signed) & (u[2] < 0.5), 2 * neutral - strength, strength)
    which = jnp.minimum((u[0] * len(names)).astype(jnp.int32), len(names) - 1)
    chosen = jnp.arange(len(names), dtype=jnp.int32) == which
    strength = jnp.where(chosen, strength, neutral)
    return {name: strength[i] for i, name in enumerate(names)}


def _matrix(strengths: Sequence[Strengths]) -> jax.Array:
    """The matrix `(2, 3)` of all moves, in reverse order, for reading pixels."""
    matrix = jnp.asarray([[1, 0, 0], [0, 1, 0]], jnp.float32)
    for layer in strengths:
        angle = layer["rotate"] * jnp.float32(math.pi / 180)
        cos = jnp.cos(angle)
        sin = jnp.sin(angle)
        # At most one of them is not neutral
        a = cos
        b = layer["shear_x"] - sin
        d = layer["shear_y"] + sin
        e = cos
        right = layer["shift_x"]
        down = layer["shift_y"]
        own = jnp.stack([a, b, -(a * right + b * down), d, e, -(d * right + e * down)])
        matrix = _after(matrix, own.reshape(2, 3))
    return matrix


def _after(first: jax.Array, last: jax.Array) -> jax.Array:
    """`first @ last` of affine maps, without a matrix product, which some devices round to
    bfloat16."""
    product = first[:, 0, None] * last[0, None, :] + first[:, 1, None] * last[1, None, :]
    return product.at[:, 2].add(first[:, 2])


def _table(colors: jax.Array, strengths: Sequence[Strengths]) -> tone.LabelTable:
    """All changes of tone as one table, from the statistics of `colors` `(height, width, 1 or
    3)`."""

    def every(name: str) -> jax.Array:
        return jnp.stack([layer[name] for layer in strengths])

    even = jnp.any(every("equalize") > 0)
    stretch = jnp.any(every("autocontrast") > 0)
    counts = tone.counts(colors, even)
    low, high = tone.extremes(colors)
    low = jnp.where(stretch, low, 0.0)
    high = jnp.where(stretch, high, 255.0)
    stretched = tone.stretched(low, high)
    evened = tone.equalized(counts)
    table = jnp.where(even, evened, stretched)

    area = colors.shape[0] * colors.shape[1]
    mean = jnp.sum(colors.astype(jnp.int32), axis=(0, 1)).astype(jnp.float32) / area
    mean = jnp.where(high > low, (mean - low) * 255 / jnp.maximum(high - low, 1.0), mean)
    mean_evened = jnp.sum(counts * evened.astype(jnp.int32), axis=0).astype(jnp.float32) / area
    middle = jnp.floor(color.gray(jnp.where(even, mean_evened, mean)[None, None, :])[0, 0] + 0.5)

    def clip(table: tone.LabelTable) -> tone.LabelTable:
        return jnp.clip(jnp.rint(table), 0, 255)

    table = clip(color.blend(middle[None, :], table, grid(jnp.prod(every("contrast")))))
    table = clip(grid(jnp.prod(every("brightness"))) * table)
    if "solarize_add" in strengths[0]:
        table = jnp.where(table < 128, clip(table + jnp.sum(every("solarize_add"))), table)
    table = tone.kept_bits(table, jnp.min(every("posterize")))
    table = tone.solarized(table, jnp.min(every("solarize")))
    if "invert" in strengths[0]:
        table = jnp.where(jnp.sum(every("invert")) % 2 == 1, 255 - table, table)
    return table


def _cut(image: jax.Array, half: jax.Array, places: jax.Array, color: np.ndarray) -> jax.Array:
    """`image` with a square of `2 * half` pixels painted around a uniform position, clipped at the
    border."""

    height, width = image.shape[:2]
    half = half.astype(jnp.int32)
    top, left = (jnp.floor(places * np.array([height, width], np.float32))).astype(jnp.int32) - half
    return paint(image, (top, 2 * half), (left, 2 * half), color)


# ---- spaces


class Levels(NamedTuple):
    """The strengths of one change in a space."""

    values: np.ndarray
    """The strength at each magnitude, `(31,)`."""
    neutral: float
    """The value that changes nothing."""
    signed: bool
    """Whether half of the draws are mirrored around `neutral`."""


_NOTHING = Levels(np.zeros(BINS), 0.0, False)
_ONCE = Levels(np.ones(BINS), 0.0, False)
Space = Callable[[int, int], Mapping[str, Levels]]


def standard(height: int, width: int) -> dict[str, Levels]:
    """torchvision's `RandAugment`: 14 changes, magnitudes 0 to 30."""
    m = np.arange(BINS) / (BINS - 1)
    return {
        **_common(
            shear=0.3 * m,
            right=150 / 331 * width * m,
            down=150 / 331 * height * m,
            turn=30 * m,
            enhance=0.9 * m,
        ),
        **_tones(posterize=8 - np.rint(4 * m), solarize=255 * (1 - m)),
        "identity": _NOTHING,
    }


def original(height: int, width: int) -> dict[str, Levels]:
    """The authors' space for ImageNet, also used by big_vision (`pp/autoaugment.py`): 16 changes,
    magnitudes 0 to 10 and above. Factors grow with the magnitude and have no sign. At 10 nothing is
    solarized."""
    m = np.arange(BINS) / 10
    factor = Levels(0.1 + 1.8 * m, 1.0, False)
    return {
        **_common(shear=0.3 * m, right=100 * m, down=100 * m, turn=30 * m, enhance=m),
        **dict.fromkeys(("saturation", "contrast", "brightness", "sharpness"), factor),
        **_tones(posterize=np.minimum(np.floor(4 * m), 8), solarize=np.floor(256 * m)),
        "invert": _ONCE,
        "solarize_add": Levels(np.floor(110 * m), 0.0, False),
        "cutout": Levels(np.floor(40 * m), 0.0, False),
    }


SPACES: dict[str, Space] = {"standard": standard, "original": original}


def _common(
    shear: np.ndarray, right: np.ndarray, down: np.ndarray, turn: np.ndarray, enhance: np.ndarray
) -> dict[str, Levels]:
    return {
        "shear_x": Levels(shear, 0.0, True),
        "shear_y": Levels(shear, 0.0, True),
        "shift_x": Levels(right, 0.0, True),
        "shift_y": Levels(down, 0.0, True),
        "rotate": Levels(turn, 0.0, True),
        **dict.fromkeys(
            ("saturation", "contrast", "brightness", "sharpness"), Levels(1 + enhance, 1.0, True)
        ),
    }


def _tones(posterize: np.ndarray, solarize: np.ndarray) -> dict[str, Levels]:
    return {
        "posterize": Levels(posterize, 8.0, False),
        "solarize": Levels(solarize, 256.0, False),
        "autocontrast": _ONCE,
        "equalize": _ONCE,
    }


@as_annotated
def compose(
    *stages: Augment, masks: str | Sequence[str] = (), fixed: str | Sequence[str] = ()
) -> Augment:
    """Applies changes in order. Stage `i` uses the key folded with `i`.

        cw.augment.compose(cw.augment.resized_crop(224), cw.augment.flip(), masks=["mask"])

    *Arguments:* `masks`: columns `(height, width)` or `(height, width, ...)` that move with the
    image, such as the classes of its pixels. Each pixel takes the value of the nearest one. Changes
    of colour and `cutout` do not change them. `fixed`: columns of the image's height and width that
    do not change.

    A change that moves pixels raises `DataError` for a column of that height and width that is
    neither.
    """
    given = [(names,) if isinstance(names, str) else tuple(names) for names in (masks, fixed)]

    def augment(example: Example, key: jax.Array) -> Example:
        outer = ROLES.get()
        roles = Roles(outer.masks + given[0], outer.fixed + given[1])
        token = ROLES.set(roles)
        try:
            for number, stage in enumerate(stages):
                example = stage(example, jax.random.fold_in(key, number))
        finally:
            ROLES.reset(token)
        return example

    return augment


@as_annotated
def cifar(mean: float | Sequence[float]) -> Augment:
    """DavidNet's set: mirror-pad 4 and crop, flip, and a cutout of 8 × 8 filled with `mean` (pixel
    units).

    Source: D. Page, "How to train your ResNet" (2018).
    """
    return compose(reflect_crop(4, flip=0.5), cutout(8, fill=mean))


@as_annotated
def imagenet(size: int = 224) -> Augment:
    """ResNet's set: a random part of 8 to 100 % of the area scaled to `size` × `size`, and flip.

    Source: Goyal et al. (2017, arXiv:1706.02677), without the lighting noise some add.
    """
    return compose(resized_crop(size), flip())
