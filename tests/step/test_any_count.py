"""Runs on any number of devices: norms of layers, groups, and a run that goes on on another count."""

import pytest

import chipwise as cw
import tasks
from sessions import bits, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("shard", [True, False])
def test_norms_of_layers(shard):
    recipe = tasks.recipe(optimizer=cw.recipe.lamb(lr=0.02, weight_decay=0.01, clip=0.5), duration="6st")
    first = bits(run(recipe, 1))
    assert all(bits(run(recipe, devices, shard_optimizer=shard)) == first for devices in (3, 5, 7))


def test_groups_of_two():
    recipe = tasks.recipe(shards=2, batch=48, duration="6st")
    results = [
        cw.fit(recipe, on=cw.On(devices=devices, feed=feed), log_every="3st", progress="none")
        for devices, feed in ((2, "device"), (6, "device"), (6, "host"))
    ]
    assert {result.devices["groups"] for result in results} == {1, 3}
    assert len({result.fingerprint for result in results}) == 1
    assert len({str([row.get("train/loss") for row in result.history]) for result in results}) == 1


@pytest.mark.parametrize("first, then", [(1, 3), (3, 5), (7, 6), (5, 1)])
def test_a_run_goes_on_on_another_count(first, then, tmp_path):
    recipe = tasks.recipe(duration="10st")
    whole = cw.fit(recipe, on=cw.On(devices=2), progress="none")
    cw.fit(recipe, tmp_path / "run", on=cw.On(devices=first), stop_after="5st", progress="none")
    assert (
        cw.fit(recipe, tmp_path / "run", on=cw.On(devices=then), progress="none").fingerprint
        == whole.fingerprint
    )
