"""What `check` doubts, and that it keeps quiet about what works."""

import functools

import optax
import pytest

import chipwise as cw
import tasks
from chipwise.recipe.settings import apply
from chipwise.recipes import BUILT_IN

PLAIN = tasks.task(loss=tasks.plain_loss, init=lambda key: (tasks.init(key)[0], {}))


def plain(**changes):
    usual = {"task": PLAIN, "batch": 64, "duration": "40ep", "optimizer": cw.sgd(lr=cw.one_cycle(0.1))}
    return tasks.recipe(**{**usual, **changes})


@functools.cache
def built_in(name):
    return cw.load(name)


@pytest.mark.parametrize("name", ["digits", "mnist", "cifar10-davidnet", "cifar10-resnet32"])
@pytest.mark.parametrize("on", [None, "v3-8"])
def test_a_built_in_recipe_is_as_it_should_be(name, on):
    recipe = built_in(name)
    expected = ["replicas=1 on the 8 devices"] if (name, on) == ("cifar10-resnet32", "v3-8") else []
    assert [str(f)[:27] for f in cw.check(recipe, on)] == expected
    assert recipe.validated.source


def test_every_built_in_recipe_says_where_it_worked():
    small = {"vit-s16": ["depth=1"], "gpt2-124m": ["depth=1"], "imagenet-resnet50": ["blocks=1,1,1,1"]}
    for name in BUILT_IN:
        recipe = cw.load(name, small.get(name, ()))
        point = recipe.validated.point
        assert (point.batch, point.optimizer) == (recipe.batch, recipe.optimizer) and point.validated is None


@pytest.mark.parametrize(
    "settings, good",
    [
        ({"replicas": "1", "weight_decay": "1.25e-4"}, False),  # one GPU, batch 512: 92 %
        ({"replicas": "1", "weight_decay": "5e-4"}, True),  # 94 %
        ({"replicas": "1", "weight_decay": "1.25e-4", "batch": "128"}, True),
        ({"replicas": "1", "weight_decay": "1.25e-4", "batch": "64"}, True),
        ({"weight_decay": "1e-3"}, True),  # a TPU of 8 cores, 1.25e-4 on each
        ({"weight_decay": "4e-3"}, False),  # 5e-4 on each: too much
    ],
)
def test_the_two_bad_ones_of_six_archived_runs_are_found(settings, good):
    found = cw.check(apply(built_in("cifar10-davidnet"), settings))
    assert len(found) == (not good)
    if found:
        assert found[0].usual == "0.019 to 0.04" and found[0].type == "--set weight_decay=0.0005"
        assert cw.check(apply(built_in("cifar10-davidnet"), settings | {"weight_decay": "0.0005"})) == []


def test_a_transferred_recipe_is_not_doubted():
    for batch, replicas in ((128, 2), (2048, 32)):
        assert cw.check(built_in("cifar10-davidnet").transfer(batch=batch, replicas=replicas)) == []


@pytest.mark.parametrize(
    "changes, given, fix",
    [
        ({"optimizer": cw.sgd(lr=cw.one_cycle(4.0))}, "sgd's peak lr=4", "--set lr=3"),
        ({"optimizer": cw.sgd(lr=0.5)}, "lr=0.5 from the first step, 5 with momentum", "warmup("),
        ({"optimizer": cw.adam(lr=0.3)}, "adam's peak lr=0.3", "--set lr=0.03"),
        ({"batch": 48, "duration": "9st"}, "6 examples a replica", "--set batch=64"),
        ({"task": tasks.task(), "replicas": 8}, "batch norm over 8 examples a replica", "--set replicas=4"),
        ({"task": tasks.task(eval=None, init=PLAIN.init)}, "no evaluation examples", "eval="),
        ({"optimizer": cw.sgd(lr=cw.one_cycle(0.1, warmup="80ep"))}, "never reaches its peak", "duration"),
        ({"batch": 128}, "larger than the 101 training examples", "batch"),
        ({"duration": "0ep", "optimizer": cw.sgd(lr=0.1)}, "0 steps", "--set duration=1ep"),
        (
            {"optimizer": cw.sgd(lr=lambda step: 0.1 * step / 1860)},
            "still rises at the last of 63 steps",
            "one_cycle",
        ),
        (
            {"optimizer": cw.sgd(lr=optax.cosine_decay_schedule(0.1, 200))},
            "of its peak and still",
            "one_cycle",
        ),
        (
            {"optimizer": cw.sgd(lr=optax.cosine_decay_schedule(0.1, 40))},
            "is 0 for the last 23 of",
            "one_cycle",
        ),
        ({"optimizer": cw.sgd(lr=cw.exponential(0.1, 0.5, "5000st"))}, "still falling", "one_cycle"),
        (
            {"optimizer": cw.sgd(lr=optax.cosine_onecycle_schedule(63, 0.1, pct_start=0.01))},
            "starts at its peak",
            "one_cycle",
        ),
    ],
)
def test_each_doubt_on_its_own(changes, given, fix):
    (found,) = cw.check(plain(**changes))
    assert given in found.given and fix in found.type
    line = str(found)
    assert (
        "\n" not in line and line.endswith(".") and "usual:" in line and "because" in line and "Type" in line
    )


def test_a_padded_batch_is_filled_where_there_are_examples_for_it():
    for batch, fix in ((72, 96), (100, 96), (20, 32)):  # of 101 examples
        (found,) = cw.check(plain(batch=batch, replicas=4, duration="400st"))
        assert f"--set batch={fix}" == found.type


def test_near_misses_are_quiet():
    for changes in (
        {"optimizer": cw.sgd(lr=0.2)},
        {"optimizer": cw.adam(lr=0.03)},
        {"optimizer": cw.sgd(lr=cw.warmup(1.0, "5%"))},
        {"optimizer": cw.sgd(lr=optax.cosine_decay_schedule(0.1, 63))},
        {"optimizer": cw.sgd(lr=cw.exponential(0.1, 0.5, "10st"))},
        {"optimizer": cw.from_optax(optax.lion, learning_rate=cw.cosine(1e-4))},
        {"task": tasks.task(), "replicas": 4},
    ):
        assert cw.check(plain(**changes)) == [], changes


def test_a_validated_point_says_what_is_far():
    recipe = plain(
        optimizer=cw.adamw(lr=cw.one_cycle(0.01), weight_decay=0.1),
        validated=cw.Validated(source="seen", forgetting=None),
    )
    assert cw.check(recipe) == []

    def said(**settings):
        return [f.given for f in cw.check(apply(recipe, settings))]

    (rate, product) = said(lr="0.1")
    assert rate == "peak lr=0.1 at batch 64" and product.startswith("peak lr 0.1 × weight_decay 0.1")
    assert said(lr="0.019", weight_decay="0.105") == []  # twice the product, and less than ten times the rate
    assert len(said(weight_decay="0.0")) == 1
    assert said(duration="10ep") == ["10.1 epochs"]
    assert said(duration="20ep") == []


def test_devices_that_would_stand_idle():
    def said(on, **changes):
        return [f.given for f in cw.check(plain(**changes), on)]

    assert said("v3-8") == said("a100:4") == said("t4") == []
    assert said("v3-8", batch=48, replicas=6) == ["replicas=6 on the 8 devices of v3-8"]
    assert said("a100:8", batch=60, replicas=6) == ["replicas=6 on the 8 devices of a100:8"]
    assert said("v3-8", batch=60, replicas=4)[0] == "15 examples a replica"
    assert said("a100", batch=60, replicas=4) == []


def test_errors():
    with pytest.raises(cw.RecipeError, match="not divisible"):
        cw.check(plain(batch=63))
    with pytest.raises(cw.DeviceError, match="v3-8"):
        cw.check(plain(), "v3-7")
