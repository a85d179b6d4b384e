"""Durations and the clock: what a user types becomes the steps they would count by hand."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chipwise.base.errors import RecipeError
from chipwise.recipe.duration import Clock, Duration, Marks
from refusals import refused

units = st.sampled_from(["ep", "st", "ex", "%"])
sizes = st.integers(1, 10**7)


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("24ep", 24, "ep"),
        ("9360st", 9360, "st"),
        ("1.2e6ex", 1_200_000, "ex"),
        ("5%", 5, "%"),
        ("0.1ep", Fraction(1, 10), "ep"),
        (".5ep", Fraction(1, 2), "ep"),
        ("0st", 0, "st"),
        (" 3ep ", 3, "ep"),
    ],
)
def test_reads_the_grammar(text, value, unit):
    duration = Duration.parse(text)
    assert (duration.value, duration.unit) == (value, unit)
    assert str(duration) == text.strip()
    assert eval(repr(duration)) == duration
    assert Duration.parse(duration) is duration


@pytest.mark.parametrize(
    ("text", "code", "facts"),
    [
        ("24", "duration-without-unit", {"number": "24"}),
        (24, "duration-without-unit", {"number": "24"}),
        ("24epochs", "duration-unreadable", {"near": "24ep"}),
        ("24 ep", "duration-unreadable", {"near": "24ep"}),
        ("100 Steps", "duration-unreadable", {"near": "100st"}),
        ("1e6 samples", "duration-unreadable", {"near": "1e6ex"}),
        ("5 percent", "duration-unreadable", {"near": "5%"}),
        ("5epp", "duration-unreadable", {"near": "5ep"}),
        ("2.5st", "duration-fraction", {"unit": "steps", "whole": "3st"}),
    ],
)
def test_a_slip_is_answered_with_what_to_type(text, code, facts):
    with refused(RecipeError, code, **facts) as caught:
        Duration.parse(text)
    assert str(text) in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "ep", "-3ep", "nanep", "infst", "1e999999999ex", "9" * 5000 + "st", "٣ep", None, 1.5, True]
)
def test_everything_else_is_refused_with_the_grammar(text):
    with refused(RecipeError, "duration-unreadable", duration=repr(text), near=None):
        Duration.parse(text)


def test_durations_are_equal_within_a_unit_only():
    one = Duration.parse("1ep")
    assert one == Duration.parse("1.0ep")
    assert len({one, Duration.parse("1.0ep")}) == 1
    assert one != Duration.parse("1st")
    assert not Duration.parse("0ep") and one


def test_values_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Duration.parse("1ep").value = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Clock(10, 2).batch = 3


def test_davidnet_in_steps():
    clock = Clock.for_run(50_000, 512, "24ep")
    assert clock.total == 2344  # 2343.75
    assert clock.steps("5ep") == 488  # 488.28
    assert clock.steps("1ep") == 98
    assert clock.steps("25%") == 586
    assert clock.steps("1.2e6ex") == clock.total


@pytest.mark.parametrize(
    ("batch", "steps"), [(9, 2), (10, 2), (11, 2), (16, 1), (40, 1), (41, 1), (8, 3), (7, 3)]
)
def test_epochs_round_half_up_and_never_to_nothing(batch, steps):
    assert Clock(20, batch).steps("1ep") == steps


def test_exact_where_floats_are_not():
    # 0.29 * 100 is 28.999999999999996 in doubles, and 0.15 * 10 = 1.5 sits on the edge.
    assert Clock(100, 1).steps("0.29ep") == 29
    assert Clock(10, 1).steps("0.15ep") == 2
    assert Clock(10**15 + 1, 1).steps("3ep") == 3 * 10**15 + 3


@given(value=st.integers(0, 10**6), unit=st.sampled_from(["ep", "st", "ex"]), examples=sizes, batch=sizes)
def test_steps_are_the_nearest_whole_number(value, unit, examples, batch):
    steps = Clock(examples, batch).steps(f"{value}{unit}")
    exact = {
        "st": Fraction(value),
        "ex": Fraction(value, batch),
        "ep": Fraction(value * examples, batch),
    }[unit]
    assert isinstance(steps, int)
    assert (steps == 0) == (value == 0)
    assert steps == 1 if 0 < exact < 1 else abs(steps - exact) <= Fraction(1, 2)


@given(a=st.decimals(0, 1000, places=3), b=st.decimals(0, 1000, places=3), unit=st.sampled_from(["ep", "%"]))
def test_longer_durations_never_have_fewer_steps(a, b, unit):
    clock = Clock(1000, 7, 333)
    short, long = sorted([a, b])
    assert clock.steps(f"{short:f}{unit}") <= clock.steps(f"{long:f}{unit}")


@given(examples=st.integers(1, 500), batch=st.integers(1, 500), epochs=st.integers(1, 20))
def test_marks_do_not_drift(examples, batch, epochs):
    clock = Clock.for_run(examples, batch, f"{epochs}ep")
    marks = list(clock.marks("1ep"))
    assert marks == sorted(set(marks))
    assert marks[-1] == clock.total
    assert all(1 <= mark <= clock.total for mark in marks)
    if batch <= examples:
        assert len(marks) == epochs
        assert all(mark == clock.steps(f"{k}ep") for k, mark in enumerate(marks, 1))


def test_marks_of_less_than_a_step_are_every_step():
    assert list(Clock(4, 8, 3).marks("0.01ep")) == [1, 2, 3]
    assert not list(Clock(4, 8, 3).marks("4st"))
    assert list(Clock(4, 8, 7).marks("2st")) == [2, 4, 6]
    with refused(RecipeError, "interval-zero", value="0ep"):
        Clock(4, 8, 3).marks("0ep")
    with refused(RecipeError, "marks-need-total", every="1ep"):
        Clock(4, 8).marks("1ep")


def test_percent_needs_a_run():
    assert Clock(10, 1, 200).steps("5%") == 10
    assert Clock(10, 1, 3).steps("0.001%") == 1
    with refused(RecipeError, "share-of-unknown-run", duration="5%"):
        Clock(10, 1).steps("5%")
    with refused(RecipeError, "share-of-unknown-run", duration="100%"):
        Clock.for_run(10, 1, "100%")


def test_a_run_has_a_step_unless_none_was_asked_for():
    assert Clock.for_run(1, 10**6, "1ep").total == 1
    assert Clock.for_run(10, 1, "0ep").total == 0
    assert not list(Clock.for_run(10, 1, "0ep").marks("1st"))


@given(
    length=st.fractions(Fraction(1, 9), 40, max_denominator=9),
    total=st.integers(1, 200),
    also=st.none() | st.integers(1, 200),
    but=st.none() | st.integers(1, 200),
)
def test_marks_by_arithmetic_are_those_by_counting(length, total, also, but):
    """Each multiple, rounded half up, once."""
    multiples = range(1, total * 9 + 10)
    counted = {math.floor(k * length + Fraction(1, 2)) for k in multiples} - {0, but} | {also} - {None}
    expected = sorted(mark for mark in counted if mark <= total)
    marks = Marks(length, total, also, but if but != also else None)
    if but == also:
        return
    assert list(marks) == expected
    assert [step for step in range(1, total + 1) if step in marks] == expected
    for step in range(total + 1):
        assert marks.after(step) == next((mark for mark in expected if mark > step), None)


def test_a_run_of_more_steps_than_can_be_counted_is_refused_at_once():
    assert Clock.for_run(1000, 1, f"{2**31 - 1}st").total == 2**31 - 1
    with refused(RecipeError, "duration-too-long", most=2**31 - 1, steps=10**12):
        Clock.for_run(1000, 1, "1e12ex")
    assert 2**31 - 1 in Clock.for_run(1000, 1, f"{2**31 - 1}st").marks("1st")


@pytest.mark.parametrize("bad", [-1, 1.5, "3", True])
@pytest.mark.parametrize("name", ["examples", "batch", "total"])
def test_the_clock_refuses_what_is_not_a_count(name, bad):
    with refused(RecipeError, "clock-field", name=name, value=bad):
        Clock(**{"examples": 10, "batch": 2, "total": 5, name: bad})
    for empty in [(0, 2), (10, 0)]:
        with refused(RecipeError, "clock-field", least=1):
            Clock(*empty)


def test_the_clock_takes_numpy_integers():
    clock = Clock(np.int64(10), np.int32(2), np.int64(5))
    assert clock == Clock(10, 2, 5)
    assert type(clock.examples) is int
