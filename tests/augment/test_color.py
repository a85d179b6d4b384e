"""Colours against Pillow's ImageEnhance on photographs: within the level that its dropped fraction makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance

from chipwise.augment.color import of_colors, saturate, sharpen


@pytest.mark.parametrize("factor", [0.25, 1.0, 1.75])
@pytest.mark.parametrize(
    ("change", "enhance"), [(saturate, ImageEnhance.Color), (sharpen, ImageEnhance.Sharpness)]
)
def test_photographs_change_as_in_pillow(pictures, change, enhance, factor):
    def changed(image):
        return of_colors(image, lambda colors: change(colors, jnp.float32(factor)))

    expected = np.asarray(enhance(Image.fromarray(pictures[0])).enhance(factor)).astype(int)
    assert np.abs(np.asarray(jax.jit(changed)(pictures[0])).astype(int) - expected).max() <= 1
    opaque = np.concatenate([pictures[0], pictures[0][..., :1]], axis=2)
    np.testing.assert_array_equal(jax.jit(changed)(opaque)[..., 3], opaque[..., 3])
