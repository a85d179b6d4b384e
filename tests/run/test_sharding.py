"""The optimizer's state shared out over the devices: the bits of the whole update, on any number of them."""

import functools
import weakref

import jax
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.run.session import Session
from chipwise.step.layout import Layout
from chipwise.step.state import abstract_state
from chipwise.step.step import Step
from chipwise.step.update import WORTH_BYTES, Update, shards_optimizer

pytestmark = pytest.mark.as_users_compile

RATE = cw.one_cycle(0.02, warmup="20%")
OPTIMIZERS = {
    "adamw": cw.adamw(lr=RATE, weight_decay=0.01, clip=0.5, decay="kernels"),
    "sgd": cw.sgd(lr=RATE, momentum=0.9, nesterov=True, weight_decay=5e-4),
    "grouped": cw.recipe.grouped(cw.sgd(lr=RATE, clip=0.5), {"w*": {"lr": 0.5}}),
}
FURTHER = {
    "dampened sgd": cw.sgd(lr=RATE, momentum=0.9, dampening=0.3, weight_decay=5e-4, maximize=True),
    "amsgrad": cw.adam(lr=RATE, l2=0.01, amsgrad=True, clip=0.5, decay="kernels"),
    "adagrad": cw.recipe.adagrad(lr=RATE, lr_decay=0.1, l2=0.01, decay="kernels"),
    "adadelta": cw.recipe.adadelta(lr=1.0, weight_decay=0.01, clip=0.5),
    "rmsprop": cw.recipe.rmsprop(lr=RATE, momentum=0.9, centered=True, eps=1e-3, l2=0.01),
    "adamax": cw.recipe.adamax(lr=RATE, weight_decay=0.01, decay="kernels"),
    "nadam": cw.recipe.nadam(lr=RATE, weight_decay=0.01, l2=0.01, clip=0.5),
    "radam": cw.recipe.radam(lr=RATE, b2=0.9, weight_decay=0.01),
    "asgd": cw.recipe.asgd(lr=RATE, lambd=0.01, clip=0.5),
    "rprop": cw.recipe.rprop(lr=0.01),
    "grouped nadam": cw.recipe.grouped(cw.recipe.nadam(lr=RATE, l2=0.01), {"w*": {"lr": 0.5, "b1": 0.9}}),
    "grouped radam": cw.recipe.grouped(cw.recipe.radam(lr=RATE, b2=0.9), {"w*": {"lr": 0.5, "b2": 0.9}}),
    "grouped asgd": cw.recipe.grouped(cw.recipe.asgd(lr=RATE), {"w*": {"lr": 0.5}}),
}


def trained(recipe, shard, devices, **more):
    on = cw.On(devices=devices, shard_optimizer=shard)
    return cw.fit(recipe, on=on, log_every="3st", progress="none", **more)


@pytest.mark.slow  # `test_leaves` has one that is not
@pytest.mark.parametrize("name, counts", [(name, (2, 4)) for name in OPTIMIZERS])
def test_the_bits_are_those_of_the_whole_update(name, counts):
    recipe = tasks.quick(optimizer=OPTIMIZERS[name], ema=0.9, duration="12st")
    whole = trained(recipe, False, 2)
    for devices in counts:
        shared = trained(recipe, True, devices)
        assert (shared.devices["update"], whole.devices["update"]) == ("sharded", "flat")
        assert shared.fingerprint == whole.fingerprint
        if devices == 2:  # an evaluation's last digits depend on its batch
            assert shared.metrics == whole.metrics
        jax.tree.map(np.testing.assert_array_equal, shared.params, whole.params)  # the averages
        jax.tree.map(np.testing.assert_array_equal, shared.state, whole.state)


@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER)
@pytest.mark.drawn(share=0.25)
def test_further_optimizers_have_the_bits_of_one_device_on_three(name):
    recipe = tasks.quick(optimizer=FURTHER[name], ema=0.9, duration="12st")
    one, *three = (trained(recipe, shard, n) for shard, n in ((False, 1), (True, 3), (False, 3)))
    assert [run.devices["update"] for run in three] == ["sharded", "flat"]
    assert {run.fingerprint for run in three} == {one.fingerprint}
    for run in three:
        jax.tree.map(np.testing.assert_array_equal, run.params, one.params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(one.params))


@pytest.mark.parametrize("shard", [pytest.param(True, marks=pytest.mark.slow), False])
def test_gradients_are_free_once_they_are_added(shard, monkeypatch):
    recipe = tasks.quick(optimizer=OPTIMIZERS["adamw"], duration="12st")
    with Session(recipe, cw.On(devices=2, shard_optimizer=shard)) as session:
        session.begin()
        session.advance(1)
        programs, made, left = session.programs, [], []
        vectors, updates, join = programs.vectors, programs.compiled["update"], programs.placement.join
        size = programs.functions.updates.size

        def joined(parts):
            whole = join(parts)
            if whole.shape == (2 * size,):  # of gradients
                made.append(weakref.ref(whole))
            return whole

        def noted(*given):
            found = vectors(*given)
            made.extend(weakref.ref(vector) for vector in found)
            return found

        def counted(update, *given):
            left.append(sum(vector() is not None for vector in made))
            return update(*given)

        monkeypatch.setattr(programs, "vectors", noted)
        monkeypatch.setattr(programs.placement, "join", joined)
        noting = [functools.partial(counted, update) for update in updates]
        monkeypatch.setitem(programs.compiled, "update", noting)
        session.advance(1)
    assert made and left == [0, 0]


@pytest.mark.slow
def test_a_device_holds_its_part_and_a_checkpoint_all(tmp_path):
    recipe = tasks.quick(optimizer=OPTIMIZERS["adamw"], duration="12st")
    with Session(recipe, cw.On(devices=4, shard_optimizer=True)) as session:
        session.begin()
        session.advance(3)
        made = jax.eval_shape(session.state_layout._make, np.uint32(0), {})
        assert made.optimizer is None and made.ema is None  # no device holds all of either, even at first
        flat = session.programs.functions.updates.flat
        for state in session._carry:
            sizes = {x.shape for x in jax.tree.leaves(state.optimizer) if x.ndim}
            assert sizes == {(flat.size // 4,)}
        found = session.snapshot()
        jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), found, abstract_state(recipe))
    first = trained(recipe, True, 4, run=tmp_path / "run", stop_after="5st")
    assert first.steps == 5
    end = trained(recipe, False, 1, run=tmp_path / "run")
    assert end.fingerprint == trained(recipe, None, 1).fingerprint


def test_it_is_shared_where_that_saves_much_and_changes_nothing():
    recipe = tasks.quick()
    state = abstract_state(recipe)
    updates = Update(recipe, state)
    assert not shards_optimizer(updates, state, 8, None) and shards_optimizer(updates, state, 8, True)
    assert not shards_optimizer(updates, state, 1, True)  # there is nobody to share with

    class Large:
        params, optimizer, ema = state.params, jax.ShapeDtypeStruct((2 * WORTH_BYTES,), "uint8"), None

    assert shards_optimizer(updates, Large, 2, None) and not shards_optimizer(updates, Large, 2, False)
    Large.optimizer = jax.ShapeDtypeStruct((2 * WORTH_BYTES - 2,), "uint8")
    assert not shards_optimizer(updates, Large, 2, None)


def test_a_plan_counts_a_part():
    recipe = tasks.quick()
    step = Step(recipe, Layout.of(recipe, 4), shard_optimizer=True)
    _, summed, *_ = step.update_specs(step.specs()["window"]["hyper"])
    assert summed.shape == (step.updates.flat.size // 4,)
