"""What a comparison says, in sentences: who is faster, by how much, and which figures were measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...words import digits, dollars, duration, listed
from ..spread import HIGHER, LOWER, NO_DIFFERENCE
from .row import MEASURED, PUBLISHED
from .words import interval, times

Made = Mapping[str, Any]


def sentences(document: Made) -> dict[str, Any]:
    """By what they are about: `headline`, one sentence; `kinds`, which figures were measured; `speed`,
    `wall`, `target`, `money`, `metric` and `published`, a list each."""
    rows = [row for row in document["rows"] if row["examples_per_second"]]
    return {
        "headline": _headline(document, rows),
        "kinds": _kinds(document["labels"]),
        "speed": _speed(document, rows),
        "wall": _wall(document["rows"]),
        "target": _target(document),
        "money": _money(rows),
        "metric": _metric(document),
        "published": [s for group in document["relative"] for s in _relative(group)],
    }


def _headline(document: Made, rows: list[Made]) -> str:
    if len(rows) < 2:
        alone = " ".join(f"{row['label']} ({row['kind']}) does {_rate(row)}." for row in rows)
        if groups := document["relative"]:
            return f"{_relative(groups[0])[0]} {f'On another scale, {alone}' if alone else ''}".strip()
        return f"Nothing to compare in examples/s: {alone or 'no row has a speed.'}"
    return _faster(rows, document["baseline"])


def _faster(rows: list[Made], baseline: str) -> str:
    """The fastest against the baseline; the baseline against the next where it is the fastest itself."""
    base = next(row for row in rows if row["label"] == baseline)
    ranked = sorted(rows, key=lambda row: -row["examples_per_second"]["value"])
    top = ranked[0]
    if top is not base:
        return _one(top, base, top["ratio"], top)
    second = ranked[1]
    found = second["ratio"]
    turned = {
        "value": 1 / found["value"],
        "low": found["high"] and 1 / found["high"],
        "high": found["low"] and 1 / found["low"],
        "verdict": {LOWER: HIGHER, HIGHER: LOWER}.get(found["verdict"], found["verdict"]),
    }
    return _one(base, second, turned, second)


def _one(a: Made, b: Made, ratio: Made, other: Made) -> str:
    """`other`: the one of the two that is not the baseline, whose agreement counts."""
    both = (
        f"both {a['kind']}"
        if a["kind"] == b["kind"]
        else f"{a['label']} {a['kind']}, {b['label']} {b['kind']}"
    )
    within = interval(ratio)
    range_ = f" ({within} ×)" if within else ""
    doubt = " They are not known to compute the same thing." if other["same_computation"] is False else ""
    if ratio["verdict"] == NO_DIFFERENCE:
        names = f"{a['label']} and {b['label']}"
        return f"No difference shown between {names}: {times(ratio)}{range_} in examples/s; {both}.{doubt}"
    unknown = "" if within else "; no interval is known"
    found = f"{a['label']} is {times(ratio)} as fast as {b['label']}{range_}"
    return f"{found} in examples/s{unknown}; {both}.{doubt}"


def _kinds(labels: Mapping[str, list[str]]) -> str:
    said = [f"{kind.capitalize()}: {listed(names)}" for kind, names in labels.items() if names]
    return ". ".join(said) + "."


def _speed(document: Made, rows: list[Made]) -> list[str]:
    made = []
    measured = [row for row in rows if row["kind"] == MEASURED]
    top = max(rows, key=lambda row: row["examples_per_second"]["value"], default=None)
    base = document["baseline"]
    based = any(row["label"] == base for row in measured)
    if based and len(measured) > 1 and top is not None and top["kind"] != MEASURED:
        made.append(f"Of those measured: {_lower(_faster(measured, base))}")
    batches = sorted({row["batch"] for row in rows if row["batch"] is not None})
    if len(batches) > 1:
        said = ", ".join(str(b) for b in batches)
        made.append(
            f"Batches differ ({said}), so examples/s are compared and steps/s are not: a step is other work."
        )
    single = [row["label"] for row in rows if row["within_one_run"]]
    if single:
        made.append(
            f"The interval of {listed(single)} is the spread within one run; what differs from run to run is "
            f"not in it. For that, give a folder of several records."
        )
    doubtful = [row["label"] for row in rows if row["same_computation"] is False]
    if doubtful:
        made.append(f"† {listed(doubtful)}: not known to compute the same thing; see what the losses say.")
    similar = [f"{row['label']} ({row['similar']})" for row in rows if row["similar"]]
    if similar:
        made.append(f"Similar, not the same, is {'; '.join(similar)}.")
    return made


def _wall(rows: list[Made]) -> list[str]:
    made = []
    for row in rows:
        if not row["wall_seconds"]:
            continue
        wall = row["wall_seconds"]
        parts = ", ".join(
            f"{name} {duration(s)}" for name, s in row["seconds"].items() if name != "total" and s
        )
        within = interval(wall, duration)
        against = _against(row["wall_ratio"])
        within = f" ({within})" if within else ""
        said = f"{row['label']} ({row['kind']}): {duration(wall['value'])}{within} in all"
        made.append(f"{said}{against}{f'; {parts}' if parts else ''}.")
    lengths = {(row["steps"] or 0) * (row["batch"] or 0) for row in rows if row["wall_seconds"]}
    if len(lengths) > 1:
        made.append("Runs of other lengths are not compared by wall time.")
    for row in rows:
        if not row["wall_seconds"] and row["seconds"]:
            parts = ", ".join(f"{name} {duration(s)}" for name, s in row["seconds"].items() if s)
            made.append(f"{row['label']} ({row['kind']}): {parts}; a benchmark, not a whole run.")
    return made


def _target(document: Made) -> list[str]:
    if document["target"] is None:
        return []
    made = []
    for row in document["rows"]:
        time = row["target"]
        if time["seconds"] is None:
            made.append(f"{row['label']}: {time['how']}.")
            continue
        within = interval(time["seconds"], duration)
        against = _against(row["target_ratio"])
        made.append(
            f"{row['label']}: {duration(time['seconds']['value'])}{f' ({within})' if within else ''} to "
            f"{document['target']['words']}, {time['kind']}{against}; {time['how']}."
        )
    return made


def _money(rows: list[Made]) -> list[str]:
    priced = []
    for row in rows:
        found = [c for c in row["costs"] if not c["spot"] and c["per_million_examples"]]
        if found:
            priced.append((found[0]["per_million_examples"]["value"], row))
    made = []
    if len(priced) > 1:
        (least, row), (next_, other) = sorted(priced, key=lambda p: p[0])[:2]
        made.append(
            f"Cheapest on demand: {row['label']} ({row['kind']}), {dollars(least)} a million examples, "
            f"against {dollars(next_)} on {other['label']} ({other['kind']})."
        )
    return made


def _metric(document: Made) -> list[str]:
    made = []
    for row in document["rows"]:
        found = row["metric"]
        if not found:
            continue
        within = interval(found, lambda v: f"{v:.4g}")
        runs = f"{found['n']} runs, 95 % interval of the mean {within}" if within else "one run"
        said = f"{row['label']} ({row['kind']}): {document['metric']} {found['mean']:.4g} ({runs})"
        apart = found["difference"]
        if apart:
            pairs = ", by pairs of seeds" if found["by_pairs"] else ""
            said += f"; {apart['value']:+.2g} to the baseline, {apart['verdict']}{pairs}"
        made.append(said + ".")
    return made


def _relative(group: Made) -> list[str]:
    """Ratios of one source, the fastest first, and what they cost at its own prices."""
    rows = group["rows"]
    said = ", ".join(f"{row['label']} {row['span']} ×" for row in rows if row["label"] != group["anchor"])
    made = [f"{PUBLISHED.capitalize()}, relative to its own {group['anchor']}: {said}."]
    priced = [row for row in rows if row["usd_per_hour"]]
    if len(priced) > 1:
        each = sorted((_work_a_dollar(row), k) for k, row in enumerate(priced))
        (least, dear), (most, cheap) = [(work, priced[k]) for work, k in (each[0], each[-1])]
        hourly = [f"{dollars(row['usd_per_hour'])} an hour, {row['price_note']}" for row in (cheap, dear)]
        made.append(
            f"At the prices it states, {cheap['label']} ({hourly[0]}) costs {1 - least / most:.0%} less a "
            f"step than {dear['label']} ({hourly[1]}): {digits(most)} against {digits(least)} times that "
            f"CPU's speed for a dollar an hour."
        )
    made.append("These ratios are to that CPU, not to any machine measured here.")
    return made


def _work_a_dollar(row: Made) -> float:
    """How many times the anchor's speed one gets for a dollar an hour."""
    return (row["low"] + row["high"]) / 2 / row["usd_per_hour"]


def _against(ratio: Made | None) -> str:
    if not ratio:
        return ""
    doubt = f" ({ratio['verdict']})" if ratio["verdict"] not in (HIGHER, LOWER) else ""
    return f", {times(ratio)} the baseline's{doubt}"


def _lower(sentence: str) -> str:
    return f"n{sentence[1:]}" if sentence.startswith("No difference") else sentence


def _rate(row: Made) -> str:
    return f"{digits(row['examples_per_second']['value'])} examples/s"
