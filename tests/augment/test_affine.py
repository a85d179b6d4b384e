"""Rotation, zoom, shear and shift by one matrix, against Pillow on photographs."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from chipwise.augment.affine import positions, resample

EDGE = np.uint8([9, 9, 9])


@partial(jax.jit)
def look(image, matrix, edge):
    return resample(image, positions(matrix, *image.shape[:2]), edge)


def seen(image, matrix, edge=EDGE):
    return np.asarray(look(jnp.asarray(image), jnp.asarray(matrix, jnp.float32), edge))


def pillow(image, matrix, fill):
    """The same look-up by Pillow, which counts from the corner of the corner pixel."""
    (a, b, c), (d, e, f) = matrix
    x, y = image.shape[1] / 2, image.shape[0] / 2
    data = (a, b, c + x - a * x - b * y, d, e, f + y - d * x - e * y)
    made = Image.fromarray(image).transform(
        Image.fromarray(image).size, Image.Transform.AFFINE, data, Image.Resampling.BILINEAR, fillcolor=fill
    )
    return np.asarray(made).astype(int)


COS, SIN = math.cos(math.pi / 6), math.sin(math.pi / 6)
MATRICES = {
    "rotate": [[COS, -SIN, 0], [SIN, COS, 0]],
    "zoom": [[1 / 1.3, 0, 0], [0, 1 / 1.3, 0]],
    "shrink": [[1 / 0.7, 0, 0], [0, 1 / 0.7, 0]],
    "shear": [[1, 0.36, 0], [0, 1, 0]],
    "shift": [[1, 0, -5.25], [0, 1, 3.5]],
    "all": [[0.2, 0.8, -3], [-0.7, 0.3, 7.5]],
}


@pytest.mark.parametrize("name", MATRICES)
def test_a_photograph_moves_as_in_pillow(pictures, name):
    """But for the fraction, which Pillow drops, and 1/512 pixel; on the border either side will do."""
    image = pictures[0]
    got = seen(image, MATRICES[name]).astype(int)
    expected = pillow(image, MATRICES[name], (9, 9, 9))
    border = np.abs(got - expected).max(axis=2) > 2
    assert border.mean() < 0.01
    assert 0.2 < (got - expected)[~border].mean() < 0.55


def test_quarter_turns_and_mirrors_move_whole_pixels(pictures):
    image = pictures[0, :48, :48]
    np.testing.assert_array_equal(seen(image, [[0, -1, 0], [1, 0, 0]]), np.rot90(image))
    np.testing.assert_array_equal(seen(image, [[-1, 0, 0], [0, -1, 0]]), image[::-1, ::-1])
    np.testing.assert_array_equal(seen(image, [[-1, 0, 0], [0, 1, 0]]), image[:, ::-1])


def test_what_is_outside_is_the_colour():
    image = np.full((8, 10, 3), 200, np.uint8)
    made = seen(image, [[1, 0, -5], [0, 1, -4]], np.uint8([1, 3, 3]))
    assert (made[:4] == [1, 3, 3]).all() and (made[:, :5] == [1, 3, 3]).all() and (made[4:, 5:] == 200).all()


def test_images_of_one_row_show_only_themselves():
    image = np.arange(5, dtype=np.uint8).reshape(1, 5)
    np.testing.assert_array_equal(seen(image, [[1, 0, 0], [0, 1, 0.3]], np.uint8(9)), image)
