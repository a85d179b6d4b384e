"""A mask moves with its image, and no column of the image's size is left behind in silence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.augment import compose, cutout, flip, rand_augment, reflect_crop, resized_crop
from chipwise.base.errors import DataError
from refusals import refused

SIDE, N = 24, 64


def example(side=SIDE):
    """Dark with a bright disc, and the mask of the disc; where each pixel is, as a mask of another type."""
    y, x = np.mgrid[:side, :side]
    disc = (y - side * 0.4) ** 2 + (x - side * 0.6) ** 2 < (side / 4) ** 2
    image = np.where(disc[..., None], np.uint8([230, 200, 240]), np.uint8([20, 30, 10]))
    return {"image": image, "mask": disc.astype(np.int32), "label": np.int32(3)}


def changed(augment, given=None, n=N):
    given = example() if given is None else given
    keys = jax.random.split(jax.random.key(5), n)
    return jax.device_get(jax.jit(jax.vmap(augment, (None, 0)))(given, keys))


MOVES = {
    "flip": flip(),
    "reflect_crop": reflect_crop(4, flip=0.5),
    "resized_crop": resized_crop(SIDE),
    "rand_augment": rand_augment(2, 9, fill=0),
    "all": compose(flip(), resized_crop(16, area=(0.3, 1.0)), rand_augment(1, 15, fill=0), cutout(4)),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in ("rand_augment", "all") else ()) for n in MOVES],
)
def test_the_mask_stays_on_what_it_marks(name):
    only_moves = compose(MOVES[name], masks="mask")
    got = changed(only_moves)
    assert got["mask"].dtype == np.int32 and got["mask"].shape == got["image"].shape[:3]
    assert set(np.unique(got["mask"])) == {0, 1} and (got["label"] == 3).all()
    # Policies also change colours, so a disc is what differs from the corner; edges are blended
    bright = got["image"].astype(int).max(axis=3) > 120 if "rand" not in name and name != "all" else None
    if bright is not None:
        both, either = (bright & (got["mask"] > 0)).sum(), (bright | (got["mask"] > 0)).sum()
        assert both / either > 0.93
    assert (got["mask"] != example()["mask"][: got["mask"].shape[1], : got["mask"].shape[2]]).any()


@pytest.mark.slow
@pytest.mark.parametrize("space", ["standard", "original"])
def test_a_policy_moves_a_mask_as_it_moves_pixels(space):
    """Pixels that know where they were, in an image whose tones survive: both are read at the same places."""
    given = example()
    got = changed(compose(rand_augment(1, 9, space, fill=0, mask_fill=7), masks=["mask"]), given)
    same = (got["mask"] == given["mask"]).all(axis=(1, 2))
    outside = got["mask"] == 7
    assert 5 < same.sum() < N and outside.any()  # some drew a move
    for image, mask in zip(got["image"], got["mask"], strict=True):
        inside = mask != 7
        marked, rest = image[(mask == 1)], image[inside & (mask == 0)]
        if len(marked) and len(rest) and not (image == image[0, 0]).all():
            spread = np.abs(np.median(marked, axis=0) - np.median(rest, axis=0)).max()
            close = np.abs(marked - np.median(marked, axis=0)).max(axis=1) < max(spread / 2, 1)
            assert close.mean() > 0.75


@pytest.mark.as_users_compile
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("reflect_crop", "all") else pytest.mark.slow) for name in MOVES],
)
def test_bits_of_an_image_do_not_depend_on_a_mask(name):
    image = {"image": example()["image"]}
    with_mask = changed(compose(MOVES[name], masks="mask"))["image"]
    np.testing.assert_array_equal(with_mask, changed(compose(MOVES[name]), image)["image"])


@pytest.mark.slow
@pytest.mark.parametrize("augment", [MOVES[name] for name in ("flip", "reflect_crop", "rand_augment")])
def test_a_column_of_the_image_s_size_needs_a_role(augment):
    facts = {"column": "mask", "shape": [SIDE, SIDE]}
    with refused(DataError, "column-without-role", **facts):
        changed(augment)
    with refused(DataError, "column-without-role", **facts):
        changed(compose(cutout(4), augment))
    fixed = changed(compose(augment, fixed=["mask"]))
    assert (fixed["mask"] == example()["mask"]).all()


def test_what_moves_no_pixel_needs_no_role():
    for augment in (cutout(4), compose(cutout(4), cutout(2))):
        assert (changed(augment)["mask"] == example()["mask"]).all()


def test_a_mask_that_is_missing_or_of_another_size():
    with refused(DataError, "mask-size", column="depth", shape="missing", sides=[SIDE, SIDE]):
        changed(compose(flip(), masks=["mask", "depth"]))
    with refused(DataError, "mask-size", column="mask", shape=[SIDE, SIDE + 1]):
        changed(compose(flip(), masks=["mask"]), {**example(), "mask": np.zeros((SIDE, SIDE + 1), np.int32)})


@pytest.mark.slow
def test_a_segmentation_learns_with_its_masks_moved():
    """What goes wrong if only the image moves: pixels and classes no longer belong together."""
    rng = np.random.default_rng(0)
    mask = np.zeros((32, 8, 8), np.int32)
    mask[:, :, :4] = 1
    image = (mask * 200 + rng.integers(0, 50, mask.shape)).astype(np.uint8)

    def loss(params, state, batch, key, train):
        x, mask = batch["image"].reshape(-1, 1).astype(jnp.float32) / 255, batch["mask"].reshape(-1)
        logits = x @ params["w"] + params["b"]
        error = cw.losses.softmax_cross_entropy(logits, mask)
        return {"loss": cw.Sum.of(error), "right": cw.metrics.accuracy(logits, mask)}, state

    zeros = {"w": jnp.zeros((1, 2)), "b": jnp.zeros((1, 2))}
    task = cw.Task(init=lambda key: (zeros, {}), loss=loss, train=cw.Arrays(image=image, mask=mask),
                   eval=cw.Arrays(image=image, mask=mask), augment=compose(flip(), masks="mask"))  # fmt: skip
    recipe = cw.Recipe(task=task, batch=8, replicas=1, duration="30ep", optimizer=cw.sgd(lr=1.0))
    result = cw.fit(recipe, on=cw.On(devices=1), progress="none")
    assert result.metrics["eval/right"] > 0.99
