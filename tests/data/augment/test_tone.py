"""Tables against Pillow's ImageOps on photographs: the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageOps

from chipwise.data.augment import autocontrast, equalize, invert, posterize, solarize
from chipwise.data.augment.tone import counts
from chipwise.errors import DataError
from refusals import refused

KEY = jax.random.key(0)


def done(stage, image, key=KEY):
    return np.asarray(jax.jit(stage)({"image": jnp.asarray(image)}, key)["image"])


@pytest.mark.parametrize(
    ("stage", "pillow", "levels"),
    [
        (posterize(3), lambda i: ImageOps.posterize(i, 3), 0),
        (solarize(100), lambda i: ImageOps.solarize(i, 100), 0),
        (invert(), ImageOps.invert, 0),
        (equalize(), ImageOps.equalize, 0),
        (autocontrast(), ImageOps.autocontrast, 1),  # Pillow multiplies by a rounded 255 / (high - low)
    ],
)
def test_photographs_change_as_in_pillow(pictures, stage, pillow, levels):
    dull = (pictures[0] // 3 + 40).astype(np.uint8)
    for image in (*pictures, dull, np.full_like(dull, 99), dull[:, :, 1]):
        expected = np.asarray(pillow(Image.fromarray(image))).astype(int)
        assert np.abs(done(stage, image).astype(int) - expected).max() <= levels


def test_settings_that_change_nothing(pictures):
    for stage in (posterize(8), solarize(256), invert(0.0), equalize(0.0), autocontrast(0.0)):
        np.testing.assert_array_equal(done(stage, pictures[0]), pictures[0])


def test_a_batch_in_which_none_drew_it_is_left_alone(pictures):
    keys = jax.random.split(KEY, 2)
    made = jax.jit(jax.vmap(invert(1e-9)))({"image": jnp.asarray(pictures)}, keys)["image"]
    np.testing.assert_array_equal(made, pictures)


def test_a_fourth_channel_is_opacity(pictures):
    image = np.dstack([pictures[0], pictures[1][:, :, 0]])
    made = done(invert(), image)
    np.testing.assert_array_equal(made[:, :, 3], image[:, :, 3])
    np.testing.assert_array_equal(made[:, :, :3], 255 - image[:, :, :3])


def test_only_images_that_drew_it_are_counted(pictures):
    wanted = jnp.asarray([True, False])
    made = np.asarray(jax.jit(jax.vmap(counts))(pictures, wanted))
    for c in range(3):
        np.testing.assert_array_equal(made[0, :, c], np.bincount(pictures[0, :, :, c].ravel(), minlength=256))
    assert not made[1].any()
    twice = jax.vmap(jax.vmap(counts))(pictures[None], wanted[None])
    np.testing.assert_array_equal(twice[0], made)


def test_a_share_of_the_images_is_changed(pictures):
    batch = {"image": jnp.broadcast_to(jnp.asarray(pictures[0, :20, :20]), (200, 20, 20, 3))}
    made = np.asarray(jax.jit(jax.vmap(equalize(0.25)))(batch, jax.random.split(KEY, 200))["image"])
    assert 0.15 < (made != np.asarray(batch["image"])).any(axis=(1, 2, 3)).mean() < 0.35


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: posterize(9), "posterize-bits"),
        (lambda: solarize(257), "solarize-threshold"),
        (lambda: equalize(1.5), "augment-probability"),
        (lambda: done(equalize(), np.zeros((4, 4, 3), np.float32)), "augment-not-uint8"),
    ],
)
def test_what_is_refused(call, code):
    with refused(DataError, code):
        call()
