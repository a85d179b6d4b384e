"""What is frozen: patterns, the last that fits decides; and batch norm that keeps and uses its statistics."""

import dataclasses

import jax
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.models.conv_layers import ConvBN
from chipwise.recipe.freezing import is_frozen
from chipwise.step.freeze import split
from refusals import refused


@pytest.mark.parametrize(
    ("path", "patterns", "frozen"),
    [
        ("a/b", (), False),
        ("a/b", ("a/*",), True),
        ("a/b", ("*", "!a/*"), False),
        ("a/b", ("!a/*", "*"), True),
        ("a/b", ("*", "!a/*", "a/b"), True),
        ("a/norm/mean", cw.recipe.freeze("a/*"), True),
        ("a/norm/scale", cw.recipe.freeze("a/*", batch_norm="train"), True),
        ("a/norm/running_var", cw.recipe.freeze("a/*", batch_norm="train"), False),
        ("batch_stats/a/norm/mean", ("a/*",), True),
    ],
)
def test_the_last_pattern_that_fits_decides(path, patterns, frozen):
    assert is_frozen(path, patterns) == frozen


def test_mistakes_are_one_line():
    with refused(cw.errors.RecipeError, "frozen-not-patterns"):
        cw.recipe.freeze()
    with refused(cw.errors.RecipeError, "freeze-batch-norm", name="evaluate", near="eval"):
        cw.recipe.freeze("a/*", batch_norm="evaluate")
    with refused(cw.errors.RecipeError, "frozen-matches-nothing", pattern="meen", near="mean"):
        split({"w": 1}, ("meen",), {"mean": 2})
    with refused(cw.errors.RecipeError, "frozen-matches-nothing", pattern="!v"):
        split({"w": 1, "b": 1}, ("w", "!v"), {"mean": 2})
    assert split({"w": 1, "b": 1}, cw.recipe.freeze("w", batch_norm="train"))[1] == {"w": 1, "b": None}


@pytest.mark.slow
def test_statistics_alone_may_be_frozen():
    """Nothing else is; parameters lie as they do without."""
    assert split({"w": 1}, ("mean",), {"mean": 2}) == ({"w": 1}, None)
    recipe = tasks.recipe(duration="3st", frozen=("mean", "var"))
    result = cw.fit(recipe, on=cw.On(devices=1), progress="none", eval_every=None)
    first = jax.tree.map(np.asarray, tasks.init(jax.random.key(0))[1])
    for name in ("mean", "var"):
        np.testing.assert_array_equal(result.state[name], first[name])
    assert result.state["calls"] == 3


def recipe(**changes):
    """A frozen convolution with batch norm below a head."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.body = ConvBN(1, 4, momentum=0.9, rngs=rngs)
            self.head = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(self.body(x).mean((1, 2)))

    rng = np.random.default_rng(0)
    data = cw.Arrays(
        image=rng.normal(size=(48, 4, 4, 1)).astype(np.float32), label=rng.integers(0, 3, 48).astype(np.int32)
    )
    task = cw.nnx.task(lambda rngs: Net(rngs), cw.losses.softmax_cross_entropy, train=data, eval=data)
    settings = dict(task=task, batch=16, replicas=8, duration="4st", optimizer=cw.sgd(lr=0.1), seed=3)
    return cw.Recipe(**settings | changes)


@pytest.mark.slow
def test_a_frozen_body_gives_the_same_features_all_along():
    """So training its head is training a head alone on those features."""
    held = recipe(frozen=cw.recipe.freeze("body/*"), replicas=1)
    result = cw.fit(held, on=cw.On(devices=1), progress="none", eval_every=None)
    _, state = held.task.init(jax.random.key(0))
    assert set(result.state["body"]["norm"]) == {"mean", "var"}
    np.testing.assert_array_equal(result.state["body"]["norm"]["var"], state["body"]["norm"]["var"])
    moving = recipe(frozen=cw.recipe.freeze("body/*", batch_norm="train"), replicas=1)
    other = cw.fit(moving, on=cw.On(devices=1), progress="none", eval_every=None)
    assert not np.array_equal(other.state["body"]["norm"]["var"], state["body"]["norm"]["var"])
    np.testing.assert_array_equal(other.params["body"]["norm"]["scale"], np.ones(4))
    assert not np.array_equal(other.params["head"]["kernel"], result.params["head"]["kernel"])


@pytest.mark.slow
@pytest.mark.parametrize("batch_norm", ["eval", "train"])
def test_the_same_bits_on_1_2_4_and_8_devices(batch_norm):
    held = recipe(frozen=cw.recipe.freeze("body/*", batch_norm=batch_norm))
    prints = {
        cw.fit(held, on=cw.On(devices=n), progress="none", eval_every=None).fingerprint for n in (1, 2, 4, 8)
    }
    assert len(prints) == 1
    again = cw.fit(dataclasses.replace(held, blocks=2), on=cw.On(devices=2), progress="none", eval_every=None)
    assert np.isfinite(again.metrics["eval/loss"])
