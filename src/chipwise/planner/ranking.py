"""Which target to take: rankings by time and by money, the Pareto set, and their facts.

Targets are ranked by the wall time of the run. If a target's steps may take less time than starting and
compiling, they are ranked by the steps alone, since those two are only assumed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..chips.prices import OLD_DAYS
from ..words.facts import Fact, fact
from .plans import Cost, Plan, Range


@dataclass(frozen=True)
class BreakEven:
    """Two targets: the one with the higher hourly price must be `price_ratio` times faster to cost the same.

    `speed_ratio`: how many times faster it is predicted to be.
    """

    dearer: str
    cheaper: str
    dearer_usd_per_hour: float
    cheaper_usd_per_hour: float
    price_ratio: float
    speed_ratio: float

    @property
    def fact(self) -> Fact:
        return Fact("plan-break-even", vars(self))


@dataclass(frozen=True)
class Verdict:
    """The verdict; names are those of targets. `by_money` uses on-demand prices: targets without a price are
    left out, and those with only old or marketplace prices come last.

    *Fields:* `ranked_by`: "run", by wall time, or "step", by the steps alone, for `by_time`, `by_money` and
    `pareto`. `fastest` and `cheapest`: facts about the first ones.
    """

    ranked_by: str
    by_time: tuple[str, ...]
    by_money: tuple[str, ...]
    pareto: tuple[str, ...]
    fastest: tuple[Fact, ...]
    cheapest: tuple[Fact, ...]
    break_even: tuple[BreakEven, ...]
    all_old: bool  # no price is current, so old list prices decide

    @property
    def facts(self) -> tuple[Fact, ...]:
        """All facts of the verdict, in order."""
        return *self.fastest, *self.cheapest, *self.more

    @property
    def more(self) -> tuple[Fact, ...]:
        """The facts after the first ones: where a higher price saves time."""
        front = [fact("plan-front", targets=self.pareto)] if len(self.pareto) > 1 else []
        return *front, *(pair.fact for pair in self.break_even)

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "fastest": [one.json() for one in self.fastest],
            "cheapest": [one.json() for one in self.cheapest],
            "break_even": [pair.fact.json() for pair in self.break_even],
        }


@dataclass(frozen=True)
class _Ranked:
    """A plan with its ranking: the seconds of the run or of its steps, and their price, if known."""

    plan: Plan
    seconds: Range
    cost: Cost | None
    usd: Range | None

    @property
    def target(self) -> str:
        return self.plan.target

    def decides(self, all_old: bool) -> bool:
        return self.cost is not None and _decides(self.cost, all_old)

    def dollars(self, cost: Cost) -> Range:
        """The dollars of the ranked seconds, at one of the plan's prices."""
        return self.seconds.times(cost.usd_per_hour / 3600)

    @property
    def usd_per_hour(self) -> float:
        assert self.cost is not None
        return self.cost.usd_per_hour


def judge(plans: Sequence[Plan]) -> Verdict:
    """The verdict over plans of one recipe."""
    able = [p for p in plans if p.runs and p.wall_seconds is not None]
    short = [p.target for p in able if p.ranked_by == "step"] if len(able) > 1 else []
    ranked = [_ranked(p, bool(short)) for p in able]
    by_time = sorted(ranked, key=lambda one: one.seconds.value)
    priced = [
        ((*one.cost.order[2:4], one.usd.value, one.seconds.value), one)
        for one in ranked
        if one.cost is not None and one.usd is not None
    ]
    by_money = [one for _, one in sorted(priced, key=lambda row: row[0])]
    all_old = all_prices_old(plans)
    deciding = [one for one in by_money if one.decides(all_old)]
    front: list[_Ranked] = []  # pairs of neighbours: where a higher price saves time
    for one in deciding or by_money:
        if not front or one.seconds.value < front[-1].seconds.value:
            front.append(one)
    fastest = [_fastest(by_time, plans, bool(short))]
    if short:
        fastest.append(fact("plan-ranked-by-step", targets=short))
    return Verdict(
        ranked_by="step" if short else "run",
        by_time=tuple(one.target for one in by_time),
        by_money=tuple(one.target for one in by_money),
        pareto=tuple(one.target for one in reversed(front)),
        fastest=tuple(fastest),
        cheapest=tuple(_cheapest(by_money, deciding, bool(short), all_old)) if able else (),
        break_even=tuple(_break_even(*pair) for pair in itertools.pairwise(front)),
        all_old=all_old,
    )


def break_even(dearer_usd_per_hour: float, cheaper_usd_per_hour: float) -> float:
    """How many times faster the more expensive of two chips must be for a step to cost the same on both.

    April 2018: a TPU v2-8 at $6.50 against a V100 at $3.06 must be 2.12 times faster.
    """
    return dearer_usd_per_hour / cheaper_usd_per_hour


def _ranked(plan: Plan, by_step: bool) -> _Ranked:
    assert plan.wall_seconds is not None
    cost, seconds = plan.cheapest(), plan.wall_seconds
    usd = None if cost is None else cost.usd
    if by_step and plan.step_seconds is not None:
        seconds = plan.step_seconds.times(plan.steps or 1)
        usd = None if cost is None else seconds.times(cost.usd_per_hour / 3600)
    return _Ranked(plan, seconds, cost, usd)


def _fastest(ranked: list[_Ranked], plans: Sequence[Plan], by_step: bool) -> Fact:
    if not ranked:
        return fact("plan-none-runs", targets=[p.target for p in plans])
    first = ranked[0]
    shown = first.seconds
    if by_step and first.plan.predicts is None and first.plan.step_seconds is not None:
        shown = first.plan.step_seconds
    numbers: dict[str, Any] = {
        "target": first.target,
        "seconds": shown.value,
        "low": shown.low,
        "high": shown.high,
    }
    if len(plans) == 1:
        return fact("plan-alone", **numbers)
    if len(ranked) == 1:
        return fact("plan-only", **numbers)
    second = ranked[1]
    ratio = second.seconds.value / first.seconds.value
    numbers |= {"second": second.target, "ratio": ratio, "second_seconds": shown.value * ratio}
    code = "plan-fastest"
    if by_step:
        code = "plan-fastest-step" if first.plan.predicts is None else "plan-fastest-blocks"
    return fact(f"{code}-tied" if first.seconds.overlaps(second.seconds) else code, **numbers)


def all_prices_old(plans: Sequence[Plan]) -> bool:
    """Whether there are list prices and none was read in the last `OLD_DAYS` days."""
    listed = [cost for plan in plans for cost in plan.costs if not cost.spot and not cost.market]
    return bool(listed) and all(cost.old for cost in listed)


def _decides(cost: Cost, all_old: bool) -> bool:
    return not cost.market if all_old else cost.decides


def _cheapest(ranked: list[_Ranked], deciding: list[_Ranked], by_step: bool, all_old: bool) -> list[Fact]:
    if not ranked:
        return [fact("plan-no-price")]
    first = ranked[0]
    cost, usd = first.cost, first.usd
    assert cost is not None and usd is not None
    numbers = _price_numbers(first, cost, usd)
    if not deciding:
        head = fact("plan-only-market", **numbers)
    elif len(deciding) == 1:
        head = fact("plan-cheapest-alone", **numbers)
    else:
        second = deciding[1]
        assert second.usd is not None
        numbers |= {"second": second.target, "second_usd": second.usd.value}
        tied = usd.overlaps(second.usd)
        if by_step:
            code = "plan-cheapest-step-tied" if tied else "plan-cheapest-step"
        else:
            code = "plan-cheapest-tied" if tied else "plan-cheapest"
        head = fact(code, **numbers)
    aged = [fact("plan-prices-old", days=OLD_DAYS)] if all_old else []
    return [
        head,
        *about_price(cost),
        *aged,
        *_lower(ranked, deciding, usd, all_old),
        *_by_cloud(ranked, all_old),
    ]


def _price_numbers(one: _Ranked, cost: Cost, usd: Range) -> dict[str, Any]:
    return {
        "target": one.target,
        "usd": usd.value,
        "usd_per_hour": cost.usd_per_hour,
        "cloud": cost.cloud,
        "region": cost.region,
        "date": cost.date,
    }


def _lower(ranked: list[_Ranked], deciding: list[_Ranked], usd: Range, all_old: bool) -> list[Fact]:
    """The lowest on-demand price that may not decide, if it is below the deciding one."""
    others = [
        (one.dollars(cost).value, one, cost)
        for one in ranked
        for cost in one.plan.costs
        if not (cost.spot or _decides(cost, all_old))
        and cost.includes != "accelerator alone"
        and cost.machines == 1
    ]
    if not deciding or not others:
        return []
    lowest, one, cost = min(others, key=lambda row: row[0])
    if lowest >= usd.value:
        return []
    code = "plan-maybe-cheaper-market" if cost.market else "plan-maybe-cheaper-old"
    return [fact(code, days=OLD_DAYS, **_price_numbers(one, cost, one.dollars(cost)))]


def _by_cloud(ranked: list[_Ranked], all_old: bool) -> list[Fact]:
    """The cheapest target on each cloud that offers several, if they differ."""
    offers: dict[str, dict[str, float]] = {}
    for one in ranked:
        for cost in one.plan.costs:
            whole = cost.includes != "accelerator alone" and cost.machines == 1
            if cost.spot or not _decides(cost, all_old) or not whole:
                continue
            of = offers.setdefault(cost.cloud, {})
            of[one.target] = min(of.get(one.target, math.inf), one.dollars(cost).value)
    winners = {cloud: min(of, key=lambda t: of[t]) for cloud, of in offers.items() if len(of) > 1}
    if len(set(winners.values())) < 2:
        return []
    order = sorted(winners, key=lambda cloud: offers[cloud][winners[cloud]])
    facts = [fact("plan-in-cloud", cloud=c, target=winners[c], usd=offers[c][winners[c]]) for c in order]
    return [fact("plan-turns-with-cloud", winners=facts)]


def about_price(cost: Cost) -> list[Fact]:
    """Caveats of a price."""
    facts = []
    if cost.includes == "accelerator alone":
        facts.append(fact("price-without-host"))
    if cost.machines > 1:
        facts.append(fact("price-separate-machines", machines=cost.machines))
    return facts


def _break_even(a: _Ranked, b: _Ranked) -> BreakEven:
    dear, cheap = sorted((a, b), key=lambda one: -one.usd_per_hour)
    rates = dear.usd_per_hour, cheap.usd_per_hour
    return BreakEven(
        dear.target, cheap.target, *rates, break_even(*rates), cheap.seconds.value / dear.seconds.value
    )
