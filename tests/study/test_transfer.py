"""Transfer: what the rules keep, on the optimizers that train and on the six archived runs of DavidNet."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chipwise as cw
import tasks
from chipwise.base.facts import fact
from chipwise.recipe.settings import apply
from refusals import refused

PLAIN = tasks.task(loss=tasks.plain_loss, init=lambda key: (tasks.init(key)[0], {}))


@functools.cache
def davidnet():
    return cw.load("cifar10-davidnet")


def plain(**changes):
    return tasks.recipe(**{"task": PLAIN, "batch": 64, "duration": "40ep", **changes})


OPTIMIZERS = [
    cw.sgd(lr=cw.one_cycle(0.4, warmup="5ep"), nesterov=True, weight_decay=5e-4),
    cw.sgd(
        lr=cw.schedules.piecewise({"0st": 0.1, "50%": 0.01}), weight_decay=cw.schedules.cosine(2e-4), clip=1.0
    ),
    cw.adamw(lr=cw.schedules.warmup(cw.schedules.cosine(1e-3), "700st"), b2=0.95, weight_decay=0.1),
    cw.adam(lr=cw.schedules.exponential(0.01, 0.5, decay="2000st", floor=1e-4)),
]


# ---- the invariant, and the six points it was found on


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"weight_decay": "1.25e-4"}, 0.00485),
        ({"weight_decay": "5e-4"}, 0.0194),
        ({"weight_decay": "1.25e-4", "batch": "128"}, 0.0195),
        ({"weight_decay": "1.25e-4", "batch": "64"}, 0.0391),
        ({"weight_decay": "1e-3"}, 0.0388),  # as 8 cores applied 1.25e-4
        ({"weight_decay": "4e-3"}, 0.155),  # as they applied 5e-4
    ],
)
def test_the_six_points(changes, expected):
    assert apply(davidnet(), changes).forgetting == pytest.approx(expected, rel=0.01)


def test_a_rate_kept_by_hand_moves_the_decay_instead():
    """What the archived runs did from 512 to 128: a fourth of the decay at the same rate."""
    moved = cw.transfer(davidnet(), batch=128, lr=0.4)
    assert moved.recipe.optimizer == cw.sgd(
        lr=cw.one_cycle(0.4, warmup="5ep"), nesterov=True, weight_decay=1.25e-4
    )
    old, new = moved.forgetting
    assert old == pytest.approx(new, rel=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@given(batch=st.integers(1, 4096), lr=st.none() | st.floats(1e-4, 1.0))
@settings(max_examples=40, deadline=None)
def test_every_batch_forgets_as_fast_and_sees_as_much(optimizer, batch, lr):
    old = plain(optimizer=optimizer, replicas=1)
    new = cw.transfer(old, batch=batch, lr=lr).recipe
    if old.forgetting is not None:
        assert new.forgetting == pytest.approx(old.forgetting, rel=1e-4)
    assert new.clock.total * new.batch == pytest.approx(
        old.clock.total * old.batch, abs=new.batch + old.batch
    )
    assert new.optimizer.hyper["lr"].highest(new.clock) > 0


# ---- the rules, by the steps they make


def test_sgd_goes_as_far_in_one_large_step_as_in_four_small_ones():
    old = plain(optimizer=cw.sgd(lr=1e-3, momentum=0, weight_decay=0.1))
    big = cw.transfer(old, batch=256).recipe.optimizer
    assert (big.lr, big.weight_decay) == (4e-3, 0.1)
    params, grads = {"w": jnp.float32(2.0)}, {"w": jnp.float32(3.0)}

    def walk(optimizer, steps):
        p, state = params, optimizer.init(params)
        for _ in range(steps):
            p, state = optimizer.update(grads, state, p, {"lr": optimizer.lr, "weight_decay": 0.1})
        return float(p["w"])

    assert walk(big, 1) == pytest.approx(walk(old.optimizer, 4), abs=1e-5)
    assert walk(big, 1) == pytest.approx(2.0 - 4e-3 * 3.2)


def test_adam_takes_the_root_and_remembers_as_many_examples():
    old = plain(optimizer=cw.adamw(lr=1e-3, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.1), ema=0.999)
    new = cw.transfer(old, batch=256).recipe
    assert (new.optimizer.lr, new.optimizer.weight_decay, new.optimizer.eps) == (2e-3, 0.2, 5e-9)
    assert new.optimizer.b1 == pytest.approx(0.9**4) and new.optimizer.b2 == pytest.approx(0.999**4, abs=1e-7)
    assert new.ema == pytest.approx(0.999**4, abs=1e-7)
    # a decoupled decay shrinks a weight as much over the same examples
    shrink = [(1 - r.optimizer.lr * r.optimizer.weight_decay) ** n for r, n in ((old, 400), (new, 100))]
    assert shrink[0] == pytest.approx(shrink[1], rel=1e-4)


def test_rmsprop_moves_as_adam_with_its_average_of_squares():
    old = plain(optimizer=cw.recipe.rmsprop(lr=1e-3, rho=0.9, momentum=0.5))
    moved = cw.transfer(old, batch=256)
    new = moved.recipe.optimizer
    assert (new.lr, new.eps) == (2e-3, 5e-9)
    assert (new.rho, new.momentum) == (pytest.approx(0.9**4), pytest.approx(0.5**4))
    assert "limit-adam-memory" not in {limit.code for limit in moved.limits}


def test_muon_moves_as_adam_with_both_rates_and_its_momentum():
    old = plain(optimizer=cw.recipe.muon(lr=0.02, adam_lr=1e-3, momentum=0.95, b2=0.95, weight_decay=0.1))
    new = cw.transfer(old, batch=256).recipe.optimizer
    assert (new.lr, new.adam_lr, new.weight_decay) == (0.04, 2e-3, 0.2)
    assert (new.momentum, new.b2) == (pytest.approx(0.95**4, 1e-3), pytest.approx(0.95**4, 1e-3))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_there_and_back_is_where_it_was(optimizer):
    old = plain(optimizer=optimizer, duration="10000st", ema=0.99)
    back = cw.transfer(cw.transfer(old, batch=256).recipe, batch=64).recipe
    assert back.duration == "10000st"
    for name, schedule in old.optimizer.hyper.items():
        after = back.optimizer.hyper[name]
        np.testing.assert_allclose(
            after.table(back.clock, 0, 500), schedule.table(old.clock, 0, 500), rtol=1e-3, atol=1e-6
        )
    assert back.ema == pytest.approx(0.99, abs=1e-5)


# ---- lengths


def test_lengths_in_steps_follow_the_batch_and_others_stay():
    old = plain(
        duration="9000st",
        optimizer=cw.sgd(
            lr=cw.schedules.warmup(cw.schedules.piecewise({"0st": 0.1, "4000st": 0.01, "50ep": 0.001}), "5%")
        ),
    )
    new = cw.transfer(old, batch=128).recipe
    assert new.duration == "4500st"
    assert new.optimizer.lr.lengths() == [("warmup", "5%"), ("boundaries", "2000st, 50ep")]
    assert new.optimizer.lr.schedule.pieces[0] == ("0st", 0.2)


def test_another_length_stretches_the_schedule():
    old = plain(optimizer=cw.sgd(lr=cw.one_cycle(0.4, warmup="5ep"), weight_decay=1e-4), duration="24ep")
    new = cw.transfer(old, duration="48ep").recipe
    assert new.optimizer == cw.sgd(lr=cw.one_cycle(0.4, warmup="10ep"), weight_decay=1e-4)
    both = plain(optimizer=cw.adam(lr=cw.schedules.exponential(0.1, 0.5, decay="100st")), duration="40ep")
    assert (
        cw.transfer(both, batch=128, duration="10ep").recipe.optimizer.lr.decay == "13st"
    )  # 100 / 4 / 2, half up


def test_replicas_alone_change_no_number_of_the_optimizer():
    old = plain(optimizer=OPTIMIZERS[2])
    new = cw.transfer(old, replicas=2).recipe
    assert new.optimizer == old.optimizer and (new.batch, new.replicas) == (64, 2)


# ---- what is said


def test_the_table_names_old_new_reason_and_source():
    moved = cw.transfer(tasks.recipe(), batch=8, replicas=2)
    rows = {change.setting: change for change in moved.changes}
    assert rows["lr"].shown == ("0.02", "0.011547") and "Malladi" in rows["lr"].source
    assert rows["weight_decay"].changed and rows["duration"].old != rows["duration"].new
    lines = str(moved).splitlines()
    assert lines[0].split() == ["setting", "old", "new", "why", "source"]
    assert any(line.startswith("b1 ") and "0.96549" in line for line in lines)
    assert moved.to_json()["recipe"]["batch"] == 8
    group = next(limit for limit in moved.limits if limit.code == "limit-batch-norm-group")
    assert (group["group"], group["before"]) == (4, 3)
    json.dumps(moved.to_json(), allow_nan=False)


def test_the_limits_appear_where_they_hold_and_not_elsewhere():
    def limits(recipe, **given):
        found = cw.transfer(recipe, **given).limits
        assert all(map(str, found))
        return {limit.code: limit for limit in found}

    fine = plain(optimizer=cw.sgd(lr=cw.one_cycle(0.1)), duration="9000st")
    assert list(limits(fine, batch=32).values()) == [fact("limit-padding", group=4)]
    assert limits(fine, replicas=4) == {}
    up = limits(fine, batch=16_384)
    assert up["limit-linear-rule"]["largest"] == 8192 and up["limit-few-steps"]["steps"] == 35
    assert "limit-critical-batch" in up
    few = limits(fine, batch=128, replicas=1)["limit-few-steps-an-epoch"]
    assert few["steps"] == pytest.approx(0.789, abs=1e-3)
    assert limits(fine, batch=8192, duration="100st")["limit-few-steps"]["fewest"] == 200
    assert "limit-no-warmup" in limits(plain(optimizer=cw.sgd(lr=0.1)), batch=128)
    adam = limits(plain(optimizer=cw.adam(lr=0.01)), batch=640)
    assert adam["limit-adam-memory"]["b1"] < 0.5 and adam["limit-adam-rate"]["highest"] == 0.03
    normed = limits(tasks.recipe(), batch=48)
    assert normed["limit-batch-norm-group-mended"].numbers == {"group": 6, "before": 3, "replicas": 16}
    assert normed["limit-batch-norm-momentum"]["example"] == pytest.approx(0.81)
    assert "limit-rate-by-hand" in limits(fine, batch=128, lr=0.1)


def test_batch_norm_is_told_by_its_statistics():
    assert tasks.task().has_batch_norm
    assert not PLAIN.has_batch_norm
    for state, found in [
        ({"bn": {"running_mean": jnp.zeros(3), "running_var": jnp.ones(3)}}, True),
        ({"mean": jnp.zeros(3), "var": jnp.ones(4)}, False),
        ({"mean": jnp.zeros(3)}, False),
        ({"a": {"mean": jnp.zeros(3)}, "b": {"var": jnp.ones(3)}}, False),
        ({"mean": jnp.zeros(3, jnp.int32), "var": jnp.ones(3, jnp.int32)}, False),
    ]:
        assert tasks.task(init=lambda key, state=state: ({}, state)).has_batch_norm is found


@pytest.mark.parametrize(
    "optimizer, given, code",
    [
        (OPTIMIZERS[0], {}, "transfer-nothing"),
        (OPTIMIZERS[0], {"batch": 63}, "batch-indivisible"),
        (OPTIMIZERS[0], {"batch": 32, "lr": 0}, "lr-not-above-zero"),
        (cw.from_optax(optax.lion, learning_rate=1e-4, b1=0.9), {"batch": 32}, "no-rule-for-optimizer"),
        (cw.sgd(lr=optax.cosine_decay_schedule(0.1, 100)), {"batch": 32}, "function-values"),
        (cw.adam(lr=0.1, b1=cw.schedules.exponential(0.5, 0.5, "9st")), {"batch": 32}, "average-decays"),
    ],
)
def test_what_cannot_be_moved_is_one_line(optimizer, given, code):
    with refused(cw.errors.RecipeError, code):
        cw.transfer(plain(optimizer=optimizer), **given)


def test_a_batch_that_the_devices_of_groups_cannot_share():
    with refused(cw.errors.RecipeError, "shards-above-batch", batch=80, replicas=8, shards=4, near=[64, 96]):
        cw.transfer(plain(optimizer=OPTIMIZERS[0], shards=4), batch=80)


@pytest.mark.parametrize("given", [{"batch": 0}, {"duration": "5%"}])
def test_a_recipe_that_cannot_be_is_refused(given):
    with pytest.raises(cw.errors.RecipeError):
        cw.transfer(plain(optimizer=OPTIMIZERS[0]), **given)


def test_an_optax_optimizer_moves_where_no_rule_is_needed():
    lion = cw.from_optax(
        optax.lion, learning_rate=cw.schedules.warmup(cw.schedules.cosine(1e-4), "10ep"), b1=0.9
    )
    new = cw.transfer(plain(optimizer=lion), duration="80ep", replicas=4).recipe
    assert new.optimizer.hyper["learning_rate"] == cw.schedules.warmup(cw.schedules.cosine(1e-4), "20ep")
    assert cw.transfer(plain(optimizer=lion), replicas=4).recipe.optimizer is lion
    function = cw.sgd(lr=lambda step: 0.1 / (1 + step))
    assert cw.transfer(plain(optimizer=function), replicas=4).recipe.optimizer == function


def test_an_average_of_less_than_a_step_is_none():
    assert cw.transfer(plain(ema=0.5), batch=64 * 100, replicas=1).recipe.ema is None
