"""The mirror that alternates: by seed, epoch and example, wherever an example is computed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.data.augment import alternating_flip, compose, flip, reflect_crop
from chipwise.engine.replica import augmented
from refusals import refused

IMAGES = np.random.default_rng(0).integers(0, 256, (64, 4, 6, 3), np.uint8)


def mirrored(epoch, seed=0, examples=range(64), augment=None):
    """Of each example, whether it is mirrored in an epoch."""
    rows = jnp.asarray(list(examples), jnp.int32)
    batch = {"image": jnp.asarray(IMAGES[np.asarray(rows)]), "label": jnp.arange(len(rows), dtype=jnp.int32)}
    augment = alternating_flip() if augment is None else augment
    after = augmented(augment, batch, seed, jnp.full(len(rows), epoch, jnp.int32), rows)
    assert set(after) == {"image", "label"}
    same = np.asarray(after["image"] == batch["image"]).all((1, 2, 3))
    turned = np.asarray(after["image"] == batch["image"][:, :, ::-1]).all((1, 2, 3))
    assert (same ^ turned).all()
    return turned


def test_every_second_epoch_is_the_other_way():
    first, second, third = (mirrored(epoch) for epoch in range(3))
    assert 16 < first.sum() < 48
    np.testing.assert_array_equal(second, ~first)
    np.testing.assert_array_equal(third, first)


def test_an_example_is_drawn_by_itself_and_by_the_seed():
    np.testing.assert_array_equal(mirrored(0, examples=range(40, 50)), mirrored(0)[40:50])
    assert (mirrored(0, seed=1) != mirrored(0)).any()


def test_a_batch_may_begin_in_one_epoch_and_end_in_the_next():
    rows = jnp.arange(8, dtype=jnp.int32)
    epochs = jnp.asarray([4] * 3 + [5] * 5, jnp.int32)
    after = augmented(alternating_flip(), {"image": jnp.asarray(IMAGES[:8])}, 0, epochs, rows)
    expected = np.where(np.arange(8) < 3, mirrored(4)[:8], mirrored(5)[:8])
    turned = np.asarray(after["image"] == IMAGES[:8, :, ::-1]).all((1, 2, 3))
    np.testing.assert_array_equal(turned, expected)


def test_compose_hands_the_epoch_on():
    both = compose(reflect_crop(0), compose(alternating_flip()))
    np.testing.assert_array_equal(mirrored(1, augment=both), mirrored(1))
    assert (mirrored(0, augment=compose(flip(0.0))) == False).all()  # noqa: E712


def test_what_hides_it_from_the_step_is_refused():
    hidden = alternating_flip()
    with refused(cw.errors.DataError, "augment-expects"):
        mirrored(0, augment=lambda example, key: hidden(example, key))


@pytest.mark.parametrize("replicas", [1, 2])
def test_it_trains(replicas):
    """The columns that it reads reach no loss."""
    import tasks
    from chipwise.engine.session import Session

    def loss(params, state, batch, key, train):
        assert not [name for name in batch if name.startswith("_")]
        flat = batch["image"].astype(jnp.float32).mean((1, 2))
        return {"loss": cw.Sum.of((flat @ params["w"]) ** 2)}, state

    source = cw.Arrays(image=IMAGES, label=np.zeros(64, np.int32))
    task = cw.Task(
        init=lambda key: ({"w": jnp.ones(3)}, {}), loss=loss, train=source, augment=alternating_flip()
    )
    recipe = dataclasses.replace(tasks.recipe(), task=task, batch=16, replicas=replicas, duration="2st")
    with Session(recipe, cw.On(devices=1)) as session:
        session.begin()
        session.advance(2)
        assert np.isfinite(np.asarray(jax.tree.leaves(session.snapshot().params)[0])).all()
