"""Figures of a comparison in words, the same in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...words.figures import digits, dollars


def times(ratio: Mapping[str, Any]) -> str:
    """`2.1 ×`."""
    return f"{digits(ratio['value'])} ×"


def interval(found: Mapping[str, Any] | None, form: Callable[[float], str] = digits) -> str:
    """`1.9 to 2.3`; empty where no interval is known."""
    if not found or found.get("low") is None or found.get("high") is None:
        return ""
    return f"{form(found['low'])} to {form(found['high'])}"


def varies(found: Mapping[str, Any] | None, form: Callable[[float], str] = digits) -> str:
    """The interval; of two values, which are too few for one, both."""
    if two := pair(found, form):
        return f"{two}; 2 runs are too few for an interval"
    return interval(found, form)


def pair(found: Mapping[str, Any] | None, form: Callable[[float], str] = digits) -> str:
    """`6.0 and 16.0` of exactly two values, else nothing."""
    if not found or found["n"] != 2 or interval(found):
        return ""
    return " and ".join(form(v) for v in sorted(found["values"]))


def interval_of(ratio: Mapping[str, Any], mine: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Whose interval that of a ratio is, where it is that of one row alone: `interval of a alone`."""
    known = [row["label"] for row in (mine, other) if _varies(row["examples_per_second"])]
    return f"interval of {known[0]} alone" if interval(ratio) and len(known) == 1 else ""


def _varies(speed: Mapping[str, Any]) -> bool:
    return speed["low"] is not None or len(speed["values"]) > 1


def said(value: Any) -> str:
    """A setting's value."""
    if value is None:
        return "not stated"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def price(cost: Mapping[str, Any]) -> str:
    """Everything that is known of a price, its day and source included."""
    hourly = f"{dollars(cost['usd_per_hour'])} an hour {'spot' if cost['spot'] else 'on demand'}"
    where = " ".join(str(cost[k]) for k in ("cloud", "instance", "region") if cost[k])
    parts = [hourly, where, cost["includes"], cost["note"], cost["date"], cost["source"]]
    return ", ".join(str(p) for p in parts if p)


def prices_used(document: Mapping[str, Any], amounts: bool = False) -> list[str]:
    """Every price that figures rest on, once, with its day and source; and who has none, and why.

    `amounts`: also what the run and the target cost at it.
    """
    used: dict[str, list[str]] = {}
    none: dict[str, list[str]] = {}
    for row in document["rows"]:
        if not (row["examples_per_second"] or row["wall_seconds"]):
            continue
        for cost in row["costs"]:
            parts = [
                f"{dollars(cost[k]['value'])} {words}{_basis(cost) if k == 'target' else ''}"
                for k, words in (("run", "the run"), ("target", "to the target"))
                if amounts and cost[k]
            ]
            said_of = row["label"] + (f" ({', '.join(parts)})" if parts else "")
            used.setdefault(price(cost), []).append(said_of)
        if row["no_price"]:
            none.setdefault(row["no_price"], []).append(row["label"])
    return [f"{', '.join(labels)}: {why}" for why, labels in (*used.items(), *none.items())]


def _basis(cost: Mapping[str, Any]) -> str:
    return f", {cost['target_basis']}"


def sources(document: Mapping[str, Any]) -> list[str]:
    """Where the figures of each row come from, rows of one source together, and what to know of them."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in document["rows"]:
        found.setdefault((row["kind"], row["source"]), []).append(row)
    lines = []
    for (kind, source), rows in found.items():
        notes = [f"{row['label']}: {'; '.join(row['notes'])}" for row in rows if row["notes"]]
        if len(rows) == 1:
            notes = list(rows[0]["notes"])
        extra = f" ({'; '.join(notes)})" if notes else ""
        lines.append(f"{', '.join(row['label'] for row in rows)}: {kind}, {source}{extra}")
    return lines
