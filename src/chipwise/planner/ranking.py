"""Ranks targets by time and by money. Finds the Pareto set, and the facts about the first targets.

Targets are ranked by the wall time of the run. If a target's steps may take less time than starting
and compiling, all are ranked by the steps alone, since those two are only assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..base import Fact, fact
from ..base.prediction import Range
from ..chips.prices import OLD_DAYS
from .plans import Cost, Plan


@dataclass(frozen=True)
class Verdict:
    """The verdict. Names are those of targets."""

    ranked_by: str
    """"run", by wall time, or "step", by the steps alone. Applies to `by_time`, `by_money` and
    `pareto`."""
    by_time: tuple[str, ...]
    by_money: tuple[str, ...]
    """By on-demand prices. Targets without a price are left out, and those without one of a large
    cloud come last."""
    pareto: tuple[str, ...]
    fastest: tuple[Fact, ...]
    """Facts about the first target by time."""
    cheapest: tuple[Fact, ...]
    """Facts about the first target by money."""


@dataclass(frozen=True)
class _Ranked:
    """A plan with its cheapest price, and the seconds of its run or of its steps."""

    plan: Plan
    seconds: Range
    cost: Cost | None

    @property
    def target(self) -> str:
        return self.plan.target

    @property
    def usd_per_hour(self) -> float:
        return math.inf if self.cost is None else self.cost.usd_per_hour

    @property
    def usd(self) -> Range:
        return self.seconds.times(self.usd_per_hour / 3600)

    @property
    def numbers(self) -> dict[str, Any]:
        """The price, as numbers of a fact."""
        names = ("usd_per_hour", "cloud", "region", "date")
        price = {name: getattr(self.cost, name) for name in names}
        return {"target": self.target, "usd": self.usd.value, **price}


def judge(plans: Sequence[Plan]) -> Verdict:
    """The verdict over plans of one recipe."""
    able = [p for p in plans if p.runs and p.wall_seconds is not None]
    short = [p.target for p in able if p.ranked_by == "step"] if len(able) > 1 else []
    ranked = [_Ranked(p, _seconds(p, bool(short)), p.cheapest()) for p in able]
    by_time = sorted(ranked, key=lambda one: one.seconds.value)
    priced = [(one.cost.standing, one) for one in ranked if one.cost is not None]
    priced.sort(key=lambda row: (row[0], row[1].usd.value, row[1].seconds.value))
    by_money = [one for _, one in priced]
    deciding = [one for standing, one in priced if standing == priced[0][0]]
    front: list[_Ranked] = []
    for one in deciding:
        if not front or one.seconds.value < front[-1].seconds.value:
            front.append(one)
    fastest = [_fastest(by_time, plans, bool(short))]
    if short:
        fastest.append(fact("plan-ranked-by-step", targets=short))
    without = [one.target for one in ranked if one.cost is None]
    unpriced = [fact("plan-unpriced", targets=without)] if 0 < len(without) < len(ranked) else []
    return Verdict(
        ranked_by="step" if short else "run",
        by_time=tuple(one.target for one in by_time),
        by_money=tuple(one.target for one in by_money),
        pareto=tuple(one.target for one in reversed(front)),
        fastest=tuple(fastest),
        cheapest=(*_cheapest(by_money, deciding, bool(short)), *unpriced) if able else (),
    )


def _seconds(plan: Plan, by_step: bool) -> Range:
    assert plan.wall_seconds is not None
    if by_step and plan.step_seconds is not None:
        return plan.step_seconds.times(plan.steps or 1)
    return plan.wall_seconds


def _fastest(ranked: list[_Ranked], plans: Sequence[Plan], by_step: bool) -> Fact:
    if not ranked:
        return fact("plan-none-runs", targets=[p.target for p in plans])
    first = ranked[0]
    shown = first.seconds
    alike = len({one.plan.steps for one in ranked}) == 1
    if by_step and alike and first.plan.step_seconds is not None:
        shown = first.plan.step_seconds
    numbers = {
        "target": first.target,
        "seconds": shown.value,
        "low": shown.low,
        "high": shown.high,
    }
    if len(ranked) == 1:
        return fact("plan-alone" if len(plans) == 1 else "plan-only", **numbers)
    second = ranked[1]
    ratio = second.seconds.value / first.seconds.value
    numbers |= {"second": second.target, "ratio": ratio, "second_seconds": shown.value * ratio}
    code = "plan-fastest" if not by_step else "plan-fastest-step" if alike else "plan-fastest-work"
    return fact(f"{code}-tied" if first.seconds.overlaps(second.seconds) else code, **numbers)


def _cheapest(ranked: list[_Ranked], deciding: list[_Ranked], by_step: bool) -> Iterator[Fact]:
    if not ranked:
        yield fact("plan-no-price")
        return
    first = ranked[0]
    cost = ranked[0].cost
    numbers = ranked[0].numbers
    assert cost is not None
    code = "plan-only-market" if cost.market else "plan-cheapest-alone"
    if len(deciding) > 1 and not cost.market:
        second = deciding[1]
        numbers |= {"second": second.target, "second_usd": second.usd.value}
        code = "plan-cheapest-step" if by_step else "plan-cheapest"
        code += "-tied" if first.usd.overlaps(second.usd) else ""
    yield fact(code, **numbers)
    if cost.includes == "accelerator alone":
        yield fact("price-without-host")
    if cost.machines > 1:
        yield fact("price-separate-machines", machines=cost.machines)
    lower = min(_whole_machines(ranked), key=lambda one: one.usd.value, default=first)
    if lower.usd.value < first.usd.value:
        yield fact("plan-offered-lower", **lower.numbers)
    if cost.old:
        yield fact("plan-price-old", days=OLD_DAYS)


def _whole_machines(ranked: list[_Ranked]) -> list[_Ranked]:
    """Each plan at each of its on-demand prices of one machine with its host."""
    costs = [(one, cost) for one in ranked for cost in one.plan.costs if not cost.spot]
    whole = [(one, c) for one, c in costs if c.machines == 1 and c.includes != "accelerator alone"]
    return [_Ranked(one.plan, one.seconds, cost) for one, cost in whole]
