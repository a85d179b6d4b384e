"""Where everything stands in the page's two figures: plain numbers for a template to draw.

The scatter has logarithmic axes: time to the right, dollars upwards. At a fixed price an hour the two
are proportional, so a prediction's interval is a slanted line, not a cross.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..charts import Tick

Box = tuple[float, float, float, float]  # left, top, right, bottom

CATEGORIES = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "state": "model state",
    "replica_sums": "replicas' sums",
    "activations": "activations",
    "data": "data",
    "program": "program",
}
"""The fields of `plans.Memory`, in the order they are drawn, and in words."""

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0
_TIMES = [
    (count * size, f"{count} {unit}")
    for size, unit, counts in (
        (1e-3, "ms", (1, 10, 100)),
        (1.0, "s", (1, 2, 5, 10, 20, 30)),
        (_MINUTE, "min", (1, 2, 5, 10, 20, 30)),
        (_HOUR, "h", (1, 2, 4, 8, 16)),
        (_DAY, "d", (1, 2, 4, 7, 14, 30, 60, 120, 365, 1000, 3650, 10_000, 36_500)),
    )
    for count in counts
]
_LETTER, _LINE = 7.8, 15.0  # pixels: a wide 13 px letter, and its line
_LONGEST = 22


@dataclass(frozen=True)
class Point:
    """A target's time and dollars, in pixels, with its interval from (`x1`, `y1`) to (`x2`, `y2`)."""

    target: str
    x: float
    y: float
    x1: float
    y1: float
    x2: float
    y2: float
    spot: bool
    pareto: bool
    usd: float
    cost: Mapping[str, Any]
    wall: Mapping[str, float]


@dataclass(frozen=True)
class Label:
    text: str
    x: float  # of the text's left end
    y: float  # of its baseline
    leader: tuple[float, float, float, float] | None  # a line to the point, where the text is far from it


@dataclass(frozen=True)
class Scatter:
    width: int
    height: int
    left: int
    top: int
    right: int
    bottom: int
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    points: list[Point]
    links: list[tuple[float, float, float]]  # x, and y of on demand and of spot
    labels: list[Label]
    front: str  # an SVG path through the Pareto set's points, or ""


@dataclass(frozen=True)
class Part:
    """A piece of a memory bar, in percent of the figure's width."""

    category: str
    words: str
    bytes: int
    x: float
    width: float


@dataclass(frozen=True)
class Bar:
    target: str
    chip: str
    needed: int
    available: int
    fits: bool
    source: str
    parts: list[Part]
    limit: float  # percent
    cut: bool  # longer than the figure


# ---- memory


def bars(plans: Sequence[Mapping[str, Any]], longest: float = 1.5) -> list[Bar]:
    """One bar a target whose memory is known, as shares of what the device has, all limits below each other.

    The figure ends at the largest need, or at `longest` devices' worth.
    """
    known = [(p, m) for p in plans if (m := p.get("memory")) and _positive(m.get("available"))]
    needs = [_needed(m) / m["available"] for _, m in known]
    end = min(max([1.04, *(1.02 * n for n in needs)]), longest)
    made = []
    for (plan, memory), need in zip(known, needs, strict=True):
        scale, at, parts = 100 / (memory["available"] * end), 0.0, []
        for category, words in CATEGORIES.items():
            size = memory.get(category) or 0
            width = min(size * scale, 100 - at)
            if width > 0:
                parts.append(Part(category, words, size, at, width))
            at += width
        made.append(
            Bar(
                target=plan["target"],
                chip=plan.get("chip") or "",
                needed=int(_needed(memory)),
                available=memory["available"],
                fits=need <= 1,
                source=memory.get("available_source") or "",
                parts=parts,
                limit=100 / end,
                cut=need > end,
            )
        )
    return made


def _needed(memory: Mapping[str, Any]) -> float:
    found = memory.get("needed")
    return found if found is not None else sum(memory.get(c) or 0 for c in CATEGORIES)


# ---- time against dollars


def scatter(
    plans: Sequence[Mapping[str, Any]], pareto: Iterable[str], width: int, height: int
) -> Scatter | None:
    """The cheapest prices of each target that has one; `None` where there is nothing to draw."""
    drawn = [
        (plan, cost)
        for plan in plans
        for cost in (plan.get("cheapest"), plan.get("cheapest_spot"))
        if cost and _usable(plan.get("wall_seconds")) and _usable(cost.get("usd"))
    ]
    if not drawn:
        return None
    left, top, right, bottom = 58, 14, width - 16, height - 46
    x = _Log([v for p, _ in drawn for v in _ends(p["wall_seconds"])], left, right)
    y = _Log([v for _, c in drawn for v in _ends(c["usd"])], bottom, top)
    chosen = set(pareto)
    points = []
    for plan, cost in drawn:
        wall, usd = plan["wall_seconds"], cost["usd"]
        (low, high), (least, most) = _ends(wall), _ends(usd)
        points.append(
            Point(
                target=plan["target"],
                x=x(wall["value"]),
                y=y(usd["value"]),
                x1=x(low),
                y1=y(least),
                x2=x(high),
                y2=y(most),
                spot=bool(cost.get("spot")),
                pareto=plan["target"] in chosen,
                usd=usd["value"],
                cost=cost,
                wall=wall,
            )
        )
    demand = [p for p in points if not p.spot]
    front = sorted((p for p in demand if p.pareto), key=lambda p: (p.x, p.y))
    links = [(a.x, a.y, b.y) for a in demand for b in points if b.spot and b.target == a.target]
    return Scatter(
        width, height, left, top, right, bottom,
        x_ticks=_spaced([Tick(x(v), label) for v, label in _TIMES if x.low <= v <= x.high], 54),
        y_ticks=_dollar_ticks(y),
        points=points,
        links=links,
        labels=_labels(points, front, (left + 2, top, right, bottom - 2)),
        front=_stairs(front),
    )  # fmt: skip


class _Log:
    """A logarithmic axis from pixel `start` to pixel `end`, with room on both sides of `values`."""

    def __init__(self, values: Sequence[float], start: float, end: float):
        low, high = math.log(min(values)), math.log(max(values))
        room = max(0.07 * (high - low), (math.log(6) - (high - low)) / 2, 0.1)
        self.a, self.b, self.start, self.end = low - room, high + room, start, end
        self.low, self.high = math.exp(self.a), math.exp(self.b)

    def __call__(self, value: float) -> float:
        return self.start + (self.end - self.start) * (math.log(value) - self.a) / (self.b - self.a)


def _dollar_ticks(axis: _Log) -> list[Tick]:
    powers = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        values = [d * 10.0**p for p in powers for d in digits if axis.low <= d * 10.0**p <= axis.high]
        ticks = [Tick(axis(v), f"${v:,.0f}" if v >= 1 else f"${v:.1g}") for v in values]
        if all(abs(a.at - b.at) >= 30 for a, b in itertools.pairwise(ticks)):
            return ticks
    return _spaced(ticks, 30)


def _spaced(ticks: list[Tick], least: float) -> list[Tick]:
    """Ticks from the first on, without those too near the one before."""
    kept: list[Tick] = []
    for tick in ticks:
        if not kept or abs(tick.at - kept[-1].at) >= least:
            kept.append(tick)
    return kept


def _stairs(front: Sequence[Point]) -> str:
    """The border of what can be had: a step right and down from each point of the Pareto set to the next."""
    if len(front) < 2:
        return ""
    return f"M{front[0].x:.1f} {front[0].y:.1f}" + "".join(f"H{p.x:.1f}V{p.y:.1f}" for p in front[1:])


@dataclass
class _Busy:
    """What a label should not cover: boxes at any price, lines if it can."""

    boxes: list[Box] = field(default_factory=list)
    dots: list[tuple[float, float]] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        n = max(int(math.hypot(x2 - x1, y2 - y1) / 4), 1)
        self.dots += [(x1 + (x2 - x1) * i / n, y1 + (y2 - y1) * i / n) for i in range(n + 1)]

    def cost(self, box: Box) -> float:
        l, t, r, b = box  # noqa: E741
        hit = sum(l < r2 and l2 < r and t < b2 and t2 < b for l2, t2, r2, b2 in self.boxes)
        return 1000.0 * hit + 6.0 * sum(l <= x <= r and t <= y <= b for x, y in self.dots)


def _labels(points: Sequence[Point], front: Sequence[Point], area: Box) -> list[Label]:
    """A name beside each target's on-demand point, or its spot one, where it covers least."""
    busy = _Busy([(p.x - 8, p.y - 8, p.x + 8, p.y + 8) for p in points])
    for p in points:
        busy.line(p.x1, p.y1, p.x2, p.y2)
    for a, b in itertools.pairwise(front):
        busy.line(a.x, a.y, b.x, a.y)
        busy.line(b.x, a.y, b.x, b.y)
    named: dict[str, Point] = {}
    for p in points:
        named.setdefault(p.target, p)
    labels = []
    for p in named.values():
        text = p.target if len(p.target) <= _LONGEST else p.target[: _LONGEST - 1] + "…"
        width = _LETTER * len(text)
        best, at, far = math.inf, (p.x + 10, p.y - _LINE / 2), 0.0
        for reach in (10.0, 18.0, 28.0, 42.0, 60.0, 85.0):
            for angle in range(0, 360, 30):
                dx, dy = reach * math.cos(math.radians(angle)), reach * math.sin(math.radians(angle))
                # the box's nearest side touches the circle of that reach
                x = p.x + dx - width * (1 - math.cos(math.radians(angle))) / 2
                y = p.y + dy - _LINE * (1 - math.sin(math.radians(angle))) / 2
                box = (x, y, x + width, y + _LINE)
                outside = x < area[0] or y < area[1] or box[2] > area[2] or box[3] > area[3]
                cost = busy.cost(box) + reach / 4 + 5000 * outside
                if cost < best:
                    best, at, far = cost, (x, y), reach
        x, y = at
        busy.boxes.append((x, y, x + width, y + _LINE))
        leader = None
        if far > 20:
            end_x, end_y = min(max(p.x, x), x + width), min(max(p.y, y), y + _LINE)
            leader = (p.x, p.y, end_x, end_y)
            busy.line(*leader)
        labels.append(Label(text, x, y + 0.78 * _LINE, leader))
    return labels


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _usable(found: Any) -> bool:
    """Whether a range can stand on a logarithmic axis."""
    return bool(found) and _positive(found.get("value"))


def _ends(found: Mapping[str, Any]) -> tuple[float, float]:
    """A range's ends, its value where one is unknown or has no logarithm."""
    value: float = found["value"]
    low: Any = found.get("low")
    high: Any = found.get("high")
    return low if _positive(low) else value, high if _positive(high) else value
