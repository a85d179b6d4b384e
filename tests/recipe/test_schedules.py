"""Schedules: the values a user would compute by hand, the same for every slice, agreeing with optax."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chipwise.base.errors import RecipeError
from chipwise.recipe.duration import Clock, Duration
from chipwise.recipe.schedules import (
    as_schedule,
    as_typed,
    constant,
    cosine,
    exponential,
    from_json,
    function,
    held,
    linear,
    one_cycle,
    piecewise,
    tabulated,
    warmup,
)
from refusals import refused

CLOCK = Clock.for_run(50_000, 512, "24ep")  # 2,344 steps
EXAMPLES = [
    constant(0.1),
    linear(0.4, 0.0),
    cosine(0.3, end=0.01),
    one_cycle(0.4, warmup="5ep"),
    one_cycle(0.4, warmup="30%", start=0.016, end=1e-6, shape="cosine"),
    one_cycle(0.4, warmup="1ep", shape="linear-cosine"),
    exponential(0.01, 1 / math.e, decay="2000st", floor=1e-4),
    piecewise({"0st": 0.1, "50%": 0.01, "20ep": 0.001}),
    warmup(cosine(1e-3), "5%"),
    warmup(0.1, "100st", start=0.01),
    tabulated([0.01 * (1 + step % 7) for step in range(2_344)]),
    function(optax.cosine_decay_schedule(0.1, 2000)),
]
by_name = pytest.mark.parametrize("schedule", EXAMPLES, ids=repr)

# Peaks down to 1e-6: below float32's normal range the rounding bound of a test means nothing.
peaks = st.floats(1e-6, 1e3)
warmups = st.one_of(
    st.integers(1, 200).map("{}%".format), st.integers(1, 50).map("{}st".format), st.just("0.001%")
)
shapes = st.sampled_from(one_cycle.SHAPES)


def table_of(optax_schedule, steps):
    with jax.numpy_dtype_promotion("standard"):
        return np.array([optax_schedule(step) for step in range(steps)], np.float32)


@by_name
def test_a_table_is_one_float32_for_each_step(schedule):
    table = schedule.table(CLOCK)
    assert table.shape == (CLOCK.total,) and table.dtype == np.float32 and isinstance(table, np.ndarray)
    assert schedule.table(CLOCK, 7, 7).shape == (0,)


@by_name
def test_a_part_has_the_bits_of_the_whole(schedule):
    whole = schedule.table(CLOCK)
    for start, stop in [(0, 1), (1, 2), (1023, 1025), (1, 2344), (2343, 2344), (500, 1700)]:
        assert schedule.table(CLOCK, start, stop).tobytes() == whole[start:stop].tobytes()


@by_name
def test_values_print_as_typed_and_compare(schedule):
    if isinstance(schedule, function):
        assert repr(schedule).startswith("function(optax.") and "0x" not in repr(schedule)
        return
    if isinstance(schedule, tabulated):
        assert "2,344 values" in repr(schedule)
        schedule = tabulated(schedule.values[:5], "epoch")
    again = eval(repr(schedule))
    assert again == schedule and hash(again) == hash(schedule)
    assert dataclasses.replace(schedule) == schedule


@by_name
def test_schedules_that_fit_have_no_warnings(schedule):
    assert schedule.warnings(CLOCK) == []


@by_name
@pytest.mark.parametrize("total", [1, 2, 3])
def test_short_runs_are_defined(schedule, total):
    if isinstance(schedule, piecewise):
        schedule = piecewise({"0st": 0.1, "9st": 0.01})
    assert np.isfinite(schedule.table(Clock(10, 10, total))).all()


@given(peak=peaks, ramp=warmups, shape=shapes, total=st.integers(1, 300), data=st.data())
@settings(max_examples=200, deadline=None)
def test_one_cycle_stays_within_start_and_peak(peak, ramp, shape, total, data):
    clock = Clock(100, 10, total)
    schedule = one_cycle(peak, warmup=ramp, shape=shape)
    table = schedule.table(clock)
    w = clock.steps(ramp)
    assert w >= 1 and table[0] == 0  # never silently at the peak
    assert (table >= 0).all() and (table <= np.float32(peak)).all()
    assert (np.diff(table[: w + 1]) >= 0).all() and (np.diff(table[w:]) <= 0).all()
    if w < total:
        assert table[w] == np.float32(peak) and schedule.warnings(clock) == []
    else:
        assert len(schedule.warnings(clock)) == 1
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    assert schedule.table(clock, start, stop).tobytes() == table[start:stop].tobytes()


@given(high=st.floats(0.5, 0.99), low=st.floats(0.0, 0.5), ramp=warmups, total=st.integers(1, 300))
@settings(deadline=None)
def test_momentum_mirrors_the_rate(high, low, ramp, total):
    clock = Clock(100, 10, total)
    momentum = one_cycle(low, ramp, start=high, end=high).table(clock).astype(np.float64)
    rate = one_cycle(1.0, warmup=ramp).table(clock).astype(np.float64)
    np.testing.assert_allclose(momentum, high - (high - low) * rate, atol=2e-7)


def test_davidnet_by_hand():
    table = one_cycle(0.4, warmup="5ep").table(CLOCK)
    expected = np.interp(np.arange(2344), [0, 488, 2344], [0, 0.4, 0])
    np.testing.assert_allclose(table, expected, atol=1e-7)
    assert table[0] == 0 and table[488] == np.float32(0.4)
    assert table[-1] == pytest.approx(0.4 / (2344 - 488))  # zero belongs to step `total`
    assert one_cycle(0.4, warmup="5ep").table(CLOCK, 2344, 2346).tolist() == [0, 0]


def test_the_schedule_follows_the_batch_and_the_run():
    schedule = one_cycle(0.4, warmup="5ep")
    for batch, duration in [(128, "24ep"), (512, "10ep"), (4096, "24ep")]:
        clock = Clock.for_run(50_000, batch, duration)
        assert int(np.argmax(schedule.table(clock))) == clock.steps("5ep")


def test_mnist_by_hand():
    clock = Clock(60_000, 256, 5616)
    table = exponential(0.01, 1 / math.e, decay="2000st", floor=1e-4).table(clock)
    np.testing.assert_allclose(table, 1e-4 + 0.01 * np.exp(-np.arange(5616) / 2000), rtol=1e-6)
    assert table[0] == np.float32(0.0101)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (linear(0.4, 0.02), optax.linear_schedule(0.4, 0.02, 1000)),
        (cosine(0.4, end=0.04), optax.cosine_decay_schedule(0.4, 1000, alpha=0.1)),
        (
            one_cycle(0.4, warmup="30%"),
            optax.join_schedules(
                [optax.linear_schedule(0, 0.4, 300), optax.linear_schedule(0.4, 0, 700)], [300]
            ),
        ),
        pytest.param(
            one_cycle(0.4, warmup="30%", start=0.4 / 25, end=0.4 / 25e4, shape="cosine"),
            optax.cosine_onecycle_schedule(1000, 0.4, 0.3, 25.0, 1e4),
            marks=pytest.mark.slow,
        ),
        (
            one_cycle(0.4, warmup="50st", start=0.01, end=0.001, shape="linear-cosine"),
            optax.warmup_cosine_decay_schedule(0.01, 0.4, 50, 1000, 0.001),
        ),
        (
            piecewise({"0st": 0.1, "400st": 0.01, "60%": 0.001}),
            optax.piecewise_constant_schedule(0.1, {400: 0.1, 600: 0.1}),
        ),
        (exponential(0.1, 0.5, decay="100st"), optax.exponential_decay(0.1, 100, 0.5)),
        (warmup(0.1, "200st"), optax.linear_schedule(0, 0.1, 200)),
    ],
    ids=lambda value: repr(value) if not callable(value) else "",
)
def test_agrees_with_optax(ours, theirs):
    np.testing.assert_allclose(
        ours.table(Clock(1000, 10, 1000)), table_of(theirs, 1000), atol=1e-6 * 0.4, rtol=1e-6
    )


def test_warmup_multiplies_and_does_not_shift():
    clock = Clock(100, 10, 200)
    inner = cosine(1.0).table(clock)
    table = warmup(cosine(1.0), "20st").table(clock)
    np.testing.assert_allclose(table[:20], inner[:20] * np.arange(20) / 20, rtol=1e-6)
    assert table[20:].tobytes() == inner[20:].tobytes()
    assert warmup(0.5, "1st", start=0.25).table(clock, 0, 2).tolist() == [0.25, 0.5]


def test_piecewise_boundaries_are_the_first_step_of_their_value():
    table = piecewise({"0ep": 3, "2st": 2, "100%": 1}).table(Clock(100, 10, 5), 0, 7)
    assert table.tolist() == [3, 3, 2, 2, 2, 1, 1]


def test_plain_numbers_and_functions_are_schedules():
    clock = Clock(100, 10, 2000)
    assert as_schedule(1) == constant(1.0)
    assert as_schedule(np.float32(0.5)) == constant(0.5)
    assert as_schedule(constant(2)) == constant(2)
    plain = as_schedule(lambda step: 0.1 if step < 1000 else 0.01)
    assert plain.table(clock, 999, 1001).tolist() == [np.float32(0.1), np.float32(0.01)]
    theirs = optax.cosine_onecycle_schedule(2000, 0.4)
    np.testing.assert_allclose(as_schedule(theirs).table(clock, 0, 200), table_of(theirs, 200), atol=1e-7)

    def branches(step):  # answers with a JAX array, but cannot be traced
        return jnp.float32(1.0) if step < 1000 else jnp.float32(2.0)

    assert as_schedule(branches).table(clock, 999, 1001).tolist() == [1, 2]
    assert "partial" in repr(as_schedule(functools.partial(branches)))


def test_durations_may_be_given_as_values():
    assert one_cycle(0.4, warmup=Duration.parse("5ep")) == one_cycle(0.4, warmup="5ep")


@pytest.mark.parametrize(
    ("make", "code", "facts"),
    [
        (lambda: one_cycle(0.4, warmup="0st"), "length-zero", {"name": "warmup"}),
        (lambda: one_cycle(0.4, warmup="5epochs"), "duration-unreadable", {"near": "5ep"}),
        (lambda: one_cycle(0.4, warmup="5ep", shape="cosin"), "shape-unknown", {"near": "cosine"}),
        (lambda: one_cycle("0.4"), "wrong-kind", {"what": "peak", "value": "0.4"}),
        (lambda: constant(math.nan), "schedule-number", {"value": "nan"}),
        (lambda: constant(True), "wrong-kind", {"value": True}),
        (lambda: piecewise({"10st": 0.1}), "first-piece-missing", {}),
        (lambda: piecewise({"0st": 0.1, "0ep": 0.2}), "pieces-twice", {}),
        (lambda: piecewise({"0st": 0.1, "1ep": 0.2, "1.0ep": 0.3}), "pieces-twice", {}),
        (lambda: piecewise({"0st": "0.1"}), "schedule-number", {"name": "0st"}),
        (lambda: piecewise({}), "pieces-expected", {}),
        (lambda: piecewise(3), "pieces-expected", {"piecewise": 3}),
        (lambda: exponential(0.1, 0.0, decay="5st"), "decay-rate-range", {}),
        (lambda: exponential(0.1, 0.5, decay="0st"), "length-zero", {"name": "decay"}),
        (lambda: warmup("0.1", "5st"), "not-a-schedule", {"what": "warmup's schedule"}),
        (lambda: as_schedule("0.1", "lr"), "not-a-schedule", {"what": "lr", "value": "0.1"}),
        (lambda: exponential(0.1, 2, decay="9st").with_peak(1), "schedule-without-peak", {}),
        (lambda: cosine(0.1).with_peak("1"), "peak-not-a-number", {"value": "1"}),
        (lambda: linear(0, 0).with_peak(1), "schedule-never-above-zero", {}),
        (lambda: function(math.sqrt).with_peak(1), "schedule-without-peak", {}),
        (lambda: as_schedule(None), "not-a-schedule", {"what": "schedule", "value": None}),
        (lambda: function(math.sqrt).scaled(2), "function-values", {"schedule": "function(math.sqrt)"}),
        (lambda: function(math.sqrt).stretched(double), "function-lengths", {}),
        (lambda: linear(0, 1).table(Clock(10, 1)), "schedule-needs-total", {}),
        (lambda: linear(0, 1).table(Clock(10, 1), 0, 3), "schedule-needs-total", {}),
        (lambda: linear(0, 1).table(Clock(10, 1, 5), 3, 2), "schedule-steps", {"value": (3, 2)}),
        (lambda: linear(0, 1).table(Clock(10, 1, 5), -1), "schedule-steps", {"value": (-1, 5)}),
        (
            lambda: piecewise({"0st": 1, "1st": 2, "0.1ep": 3}).table(Clock(10, 1, 5)),
            "pieces-on-one-step",
            {"step": 1},
        ),
        (
            lambda: exponential(1, 1e30, decay="1st").table(Clock(10, 1, 99)),
            "schedule-not-finite",
            {"value": math.inf, "step": 2},
        ),
        (
            lambda: as_schedule(lambda step: math.nan).table(Clock(10, 1, 5)),
            "schedule-not-finite",
            {"step": 0},
        ),
        (lambda: tabulated([0.1, math.inf]), "table-expected", {}),
        (lambda: tabulated([]), "table-expected", {}),
        (lambda: tabulated(0.1), "table-expected", {}),
        (lambda: tabulated([0.1], "1ep"), "table-expected", {}),
        (lambda: as_schedule(lambda step: "a").table(Clock(10, 1, 5)), "function-value", {"value": "a"}),
    ],
)
def test_mistakes_are_named(make, code, facts):
    with refused(RecipeError, code, **facts):
        make()


def test_a_table_has_a_value_for_each_epoch_and_then_the_last():
    clock = Clock(100, 30, 12)  # epochs of 3 1/3 steps
    table = tabulated([0.3, 0.2, 0.1], "epoch")
    expected = [0.3] * 4 + [0.2] * 3 + [0.1] * 5
    np.testing.assert_array_equal(table.table(clock), np.array(expected, np.float32))
    half = table.stretched(lambda length: f"{Duration.parse(length).value / 2}ep")
    assert half.values == (0.3, 0.1) and half.lengths() == [("table", "2 epochs")]


def double(length):
    duration = Duration.parse(length)
    return f"{duration.value * 2}{duration.unit}"


@pytest.mark.parametrize(
    ("schedule", "scaled"),
    [
        (constant(0.3), constant(0.1)),
        (linear(0.4, 0.2), linear(0.1, 0.05)),
        (cosine(0.4, end=0.04), cosine(0.1, end=0.01)),
        (one_cycle(0.3, "5ep", start=0.15), one_cycle(0.1, "5ep", start=0.05)),
        (exponential(0.2, 0.5, decay="9st", floor=0.2), exponential(0.05, 0.5, decay="9st", floor=0.05)),
        (piecewise({"0st": 0.2, "9st": 0.4}), piecewise({"0st": 0.05, "9st": 0.1})),
        (tabulated([0.1, 0.4, 0.2], "epoch"), tabulated([0.025, 0.1, 0.05], "epoch")),
        (warmup(0.3, "5%"), warmup(0.1, "5%")),
        (warmup(cosine(0.3), "5%", start=0.03), warmup(cosine(0.1), "5%", start=0.01)),
    ],
    ids=repr,
)
def test_a_new_peak_keeps_the_shape(schedule, scaled):
    assert schedule.with_peak(0.1) == scaled
    before, after = schedule.table(CLOCK), scaled.table(CLOCK)
    np.testing.assert_allclose(after / after.max(), before / before.max(), rtol=1e-6)


def test_a_run_of_no_steps_has_empty_tables():
    clock = Clock.for_run(10, 2, "0ep")
    for schedule in EXAMPLES:
        if not isinstance(schedule, piecewise):
            assert schedule.table(clock).shape == (0,)


def test_a_constant_needs_no_total():
    assert constant(2).table(Clock(10, 1), 5, 8).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("schedule", "code"),
    [
        (one_cycle(0.4, warmup="48ep"), "peak-never-reached"),
        (one_cycle(0.4, warmup="100%"), "peak-never-reached"),
        (warmup(cosine(0.1), "48ep"), "warmup-never-ends"),
        (warmup(one_cycle(0.4, warmup="48ep"), "1ep"), "peak-never-reached"),
        (piecewise({"0st": 0.1, "2344st": 0.01}), "piece-never-used"),
        (tabulated([0.1] * 23, "epoch"), "table-too-short"),
    ],
)
def test_what_is_probably_not_meant_is_said(schedule, code):
    (warning,) = schedule.warnings(CLOCK, "lr")
    assert (warning.code, warning["setting"], warning["total"]) == (code, "lr", 2344)
    assert "2344" in str(warning) or "2,344" in str(warning)
    assert schedule.warnings(Clock(50_000, 512)) == []


@by_name
def test_a_stored_schedule_is_made_again_and_shown_as_typed(schedule):
    stored = json.loads(json.dumps(schedule.json(), allow_nan=False))
    assert stored["schedule"] == type(schedule).__name__ and as_typed(stored) == repr(schedule)
    if isinstance(schedule, function):
        with refused(RecipeError, "function-stored", name=stored["call"]):
            from_json(stored)
    else:
        assert from_json(stored) == schedule


@pytest.mark.parametrize(
    "value",
    [
        "one_cycle(0.4)",
        None,
        True,
        {},
        {"schedule": "eval", "x": 1},
        {"schedule": "cosine"},
        {"schedule": []},
    ],
)
def test_what_is_no_stored_schedule_is_refused(value):
    with refused(RecipeError, "stored-schedule-expected", value=repr(value)):
        from_json(value)
    assert isinstance(as_typed(value), str)


@by_name
def test_a_stretched_schedule_has_the_same_values_in_a_longer_run(schedule):
    if isinstance(schedule, function):
        return
    longer = Clock(50_000, 512, 2 * CLOCK.total)

    def in_steps(length):
        return f"{2 * CLOCK.steps(length)}st"

    twice = schedule.stretched(in_steps)
    np.testing.assert_allclose(twice.table(longer)[::2], schedule.table(CLOCK), rtol=1e-6, atol=1e-9)
    assert len(twice.lengths()) == len(schedule.lengths())


@by_name
def test_a_scaled_schedule_has_scaled_values_and_the_highest_is_known(schedule):
    table = schedule.table(CLOCK)
    assert schedule.highest(CLOCK) == pytest.approx(float(table.max()), rel=0.01)
    if not isinstance(schedule, function):
        np.testing.assert_allclose(schedule.scaled(0.5).table(CLOCK), table / 2, rtol=1e-5)


@by_name
def test_a_schedule_may_be_held_after_its_run(schedule):
    whole, longer = schedule.table(CLOCK), held(schedule, CLOCK).table(Clock(50_000, 512, 10**8), 0, 3000)
    assert longer[:2344].tobytes() == whole.tobytes()
    assert (longer[2344:] == whole[-1]).all()
    late = held(schedule, CLOCK).table(Clock(50_000, 512, 10**8), 10**6, 10**6 + 3)
    assert late.tolist() == [whole[-1]] * 3
