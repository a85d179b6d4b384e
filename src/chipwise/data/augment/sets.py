"""Several changes as one, and what well-known recipes do to an image, by name."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from ...errors import DataError
from .affine import affine
from .color import color_jitter, lighting
from .crop import flip, flip_up_down, reflect_crop, resized_crop
from .erase import cutout
from .image import Augment, Example


def compose(*stages: Augment) -> Augment:
    """One change after another; stage `i` draws from the key folded with `i`."""

    def augment(example: Example, key: jax.Array) -> Example:
        for number, stage in enumerate(stages):
            example = stage(example, jax.random.fold_in(key, number))
        return example

    return augment


def cifar(mean: float | Sequence[float]) -> Augment:
    """DavidNet's set: mirror-pad 4 and crop, flip, cut out 8 × 8 and fill with `mean` (pixel units).

    Source: D. Page, "How to train your ResNet" (2018).
    """
    return compose(reflect_crop(4, flip=0.5), cutout(8, fill=mean))


def imagenet(size: int = 224) -> Augment:
    """ResNet's set: a random part of 8 to 100 % of the area scaled to `size` × `size`, and flip.

    Source: Goyal et al. (2017, arXiv:1706.02677), without the lighting noise some add.
    """
    return compose(resized_crop(size), flip())


def inception(size: int = 299) -> Augment:
    """Inception's set: `imagenet`'s, and a colour jitter: brightness by up to 32 / 255, contrast and
    saturation by up to 0.5, hue by up to 0.2 of the circle.

    Source: TensorFlow's `inception_preprocessing`, after Szegedy et al. (2015, arXiv:1409.4842). It adds to
    the brightness where this multiplies, and draws the order of the changes and one of four ways to scale.
    """
    jitter = color_jitter(brightness=32 / 255, contrast=0.5, saturation=0.5, hue=0.2)
    return compose(resized_crop(size), flip(), jitter)


def fastai(
    max_rotate: float = 10.0,
    max_zoom: float = 1.1,
    max_lighting: float = 0.2,
    p_affine: float = 0.75,
    p_lighting: float = 0.75,
    flip_vert: bool = False,
) -> Augment:
    """fastai's set: flip, turn by up to 10 degrees, zoom up to 1.1 into any part, change the lighting.

    Turn and zoom are one look-up, mirrored at the edges. fastai's perspective warp (`max_warp=0.2`) is
    left out: it is not affine. `flip_vert` also mirrors top and bottom; fastai's turns by quarters as well.

    Source: Howard and Gugger, fastai 2, `aug_transforms`. Raises `DataError` unless `max_zoom` is at least 1.
    """
    if max_zoom < 1:
        raise DataError("fastai-zoom", max_zoom=max_zoom)
    upright = (flip_up_down(),) if flip_vert else ()
    moved = affine(rotate=max_rotate, zoom=(1.0, max_zoom), p=p_affine, anywhere=True)
    return compose(flip(), *upright, moved, lighting(max_lighting, p_lighting))
