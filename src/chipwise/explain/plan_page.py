"""A plan document as a self-contained HTML page: the targets, time against dollars, and the memory of a
device. Its scripts only sort the table and expand everything for printing."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..words.figures import byte_size, dollars, duration, interval, price
from . import page, plan_kernels
from .charts import Axis, Frame, Part, stack

SIZES = {"wide": (660, 430), "narrow": (328, 360)}  # pixels of the scatter plot on desktops and on phones
LONGEST = 1.5  # times a device's memory, at which a bar is clipped
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


def render(document: Mapping[str, Any]) -> str:
    """The page of a document of `chipwise plan --json` (`plans.SCHEMA`)."""
    plans, verdict = document["plans"], document["verdict"]
    by_name = {p["target"]: p for p in plans}
    able, failed = ([p for p in plans if (p["problem"] is None) is runs] for runs in (True, False))
    by_step = verdict["ranked_by"] == "step"
    ranked = sorted(able, key=lambda p: p["step_seconds" if by_step else "wall_seconds"]["value"])
    spot = [p for p in able if p["cheapest_spot"] and not p["cheapest_spot"].get("market")]
    seen = [(p, plan_kernels.costliest(p)) for p in ranked]
    return page.render(
        "plan",
        document=document,
        recipe=document["recipe"],
        verdict=verdict,
        by_step=by_step,
        pareto=verdict["pareto"],
        fastest=by_name.get(next(iter(verdict["by_time"]), "")),
        cheapest=by_name.get(next(iter(verdict["by_money"]), "")),
        cheapest_spot=min(spot, key=lambda p: p["cheapest_spot"]["usd"]["value"], default=None),
        plans=ranked + failed,
        bars=bars(plans),
        no_memory=[p["target"] for p in plans if not p["memory"]],
        scatters=scatters(plans, () if by_step else verdict["pareto"]),
        undrawn=[p["target"] for p in able if not p["cheapest"] and not p["cheapest_spot"]],
        failed=[p["target"] for p in failed],
        kernels=[(p["target"], rows, plan_kernels.helps(rows)) for p, rows in seen if rows],
        categories=CATEGORIES,
    )


def scatters(plans: Sequence[Mapping[str, Any]], pareto: Collection[str]) -> list[tuple[str, Scatter]]:
    """Scatter plots of the cheapest price of each target, in both sizes; empty if there is nothing to draw.

    At a fixed hourly price, time and dollars are proportional, so an interval is a diagonal line on
    logarithmic axes, not a cross.
    """
    dots = []
    for plan in plans:
        for cost in filter(None, (plan["cheapest"], plan["cheapest_spot"])):
            wall, usd = plan["wall_seconds"], cost["usd"]
            text = (
                f"{plan['target']}: {duration(wall['value'])} ({interval(wall, duration)}), "
                f"{dollars(usd['value'])} ({interval(usd, dollars)}); {price(cost)}"
            )
            style = f"{'best' if plan['target'] in pareto else ''}{' hollow' if cost['spot'] else ''}"
            x, y = ((span["value"], span["low"], span["high"]) for span in (wall, usd))
            dots.append(Dot(plan["target"], x, y, style, text))
    return [(name, scatter(dots, size)) for name, size in SIZES.items() if dots]


class Bar(NamedTuple):
    """A device's memory. `limit`: its memory, in percent of the figure; `parts`: also in percent."""

    plan: Mapping[str, Any]
    parts: list[Part]
    limit: float


def bars(plans: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """A bar for each target with known memory, relative to the device's memory, so that all limits are
    aligned.

    The figure ends at the largest need, or at `LONGEST` devices' worth.
    """
    stated = [plan for plan in plans if plan["memory"]]
    needs = [plan["memory"]["needed"] / plan["memory"]["available"] for plan in stated]
    end = min(max([1.04, *(1.02 * n for n in needs)]), LONGEST)
    drawn = []
    for plan in stated:
        sizes = [(name, plan["memory"][name]) for name in CATEGORIES]
        pieces = ((name, f"{CATEGORIES[name]} {byte_size(size)}", size) for name, size in sizes)
        drawn.append(Bar(plan, stack(pieces, plan["memory"]["available"] * end), 100 / end))
    return drawn


# ---- the scatter

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Dot:
    """A point of a scatter plot: (value, low, high) along both axes, an interval from lower left to upper
    right. Dots with the same name are linked; the first is labelled."""

    name: str
    x: tuple[float, float, float]
    y: tuple[float, float, float]
    style: str = ""
    title: str = ""


class Spot(NamedTuple):
    """A dot in pixels, with its interval from (`x1`, `y1`) to (`x2`, `y2`)."""

    of: Dot
    x: float
    y: float
    x1: float
    y1: float
    x2: float
    y2: float


class Label(NamedTuple):
    text: str
    x: float  # of the text's left end
    y: float  # of its baseline


@dataclass(frozen=True)
class Scatter(Frame):
    """Dots over two logarithmic axes. `links`: x, and two heights; `front`: an SVG path, or ""."""

    spots: list[Spot]
    links: list[tuple[float, float, float]]
    labels: list[Label]
    front: str


def scatter(dots: Sequence[Dot], size: tuple[int, int]) -> Scatter:
    """A scatter plot of seconds and dollars; steps join the dots of style "best", the Pareto set."""
    width, height = size
    left, top, right, bottom = 58.0, 14.0, width - 16.0, height - 46.0
    across = _log_axis([v for d in dots for v in d.x], left, right, "s")
    up = _log_axis([v for d in dots for v in d.y], bottom, top, "$")
    spots = []
    for d in dots:
        (x, x1, x2), (y, y1, y2) = map(across, d.x), map(up, d.y)
        spots.append(Spot(d, x, y, x1, y1, x2, y2))
    first: dict[str, Spot] = {}
    for spot in spots:
        first.setdefault(spot.of.name, spot)
    links = [(s.x, first[s.of.name].y, s.y) for s in spots if s is not first[s.of.name]]
    corners = sorted((s for s in spots if s.of.style == "best"), key=lambda s: (s.x, s.y))
    stairs = ""
    if len(corners) > 1:
        stairs = f"M{corners[0].x:.1f} {corners[0].y:.1f}"
        stairs += "".join(f"H{s.x:.1f}V{s.y:.1f}" for s in corners[1:])
    return Scatter(
        width, height, left, top, right, bottom, across.ticks(max(width // 90, 3)), up.ticks(7), spots, links,
        _labels(spots, list(first.values()), (left + 2, top, right, bottom - 2)), stairs,
    )  # fmt: skip


def _log_axis(values: Sequence[float], start: float, end: float, unit: str) -> Axis:
    """A logarithmic axis with room for names, spanning at least a factor of 6."""
    low, high = math.log(min(values)), math.log(max(values))
    room = max(0.07 * (high - low), (math.log(6) - (high - low)) / 2, 0.1)
    return Axis(math.exp(low - room), math.exp(high + room), start, end, True, unit)


_LETTER, _HEIGHT = 7.8, 15.0  # pixels: a wide 13 px letter, and its line
_LONGEST = 22  # letters of a name


def _labels(spots: Sequence[Spot], named: Sequence[Spot], area: Box) -> list[Label]:
    """A label for each of `named`, at the nearest height above or below its dot where it covers no other
    label and no dot, within the area."""
    boxes = [(s.x - 8, s.y - 8, s.x + 8, s.y + 8) for s in spots]
    labels = []
    for s in named:
        text = s.of.name if len(s.of.name) <= _LONGEST else s.of.name[: _LONGEST - 1] + "…"
        width = _LETTER * len(text)
        left = min(max(s.x - width / 2, area[0]), area[2] - width)

        def free(top: float, left: float = left, right: float = left + width) -> bool:
            inside = area[1] <= top <= area[3] - _HEIGHT
            return inside and not any(
                left < x2 and x1 < right and top < y2 and y1 < top + _HEIGHT for x1, y1, x2, y2 in boxes
            )

        heights = [s.y + side * 4 * n - _HEIGHT / 2 for n in range(4, 60) for side in (-1, 1)]
        top = next(filter(free, heights), heights[0])
        boxes.append((left, top, left + width, top + _HEIGHT))
        labels.append(Label(text, left, top + 0.78 * _HEIGHT))
    return labels
