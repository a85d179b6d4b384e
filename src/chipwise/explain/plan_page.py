"""A plan document as a self-contained HTML page: the targets and the memory of a device. Its scripts only
sort the table and expand everything for printing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..words.figures import byte_size
from . import page, plan_kernels
from .charts import Part, stack

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
        kernels=[(p["target"], rows, plan_kernels.helps(rows)) for p, rows in seen if rows],
        categories=CATEGORIES,
    )


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
