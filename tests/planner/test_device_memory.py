"""A model that no device holds whole: refused before anything is compiled, with how it should be cut."""

import dataclasses

import jax.numpy as jnp
import pytest

import chipwise as cw
import tasks
from chipwise.chips.targets import parse
from chipwise.compile.absent_device import available
from chipwise.planner.device_memory import TOO_LARGE, smallest_cut
from chipwise.planner.tracing import training_step
from chipwise.step.layout import Layout

GIB = 1 << 30


def large(gigabytes, **changes):
    """A recipe whose parameters take so much, and whose state five times that: never made, only looked at."""

    def init(key):
        params, state = tasks.init(key)
        return {**params, "wide": jnp.zeros((gigabytes * 2**18, 2**10))}, state

    settings = {"task": tasks.task(init=init), "batch": 1024, "replicas": 8, "optimizer": cw.adam(lr=0.1)}
    return tasks.recipe(**{**settings, **changes})


def plans(recipe, names):
    return {one.target: one for one in cw.plan(recipe, names)}


def test_what_no_device_holds_is_refused_with_its_cut_and_compiles_nothing(monkeypatch):
    def nothing(requests, **_):
        assert not requests
        return iter(())

    monkeypatch.setattr("chipwise.planner.compile_step.compile_each", nothing)
    found = plans(large(40, replicas=1), ["v5e-4", "v6e-16", "h100:8"])
    ways = {name: one.problem.numbers["way"] for name, one in found.items()}
    assert {one.problem.code for one in found.values()} == {TOO_LARGE}
    assert {name: way.code for name, way in ways.items()} == {
        "v5e-4": "state-cut-elsewhere", "v6e-16": "state-cut", "h100:8": "state-cut",
    }  # fmt: skip
    assert ways["v5e-4"].numbers["target"] == "v5e-16" and ways["v5e-4"].numbers["shards"] == 16
    assert ways["v6e-16"].numbers["shards"] == 8  # on two hosts of four chips
    assert ways["h100:8"].numbers["shards"] == 4
    assert all(str(one.problem) for one in found.values())


def whole(recipe):
    return training_step(recipe, Layout.of(recipe, recipe.shards), resident=False).whole


@pytest.mark.parametrize(("name", "shards"), [("v5p-16", 2), ("v6e-16", 4)])
def test_the_fewest_that_hold_it(name, shards):
    recipe, target = large(20), parse(name)
    found = smallest_cut(recipe, whole(recipe), target, True)
    assert found is not None and found[0] == shards
    assert found[1] <= available(target)[0] < 2 * found[1] + 20 * GIB
    wide = dataclasses.replace(recipe, batch=8)  # a replica's one example is cut over no devices
    assert smallest_cut(wide, whole(wide), target, True) is None


def test_what_nothing_holds():
    recipe = large(20_000)
    (one,) = cw.plan(recipe, ["v5e-8"])
    assert one.problem.numbers["way"].code == "state-cut-nowhere"


def test_what_groups_do_not_lie_on():
    recipe = tasks.recipe(batch=96, replicas=2, shards=6, optimizer=cw.adam(lr=0.1))
    (one,) = cw.plan(recipe, ["v5p-384"])  # of hosts with four devices
    assert (one.problem.code, one.problem.numbers["here"]) == ("shards-over-hosts", 4)
    (one,) = cw.plan(dataclasses.replace(recipe, shards=8), ["v6e-4"])
    assert one.problem.code == "shards-uneven"


def test_a_gpu_has_what_chipwise_lets_jax_take():
    limit, source = available(parse("t4"))
    assert limit == int(0.9 * 15095 * 2**20) and source["share"] == 0.9
    assert available(parse("l4"))[0] == int(0.9 * 24e9)  # what CUDA reports is not in the catalogue
