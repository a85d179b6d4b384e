"""Charts: round numbers along an axis; curves and bars within their frames."""

import itertools
import math
import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chipwise.explain import charts
from chipwise.explain.charts import Axis, Trace, log_steps, panel, spread_out, steps

POSITIVE = st.floats(1e-6, 1e12)
NUMBERS = st.floats(-1e30, 1e30, allow_subnormal=False)
POINTS = st.lists(st.tuples(st.floats(0, 1e9), NUMBERS), max_size=50)


# ---- axes


@given(low=st.floats(-1e30, 1e30), span=st.floats(1e-6, 1e30), most=st.integers(3, 6))
def test_steps(low, span, most):
    found = steps(low, low + span, most)
    assert len(found) <= most + 1 and all(a <= b for a, b in itertools.pairwise(found))
    if span > abs(low) * 1e-6:
        assert all(low - 1e-6 * span <= x <= low + span * (1 + 1e-6) for x in found)


def test_steps_are_round():
    assert steps(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert steps(3.1, 9.9, 3) == [5]
    assert steps(7, 7, 5) == [7]


@given(low=st.floats(1e-12, 1e12), decades=st.floats(0, 12), most=st.integers(3, 8))
def test_log_steps(low, decades, most):
    high = low * 10**decades
    found = log_steps(low, high, most)
    assert len(found) <= most and found == sorted(found) and all(low <= x <= high for x in found)
    assert found or decades < math.log10(3)


def test_log_steps_are_round():
    assert log_steps(1, 100, 6) == [1, 3, 10, 30, 100]
    assert log_steps(1, 100, 8) == [1, 2, 5, 10, 20, 50, 100]


def test_what_is_spread_out():
    assert spread_out([1, 41], 40) and not spread_out([1, 40], 40)
    assert not spread_out([0, 41], 40) and not spread_out([-1, 41], 40) and not spread_out([], 40)
    assert not spread_out([1e-300, 1e10], 40)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("end", [1e-2, 7.0, 90.0, 4e4, 3e7, 1e10])
def test_seconds_are_cut_where_a_clock_is(end, log):
    ticks = Axis(end / 100 if log else 0.0, end, 0, 400, log, "s").ticks(5)
    assert 1 <= len(ticks) <= 11 and len({t.label for t in ticks}) == len(ticks)
    assert all(re.fullmatch(r"0|[\d.,kM]+ (ms|s|min|h|d)", t.label) for t in ticks)


def test_seconds_and_dollars_are_written_out():
    assert [t.label for t in Axis(0, 7200, 0, 400, unit="s").ticks(5)] == [
        "0",
        "0.5 h",
        "1 h",
        "1.5 h",
        "2 h",
    ]
    assert [t.label for t in Axis(0.05, 20, 0, 400, True, "$").ticks(6)] == [
        "$0.10",
        "$0.30",
        "$1",
        "$3",
        "$10",
    ]


# ---- curves


def test_what_is_written_on_an_axis():
    assert Axis(0, 40_000, 0, 100).ticks(4)[-1].label == "40k"


@example(points=[(0, 1.0), (0, 4e-305)], zero=False, log=True, second=None)
@given(points=POINTS, zero=st.booleans(), log=st.booleans(), second=st.none() | st.just(("epoch", 0.01)))
def test_every_point_lies_in_the_frame(points, zero, log, second):
    made = panel("a", [Trace("a", "train", points)], zero=zero, y_log=log, x_log=log, second=second)
    assert (made is None) is (not points)
    for plot in (made.plot(560, 300), made.plot(370, 260)) if made else ():
        (line,) = plot.lines
        numbers = [float(x) for x in re.findall(r"-?[\d.]+", line.path)]
        for x, y in [*zip(numbers[::2], numbers[1::2], strict=True), *line.dots]:
            assert plot.left - 0.1 <= x <= plot.right + 0.1 and plot.top - 0.1 <= y <= plot.bottom + 0.1
        for tick in plot.y_ticks:
            assert plot.top - 0.1 <= tick.at <= plot.bottom + 0.1


@pytest.mark.parametrize("many", [259, 260, 261, 2600, 2601])
def test_thinning_keeps_the_ends_and_every_peak(many):
    points = [(k, math.sin(k / 50) + (k == many // 2) * 9) for k in range(many)]
    kept = charts.thinned(points)
    assert len(kept) <= 262 and kept == sorted(kept) and set(kept) <= set(points)
    assert max(y for _, y in kept) == max(y for _, y in points) and (many > 260 or kept == points)
    assert charts.thinned([(0, math.nan), (1, None), (2, 3.0), (None, 3.0)]) == [(2, 3.0)]


def test_a_loss_over_decades_is_logarithmic():
    points = [(k, 10.0**-k) for k in range(5)]
    plot = panel("a", [Trace("a", "train", points)], y_log=True).plot(560, 300)
    gaps = [b - a for (_, a), (_, b) in itertools.pairwise(plot.lines[0].dots)]
    assert plot.y_log and gaps == pytest.approx([gaps[0]] * 4)
    with_zero = panel("a", [Trace("a", "train", [*points, (5, 0.0)])], y_log=True)
    assert not with_zero.plot(560, 300).y_log


def test_the_axis_minds_no_curve_aside():
    """Beyond a factor it is logarithmic."""
    near = Trace("a", "s0", ((1.0, 2.0), (2.0, 1.0)))
    far = Trace("b", "s1", ((1.0, 2.0), (2.0, 1e15)), aside=True)
    both, alone, wide = (
        panel("losses", curves, y_log=True).plot(560, 300)
        for curves in ([near, far], [near], [near, replace(far, aside=False)])
    )
    assert both.y_ticks == alone.y_ticks and both.lines[0] == alone.lines[0] and not both.y_log
    assert wide.y_log and len(both.lines) == 2


def test_marks_levels_and_a_second_axis():
    curve = Trace("a", "train", [(k, float(k)) for k in range(101)])
    made = panel(
        "a",
        [curve],
        second=("epoch", 0.1),
        marks=[50, 200],
        mark_words="resumed",
        level=50,
        level_words="median",
    )
    plot = made.plot(560, 300)
    assert (made.second, made.mark_words, made.level_words) == (("epoch", 0.1), "resumed", "median")
    assert plot.marks == pytest.approx([(plot.left + plot.right) / 2])
    assert plot.top < plot.level < plot.bottom and [t.label for t in plot.second] == [
        "0",
        "2",
        "4",
        "6",
        "8",
        "10",
    ]
    assert panel("a", [curve], marks=[200], mark_words="resumed").mark_words == ""


def test_a_key_has_a_name_once():
    curves = [
        Trace(name, charts.style_of(k), [(0, 1.0), (1, 2.0)]) for k, name in enumerate(["a", "a", "b", ""])
    ]
    assert panel("x", curves).key == {"a": "s1 dash0", "b": "s2 dash0"}
    marked = panel("x", curves, marks=[1], mark_words="m", level=1, level_words="l")
    assert list(marked.key) == ["a", "b", "l", "m"]
    assert charts.style_of(7) == "s1 dash1"


def test_a_metric_has_a_panel_with_training_and_evaluation():
    names = [f"{part}/{name}" for part in ("train", "eval") for name in ("f1", "accuracy", "loss")]
    drawn = [*charts.metric_panels({name: [(0, 1.0), (1, 2.0)] for name in names} | {"eval/top": []})]
    assert [one.title.split()[0] for one in drawn] == ["loss", "accuracy", "f1"]
    assert list(drawn[0].key) == ["training", "evaluation"]
    assert len([*charts.metric_panels({f"eval/{k}": [(0, 1.0)] for k in range(20)})]) == charts.CHARTS
