"""Random erasing: one rectangle inside, of the area and shape asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chipwise.data.augment import random_erasing
from chipwise.errors import DataError
from refusals import refused

KEYS = jax.random.split(jax.random.key(0), 300)


def erased(stage, shape=(40, 30, 3), dtype=jnp.uint8, n=300):
    images = jnp.full((n, *shape), 7, dtype)
    return np.asarray(jax.jit(jax.vmap(stage))({"image": images}, KEYS[:n])["image"])


def test_area_shape_place_and_share_of_images():
    made = erased(random_erasing(0.5, fill=(1, 2, 3)))
    gone = (made == [1, 2, 3]).all(axis=3)
    assert ((made == 7).all(axis=3) | gone).all()
    drawn = gone.any(axis=(1, 2))
    assert 120 < drawn.sum() < 180
    tall, wide = gone.any(axis=2).sum(axis=1)[drawn], gone.any(axis=1).sum(axis=1)[drawn]
    np.testing.assert_array_equal(tall * wide, gone[drawn].sum(axis=(1, 2)))  # a rectangle
    area, ratio = tall * wide / 1200, tall / wide
    assert 0.01 < area.min() < 0.06 and 0.27 < area.max() < 0.36 and 0.15 < area.mean() < 0.2
    assert 0.25 < ratio.min() < 0.45 and 2.2 < ratio.max() < 4 and abs(np.log(ratio).mean()) < 0.2
    where = gone[drawn].mean(axis=0)
    assert where.max() < 0.6 and (where[:, :3] > 0).any() and (where[:, -3:] > 0).any()
    assert (where[:3] > 0).any() and (where[-3:] > 0).any()


@pytest.mark.slow
def test_one_colour_and_noise():
    def both(image, key):
        stages = (random_erasing(1.0, area=(0.3, 0.3), fill=fill) for fill in ("color", "noise"))
        return [stage({"image": image}, key)["image"] for stage in stages]

    for one, noise in zip(
        *jax.jit(jax.vmap(both))(jnp.full((9, 20, 20, 3), 7, jnp.uint8), KEYS[:9]), strict=True
    ):
        assert len(np.unique(one.reshape(-1, 3), axis=0)) == 2
        assert len(np.unique(noise.reshape(-1, 3), axis=0)) > 90 and np.asarray(noise).max() > 240
    floats = random_erasing(1.0, fill="noise")({"image": jnp.full((5, 4), 7.0)}, KEYS[0])["image"]
    assert floats.min() >= 0 and ((floats < 1) | (floats == 7)).all()


def test_a_share_that_fits_with_no_shape_is_cut():
    made = erased(random_erasing(1.0, area=(1.0, 1.0), ratio=(1.0, 1.0), fill=0), (4, 30, 1), n=4)
    assert (made == 0).any() and made.shape == (4, 4, 30, 1)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: random_erasing(-0.1), "augment-probability"),
        (lambda: random_erasing(area=(0.0, 0.1)), "erasing-range"),
        (lambda: random_erasing(ratio=(2.0, 1.0)), "erasing-range"),
        (lambda: random_erasing(fill="pixel"), "erasing-fill"),
        (lambda: erased(random_erasing(fill=(1, 2)), n=1), "augment-values"),
    ],
)
def test_what_is_refused(call, code):
    with refused(DataError, code):
        call()
