"""float16: overflow skips a step and halves the scale, the same on every device and after a resume."""

import dataclasses
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import chipwise as cw
import tasks
from chipwise.machine.detect import detect
from chipwise.run.on import On
from chipwise.run.session import Session
from chipwise.step import scaling
from chipwise.step.state import fingerprint, first_state
from refusals import refused

pytestmark = pytest.mark.as_users_compile

TASK = tasks.task(loss=tasks.plain_loss, augment=None, eval=None)


def recipe(**changes):
    return tasks.recipe(**{"task": TASK, "precision": "f16", "duration": "12st", "ema": 0.9, **changes})


def states(recipe, devices=1):
    """The state after each step."""
    with Session(recipe, On(devices=devices)) as session:
        session.begin()
        for _ in range(session.total):
            session.advance()
            yield session.snapshot()


def bits(state):
    parts = (state.params, state.state, state.optimizer, state.ema, state.sums, state.scale)
    return [fingerprint(part) for part in parts]


@pytest.fixture(scope="module")
def settled():
    """The scale that 12 steps come down to from a much larger one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "FIRST", 2.0**22)
        *_, last = states(recipe())
    assert 2.0**11 < last.scale["scale"] < 2.0**22 and last.scale["good"] > 0
    return float(last.scale["scale"])


@pytest.mark.slow
def test_overflow_skips_one_step_and_nothing_else(settled, monkeypatch):
    monkeypatch.setattr(scaling, "FIRST", 2 * settled)
    found = [first_state(recipe()), *states(recipe())]
    steps = list(pairwise(found))
    (skipped,) = [i for i, (a, b) in enumerate(steps) if a.scale["scale"] != b.scale["scale"]]
    before, after = steps[skipped]
    assert float(after.scale["scale"]) == settled and int(after.scale["good"]) == 0
    for name in ("params", "state", "optimizer", "ema"):
        for a, b in zip(*(jax.tree.leaves(getattr(s, name)) for s in steps[skipped]), strict=True):
            np.testing.assert_array_equal(a, b)
    assert int(after.step) == skipped + 1  # the step counts, and its metrics too
    assert float(after.sums["loss"].count) == 24 * (skipped + 1)
    moved = [fingerprint(a.params) != fingerprint(b.params) for a, b in steps]
    assert moved[1:] == [i != skipped for i in range(1, 12)]  # the first rate is 0
    assert int(before.scale["good"]) == skipped and int(found[-1].scale["good"]) == 11 - skipped


@pytest.mark.parametrize("devices", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))])
@pytest.mark.slow
def test_the_same_decisions_on_any_number_of_devices(devices, settled, monkeypatch):
    monkeypatch.setattr(scaling, "FIRST", 2 * settled)
    *_, one = states(recipe())
    *_, many = states(recipe(), devices)
    assert bits(one) == bits(many)


@pytest.mark.slow
def test_the_scale_is_in_the_checkpoint(settled, monkeypatch, tmp_path):
    monkeypatch.setattr(scaling, "FIRST", 2 * settled)
    on = {"on": On(devices=1), "progress": "none"}
    whole = cw.fit(recipe(), tmp_path / "whole", **on)
    cw.fit(recipe(), tmp_path / "parts", stop_after="5st", **on)
    monkeypatch.setattr(scaling, "FIRST", 2.0**30)  # which a resumed run does not ask for
    assert cw.fit(recipe(), tmp_path / "parts", **on).fingerprint == whole.fingerprint


def test_good_steps_double_it(monkeypatch):
    monkeypatch.setattr(scaling, "FIRST", 2.0)
    monkeypatch.setattr(scaling, "GOOD_STEPS", 5)
    found = [(float(s.scale["scale"]), int(s.scale["good"])) for s in states(recipe())]
    assert found[3:6] == [(2, 4), (4, 0), (4, 1)] and found[-1] == (8, 2)


@given(st.integers(-20, 40), st.floats(1e-3, 1e6), st.integers(1, 64))
def test_scaling_and_back_rounds_nothing(power, count, replicas):
    up, down = scaling.factor({"scale": jnp.float32(2.0**power)}, jnp.float32(count), replicas)
    mantissa, _ = np.frexp(np.float32(up))
    assert mantissa == 0.5 and float(up) * float(down) == 1
    assert 0.5 < float(up) * count / replicas / 2.0**power < 2.01


def test_a_gradient_that_no_scale_mends_stops_the_run():
    def loss(params, state, batch, key, train):
        sums, state = tasks.plain_loss(params, state, batch, key, train)
        # Finite, with an infinite slope
        total = sums["loss"].total + jnp.sqrt(jnp.sum(params["w"].astype(jnp.float32)) * 0)
        return {"loss": cw.Sum(total, sums["loss"].count)}, state

    with pytest.raises(cw.errors.DivergedError):
        cw.fit(
            recipe(task=dataclasses.replace(TASK, loss=loss), duration="40st"),
            on=On(devices=1),
            progress="none",
        )


@pytest.mark.slow
def test_blocks_scale_too(settled, monkeypatch):
    monkeypatch.setattr(scaling, "FIRST", settled / 8)
    *_, apart = states(recipe())
    *_, together = states(recipe(blocks=1))
    assert int(together.scale["good"]) == 12
    for a, b in zip(jax.tree.leaves(apart.params), jax.tree.leaves(together.params), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-3)


def test_tpus_have_no_float16():
    class Tpu:
        platform = "tpu"
        devices = detect(1).devices

    from chipwise.run.placement import lay_out

    with refused(cw.errors.RecipeError, "precision-f16-on-tpu"):
        lay_out(recipe(), On(devices=1), Tpu())


def test_check_says_where_bfloat16_is_emulated():
    def codes(precision, on):
        return [f.code for f in cw.check(cw.load("digits", [f"precision={precision}", "blocks=1"]), on=on)]

    assert "bf16-emulated-on" in codes("bf16", "t4")
    assert "bf16-emulated-on" not in codes("f16", "t4") + codes("bf16", "a100")


@pytest.mark.slow
def test_digits_learn_as_in_float32():
    def accuracy(precision):
        small = cw.load("digits", [f"precision={precision}", "duration=8ep"])
        return cw.fit(small, on=On(devices=1), eval_every=None, progress="none").metrics["eval/accuracy"]

    assert abs(accuracy("f16") - accuracy("f32")) <= 0.02
