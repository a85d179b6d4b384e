"""Random resized crops and centre crops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.augment import centre, resized_crop
from refusals import refused


def cut(image, seed=0, **settings):
    return jax.jit(resized_crop(**settings))({"image": image}, jax.random.key(seed))["image"]


def test_the_whole_image_at_its_own_size_is_itself():
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    with jax.default_matmul_precision("highest"):
        same = cut(image, size=8, area=(1, 1), ratio=(1, 1))
    assert same.dtype == jnp.uint8
    np.testing.assert_array_equal(same, image)


def test_halving_averages_as_a_triangle_filter():
    image = np.zeros((8, 8, 1), np.float32)
    image[:, 4:] = 4.0
    with jax.default_matmul_precision("highest"):
        half = cut(image, size=4, area=(1, 1), ratio=(1, 1))
    np.testing.assert_allclose(half[0, :, 0], [0, 0.5, 3.5, 4], atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_a_crop_of_a_ramp_stays_inside_it(seed):
    ramp = np.broadcast_to(np.arange(32, dtype=np.float32)[None, :, None], (32, 32, 1))
    with jax.default_matmul_precision("highest"):
        row = np.asarray(cut(ramp, seed, size=16))[3, :, 0]
    steps = np.diff(row[1:-1])
    width = steps.mean() * 16
    assert 0 <= row[0] < row[-1] <= 31
    np.testing.assert_allclose(steps, steps.mean(), rtol=0.1)  # a sampled triangle is not quite even
    assert 32 * (0.08 * 0.75) ** 0.5 - 0.01 <= width <= 32.01


@pytest.mark.slow
def test_keys_choose_the_crop_and_a_batch_changes_nothing():
    images = np.random.default_rng(0).integers(0, 256, (4, 12, 12, 3)).astype(np.uint8)
    keys = jax.random.split(jax.random.key(0), 4)
    augment = resized_crop(8)
    both = jax.jit(jax.vmap(augment))({"image": images}, keys)["image"]
    single = jax.jit(augment)
    alone = [single({"image": image}, key)["image"] for image, key in zip(images, keys, strict=True)]
    np.testing.assert_array_equal(both, alone)
    assert (cut(images[0], 1, size=8) != cut(images[0], 2, size=8)).any()


def test_centre():
    images = np.arange(7 * 6).reshape(1, 7, 6, 1)
    np.testing.assert_array_equal(centre(images, 4)[0, :, :, 0], images[0, 1:5, 1:5, 0])
    np.testing.assert_array_equal(centre(images[:, :6], 6), images[:, :6])
    with refused(cw.errors.DataError, "augment-expects"):
        centre(images, 7)


@pytest.mark.parametrize("wrong", [{"size": 0}, {"size": 8, "area": (0, 1)}, {"size": 8, "ratio": (2, 1)}])
def test_impossible_crops_are_refused(wrong):
    with refused(cw.errors.DataError, "augment-expects"):
        resized_crop(**wrong)
