"""Ratios that say when they show nothing; time to a target."""

import json
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from chipwise.base.errors import RecipeError
from chipwise.base.facts import fact
from chipwise.explain.compare.row_figures import NO_INTERVAL, Figure, ratio, repeated
from chipwise.study.goal import Goal
from chipwise.study.stats import NO_DIFFERENCE
from explain.comparisons import by_label, compared, record, run, study
from refusals import refused

SPEEDS = st.floats(1e-3, 1e9)
HOW = fact("one-run")


@given(st.lists(SPEEDS, min_size=2, max_size=5), st.lists(SPEEDS, min_size=2, max_size=5))
def test_a_ratio_and_its_inverse(a, b):
    for x, y in (
        (repeated(a), repeated(b)),
        (Figure(a[0], a[0] / 2, a[0] * 2, 1, HOW, (a[0],)), Figure(b[0], b[0], b[0], 1, HOW, (b[0],))),
    ):
        there, back = ratio(x, y), ratio(y, x)
        assume(there.low is not None)  # two pairs that are alike
        assert there.value == pytest.approx(1 / back.value) and there.low <= there.value * (1 + 1e-9)
        assert there.low == pytest.approx(1 / back.high, rel=1e-6)
        assert (there.verdict == NO_DIFFERENCE) == (back.verdict == NO_DIFFERENCE)


@given(SPEEDS, SPEEDS, st.floats(1, 3), st.floats(1, 3))
def test_intervals_that_overlap_show_no_difference(x, y, wide, wider):
    a, b = Figure(x, x / wide, x * wide, 1, HOW, (x,)), Figure(y, y / wider, y * wider, 1, HOW, (y,))
    overlap = a.low <= b.high and b.low <= a.high
    near = math.isclose(a.low, b.high, rel_tol=1e-9) or math.isclose(b.low, a.high, rel_tol=1e-9)
    assert near or (ratio(a, b).verdict == NO_DIFFERENCE) == overlap


def test_two_figures_without_intervals():
    assert (
        ratio(Figure(2, None, None, 1, HOW, (2,)), Figure(1, None, None, 1, HOW, (1,))).verdict == NO_INTERVAL
    )


def test_time_to_a_target_is_that_of_a_rows_own_evaluations(tmp_path):
    sources = (run(tmp_path / "run"), record(tmp_path / "fast.json", 2560.0, 0))
    rows = by_label(compared(*sources, target="0.95"))
    one = {"low": None, "high": None, "n": 1, "how": fact("one-run").json()}
    trained = 200 * 256 / rows["run"]["examples_per_second"]["value"]
    assert rows["run"]["target"] | {"how": ""} == {
        "training": {"value": trained, **one, "values": [trained]},
        "wall": {"value": 200.0, **one, "values": [200.0]},
        "steps": 200, "reached": 1, "runs": 1, "how": "",
    }  # fmt: skip
    for other in ("fast",):
        assert rows[other]["target"]["training"] is rows[other]["target"]["wall"] is None
        assert rows[other]["target"]["how"] == fact("not-evaluated").json()
    never = by_label(compared(*sources, target="0.999"))
    assert never["run"]["target"]["how"] == fact("target-missed", best=0.97).json()
    down = by_label(compared(*sources, target="eval/accuracy=.9"))
    assert down["run"]["target"]["steps"] == 100


def test_a_lower_error_reaches_its_target_in_a_comparison(tmp_path):
    """0.4, 0.25, 0.2 are below 0.3 from step 200 on; a higher value is not better."""
    rows = [
        {"step": 100 * k, "eval/rmse": v, "examples_per_second": 1e3, "steps_per_second": 4.0}
        for k, v in enumerate((0.4, 0.25, 0.2), 1)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    made = [run(tmp_path / name, rows=text) for name in "ab"]
    found = compared(*made, target="eval/rmse=0.3")["rows"][0]["target"]
    assert (found["steps"], found["reached"]) == (200, 1)
    missed = compared(*made, target="eval/rmse=0.1")["rows"][0]["target"]["how"]
    assert missed == fact("target-missed", best=0.2).json()


def test_a_run_of_before_knows_its_steps_and_not_its_seconds(tmp_path):
    found = by_label(compared(run(tmp_path / "a", timed=False), run(tmp_path / "b"), target="0.95"))
    assert found["a"]["target"]["wall"] is None and found["a"]["target"]["training"]
    assert found["a"]["target"]["how"]["code"] == "own-steps" and found["a"]["target"]["steps"] == 200


def test_one_run_against_several_to_a_target(tmp_path):
    found = by_label(compared(study(tmp_path / "study", ("0.1",)), run(tmp_path / "b"), target="0.95"))
    assert found["b"]["target_ratio"]["verdict"] == NO_DIFFERENCE


def test_targets_nobody_measured(tmp_path):
    with refused(RecipeError, "target-not-measured", metric="eval/f1", seen=["eval/accuracy"]):
        compared(run(tmp_path / "a"), run(tmp_path / "b"), target="f1=0.5")
    for text in ("", "high", "eval/loss=", "=1", "nan"):
        with refused(RecipeError, "target-unreadable", given=text):
            Goal.parse(text)


def test_an_error_is_a_target_from_above():
    for text in ("eval/rmse=0.3", "distance_lower=0.3"):
        target = Goal.parse(text)
        assert target.reached(0.29) and not target.reached(0.31)
    assert Goal.parse("eval/r2=0.3").reached(0.31)
