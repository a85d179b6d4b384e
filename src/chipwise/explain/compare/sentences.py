"""What a comparison says, in sentences: who is faster, by how much, and which figures were measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...study.stats import HIGHER, LOWER, NO_DIFFERENCE
from ...words.figures import digits, dollars, duration, listed
from .row import MEASURED, PUBLISHED
from .words import interval, interval_of, pair, times, varies

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
    return _faster(document, rows)


def _faster(document: Made, rows: list[Made]) -> str:
    """The fastest against the baseline; the baseline against the next where it is the fastest itself."""
    base = next(row for row in rows if row["label"] == document["baseline"])
    ranked = sorted(rows, key=lambda row: -row["examples_per_second"]["value"])
    top = ranked[0]
    if top is not base:
        return _one(document, top, base, top["ratio"], top)
    second = ranked[1]
    found = second["ratio"]
    turned = {
        "value": 1 / found["value"],
        "low": found["high"] and 1 / found["high"],
        "high": found["low"] and 1 / found["low"],
        "verdict": {LOWER: HIGHER, HIGHER: LOWER}.get(found["verdict"], found["verdict"]),
    }
    return _one(document, base, second, turned, second)


def _one(document: Made, a: Made, b: Made, ratio: Made, other: Made) -> str:
    """`other`: the one of the two that is not the baseline, whose agreement counts.

    Of one device no chip is the faster: what differs is how it was used, and what else it did.
    """
    both = (
        f"both {a['kind']}"
        if a["kind"] == b["kind"]
        else f"{a['label']} {a['kind']}, {b['label']} {b['kind']}"
    )
    within, whose = interval(ratio), interval_of(ratio, a, b)
    range_ = f" ({within} ×{f', {whose}' if whose else ''})" if within else ""
    doubt = " They are not known to compute the same thing." if other["same_computation"] is False else ""
    if ratio["verdict"] == NO_DIFFERENCE:
        names = f"{a['label']} and {b['label']}"
        return f"No difference shown between {names}: {times(ratio)}{range_} in examples/s; {both}.{doubt}"
    unknown = "" if within else "; no interval is known"
    if other["same_device"]:
        device = a["machine"] if a["machine"] and a["machine"] == b["machine"] else a["device"]
        if other["same_steps"]:
            return (
                f"Same device ({device}), same steps, equal to the bit: {a['label']} did {_rate(a)} and "
                f"{b['label']} {_rate(b)}, which shows what else the machine did, or settings of speed "
                f"alone; {both}."
            )
        different = _settings(document, a, b)
        found = f"Same device ({device}): speeds differ by {different}, or by what else the machine did. "
    else:
        found = ""
    found += f"{a['label']} is {times(ratio)} as fast as {b['label']}{range_}"
    return f"{found} in examples/s{unknown}; {both}.{doubt}"


def _settings(document: Made, a: Made, b: Made) -> str:
    """What two rows of one device do otherwise: `the framework`, `the settings (duration, exact)`."""
    names = []
    for d in document["differing"]:
        values = d["values"]
        if a["label"] in values and b["label"] in values and values[a["label"]] != values[b["label"]]:
            names.append(d["setting"])
    names = [name for name in names if name not in ("machine", "device")]
    if "framework" in names:
        return "the framework"
    few = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"the settings ({few})" if names else "settings that are not stored"


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
        made.append(f"Of those measured: {_lower(_faster(document, measured))}")
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
    made += [
        f"{row['label']}: {row['diverged']['words']}"
        f"{', so it has no speed and no result' if row['diverged']['runs'] == row['diverged']['of'] else ''}."
        for row in document["rows"]
        if row["diverged"]
    ]
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
        within = varies(wall, duration)
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
        times_ = [
            f"{duration(time[k]['value'])} {words}{f' ({within})' if within else ''}{against}"
            for k, words, against in (
                ("training", "of training alone", _against(row["target_ratio"])),
                ("wall", "of wall time", ""),
            )
            if time[k]
            for within in (varies(time[k], duration),)
        ]
        if not times_:
            made.append(f"{row['label']}: {time['how']}.")
            continue
        made.append(
            f"{row['label']} to {document['target']['words']}, {time['kind']}: {'; '.join(times_)}; "
            f"{time['how']}."
        )
    if any(row["target"]["wall"] for row in document["rows"]):
        made.append("Wall time is from the run's begin, with start-up, compilation and evaluation.")
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
        within, two = interval(found, lambda v: f"{v:.4g}"), pair(found, lambda v: f"{v:.4g}")
        runs = f"{found['n']} runs, 95 % interval of the mean {within}" if within else "one run"
        if two:
            runs = f"{two}, 2 runs are too few for an interval"
        if row["diverged"]:
            runs += f"; {row['diverged']['words']}"
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
    own = sentence.startswith(("No difference", "Same device"))
    return f"{sentence[0].lower()}{sentence[1:]}" if own else sentence


def _rate(row: Made) -> str:
    return f"{digits(row['examples_per_second']['value'])} examples/s"
