"""Which target to take: rankings by time and by money, the Pareto set, two sentences with their evidence."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..words.figures import dollars, duration
from .plans import Cost, Plan


@dataclass(frozen=True)
class BreakEven:
    """Two targets of which the dearer per hour must be `price_ratio` times faster to cost the same.

    `speed_ratio` is how many times faster it is predicted to be. `sentence` puts it in words.
    """

    dearer: str
    cheaper: str
    price_ratio: float
    speed_ratio: float
    sentence: str


@dataclass(frozen=True)
class Verdict:
    """Names are targets'. `by_money` is of on-demand prices; targets without a price are left out of it."""

    sentences: tuple[str, ...]
    by_time: tuple[str, ...]
    by_money: tuple[str, ...]
    pareto: tuple[str, ...]
    break_even: tuple[BreakEven, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(plans: Sequence[Plan]) -> Verdict:
    """The verdict over plans of one recipe."""
    able = [p for p in plans if p.runs and p.wall_seconds is not None]
    by_time = sorted(able, key=_wall)
    priced = [(p, c) for p in able if (c := p.cheapest()) is not None]
    by_money = sorted(priced, key=lambda pair: pair[1].usd.value)
    pareto = [  # each with the next: where money buys time
        (p, c)
        for p, c in by_money
        if not any(_wall(q) < _wall(p) for q, d in by_money if d.usd.value < c.usd.value)
    ]
    return Verdict(
        sentences=tuple(s for s in (_fastest(by_time, plans), _cheapest(by_money) if able else "") if s),
        by_time=tuple(p.target for p in by_time),
        by_money=tuple(p.target for p, _ in by_money),
        pareto=tuple(p.target for p, _ in sorted(pareto, key=lambda pair: _wall(pair[0]))),
        break_even=tuple(_break_even(*pair) for pair in itertools.pairwise(pareto or by_money)),
    )


def break_even(dearer_usd_per_hour: float, cheaper_usd_per_hour: float) -> float:
    """How many times faster the dearer of two chips must be for a step to cost the same on both.

    April 2018: a TPU v2-8 at $6.50 against a V100 at $3.06 must be 2.12 times faster.
    """
    return dearer_usd_per_hour / cheaper_usd_per_hour


def _wall(plan: Plan) -> float:
    assert plan.wall_seconds is not None
    return plan.wall_seconds.value


def _fastest(ranked: list[Plan], plans: Sequence[Plan]) -> str:
    if not ranked:
        return f"There is no prediction for {', '.join(p.target for p in plans)}: see each one's problem."
    first = ranked[0]
    assert first.wall_seconds is not None
    head = f"{first.target} is predicted to finish first, in {duration(_wall(first))}"
    head += f" ({duration(first.wall_seconds.low)} to {duration(first.wall_seconds.high)})"
    if len(plans) == 1:
        return head.replace(" finish first,", " finish,") + "."
    if len(ranked) == 1:
        return f"{head}; nothing else here can run the recipe."
    second = ranked[1]
    assert second.wall_seconds is not None
    ratio = _wall(second) / _wall(first)
    if first.wall_seconds.overlaps(second.wall_seconds):
        return f"{head}, but {second.target} is within the uncertainty ({duration(_wall(second))})."
    return f"{head}, {ratio:.1f} × faster than {second.target}."


def _cheapest(ranked: list[tuple[Plan, Cost]]) -> str:
    if not ranked:
        return "No price is known for any of them; give --prices FILE."
    plan, cost = ranked[0]
    head = (
        f"{plan.target} is the cheapest, {dollars(cost.usd.value)} at {dollars(cost.usd_per_hour)} an hour "
        f"({where(cost)})"
    )
    if len(ranked) == 1:
        return f"{head}; no other price is known."
    other, price = ranked[1]
    if cost.usd.overlaps(price.usd):
        return f"{head}; {other.target} is within the uncertainty ({dollars(price.usd.value)})."
    return f"{head}, against {dollars(price.usd.value)} on {other.target}."


def where(cost: Cost) -> str:
    """Cloud, region and day of a price, and whether its host comes on top."""
    day = re.search(r"\d{4}-\d{2}(-\d{2})?", cost.date)
    extra = ", without its host" if cost.includes == "accelerator alone" else ""
    extra += f", {cost.machines} separate machines" if cost.machines > 1 else ""
    return f"{cost.cloud}, {cost.region}, {day.group() if day else cost.date}{extra}"


def _break_even(a: tuple[Plan, Cost], b: tuple[Plan, Cost]) -> BreakEven:
    (dear, high), (cheap, low) = sorted((a, b), key=lambda pair: -pair[1].usd_per_hour)
    price, speed = break_even(high.usd_per_hour, low.usd_per_hour), _wall(cheap) / _wall(dear)
    return BreakEven(
        dear.target,
        cheap.target,
        price,
        speed,
        f"At {dollars(high.usd_per_hour)} against {dollars(low.usd_per_hour)} an hour {dear.target} must be "
        f"{price:.2f} × faster than {cheap.target} to cost no more; it is predicted to be {speed:.2f} ×.",
    )
