"""Colours against Pillow's ImageEnhance on photographs: within the level that its dropped fraction makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chipwise.data.augment import color_jitter
from chipwise.data.augment.color import of_colors, sharpen
from chipwise.data.augment.image import of_image, white
from chipwise.errors import DataError
from refusals import refused

KEY = jax.random.key(0)
brightness = color_jitter


def contrast(amount):
    return color_jitter(contrast=amount)


def saturation(amount, p=1.0):
    return color_jitter(saturation=amount, p=p)


def hue(amount):
    return color_jitter(hue=amount)


def sharpness(amount):
    def sharper(image, key):
        return of_colors(image, lambda colors: sharpen(colors, jnp.float32(amount[0]), white(image.dtype)))

    return of_image("sharpness", sharper)


def done(stage, image, key=KEY):
    return np.asarray(jax.jit(stage)({"image": jnp.asarray(image)}, key)["image"])


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: brightness(-0.1), "augment-expects"),
        (lambda: contrast((-0.1, 1.0)), "augment-expects"),
        (lambda: hue(0.6), "augment-expects"),
        (lambda: saturation(0.1, p=-1), "augment-expects"),
        (lambda: done(saturation(0.1), np.zeros((4, 4, 2), np.uint8)), "augment-expects"),
    ],
)
def test_what_is_refused(call, code):
    with refused(DataError, code):
        call()
