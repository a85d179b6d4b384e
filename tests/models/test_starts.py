"""Kernels that start as the identity or are made from the data, and the net of airbench."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.data.sources import Arrays
from chipwise.engine.state import first_state
from chipwise.interop.nnx import functional
from chipwise.models.airnet import AirNet
from chipwise.models.conv_layers import pytorch_uniform
from chipwise.models.starts import dirac, whitening
from refusals import refused


@pytest.mark.slow
@pytest.mark.parametrize("c_in, c_out", [(3, 5), (4, 4)])
def test_a_dirac_kernel_hands_its_channels_on(c_in, c_out):
    kernel = dirac(pytorch_uniform)(jax.random.key(0), (3, 3, c_in, c_out), jnp.float32)
    x = jax.random.normal(jax.random.key(1), (2, 6, 7, c_in))
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    np.testing.assert_array_equal(y[..., :c_in], x)
    assert c_in == c_out or float(jnp.abs(kernel[..., c_in:]).min()) > 0


def test_whitened_patches_are_uncorrelated():
    rng = np.random.default_rng(0)
    base = rng.integers(0, 200, (40, 9, 8, 1))
    pixels = (base + rng.integers(0, 55, (40, 9, 8, 3))).astype(np.uint8)  # channels go together
    mean, std = [100.0, 110.0, 120.0], [50.0, 60.0, 70.0]
    kernel = whitening(Arrays(image=pixels), mean, std, images=40, epsilon=0.0)
    assert kernel.shape == (2, 2, 3, 24) and kernel.dtype == np.float32
    x = (pixels - np.asarray(mean)) / np.asarray(std)
    y = jax.lax.conv_general_dilated(
        jnp.asarray(x, jnp.float32), kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    y = np.asarray(y, np.float64).reshape(-1, 24)
    np.testing.assert_allclose(y[:, :12].T @ y[:, :12] / len(y), np.eye(12), atol=2e-3)
    np.testing.assert_array_equal(kernel[..., 12:], -kernel[..., :12])


def test_whitening_reads_no_more_images_than_asked():
    pixels = np.random.default_rng(0).integers(0, 256, (300, 4, 4, 3), np.uint8)
    some = whitening(Arrays(image=pixels[:260]), [0.0] * 3, [1.0] * 3)
    np.testing.assert_array_equal(some, whitening(Arrays(image=pixels), [0.0] * 3, [1.0] * 3, images=260))


def test_parameters_made_from_the_data_take_the_place_of_the_tasks():
    def task(**more):
        return tasks.recipe(task=dataclasses.replace(tasks.recipe().task, **more), frozen=())

    plain = first_state(task())
    leaves = jax.tree_util.tree_leaves_with_path(plain.params)
    name = jax.tree_util.keystr(leaves[0][0], simple=True, separator="/")
    shape, asked = leaves[0][1].shape, []

    def measured(source):
        asked.append(len(source))
        return {name: np.full(shape, 0.25)}

    recipe = task(from_data=measured)
    state = first_state(recipe)
    assert asked == [len(recipe.task.train)]
    after = jax.tree.leaves(state.params)
    np.testing.assert_array_equal(after[0], np.full(shape, 0.25, np.float32))
    for one, other in zip(after[1:], jax.tree.leaves(plain.params)[1:], strict=True):
        np.testing.assert_array_equal(one, other)
    with refused(cw.errors.RecipeError, "from-data-unknown", path="nowhere"):
        first_state(task(from_data=lambda source: {"nowhere": np.zeros(1)}))
    with refused(cw.errors.RecipeError, "from-data-shape", path=name, shape=[1, 2, 3, 4, 5]):
        first_state(task(from_data=lambda source: {name: np.zeros((1, 2, 3, 4, 5))}))


def test_airnet():
    init, apply = functional(lambda rngs: AirNet(width=4, rngs=rngs))
    params, state = jax.eval_shape(init, jax.random.key(0))
    assert set(params["group1"]["norm1"]) == {"bias"}
    x = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.bfloat16)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), params)
    logits, _ = jax.eval_shape(lambda p, s, x: apply(p, s, x, None, True), params, state, x)
    assert logits.shape == (2, 10) and logits.dtype == jnp.bfloat16
