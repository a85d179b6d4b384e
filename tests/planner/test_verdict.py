"""Rankings, the Pareto set and the sentences, on plans whose figures are easy to see through."""

import pytest

from chipwise.planner.plans import Cost, Plan, Range
from chipwise.planner.verdict import break_even, judge


def made(name, minutes, hourly=None, spread=1.05, **more):
    wall = Range(60.0 * minutes, 60.0 * minutes / spread, 60.0 * minutes * spread)
    costs = ()
    if hourly is not None:
        where = dict(cloud="gcp", instance=name, region="us", spot=False, includes="whole VM")
        usd = wall.times(hourly / 3600)
        costs = (Cost(usd_per_hour=hourly, usd=usd, date="2026-07-30", source="list", **where),)
    common = dict(chip=name, chips=1, devices=1, devices_found=1, method="compiled", batch=8, replicas=8)
    return Plan(
        target=name, replicas_per_device=8, precision="bf16", parameters=1, wall_seconds=wall, costs=costs,
        step_seconds=wall, examples_per_second=wall, **common, **more,
    )  # fmt: skip


def test_the_price_ratio_of_2018():
    assert break_even(6.50, 3.06) == pytest.approx(2.124, abs=5e-4)


def test_rankings_and_the_pareto_set():
    plans = [made("slow", 60, 1), made("fast", 10, 9), made("bad", 70, 5), made("free", 5, None)]
    verdict = judge(plans)
    assert verdict.by_time == ("free", "fast", "slow", "bad")
    assert verdict.by_money == ("slow", "fast", "bad")  # $1.00, $1.50, $5.83; "free" has no price
    assert verdict.pareto == ("fast", "slow")


def test_break_even_names_the_dearer_and_its_speed():
    (pair,) = judge([made("v100", 106.2, 3.06), made("v2-1", 53.1, 6.50)]).break_even
    assert (pair.dearer, pair.cheaper) == ("v2-1", "v100")
    assert pair.price_ratio == pytest.approx(2.124, abs=5e-4)
    assert pair.speed_ratio == pytest.approx(2.0)
    assert "2.12 ×" in pair.sentence and "2.00 ×" in pair.sentence


def test_sentences_give_the_evidence_and_admit_a_tie():
    fastest, cheapest = judge([made("a", 10, 6), made("b", 30, 1)]).sentences
    assert (
        fastest == "a is predicted to finish first, in 10.0 min (9.5 min to 10.5 min), 3.0 × faster than b."
    )
    assert "b is the cheapest, $0.50 at $1.00 an hour (gcp, us, 2026-07-30), against $1.00 on a" in cheapest
    fastest, cheapest = judge([made("a", 10, 6, 1.3), made("b", 11, 6, 1.3)]).sentences
    assert "within the uncertainty" in fastest and "within the uncertainty" in cheapest


def test_one_target_no_price_and_nothing_that_runs():
    one = judge([made("a", 10)])
    assert one.sentences[0] == "a is predicted to finish, in 10.0 min (9.5 min to 10.5 min)."
    assert "--prices" in one.sentences[1]
    two = judge([made("a", 10), made("b", 10, problem="does not fit")])
    assert "nothing else here can run" in two.sentences[0]
    none = judge([made("a", 10, problem="does not fit")])
    assert none.by_time == () and "no prediction for a" in none.sentences[0]
    assert len(none.sentences) == 1
