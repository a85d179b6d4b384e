"""A plan document as one HTML page that needs nothing else: no network, no files, no JavaScript.

Scripts only sort the table and open everything for printing. Names and messages in a document come from
recipes, price files and compilers, and are not trusted: all of it is escaped, and the page's own policy
lets no other script run and nothing be fetched.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...atomic import replace_text
from ...errors import DataError
from ...words.figures import byte_size, digits, dollars, duration
from ..page import render as page
from .figures import CATEGORIES, bars, scatter

UNKNOWN = "unknown"
WIDE, NARROW = (660, 430), (328, 360)  # pixels of the scatter on a desk and on a telephone


def render(document: Mapping[str, Any]) -> str:
    """The page of a document as `chipwise plan --json` prints it (`plans.SCHEMA`).

    Raises `DataError` when it is none.
    """
    if not isinstance(document, Mapping) or not isinstance(document.get("plans"), list):
        raise DataError("plan-document-none")
    plans: list[Mapping[str, Any]] = document["plans"]
    verdict = document.get("verdict") or {}
    by_name = {p["target"]: p for p in reversed(plans)}
    able = [p for p in plans if p.get("problem") is None]
    by_step = verdict.get("ranked_by") == "step"
    ranked = sorted(able, key=lambda p: _value(p.get("step_seconds" if by_step else "wall_seconds")))
    spot = min(able, key=lambda p: _value((p.get("cheapest_spot") or {}).get("usd")), default=None)
    pareto = verdict.get("pareto") or []
    return page(
        "plan",
        _FILTERS,
        document=document,
        recipe=document.get("recipe") or {},
        verdict=verdict,
        pareto=pareto,
        fastest=by_name.get(_first(verdict.get("by_time"))),
        cheapest=by_name.get(_first(verdict.get("by_money"))),
        cheapest_spot=spot if spot and spot.get("cheapest_spot") else None,
        plans=ranked + [p for p in plans if p.get("problem") is not None],
        bars=bars(plans),
        no_memory=[p["target"] for p in plans if not p.get("memory")],
        scatters=[
            (size, s)
            for size, (w, h) in (("wide", WIDE), ("narrow", NARROW))
            if (s := scatter(plans, () if by_step else pareto, w, h))
        ],
        undrawn=[p["target"] for p in able if not p.get("cheapest") and not p.get("cheapest_spot")],
        failed=[p["target"] for p in plans if p.get("problem") is not None],
        categories=CATEGORIES,
    )


def write(document: Mapping[str, Any], path: str | os.PathLike) -> Path:
    """Writes the page whole or not at all. Raises `DataError` where it cannot be written."""
    return replace_text(path, render(document), "the page", "another --html")


# ---- numbers in words; what is unknown, NaN or not there at all reads "unknown"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def text(told: Any) -> Any:
    """What a fact in a document says."""
    return told.get("text") if isinstance(told, Mapping) else told


def _known(form):
    return lambda value: form(value) if _number(value) else UNKNOWN


def _count(value: Any) -> str:
    """`12,345`; from a million on `124 M`, `1.3 B`."""
    if not _number(value):
        return UNKNOWN
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= size:
            return f"{digits(value / size)} {unit}"
    return f"{value:,.0f}"


def _price(cost: Mapping[str, Any]) -> str:
    """Everything that is known of a price, on one line."""
    kind = "spot" if cost.get("spot") else "on demand"
    parts = [
        f"{dollars(cost['usd_per_hour'])} an hour {kind}" if _number(cost.get("usd_per_hour")) else kind,
        " ".join(str(cost[k]) for k in ("cloud", "instance", "region") if cost.get(k)),
        cost.get("includes"),
        f"{cost.get('source') or 'source unknown'}, {cost.get('date') or 'date unknown'}",
        cost.get("note"),
    ]
    return "; ".join(str(p) for p in parts if p)


def _sortable(value: Any) -> str:
    """What the sorting script reads: a number, or "" for what stands last."""
    return f"{value:.9g}" if _number(value) else ""


def _value(found: Mapping[str, Any] | None) -> float:
    """A range's value for ranking, the unknown last."""
    value = (found or {}).get("value")
    return value if _number(value) else math.inf  # type: ignore[return-value]


def _first(names: Sequence[str] | None) -> str | None:
    return names[0] if names else None


_FILTERS: dict[str, Callable[..., Any]] = {
    "bytes": _known(byte_size),
    "count": _count,
    "dollars": _known(dollars),
    "duration": _known(duration),
    "ms": _known(lambda seconds: digits(seconds * 1e3)),
    "percent": _known(lambda share: f"{100 * share:.0f} %"),
    "digits": _known(digits),
    "sortable": _sortable,
    "price": _price,
    "text": text,
}
