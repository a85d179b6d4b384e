"""Colours against Pillow's ImageEnhance on photographs: within the level that its dropped fraction makes."""

import colorsys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance

from chipwise.data.augment import brightness, color_jitter, contrast, hue, lighting, saturation, sharpness
from chipwise.errors import DataError
from refusals import refused

KEY = jax.random.key(0)


def done(stage, image, key=KEY):
    return np.asarray(jax.jit(stage)({"image": jnp.asarray(image)}, key)["image"])


@pytest.mark.parametrize("factor", [0.4, 1.7])
@pytest.mark.parametrize(
    ("stage", "enhance"),
    [
        (brightness, ImageEnhance.Brightness),
        (contrast, ImageEnhance.Contrast),
        (saturation, ImageEnhance.Color),
        (sharpness, ImageEnhance.Sharpness),
    ],
)
def test_photographs_are_enhanced_as_in_pillow(pictures, stage, enhance, factor):
    for image in (*pictures, pictures[0][:, :, 0]):
        expected = np.asarray(enhance(Image.fromarray(image)).enhance(factor)).astype(int)
        got = done(stage((factor, factor)), image).astype(int)
        # Pillow drops the fraction of a blend, and of the blur, which factors above 1 double
        assert np.abs(got - expected).max() <= (1 if stage is not sharpness else 2)
        assert -0.1 < (got - expected).mean() < 0.6


@pytest.mark.parametrize("turn", [-0.5, -0.1, 0.25])
def test_a_hue_turns_the_circle(pictures, turn):
    image = pictures[0]
    got = done(hue((turn, turn)), image)
    for y, x in np.ndindex(6, 8):
        h, s, v = colorsys.rgb_to_hsv(*(image[y * 8, x * 8] / 255))
        expected = np.array(colorsys.hsv_to_rgb((h + turn) % 1, s, v)) * 255
        assert np.abs(got[y * 8, x * 8] - expected).max() <= 0.6


def test_a_hue_keeps_gray_and_primaries_go_round():
    colors = np.uint8([[[255, 0, 0], [0, 255, 0], [0, 0, 255], [77, 77, 77]]])
    assert done(hue((1 / 3, 1 / 3)), colors).tolist() == [
        [[0, 255, 0], [0, 0, 255], [255, 0, 0], [77, 77, 77]]
    ]


def test_the_middle_factor_of_every_stage_is_the_identity(pictures):
    for stage in (brightness, contrast, saturation, sharpness):
        np.testing.assert_array_equal(done(stage((1.0, 1.0)), pictures[0]), pictures[0])
    drawn = color_jitter(*[(1.0, 1.0001)] * 3, hue=(0.0, 0.0001))  # and so computed
    np.testing.assert_array_equal(done(drawn, pictures[0]), pictures[0])


@pytest.mark.slow
def test_floats_run_from_0_to_1(pictures):
    image = pictures[0].astype(np.float32) / 255
    for stage in (brightness, contrast, saturation, sharpness):
        whole = done(stage((1.5, 1.5)), pictures[0]).astype(np.float32) / 255
        np.testing.assert_allclose(done(stage((1.5, 1.5)), image), whole, atol=2 / 255)


def test_one_jitter_is_all_of_them_rounded_once(pictures):
    image = pictures[1].astype(np.float32) / 255
    stages = [brightness((1.3, 1.3)), contrast((0.6, 0.6)), saturation((1.5, 1.5)), hue((0.2, 0.2))]
    for stage in stages:
        image = done(stage, image)
    both = color_jitter((1.3, 1.3), (0.6, 0.6), (1.5, 1.5), (0.2, 0.2))
    assert np.abs(done(both, pictures[1]) - image * 255).max() <= 1


def test_factors_are_uniform():
    images = jnp.full((500, 1, 2), 100, jnp.uint8).at[:, 0, 1].set(50)
    stage = jax.jit(jax.vmap(brightness(0.4, p=0.5)))
    made = np.asarray(stage({"image": images}, jax.random.split(KEY, 500))["image"])[:, 0, 0]
    same = made == 100
    assert 0.4 < same.mean() < 0.6
    assert 60 <= made.min() < 64 and 136 < made.max() <= 140 and abs(made[~same].mean() - 100) < 4


def test_lighting_keeps_black_and_white_and_acts_on_odds():
    image = jnp.arange(256, dtype=jnp.uint8).reshape(16, 16)
    keys = jax.random.split(KEY, 300)
    made = np.asarray(
        jax.jit(jax.vmap(lighting(0.2)))({"image": jnp.broadcast_to(image, (300, 16, 16))}, keys)["image"]
    ).reshape(300, 256)
    assert (made[:, 0] == 0).all() and (made[:, 255] == 255).all() and (np.diff(made.astype(int)) >= 0).all()
    low, high = (255 * odds / (1 + odds) for odds in ((2 / 3) ** 1.25, 1.5**1.25))
    assert low - 1 < made[:, 128].min() < low + 9 and high - 9 < made[:, 128].max() < high + 2
    untouched = (made == np.arange(256)).all(axis=1)
    assert 0.02 < untouched.mean() < 0.12  # a quarter of a quarter
    floats = done(lighting(0.2, 1.0), np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16), keys[0])
    whole = done(lighting(0.2, 1.0), image, keys[0])
    np.testing.assert_allclose(floats * 255, whole, atol=0.51)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: brightness(-0.1), "augment-amount"),
        (lambda: contrast((-0.1, 1.0)), "augment-range"),
        (lambda: hue(0.6), "hue-range"),
        (lambda: saturation(0.1, p=-1), "augment-probability"),
        (lambda: lighting(1.0), "lighting-amount"),
        (lambda: done(saturation(0.1), np.zeros((4, 4, 2), np.uint8)), "augment-channels"),
    ],
)
def test_what_is_refused(call, code):
    with refused(DataError, code):
        call()
