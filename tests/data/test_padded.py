"""Examples of different lengths: one shape, a mask, and a result that the padding does not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.base.errors import DataError, RecipeError
from chipwise.data.cached import constant
from refusals import refused

pytestmark = pytest.mark.as_users_compile

LENGTH = 4
TEXTS = [
    {"token": np.arange(1, n + 1, dtype=np.int32), "label": np.int32(n % 2)} for n in (3, 4, 5, 1, 2, 4, 0, 6)
]


def test_lengths_around_the_one_that_all_get():
    source = cw.data.Padded(TEXTS, LENGTH)
    for n, token, seen in ((0, [1, 2, 3, 9], 3), (1, [1, 2, 3, 4], 4), (2, [1, 2, 3, 4], 4), (6, [9] * 4, 0)):
        example = cw.data.Padded(TEXTS, LENGTH, value=9)[n]
        assert example["token"].tolist() == token and example["seen"].tolist() == [i < seen for i in range(4)]
    assert {name: (s.shape, str(s.dtype)) for name, s in source.spec.items()} == {
        "token": ((4,), "int32"), "label": ((), "int32"), "seen": ((4,), "bool"),
    }  # fmt: skip
    assert cw.data.take(source, np.arange(8))["token"].shape == (8, LENGTH) and constant(source)
    assert not constant(cw.data.Padded(Drawing(), LENGTH))


class Drawing:
    """A data set with code of its own."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return {"token": np.arange(np.random.randint(1, 5))}


@pytest.mark.slow
def test_a_masked_loss_does_not_depend_on_the_padding():
    def loss(params, state, batch, key, train):
        values = jnp.where(batch["seen"], params["w"][batch["token"]], 0.0).sum(axis=1)
        count = jnp.maximum(batch["seen"].sum(axis=1), 1).astype(jnp.float32)
        return {"loss": cw.Sum.of((values / count - batch["label"].astype(jnp.float32)) ** 2)}, state

    found = []
    for value in (0, 7):
        data = cw.data.Padded(TEXTS, LENGTH, value=value)
        task = cw.Task(init=lambda key: ({"w": jax.random.normal(key, (8,))}, {}), loss=loss, train=data)
        recipe = cw.Recipe(task=task, batch=4, replicas=1, duration="3ep", optimizer=cw.sgd(lr=0.1))
        found.append(cw.fit(recipe, on=cw.On(devices=1), progress="none").fingerprint)
    assert found[0] == found[1]


def test_what_cannot_be_padded_is_refused():
    with refused(RecipeError, "padded-length", length=0):
        cw.data.Padded(TEXTS, 0)
    several = cw.data.Padded([{"token": np.zeros(3), "image": np.zeros((5, 5))}], LENGTH)
    with refused(DataError, "padded-lengths", example=0):
        several[0]
    with refused(RecipeError, "padded-column"):
        cw.data.Padded(TEXTS, LENGTH, columns=["tokens"])[0]
    assert cw.data.Padded(several.source, LENGTH, columns=["token"])[0]["image"].shape == (5, 5)
