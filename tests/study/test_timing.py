"""Timing steps: how many make an interval, and what a session starts for them. No speed is asserted."""

import math
from collections import deque
from types import SimpleNamespace
from unittest.mock import Mock

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chipwise.run.calls import Calls
from chipwise.run.on import On
from chipwise.run.session import Session
from chipwise.study import timing
from chipwise.study.timing import INTERVAL_SECONDS, INTERVALS, intervals


class Counted:
    """Programs, and the windows and data that they take: computes nothing."""

    stream, in_use, compiled, end = None, math.inf, True, math.inf

    def at(self, step, idle=None, stopped=None):
        return {}

    def step(self, carry, window, data, told, again):
        return carry, jnp.int32(0)


def counting():
    """A session that computes nothing."""
    session, counted = Session.__new__(Session), Counted()
    session.step, session.total = 0, 10**6
    session.programs, session._carry, session._queued = counted, [], deque()
    session._data = session._windows = counted
    lead, hosts = SimpleNamespace(platform="cpu"), SimpleNamespace(pace=Mock())
    session.placement = SimpleNamespace(lead=lead, devices=(0,), hosts=hosts)
    session.recipe, session.verifier, session.watched = SimpleNamespace(seed=0), Mock(), ()
    programs = SimpleNamespace(placement=session.placement, compiled={})
    session.calls = Calls(On(), programs)
    return session


@pytest.mark.parametrize("each", [0.001, 0.03, 0.2])
def test_calibration_goes_little_beyond_what_it_needs(monkeypatch, each):
    session = counting()
    monkeypatch.setattr("chipwise.study.timing.time.perf_counter", lambda: each * session.step)
    monkeypatch.setattr(timing, "mean_loss", lambda session, first: 0.0)
    assert timing.seconds_a_step(session) == pytest.approx(each)
    assert each * session.step <= 0.3 + 3 * each


@settings(deadline=None)
@given(st.floats(1e-7, 100), st.integers(1, 100_000))
def test_given_steps_are_timed_exactly(seconds_a_step, steps):
    counts = intervals(seconds_a_step, steps)
    assert sum(counts) == steps and len(counts) >= min(steps, INTERVALS)
    assert len(set(counts[:-1])) <= 1 and counts[0] <= counts[-1] < 2 * counts[0] + 1


@pytest.mark.parametrize("steps", [1, 9, 10, 11, 19, 20, 21])
def test_few_steps_are_an_interval_each(steps):
    counts = intervals(10.0, steps)
    assert sum(counts) == steps and counts == [1] * steps


@settings(deadline=None)
@given(st.floats(1e-6, 100), st.floats(0.5, 100))
def test_intervals_take_about_half_a_second(seconds_a_step, seconds):
    counts = intervals(seconds_a_step, None, seconds)
    assert len(counts) == max(INTERVALS, round(seconds / INTERVAL_SECONDS)) and len(set(counts)) == 1
    taken = counts[0] * seconds_a_step
    assert counts[0] == 1 or taken <= INTERVAL_SECONDS * 1.5
    assert taken * len(counts) <= max(1.5 * seconds + INTERVAL_SECONDS, len(counts) * seconds_a_step)
