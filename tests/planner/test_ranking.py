"""Rankings, the Pareto set and the facts, on plans whose figures are easy to see through."""

import dataclasses

import pytest

from chipwise.base.facts import fact
from chipwise.base.prediction import Range
from chipwise.planner.plans import Cost, Plan
from chipwise.planner.ranking import judge


def made(name, minutes, hourly=None, spread=1.05, **more):
    wall = Range(60.0 * minutes, 60.0 * minutes / spread, 60.0 * minutes * spread)
    costs = ()
    if hourly is not None:
        where = dict(cloud="gcp", instance=name, region="us", spot=False, includes="whole VM")
        usd = wall.times(hourly / 3600)
        costs = (Cost(usd_per_hour=hourly, usd=usd, date="2026-07-30", source="list", **where),)
    common = dict(chip=name, chips=1, devices=1, devices_found=1, batch=8, replicas=8)
    rest = {**common, "wall_seconds": wall, "step_seconds": wall, "examples_per_second": wall, **more}
    return Plan(target=name, replicas_per_device=8, precision="bf16", parameters=1, costs=costs, **rest)


def codes(facts):
    return [told.code for told in facts]


def test_rankings_and_the_pareto_set():
    plans = [made("slow", 60, 1), made("fast", 10, 9), made("bad", 70, 5), made("free", 5, None)]
    verdict = judge(plans)
    assert verdict.by_time == ("free", "fast", "slow", "bad")
    unpriced = fact("plan-unpriced", targets=["free"])
    assert verdict.cheapest[-1] == unpriced and unpriced not in judge(plans[:3]).cheapest
    assert verdict.by_money == ("slow", "fast", "bad")  # $1.00, $1.50, $5.83; "free" has no price
    assert verdict.pareto == ("fast", "slow")


def test_the_facts_hold_the_evidence_and_admit_a_tie():
    verdict = judge([made("a", 10, 6), made("b", 30, 1)])
    (fastest,), (cheapest,) = verdict.fastest, verdict.cheapest
    assert fastest.code == "plan-fastest" and fastest.numbers == {
        "target": "a", "seconds": 600, "low": pytest.approx(600 / 1.05), "high": 630, "second": "b",
        "ratio": pytest.approx(3), "second_seconds": pytest.approx(1800),
    }  # fmt: skip
    assert cheapest.code == "plan-cheapest" and cheapest.numbers == {
        "target": "b", "usd": 0.5, "usd_per_hour": 1, "cloud": "gcp", "region": "us", "date": "2026-07-30",
        "second": "a", "second_usd": pytest.approx(1),
    }  # fmt: skip
    verdict = judge([made("a", 10, 6, 1.3), made("b", 11, 6, 1.3)])
    assert codes(verdict.fastest) == ["plan-fastest-tied"] and codes(verdict.cheapest) == [
        "plan-cheapest-tied"
    ]


def test_one_target_no_price_and_nothing_that_runs():
    one = judge([made("a", 10)])
    assert codes(one.fastest) == ["plan-alone"] and codes(one.cheapest) == ["plan-no-price"]
    assert codes(judge([made("a", 10), made("b", 10, problem="does not fit")]).fastest) == ["plan-only"]
    none = judge([made("a", 10, problem="does not fit")])
    assert none.by_time == () and codes(none.fastest) == ["plan-none-runs"]
    assert none.fastest[0]["targets"] == ["a"]


def test_a_price_says_what_it_leaves_out():
    bare = dataclasses.replace(made("a", 10, 1).costs[0], includes="accelerator alone", machines=2)
    (plan,) = [dataclasses.replace(made("a", 10, 1), costs=(bare,))]
    assert codes(judge([plan]).cheapest) == [
        "plan-cheapest-alone", "price-without-host", "price-separate-machines",
    ]  # fmt: skip


def priced(plan, *offers):
    """`plan` at ($/hour, what differs) each."""
    (like,) = plan.costs
    costs = [
        dataclasses.replace(like, usd_per_hour=rate, usd=plan.wall_seconds.times(rate / 3600), **more)
        for rate, more in offers
    ]
    return dataclasses.replace(plan, costs=tuple(costs))


def test_large_clouds_decide_and_the_lower_offer_is_named():
    market, small = {"market": True, "cloud": "vast (marketplace)"}, {"cloud": "verda"}
    a = priced(made("a", 60, 1), (4, {}), (2, market), (3, small))
    b = priced(made("b", 60, 1), (5, {"cloud": "aws"}), (1, {**small, "includes": "accelerator alone"}))
    c, d = priced(made("c", 60, 1), (2.5, small)), priced(made("d", 60, 1), (1.5, market))
    assert [plan.cheapest().usd_per_hour for plan in (a, b, c, d)] == [4, 5, 2.5, 1.5]
    verdict = judge([a, b, c, d])
    assert verdict.by_money == ("a", "b", "c", "d") and set(verdict.pareto) <= {"a", "b"}
    head, lower = verdict.cheapest
    assert head.code == "plan-cheapest" and (head["target"], head["second"]) == ("a", "b")
    assert lower.code == "plan-offered-lower" and (lower["target"], lower["usd_per_hour"]) == ("d", 1.5)
    assert codes(judge([a, b]).cheapest) == ["plan-cheapest", "plan-offered-lower"]
    assert codes(judge([b]).cheapest) == ["plan-cheapest-alone"]
    assert codes(judge([c, d]).cheapest) == ["plan-cheapest-alone", "plan-offered-lower"]
    assert codes(judge([d]).cheapest) == ["plan-only-market"]


def test_what_one_owns_stands_beside_large_clouds():
    mine = priced(made("mine", 60, 1), (0.5, {"cloud": "mine", "includes": "owned"}))
    assert judge([mine, made("a", 60, 1)]).by_money == ("mine", "a")


def test_a_price_decides_at_any_age_and_an_old_one_is_said_to_be():
    a, b = priced(made("a", 60, 1), (1, {"old": True})), made("b", 60, 9)
    head, aged = judge([a, b]).cheapest
    assert (head.code, head["target"], head["second"]) == ("plan-cheapest", "a", "b")
    assert aged.code == "plan-price-old" and aged["days"] == 90
    assert codes(judge([b]).cheapest) == ["plan-cheapest-alone"]


def test_where_starting_and_compiling_decide_targets_are_ranked_by_the_step():
    """A v3-8 of 4.6 × the speed of a T4 was ranked below it on constants."""
    step, slow = Range(0.010, 0.009, 0.011), Range(0.046, 0.04, 0.05)
    tpu = made("v3-8", 2, 8, step_seconds=step, steps=100, ranked_by="step")
    t4 = made("t4", 1, 0.5, step_seconds=slow, steps=100)
    assert judge([dataclasses.replace(tpu, ranked_by="run"), t4]).by_time == ("t4", "v3-8")
    verdict = judge([tpu, t4])
    assert verdict.ranked_by == "step" and verdict.by_time == verdict.pareto == ("v3-8", "t4")
    first, why = verdict.fastest
    assert first.code == "plan-fastest-step" and first["seconds"] == 0.010
    assert first["ratio"] == pytest.approx(4.6) and first["second_seconds"] == pytest.approx(0.046)
    assert why.code == "plan-ranked-by-step" and why["targets"] == ["v3-8"]
    (cheapest,) = verdict.cheapest
    assert cheapest.code == "plan-cheapest-step" and cheapest["usd"] == pytest.approx(4.6 / 3600 * 0.5)
    assert codes(judge([tpu]).fastest) == ["plan-alone"]  # of one there is no ranking
