"""Rotation, zoom, shear and shift against Pillow on photographs, and mirrored edges against NumPy."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from chipwise.data.augment import affine
from chipwise.data.augment.affine import lookup, positions, resample
from chipwise.errors import DataError
from refusals import refused

KEY = jax.random.key(0)


def done(stage, image, key=KEY):
    return np.asarray(jax.jit(stage)({"image": jnp.asarray(image)}, key)["image"])


@partial(jax.jit, static_argnums=3)
def look(image, matrix, edge, lengths):
    return resample(image, positions(matrix, *image.shape[:2]), edge, lengths)


def seen(image, matrix, edge=None, lengths=2):
    return np.asarray(look(jnp.asarray(image), jnp.asarray(matrix, jnp.float32), edge, lengths))


def pillow(image, matrix, fill):
    """The same look-up by Pillow, which counts from the corner of the corner pixel."""
    (a, b, c), (d, e, f) = matrix
    x, y = image.shape[1] / 2, image.shape[0] / 2
    data = (a, b, c + x - a * x - b * y, d, e, f + y - d * x - e * y)
    made = Image.fromarray(image).transform(
        Image.fromarray(image).size, Image.Transform.AFFINE, data, Image.Resampling.BILINEAR, fillcolor=fill
    )
    return np.asarray(made).astype(int)


MATRICES = {
    "rotate": dict(rotate=30.0, zoom=1.0, shear=0.0, right=0.0, down=0.0),
    "zoom": dict(rotate=0.0, zoom=1.3, shear=0.0, right=0.0, down=0.0),
    "shrink": dict(rotate=0.0, zoom=0.7, shear=0.0, right=0.0, down=0.0),
    "shear": dict(rotate=0.0, zoom=1.0, shear=-20.0, right=0.0, down=0.0),
    "shift": dict(rotate=0.0, zoom=1.0, shear=0.0, right=5.25, down=-3.5),
    "all": dict(rotate=-75.0, zoom=1.2, shear=15.0, right=3.0, down=7.5),
}


@pytest.mark.parametrize("name", MATRICES)
def test_a_photograph_moves_as_in_pillow(pictures, name):
    """But for the fraction, which Pillow drops, and 1/512 pixel; on the border either side will do."""
    image = pictures[0]
    matrix = np.asarray(jax.jit(lookup)(**{k: jnp.float32(v) for k, v in MATRICES[name].items()}))
    got = seen(image, matrix, np.uint8([9, 9, 9])).astype(int)
    expected = pillow(image, matrix, (9, 9, 9))
    border = np.abs(got - expected).max(axis=2) > 2
    assert border.mean() < 0.01
    assert 0.2 < (got - expected)[~border].mean() < 0.55


def test_the_matrix_turns_counter_clockwise_as_pillow_s_rotate(pictures):
    image = pictures[1]
    expected = np.asarray(Image.fromarray(image).rotate(25, Image.Resampling.BILINEAR)).astype(int)
    got = done(affine(rotate=(25, 25), edge=0.0), image).astype(int)
    assert np.median(np.abs(got - expected)) <= 1 and np.abs(got - expected).mean() < 1


def test_quarter_turns_and_mirrors_move_whole_pixels(pictures):
    image = pictures[0, :48, :48]
    np.testing.assert_array_equal(done(affine(rotate=(90, 90)), image), np.rot90(image))
    np.testing.assert_array_equal(done(affine(rotate=(180, 180)), image), image[::-1, ::-1])
    np.testing.assert_array_equal(seen(image, [[-1, 0, 0], [0, 1, 0]]), image[:, ::-1])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_edges_are_numpy_s_reflect_however_far(dtype):
    image = np.random.default_rng(0).integers(0, 256, (7, 9, 3)).astype(dtype)
    for far, lengths in ((1, 2), (5, 2), (6, 2), (7, 4), (8, 4), (9, 4), (17, 5), (40, 10)):
        padded = np.pad(image, ((far, far), (far, far), (0, 0)), mode="reflect")
        np.testing.assert_array_equal(
            seen(image, [[1, 0, -far], [0, 1, far]], None, lengths), padded[2 * far :, :9]
        )


def test_half_a_pixel_is_the_mean_of_two():
    image = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(seen(image, [[1, 0, 0.5], [0, 1, 0]])[:, :3], image[:, :3] + 0.5)
    assert (seen(image, [[1, 0, 0.5], [0, 1, 0]])[:, 3] == image[:, 3] - 0.5).all()  # and its mirror


def test_images_of_one_row_or_pixel_have_only_themselves_to_mirror():
    image = np.arange(5, dtype=np.uint8).reshape(1, 5)
    np.testing.assert_array_equal(seen(image, [[1, 0, 0], [0, 1, 3.3]]), image)
    assert seen(np.uint8([[[7, 8]]]), [[0.3, 2, 5], [1, 1, 9]]).tolist() == [[[7, 8]]]


def test_infinities_stay_beside_the_pixels_that_are_met():
    image = np.float32([[1, np.inf, 3], [-0.0, 2, np.nan]])
    assert seen(image, [[1, 0, 0], [0, 1, 0]]).tobytes() == image.tobytes()
    assert np.isfinite(seen(image, [[1, 0, 2], [0, 1, 0]])[0, 0])


def test_what_is_outside_is_the_colour():
    image = np.full((8, 10, 3), 200, np.uint8)
    made = done(affine(shift=(0.5, 0.5), edge=(1.2, 2.6, 3)), image)
    assert (made[:4] == [1, 3, 3]).all() and (made[:, :5] == [1, 3, 3]).all() and (made[4:, 5:] == 200).all()


@pytest.mark.slow
def test_amounts_are_uniform_and_independent():
    ramp = np.broadcast_to(np.arange(101, dtype=np.float32), (3, 101))
    keys = jax.random.split(KEY, 400)
    batch = {"image": jnp.broadcast_to(jnp.asarray(ramp), (400, 3, 101))}
    rows = np.asarray(jax.jit(jax.vmap(affine(zoom=(1, 2), shift=0.1, p=0.75)))(batch, keys)["image"])[:, 1]
    slope = rows[:, 51] - rows[:, 50]
    middle = rows[:, 50]
    zoomed, moved = slope < 0.999, np.abs(middle - 50) > 0.01
    assert 0.65 < zoomed.mean() < 0.85 and 0.65 < moved.mean() < 0.85
    assert 0.45 < (zoomed & moved).mean() < 0.67  # 0.5625
    scale = 1 / slope[zoomed]
    assert 1 <= scale.min() < 1.05 and 1.95 < scale.max() < 2.01 and abs(scale.mean() - 1.5) < 0.06
    offset = (50 - middle) / slope
    assert abs(offset[moved].mean()) < 1 and 9.5 < np.abs(offset).max() < 10.2


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: affine(rotate=-1), "augment-expects"),
        (lambda: affine(rotate=math.nan), "augment-expects"),
        (lambda: affine(shift=(0.2, 0.1)), "augment-expects"),
        (lambda: affine(zoom=(0.0, 1.0)), "augment-expects"),
        (lambda: affine(zoom=(-1.0, 1.0)), "augment-expects"),
        (lambda: affine(shear=90), "augment-expects"),
        (lambda: affine(10, p=2), "augment-expects"),
        (lambda: affine(10, edge="wrap"), "augment-expects"),
        (lambda: done(affine(10, edge=(1, 2)), np.zeros((4, 4, 3), np.uint8)), "augment-expects"),
    ],
)
def test_what_is_refused(call, code):
    with refused(DataError, code):
        call()
