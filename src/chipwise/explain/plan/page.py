"""A plan document as one HTML page that needs nothing else: no network and no other file.

Scripts only sort the table and open everything for printing. Any figure of a document may be missing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DataError
from ...words.figures import byte_size, dollars, duration, interval, known, price
from .. import page
from ..charts import Part, stack
from ..scatter import Dot, Scatter, scatter

WIDE, NARROW = (660, 430), (328, 360)  # pixels of the scatter on a desk and on a telephone
LONGEST = 1.5  # devices' worth of memory, at which a bar is cut
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
    """The page of a document as `chipwise plan --json` prints it (`plans.SCHEMA`).

    Raises `DataError` when it is none.
    """
    if not isinstance(document, Mapping) or not isinstance(document.get("plans"), list):
        raise DataError("plan-document-none")
    plans: list[Mapping[str, Any]] = document["plans"]
    verdict = document.get("verdict") or {}
    by_name = {p["target"]: p for p in reversed(plans)}
    able, failed = ([p for p in plans if (p.get("problem") is None) is runs] for runs in (True, False))
    by_step = verdict.get("ranked_by") == "step"
    ranked = sorted(able, key=lambda p: _value(p.get("step_seconds" if by_step else "wall_seconds")))
    spot = min(able, key=lambda p: _value((p.get("cheapest_spot") or {}).get("usd")), default=None)
    pareto = verdict.get("pareto") or []
    return page.render(
        "plan",
        {"sortable": _sortable, "text": text},
        document=document,
        recipe=document.get("recipe") or {},
        verdict=verdict,
        by_step=by_step,
        pareto=pareto,
        fastest=by_name.get(_first(verdict.get("by_time"))),
        cheapest=by_name.get(_first(verdict.get("by_money"))),
        cheapest_spot=spot if spot and spot.get("cheapest_spot") else None,
        plans=ranked + failed,
        bars=bars(plans),
        no_memory=[p["target"] for p in plans if not p.get("memory")],
        scatters=scatters(plans, () if by_step else pareto),
        undrawn=[p["target"] for p in able if not p.get("cheapest") and not p.get("cheapest_spot")],
        failed=[p["target"] for p in failed],
        categories=CATEGORIES,
    )


def write(document: Mapping[str, Any], path: str | os.PathLike) -> Path:
    """Writes the page whole or not at all. Raises `DataError` where it cannot be written."""
    return page.write(render(document), path)


# ---- time against dollars


def scatters(plans: Sequence[Mapping[str, Any]], pareto: Iterable[str]) -> list[tuple[str, Scatter]]:
    """The cheapest prices of each target that has one, in both sizes; empty where there is nothing to draw.

    At a fixed price an hour time and dollars are proportional, so an interval is a slanted line on
    logarithmic axes, not a cross.
    """
    dots = list(_dots(plans, set(pareto)))
    front = [dot for dot in dots if dot.style == "best"]
    sizes = (("wide", WIDE), ("narrow", NARROW))
    both = ((name, scatter(dots, size, front=front, x_unit="s", y_unit="$")) for name, size in sizes)
    return [(name, drawn) for name, drawn in both if drawn is not None]


def _dots(plans: Sequence[Mapping[str, Any]], pareto: set[str]) -> Iterator[Dot]:
    for plan in plans:
        for cost in (plan.get("cheapest"), plan.get("cheapest_spot")):
            wall: Mapping[str, Any] = plan.get("wall_seconds") or {}
            usd: Mapping[str, Any] = (cost or {}).get("usd") or {}
            if not cost or not _positive(wall.get("value")) or not _positive(usd.get("value")):
                continue
            yield Dot(
                plan["target"],
                _ends(wall),
                _ends(usd),
                f"{'best' if plan['target'] in pareto else ''}{' hollow' if cost.get('spot') else ''}",
                f"{plan['target']}: {duration(wall['value'])} ({interval(wall, duration)}), "
                f"{dollars(usd['value'])} ({interval(usd, dollars)}); {price(cost)}",
            )


# ---- memory


@dataclass(frozen=True)
class Bar:
    """A device's memory. `limit`: what it has, in percent of the figure; `parts`, of it too."""

    target: str
    chip: str
    needed: int
    available: int
    source: str
    parts: list[Part]
    limit: float

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


def bars(plans: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """One bar a target whose memory is known, as shares of what the device has, all limits below each other.

    The figure ends at the largest need, or at `LONGEST` devices' worth.
    """
    known_ones = [(p, m) for p in plans if (m := p.get("memory")) and _positive(m.get("available"))]
    needs = [_needed(m) / m["available"] for _, m in known_ones]
    end = min(max([1.04, *(1.02 * n for n in needs)]), LONGEST)
    return [
        Bar(
            plan["target"],
            plan.get("chip") or "",
            int(_needed(memory)),
            memory["available"],
            text(memory.get("available_source")) or "",
            stack(
                (
                    (name, f"{words} {byte_size(memory.get(name) or 0)}", memory.get(name))
                    for name, words in CATEGORIES.items()
                ),
                memory["available"] * end,
            ),
            100 / end,
        )
        for plan, memory in known_ones
    ]


def _needed(memory: Mapping[str, Any]) -> float:
    stated = memory.get("needed")
    return stated if stated is not None else sum(memory.get(c) or 0 for c in CATEGORIES)


# ---- figures that may be missing


def text(fact: Any) -> Any:
    """What a fact in a document says."""
    return fact.get("text") if isinstance(fact, Mapping) else fact


def _positive(value: Any) -> bool:
    return known(value) and value > 0


def _ends(range_: Any) -> tuple[float, float, float]:
    """Value, low and high; the value for an end that is unknown or has no logarithm."""
    value, low, high = (range_.get(name) for name in ("value", "low", "high"))
    return value, low if _positive(low) else value, high if _positive(high) else value


def _sortable(value: Any) -> str:
    """What the sorting script reads: a number, or "" for what stands last."""
    return f"{value:.9g}" if known(value) else ""


def _value(range_: Mapping[str, Any] | None) -> float:
    """A range's value for ranking, the unknown last."""
    value = (range_ or {}).get("value")
    return value if known(value) and value is not None else math.inf


def _first(names: Sequence[str] | None) -> str | None:
    return names[0] if names else None
