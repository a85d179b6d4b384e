"""`chipwise check --images`: a picture with the very pixels that training gets."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import chipwise as cw
from chipwise.cli.gallery import epoch, gallery
from chipwise.engine import replica
from chipwise.words.facts import fact

RECIPE = '''
import numpy as np

import chipwise as cw
import tasks

IMAGES = np.random.default_rng(0).integers(0, 256, (40, 10, 12, 3)).astype(np.uint8)


def recipe(mix: bool = False, dtype: str = "uint8", column: str = "image", channels: int = 3):
    """Images of 10 × 12 pixels."""
    data = cw.Arrays(**{column: IMAGES[..., :channels].astype(dtype), "label": np.arange(40) % 10})
    task = cw.Task(
        init=tasks.init,
        loss=tasks.plain_loss,
        train=data,
        augment=cw.augment.compose(cw.augment.flip(), cw.augment.rand_augment()),
        mix=cw.augment.cutmix(10) if mix else None,
    )
    return cw.Recipe(name="pictures", task=task, batch=8, duration="3ep", optimizer=cw.sgd(lr=0.1))
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp("show") / "pictures.py"
    file.write_text(RECIPE)
    return f"{file}:recipe"


def test_a_grid_of_examples_and_epochs(chipwise, file, tmp_path):
    out = tmp_path / "new" / "made.png"
    said = chipwise("check", file, "--examples", 3, "--epochs", 2, "--images", out)
    assert said.code == 0 and said.out.endswith(f"{fact('written', path=out)}\n"), said.err
    page = np.asarray(Image.open(out))
    stored = cw.load(file).task.train[0]["image"]
    tile = np.repeat(np.repeat(stored, 8, axis=0), 8, axis=1)  # 12 pixels to at least 96
    np.testing.assert_array_equal(page[18 : 18 + 80, 4 : 4 + 96], tile)
    assert page.shape[1] >= 3 * 96 and page.shape[0] >= 3 * 80


@pytest.mark.slow
def test_copies_are_what_training_computes(file):
    """Compared inside of a replica: the loss hands out the batch that it was given."""
    recipe = cw.load(file, ["mix=true"])
    indices, got = np.arange(8, dtype=np.int32), []

    def loss(params, state, batch, key, train):
        got.append(batch)
        return {"loss": cw.Sum.of(jnp.zeros(8))}, {
            "image": batch["image"].astype(jnp.float32),
            "label": batch["label"],
        }

    task = dataclasses.replace(recipe.task, loss=loss)
    stored = recipe.task.train.take(indices)
    state = {"image": jnp.zeros(stored["image"].shape), "label": jnp.zeros((8, 10))}
    for number, step in ((0, 0), (2, 10)):
        made = jax.jit(
            lambda step, epochs: replica.contribution(
                dataclasses.replace(recipe, task=task),
                ({}, None, state, step, None),
                stored,
                indices,
                epochs,
                jnp.int32(0),
                jnp.uint32(recipe.seed),
            )
        )(jnp.int32(step), jnp.full(8, number, jnp.int32))
        image, label = made["state"]
        shown = epoch(recipe, stored, indices, number)
        np.testing.assert_array_equal(shown["image"], image)
        np.testing.assert_allclose(shown["label"], label, atol=1e-6)
    assert set(got[0]) == {"image", "label"}


def test_floats_and_gray_are_drawn_and_examples_are_not_repeated(file):
    for settings in (["dtype=float32"], ["channels=1"], ["channels=2"]):
        page = np.asarray(gallery(cw.load(file, settings), examples=2, epochs=0))
        assert len(np.unique(page)) > 100
    rows = gallery(cw.load(file), examples=1000, epochs=0).height // 98
    assert rows == 40


@pytest.mark.parametrize(
    ("more", "code", "error"),
    [
        (["--set", "column=picture", "--images", "made.png"], 3, "show-no-images"),
        (["--images", "made.txt"], 2, "picture-suffix"),
        (["--images", "/dev/null/made.png"], 3, "picture-unwritable"),
    ],
)
def test_what_is_refused(chipwise, file, more, code, error):
    assert chipwise("check", file, "--epochs", 1, *more).refused(code, error)
