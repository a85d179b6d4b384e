"""What `check` doubts, and that it keeps quiet about what works."""

import dataclasses
import functools
import json

import optax
import pytest

import chipwise as cw
import tasks
from chipwise.recipe.settings import apply
from chipwise.recipes import BUILT_IN
from refusals import refused

PLAIN = tasks.task(loss=tasks.plain_loss, init=lambda key: (tasks.init(key)[0], {}))


def plain(**changes):
    usual = {"task": PLAIN, "batch": 64, "duration": "40ep", "optimizer": cw.sgd(lr=cw.one_cycle(0.1))}
    return tasks.recipe(**{**usual, **changes})


@functools.cache
def built_in(name):
    return cw.load(name)


@pytest.mark.parametrize("name", ["digits", "mnist", "cifar10-davidnet"])
@pytest.mark.parametrize("on", [None, "v3-8"])
def test_a_built_in_recipe_is_as_it_should_be(name, on):
    recipe = built_in(name)
    assert not cw.check(recipe, on)
    assert recipe.validated.source


def test_every_built_in_recipe_says_where_it_worked():
    small = {
        "vit-s16": ["depth=1"],
        "gpt2-124m": ["depth=1"],
        "imagenet-resnet50": ["blocks=1,1,1,1"],
    }
    unmeasured = {"bert-base", "llama-8b"}
    for name in sorted(set(BUILT_IN) - unmeasured):
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
        assert found[0].code == "forgetting-far" and found[0].fact["near"] == 0.0005
        assert (found[0].fact["low"], found[0].fact["high"]) == (0.019, 0.04)
        assert cw.check(apply(built_in("cifar10-davidnet"), settings | {"weight_decay": "0.0005"})) == []


def test_a_transferred_recipe_is_not_doubted():
    for batch, replicas in ((128, 2), (2048, 32)):
        assert (
            cw.check(cw.transfer(built_in("cifar10-davidnet"), batch=batch, replicas=replicas).recipe) == []
        )


@pytest.mark.parametrize(
    "changes, code, facts",
    [
        (
            {"optimizer": cw.sgd(lr=cw.one_cycle(4.0))},
            "rate-unusual",
            {"optimizer": "sgd", "lr": 4.0, "near": 3.0},
        ),
        ({"optimizer": cw.sgd(lr=0.5)}, "rate-sudden", {"lr": 0.5, "with_momentum": 5.0}),
        (
            {"optimizer": cw.adam(lr=0.3)},
            "rate-unusual",
            {"optimizer": "adam", "lr": 0.3, "near": 0.03},
        ),
        ({"task": tasks.task(), "replicas": 8}, "batch-norm-few", {"group": 8, "near": 4}),
        ({"task": tasks.task(eval=None, init=PLAIN.init)}, "no-evaluation", {}),
        (
            {"optimizer": cw.sgd(lr=cw.one_cycle(0.1, warmup="80ep"))},
            "peak-never-reached",
            {"setting": "lr", "ramp": "80ep", "total": 63},
        ),
        ({"ema": 0.99}, "ema-long", {"steps": 63, "left": 0.99**63, "near": 0.9}),
        ({"batch": 128}, "batch-above-examples", {"batch": 128, "examples": 101}),
        ({"duration": "0ep", "optimizer": cw.sgd(lr=0.1)}, "duration-zero", {"duration": "0ep"}),
        ({"optimizer": cw.sgd(lr=lambda step: 0.1 * step / 1860)}, "rate-still-rising", {"steps": 63}),
        ({"optimizer": cw.sgd(lr=optax.cosine_decay_schedule(0.1, 200))}, "rate-ends-high", {}),
        (
            {"optimizer": cw.sgd(lr=optax.cosine_decay_schedule(0.1, 40))},
            "rate-idle",
            {"idle": 23, "steps": 63},
        ),
        ({"optimizer": cw.sgd(lr=cw.schedules.exponential(0.1, 0.5, "5000st"))}, "rate-ends-high", {}),
        (
            {"optimizer": cw.sgd(lr=optax.cosine_onecycle_schedule(63, 0.1, pct_start=0.01))},
            "rate-starts-at-peak",
            {"setting": "lr"},
        ),
    ],
)
def test_each_doubt_on_its_own(changes, code, facts):
    (finding,) = cw.check(plain(**changes))
    assert finding.code == code
    assert {name: finding.fact[name] for name in facts} == facts
    told = finding.json()
    assert told["code"] == code and all(told[part] for part in ("given", "usual", "why", "type"))
    assert json.loads(json.dumps(told))["numbers"] == dict(finding.fact.numbers)
    line = str(finding)
    assert "\n" not in line and all(told[part] in line for part in ("given", "usual", "why", "type"))


def test_a_padded_batch_is_filled_where_there_are_examples_for_it():
    for batch, fix in ((72, 96), (100, 96), (20, 32)):  # of 101 examples
        recipe = plain(batch=batch, replicas=4, duration="400st")
        finding = next(f for f in cw.check(recipe, "v2-8") if f.code == "padding")
        assert finding.fact["near"] == fix
        assert cw.check(recipe) == []  # advice for a TPU, to nobody else


def test_near_misses_are_quiet():
    for changes in (
        {"optimizer": cw.sgd(lr=0.2)},
        {"optimizer": cw.sgd(lr=0.1, momentum=cw.schedules.linear(0.9, 1.0))},
        {"optimizer": cw.adam(lr=0.03)},
        {"optimizer": cw.sgd(lr=cw.schedules.warmup(1.0, "5%"))},
        {"optimizer": cw.sgd(lr=optax.cosine_decay_schedule(0.1, 63))},
        {"optimizer": cw.sgd(lr=cw.schedules.exponential(0.1, 0.5, "10st"))},
        {"optimizer": cw.from_optax(optax.lion, learning_rate=cw.schedules.cosine(1e-4))},
        {"task": tasks.task(), "replicas": 4},
        {"ema": 0.95},
    ):
        assert cw.check(plain(**changes)) == [], changes


def test_an_average_that_another_run_began_is_not_doubted():
    """It is settled. One that begins at pretrained weights is mostly these weights."""
    pretrained = dataclasses.replace(PLAIN, weights=("5e0a",))
    assert [one.code for one in cw.check(plain(ema=0.99, task=pretrained))] == ["ema-long"]
    assert not cw.check(plain(ema=0.99, task=dataclasses.replace(pretrained, start_state={})))


def test_a_validated_point_says_what_is_far():
    recipe = plain(
        optimizer=cw.adamw(lr=cw.one_cycle(0.01), weight_decay=0.1),
        validated=cw.recipe.Validated(source="seen", forgetting=None),
    )
    assert cw.check(recipe) == []

    def found(**settings):
        return [f.fact for f in cw.check(apply(recipe, settings))]

    (rate, product) = found(lr="0.1")
    assert (rate.code, rate["lr"], rate["batch"]) == ("rate-far", 0.1, 64)
    assert (product.code, product["lr"], product["weight_decay"]) == ("forgetting-far", 0.1, 0.1)
    # twice the product, and less than ten times the rate
    assert found(lr="0.019", weight_decay="0.105") == []
    assert [f.code for f in found(weight_decay="0.0")] == ["forgetting-far"]
    assert [f.code for f in found(lr="0.0")] == ["rate-far", "forgetting-zero"]
    (short,) = found(duration="10ep")
    assert (short.code, round(short["epochs"], 1)) == ("epochs-few", 10.1)
    assert found(duration="20ep") == []


def test_replicas_on_devices():
    def found(on, **changes):
        return [f.fact for f in cw.check(plain(**changes), on)]

    assert found("v3-8") == found("a100:4") == found("t4", blocks=1) == []
    (in_turn,) = found("t4")
    assert (in_turn.code, in_turn["calls"], in_turn["devices"]) == ("blocks-in-turn", 8, 1)
    assert found("v3-8", batch=48, replicas=6) == []  # all are used
    padded = found("v3-8", batch=60, replicas=4)[0]
    assert (padded.code, padded["group"]) == ("padding", 15)
    assert found("a100", batch=60, replicas=4, blocks=1) == []


def test_errors():
    with refused(cw.errors.RecipeError, "batch-indivisible", batch=63, near=[56, 64]):
        cw.check(plain(batch=63))
    with refused(cw.errors.RecipeError, "shards-above-batch", batch=40, shards=4, near=[32, 64]):
        cw.check(plain(batch=40, replicas=8, shards=4))
    with refused(cw.errors.DeviceError, "slice-unknown", target="v3-7"):
        cw.check(plain(), "v3-7")
