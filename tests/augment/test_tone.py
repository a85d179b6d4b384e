"""Tables against Pillow's ImageOps on photographs: the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageOps

from chipwise.augment import tone
from chipwise.base.errors import DataError
from refusals import refused

SAME = jnp.broadcast_to(jnp.arange(256, dtype=jnp.float32)[:, None], (256, 3))
ALWAYS = jnp.asarray(True)


@pytest.mark.parametrize(
    ("table", "pillow", "levels"),
    [
        (lambda colors: tone.kept_bits(SAME, jnp.float32(3)), lambda i: ImageOps.posterize(i, 3), 0),
        (lambda colors: tone.solarized(SAME, jnp.float32(100)), lambda i: ImageOps.solarize(i, 100), 0),
        (lambda colors: tone.equalized(tone.counts(colors, ALWAYS)), ImageOps.equalize, 0),
        # Pillow multiplies by a rounded 255 / (high - low)
        (lambda colors: tone.stretched(*tone.extremes(colors)), ImageOps.autocontrast, 1),
        (lambda colors: tone.kept_bits(SAME, jnp.float32(8)), lambda i: i, 0),
        (lambda colors: tone.solarized(SAME, jnp.float32(256)), lambda i: i, 0),
    ],
)
def test_photographs_change_as_in_pillow(pictures, table, pillow, levels):
    dull = (pictures[0] // 3 + 40).astype(np.uint8)
    change = jax.jit(lambda image: tone.applied(image, table(tone.channels_of(image))))
    for image in (*pictures, dull, np.full_like(dull, 99), dull[:, :, 1]):
        expected = np.asarray(pillow(Image.fromarray(image))).astype(int)
        assert np.abs(np.asarray(change(image)).astype(int) - expected).max() <= levels


def test_a_fourth_channel_is_opacity(pictures):
    image = np.dstack([pictures[0], pictures[1][:, :, 0]])
    made = np.asarray(tone.applied(jnp.asarray(image), 255 - SAME))
    np.testing.assert_array_equal(made[:, :, 3], image[:, :, 3])
    np.testing.assert_array_equal(made[:, :, :3], 255 - image[:, :, :3])


def test_only_bytes_have_tables():
    with refused(DataError, "augment-expects", call="rand"):
        tone.eight_bit(jnp.zeros((4, 4, 3)), "rand")


def test_only_images_that_drew_it_are_counted(pictures):
    wanted = jnp.asarray([True, False])
    made = np.asarray(jax.jit(jax.vmap(tone.counts))(pictures, wanted))
    for c in range(3):
        np.testing.assert_array_equal(made[0, :, c], np.bincount(pictures[0, :, :, c].ravel(), minlength=256))
    assert not made[1].any()
    twice = jax.vmap(jax.vmap(tone.counts))(pictures[None], wanted[None])
    np.testing.assert_array_equal(twice[0], made)
