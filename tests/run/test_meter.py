import pytest

from chipwise.chips import named
from chipwise.run.meter import Meter, share_of_peak


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def test_pauses_are_kept_out_of_the_speed(clock):
    meter = Meter(batch=10)
    meter.mark(0, first=True)
    clock[0] += 5  # warm-up
    meter.mark(10)
    clock[0] += 1
    with meter.section("evaluate"):
        clock[0] += 50
    with meter.section("checkpoint"):
        clock[0] += 7
    clock[0] += 1
    assert meter.mark(30) == pytest.approx(10)
    clock[0] += 1
    meter.mark(50)
    summary = meter.summary()
    assert summary["steps_per_second"] == pytest.approx(15)  # the first interval is warm-up
    assert summary["examples_per_second"] == pytest.approx(150)
    assert summary["batch"] == 10
    assert summary["intervals"] == 2
    assert meter.seconds["train"] == pytest.approx(8)
    assert meter.seconds["evaluate"] == 50
    assert meter.seconds["checkpoint"] == 7
    assert meter.total() == 65


def test_one_interval_is_better_than_none_and_none_is_said(clock):
    meter = Meter(batch=4)
    assert meter.summary()["examples_per_second"] is None
    meter.mark(0, first=True)
    assert meter.summary()["examples_per_second"] is None
    clock[0] += 2
    meter.mark(1)
    assert meter.summary()["examples_per_second"] == pytest.approx(2)


def test_share_of_peak_is_known_where_the_chip_is():
    assert share_of_peak(1e12, 10.0, named("a100"), "bf16") == pytest.approx(1e13 / 312e12)
    assert share_of_peak(1e12, 10.0, None, "bf16") is None
    assert share_of_peak(1e12, None, named("a100"), "bf16") is None
    assert share_of_peak(None, 1.0, named("v5e"), "bf16") is None
    assert share_of_peak(1e12, 10.0, named("v5e"), "f32") is None
