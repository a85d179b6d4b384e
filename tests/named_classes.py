"""Pairs of lists of classes, data of them, and a model that is right about each class of its training.

An accuracy of 1 says that labels mean the same to the data and the model.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.base.errors import DataError
from chipwise.data import Renamed
from chipwise.data.class_names import names_of
from refusals import refused

THINGS = ("ant", "bee", "cat", "dog", "eel")
PAIRS = {
    # of the training, of the evaluation, and what the evaluation has that training lacks
    "same": ("ant bee cat", "ant bee cat", ""),
    "subset": ("ant bee cat", "bee cat", ""),
    "one": ("ant bee cat", "cat", ""),
    "permuted": ("ant bee cat", "cat ant bee", ""),
    "permuted subset": ("ant bee cat dog", "dog bee", ""),
    "superset": ("ant bee", "ant bee cat", "cat"),
    "superset before": ("bee cat", "ant bee cat", "ant"),
    "disjoint": ("ant bee", "cat dog", "cat dog"),
    "overlapping": ("ant bee dog", "bee cat", "cat"),
    "renamed": ("ant bee cat", "ant bee Cat", "Cat"),
    "evaluation without names": ("ant bee cat", "", ""),
    "training without names": ("", "ant bee cat", ""),
}
"""A side without names counts as THINGS does."""
every_pair = pytest.mark.parametrize(("known", "own", "missing"), PAIRS.values(), ids=PAIRS)
most_slow = pytest.mark.parametrize(
    ("known", "own", "missing"),
    [
        pytest.param(
            *pair, id=name, marks=[] if name in ("permuted subset", "superset") else pytest.mark.slow
        )
        for name, pair in PAIRS.items()
    ],
)
"""As `every_pair`, for tests that take a second a pair."""
ONE = cw.On(devices=1)


def columns(names, n=12):
    """Examples of the classes `names`, numbered as there."""
    label = np.arange(n) % len(names)
    things = np.eye(len(THINGS), dtype=np.float32)
    x = things[[THINGS.index(names[i].lower()) for i in label]]
    return {"x": x, "label": label.astype(np.int32)}


def source(names, **more):
    """Arrays of the classes `names`, which state them. Without names, arrays of some THINGS."""
    arrays = cw.Arrays(**columns(names or THINGS[:3], **more))
    return Renamed(arrays, names) if names else arrays


def recipe(train, evaluation=None):
    """A model that knows the classes of `train`, as it counts them."""
    names = names_of(train) or THINGS[:3]
    knows = np.stack([np.asarray([name == thing for thing in THINGS]) for name in names], 1)

    def logits(params, batch):
        return batch["x"] @ params["w"]

    def loss(params, state, batch, key, is_training):
        made = logits(params, batch)
        right = cw.losses.correct(made, batch["label"])
        error = cw.losses.softmax_cross_entropy(made, batch["label"])
        return {"loss": cw.Sum.of(error), "accuracy": cw.Sum.of(right)}, state

    task = cw.Task(
        init=lambda key: ({"w": jnp.asarray(20 * knows, jnp.float32)}, {}),
        loss=loss,
        train=train,
        eval=evaluation,
        classes=len(names),
        predict=lambda params, state, batch: logits(params, batch),
    )
    return cw.Recipe(task=task, batch=8, replicas=2, duration="1st", optimizer=cw.sgd(lr=1e-6))


def lacking(missing):
    """Asserts that the classes `missing` are refused."""
    return refused(DataError, "classes-unjoined", classes=missing)


def parts(known, own, missing):
    return tuple(known.split()), tuple(own.split()), missing.split()
