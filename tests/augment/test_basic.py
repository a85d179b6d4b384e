"""Augmentation against plain NumPy, under jit, vmap and shard_map, and with nothing to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from chipwise.augment import cifar, compose, cutout, flip, reflect_crop
from chipwise.base.errors import DataError, RecipeError
from refusals import refused

KEYS = jax.random.split(jax.random.key(0), 64)
SHAPES = [(9, 7), (9, 7, 3), *(pytest.param(s, marks=pytest.mark.slow) for s in ((9, 7, 1), (8, 8, 3)))]
DTYPES = [
    jnp.uint8,
    jnp.bfloat16,
    *(pytest.param(t, marks=pytest.mark.slow) for t in (jnp.float32, jnp.float16)),
]


def image(shape, dtype=jnp.uint8, n=None):
    rng = np.random.default_rng(0)
    shape = shape if n is None else (n, *shape)
    return jnp.asarray(rng.integers(0, 256, shape)).astype(dtype)


def over(stage, images, keys=KEYS):
    out = jax.jit(jax.vmap(stage))({"image": images, "label": jnp.arange(len(images))}, keys[: len(images)])
    assert out["label"].tolist() == list(range(len(images)))
    assert out["image"].dtype == images.dtype and out["image"].shape == images.shape
    return np.asarray(out["image"])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.drawn(share=0.25)
def test_crop_is_numpy_s_reflect_and_reaches_every_offset(shape, dtype):
    one, pad = np.asarray(image(shape, dtype)), 2
    edges = [(pad, pad)] * 2 + [(0, 0)] * (one.ndim - 2)
    padded = np.pad(one, edges, mode="reflect")
    windows = {
        (y, x): padded[y : y + shape[0], x : x + shape[1]].tobytes() for y in range(5) for x in range(5)
    }
    keys = jax.random.split(jax.random.key(1), 400)
    got = over(reflect_crop(pad), jnp.broadcast_to(jnp.asarray(one), (400, *shape)), keys)
    where = {content: place for place, content in windows.items()}
    assert {where[g.tobytes()] for g in got} == set(windows)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.drawn(share=0.25)
def test_flip_mirrors_about_half(shape, dtype):
    images = image(shape, dtype, 64)
    got, given = over(flip(), images), np.asarray(images)
    mirrored = [np.array_equal(a, b[:, ::-1]) for a, b in zip(got, given, strict=True)]
    kept = [np.array_equal(a, b) for a, b in zip(got, given, strict=True)]
    assert all(a != b for a, b in zip(mirrored, kept, strict=True)) and 16 < sum(mirrored) < 48
    np.testing.assert_array_equal(over(flip(1.0), images), given[:, :, ::-1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.drawn(share=0.25)
def test_cutout_paints_one_whole_square(shape, dtype, size):
    images = image(shape, dtype, 64)
    fill = 3.0 if len(shape) == 2 else tuple(3.0 + i for i in range(shape[2]))
    got, given = over(cutout(size, fill), images), np.asarray(images)
    color = np.asarray(fill, dtype)
    corners = set()
    for a, b in zip(got, given, strict=True):
        matches = [
            (y, x)
            for y in range(shape[0] - size + 1)
            for x in range(shape[1] - size + 1)
            if (a[y : y + size, x : x + size] == color).all()
        ]
        for y, x in matches:
            c = b.copy()
            c[y : y + size, x : x + size] = color
            if np.array_equal(a, c):
                corners.add((y, x))
                break
        else:
            raise AssertionError("no such square")
    rows, columns = shape[0] - size + 1, shape[1] - size + 1
    assert {y for y, _ in corners} <= set(range(rows)) and len(corners) > min(64, rows * columns) / 3


def test_a_crop_mirrors_half_of_its_windows_by_the_same_look_up():
    images = image((9, 7, 3), n=64)
    np.testing.assert_array_equal(over(reflect_crop(0, flip=1.0), images), np.asarray(images)[:, :, ::-1])
    plain, both = over(reflect_crop(2), images), over(reflect_crop(2, flip=0.5), images)
    mirrored = [np.array_equal(a, b[:, ::-1]) for a, b in zip(both, plain, strict=True)]
    kept = [np.array_equal(a, b) for a, b in zip(both, plain, strict=True)]
    assert all(a != b for a, b in zip(mirrored, kept, strict=True)) and 16 < sum(mirrored) < 48


@pytest.mark.parametrize("dtype", DTYPES)
def test_identity_settings_give_back_the_bits(dtype):
    images = image((9, 7, 3), dtype, 8)
    if dtype != jnp.uint8:
        images = images.at[0, 0, 0].set(jnp.asarray([jnp.nan, -0.0, jnp.inf], dtype))
    for stage in (reflect_crop(0), flip(0.0), cutout(0), compose(), compose(reflect_crop(0), flip(0.0))):
        assert over(stage, images).tobytes() == np.asarray(images).tobytes()


def test_fills_of_whole_numbers_are_rounded_and_must_fit():
    images = image((8, 8, 3), n=2)
    assert (over(cutout(8, (125.31, 122.95, 113.87)), images) == [125, 123, 114]).all()
    assert (over(cutout(8, (33.318,)), image((8, 8), n=2)) == 33).all()
    assert over(cutout(8, 0.25), image((8, 8), jnp.float32, 2)).max() == 0.25
    for fill in (256, -1, float("nan")):
        with refused(DataError, "augment-expects"):
            over(cutout(8, fill), images)
    with refused(DataError, "augment-expects"):
        over(cutout(8, (1.0, 2.0)), images)
    with refused(RecipeError, "wrong-kind", what="fill"):
        cutout(8, ((1.0, 2.0, 3.0),))


def test_compose_folds_the_key_so_that_stages_differ():
    images = image((32, 32, 3), n=16)
    a, b = flip(), cutout(8)
    got = over(compose(a, b), images)

    @jax.jit
    def one(image, key):
        return b(a({"image": image}, jax.random.fold_in(key, 0)), jax.random.fold_in(key, 1))["image"]

    for i in range(16):
        np.testing.assert_array_equal(got[i], one(images[i], KEYS[i]))
    twice = over(compose(flip(), flip()), images)
    assert any(not np.array_equal(t, i) for t, i in zip(twice, np.asarray(images), strict=True))


@pytest.mark.parametrize("n", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 9))])
def test_an_example_s_result_does_not_depend_on_the_batch(n):
    images, stage = image((32, 32, 3), n=16), cifar((125.31, 122.95, 113.87))
    whole = over(stage, images)
    np.testing.assert_array_equal(over(stage, images[:n]), whole[:n])
    np.testing.assert_array_equal(jax.jit(stage)({"image": images[n]}, KEYS[n])["image"], whole[n])


@pytest.mark.parametrize("devices", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_the_result_does_not_depend_on_the_devices(devices):
    images, stage = image((32, 32, 3), n=16), cifar((125.31, 122.95, 113.87))
    mesh = Mesh(np.array(jax.devices()[:devices]), ("d",))
    split = jax.jit(jax.shard_map(jax.vmap(stage), mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    got = split({"image": images, "label": jnp.arange(16)}, KEYS[:16])
    np.testing.assert_array_equal(got["image"], over(stage, images))


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: reflect_crop(-1), "augment-expects"),
        (lambda: flip(1.5), "augment-expects"),
        (lambda: cutout(-1), "augment-expects"),
        (lambda: over(reflect_crop(7), image((9, 7), n=1)), "augment-expects"),
        (lambda: over(cutout(8), image((9, 7), n=1)), "augment-expects"),
        (lambda: over(flip(), image((9,), n=1)), "augment-expects"),
        (lambda: flip()({"x": image((9, 7))}, KEYS[0]), "augment-expects"),
    ],
)
def test_what_is_refused(call, code):
    with refused(DataError, code):
        call()
