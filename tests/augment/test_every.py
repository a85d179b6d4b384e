"""What every change to one image promises: shape and type, identity, the same bits in any batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.augment import compose

pytestmark = pytest.mark.as_users_compile

A = cw.augment
KEYS = jax.random.split(jax.random.key(0), 8)
TONES = {
    "rand": A.rand_augment(),
    "original": A.rand_augment(2, 10, "original"),
}
MOVES = {
    "flip": A.flip(),
    "crop": A.reflect_crop(4),
    "cutout": A.cutout(3),
}
SIZES = {"imagenet": A.imagenet(6)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((9, 7), jnp.uint8), ((9, 7, 4), jnp.uint8), ((9, 7, 1), jnp.float32), ((9, 7, 3), jnp.bfloat16)],
)
def test_shapes_and_types_are_kept(shape, dtype):
    example = {"image": jax.ShapeDtypeStruct(shape, dtype), "label": jax.ShapeDtypeStruct((), jnp.int32)}
    for name, stage in (MOVES | SIZES | (TONES if dtype == jnp.uint8 else {})).items():
        made = jax.eval_shape(stage, example, KEYS[0])
        expected = (6, 6, *shape[2:]) if name in SIZES else shape
        assert (made["image"].shape, made["image"].dtype) == (expected, dtype), name
        assert made["label"] == example["label"]


@pytest.mark.parametrize("stage", [A.flip(0.0), A.rand_augment(0)])
def test_settings_that_change_nothing_give_back_the_bits(stage):
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    made = compose(stage)({"image": image}, KEYS[3])["image"]
    np.testing.assert_array_equal(made, image)


CHAIN = {
    "pixels": compose(MOVES["crop"], MOVES["cutout"]),
    "policy": compose(MOVES["flip"], TONES["rand"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pixels", "policy", *MOVES, *TONES, *SIZES])
def test_the_bits_do_not_depend_on_how_the_batch_is_cut(name):
    stage = (CHAIN | MOVES | TONES | SIZES)[name]
    # Larger than the farthest shift, 32 pixels: one that moves all of an image out leaves two alike
    images = np.random.default_rng(1).integers(0, 256, (8, 40, 37, 3)).astype(np.uint8)
    run = jax.jit(jax.vmap(lambda image, key: stage({"image": image}, key)["image"]))
    whole = np.asarray(run(images, KEYS))
    parts = [np.asarray(run(images[i : i + 4], KEYS[i : i + 4])) for i in (0, 4)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert len({x.tobytes() for x in whole}) == 8
    np.testing.assert_array_equal(run(images, KEYS), whole)  # the same key, the same bits
