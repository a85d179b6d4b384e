"""RandAugment: every result is one of Pillow's, each about as often as it should be."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from chipwise.augment import rand_augment
from chipwise.base.errors import DataError
from refusals import refused

KEYS = jax.random.split(jax.random.key(0), 420)
FILL = (128, 128, 128)


def over(stage, image, keys=KEYS):
    batch = {"image": jnp.broadcast_to(jnp.asarray(image), (len(keys), *image.shape))}
    return np.asarray(jax.jit(jax.vmap(stage))(batch, keys)["image"])


def moved(image, a=1.0, b=0.0, c=0.0, d=0.0, e=1.0, f=0.0):
    x, y = image.width / 2, image.height / 2
    data = (a, b, c + x - a * x - b * y, d, e, f + y - d * x - e * y)
    return image.transform(
        image.size, Image.Transform.AFFINE, data, Image.Resampling.BILINEAR, fillcolor=FILL
    )


def standard(image, m):
    """What torchvision's RandAugment can make of an image at magnitude `m` of 30, by change."""
    share, (w, h) = m / 30, image.size
    angle = math.radians(30 * share)
    both = (-1, 1)
    enhanced = {
        name: [enhance(image).enhance(1 + sign * 0.9 * share) for sign in both]
        for name, enhance in {
            "brightness": ImageEnhance.Brightness,
            "color": ImageEnhance.Color,
            "contrast": ImageEnhance.Contrast,
            "sharpness": ImageEnhance.Sharpness,
        }.items()
    }
    return enhanced | {
        "identity": [image],
        "shear_x": [moved(image, b=s * 0.3 * share) for s in both],
        "shear_y": [moved(image, d=s * 0.3 * share) for s in both],
        "shift_x": [moved(image, c=s * 150 / 331 * w * share) for s in both],
        "shift_y": [moved(image, f=s * 150 / 331 * h * share) for s in both],
        "rotate": [
            moved(image, math.cos(angle), s * math.sin(angle), 0, -s * math.sin(angle), math.cos(angle))
            for s in both
        ],
        "posterize": [ImageOps.posterize(image, 8 - round(4 * share))],
        "solarize": [ImageOps.solarize(image, round(255 * (1 - share)))],
        "autocontrast": [ImageOps.autocontrast(image)],
        "equalize": [ImageOps.equalize(image)],
    }


@pytest.mark.slow
def test_rand_augment_makes_what_pillow_makes_each_as_often(pictures):
    image = (pictures[1] * 0.8 + 10).astype(np.uint8)
    names, results = [], []
    for name, made in standard(Image.fromarray(image), 15).items():
        names += [(name, sign) for sign in range(len(made))]
        results += [np.asarray(x) for x in made]
    away = np.abs(over(rand_augment(1, 15), image)[:, None].astype(int) - np.stack(results)[None].astype(int))
    # The mean: edges of what moves in differ by whole pixels here and there
    distance = away.mean(axis=(2, 3, 4))
    assert distance.min(axis=1).max() < 1.1
    drawn = [names[i] for i in distance.argmin(axis=1)]
    for name in {n for n, _ in names}:
        count = sum(n == name for n, _ in drawn)
        assert 10 < count < 55, (name, count)  # of 420, 30 expected
        if (name, 1) in names:
            assert min(drawn.count((name, 0)), drawn.count((name, 1))) > 2


@pytest.mark.slow
def test_the_authors_space_inverts_and_cuts_out(pictures):
    image = pictures[0]
    made = over(rand_augment(1, 5, space="original"), image, KEYS[:200])
    assert 3 < (made == 255 - image).all(axis=(1, 2, 3)).sum() < 26
    gray = (made == 128).all(axis=3) & (image != 128).any(axis=2)
    square = gray & ((made == image).all(axis=3) | gray).all(axis=(1, 2), keepdims=True)
    painted = square.any(axis=(1, 2)) & ~gray.all(axis=(1, 2))  # moved by 50 pixels down, all are gray
    assert 3 < painted.sum() < 26
    assert 0.1 < square[painted].mean() < 0.52  # 40 × 40 of these 48 × 64 where it is all inside


@pytest.mark.parametrize("shape", [(9, 7), (9, 7, 4)])
@pytest.mark.parametrize("stage", [rand_augment(), rand_augment(fill=0)])
def test_gray_and_opaque_images_keep_their_shape(shape, stage):
    example = {"image": jax.ShapeDtypeStruct(shape, jnp.uint8)}
    made = jax.eval_shape(stage, example, KEYS[0])["image"]
    assert (made.shape, made.dtype) == (shape, jnp.uint8)


def test_no_layers_change_nothing(pictures):
    image = rand_augment(0)({"image": pictures[0]}, KEYS[0])["image"]
    np.testing.assert_array_equal(image, pictures[0], strict=True)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: rand_augment(-1), "augment-expects"),
        (lambda: rand_augment(2, 31), "augment-expects"),
        (lambda: rand_augment(space="standart"), "augment-expects"),
        (
            lambda: rand_augment(fill=300)({"image": np.zeros((4, 4), np.uint8)}, KEYS[0]),
            "augment-expects",
        ),
        (lambda: rand_augment()({"image": np.zeros((4, 4), np.float32)}, KEYS[0]), "augment-expects"),
    ],
)
def test_what_is_refused(call, code):
    with refused(DataError, code):
        call()
