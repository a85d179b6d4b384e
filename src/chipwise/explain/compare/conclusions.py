"""The conclusions of a comparison: who is faster, by how much, and which figures were measured, as facts from
a document's values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...study.stats import HIGHER, LOWER, NO_DIFFERENCE
from ...words.facts import Fact, fact
from ...words.figures import known
from ..row import KINDS, MEASURED

Document = Mapping[str, Any]
_KINDS = dict(zip(KINDS, ("rows-measured", "rows-predicted", "rows-published"), strict=True))


def conclusions(document: Document) -> dict[str, list[Fact]]:
    """The facts by subject: `headline`; `kinds`: which figures were measured; `speed`, `wall`, `target`
    and `metric`."""
    rows = [row for row in document["rows"] if row["examples_per_second"]]
    labels = document["labels"]
    return {
        "headline": _headline(document, rows),
        "kinds": [fact(code, labels=labels[kind]) for kind, code in _KINDS.items() if labels[kind]],
        "speed": _speed(document, rows),
        "wall": _wall(document["rows"]),
        "target": _target(document),
        "metric": _metric(document),
    }


def _headline(document: Document, rows: list[Document]) -> list[Fact]:
    if len(rows) > 1:
        return _faster(document, rows)
    alone = [fact("speed-alone", **_of(row), speed=_speed_of(row)) for row in rows]
    return [fact("nothing-to-compare"), *(alone or [fact("no-row-has-a-speed")])]


def _faster(document: Document, rows: list[Document]) -> list[Fact]:
    """Compares the fastest row with the baseline; if the baseline is the fastest, it with the next one."""
    base = next(row for row in rows if row["label"] == document["baseline"])
    first, second, *_ = sorted(rows, key=lambda row: -_speed_of(row))
    if first is not base:
        return _one(document, first, base, first["ratio"], first)
    there = second["ratio"]
    turned = {
        "value": 1 / there["value"],
        "low": there["high"] and 1 / there["high"],
        "high": there["low"] and 1 / there["low"],
        "verdict": {LOWER: HIGHER, HIGHER: LOWER}.get(there["verdict"], there["verdict"]),
    }
    return _one(document, base, second, turned, second)


def _one(document: Document, a: Document, b: Document, ratio: Document, other: Document) -> list[Fact]:
    """`other`: the one of the two that is not the baseline, whose agreement counts.

    On one device no chip is faster: the difference is in how it was used, and what else it did.
    """
    names = {"a": a["label"], "b": b["label"]}
    ends = {name: ratio[name] for name in ("value", "low", "high")}
    code = "faster" if known(ratio["low"]) and known(ratio["high"]) else "faster-without-interval"
    faster = fact("no-difference-shown" if ratio["verdict"] == NO_DIFFERENCE else code, **names, **ends)
    alone = interval_of(ratio, a, b)
    notes = [fact("interval-of-one", label=alone)] if alone else []
    notes += [fact("not-known-to-be-the-same")] if other["same_computation"] is False else []
    if not other["same_device"] or ratio["verdict"] == NO_DIFFERENCE:
        return [faster, *notes]
    device = a["machine"] if a["machine"] and a["machine"] == b["machine"] else a["device"]
    if other["same_steps"]:
        speeds = {"a_speed": _speed_of(a), "b_speed": _speed_of(b)}
        return [fact("same-device-and-steps", device=device, **names, **speeds)]
    differ = [d for d in document["differing"] if d["setting"] not in ("machine", "device")]
    both = [(d["setting"], [d["values"].get(name, "") for name in names.values()]) for d in differ]
    settings = [setting for setting, (one, two) in both if one != two and "" not in (one, two)]
    code = "same-device-other-settings" if settings else "same-device"
    return [fact(code, device=device, settings=settings), faster, *notes]


def _speed(document: Document, rows: list[Document]) -> list[Fact]:
    facts = []
    measured = [row for row in rows if row["kind"] == MEASURED]
    top = max(rows, key=_speed_of, default=None)
    based = any(row["label"] == document["baseline"] for row in measured)
    if based and len(measured) > 1 and top is not None and top["kind"] != MEASURED:
        facts.append(fact("of-those-measured", what=_faster(document, measured)))
    batches = sorted({row["batch"] for row in rows if row["batch"] is not None})
    if len(batches) > 1:
        facts.append(fact("batches-differ", batches=batches))
    if single := [row["label"] for row in rows if row["within_one_run"]]:
        facts.append(fact("interval-within-one-run", labels=single))
    if doubtful := [row["label"] for row in rows if row["same_computation"] is False]:
        facts.append(fact("rows-not-known-to-be-the-same", labels=doubtful))
    for row in document["rows"]:
        if some := row["diverged"]:
            code = "row-diverged" if some["runs"] == some["of"] else "some-diverged"
            facts.append(fact(code, label=row["label"], **_divergence(some)))
        if row["similar"]:
            facts.append(fact("row-similar", label=row["label"], how=row["similar"]))
    return facts


def _wall(rows: list[Document]) -> list[Fact]:
    facts = []
    for row in rows:
        if row["wall_seconds"]:
            parts = {name: s for name, s in row["seconds"].items() if name != "total" and s}
            more = [*_against(row["wall_ratio"]), *([fact("wall-parts", parts=parts)] if parts else [])]
            facts.append(fact("wall-time", **_of(row), wall=row["wall_seconds"], more=more))
    return facts


def _target(document: Document) -> list[Fact]:
    facts = []
    for row in document["rows"] if document["target"] is not None else ():
        time = row["target"]
        times = []
        if time["training"]:
            times.append(fact("training-time", seconds=time["training"], more=_against(row["target_ratio"])))
        if time["wall"]:
            times.append(fact("wall-time-to-target", seconds=time["wall"]))
        of = {"label": row["label"], "target": document["target"]["words"], "why": time["how"]["text"]}
        facts.append(fact("time-to-target", **of, times=times) if times else fact("target-unreached", **of))
    return facts


def _metric(document: Document) -> list[Fact]:
    facts = []
    for row in document["rows"]:
        if not (final := row["metric"]):
            continue
        runs = fact("final-of-one")
        if known(final["low"]):
            runs = fact("final-of-runs", n=final["n"], low=final["low"], high=final["high"])
        elif final["n"] == 2:
            runs = fact("final-of-two", low=min(final["values"]), high=max(final["values"]))
        more = []
        if row["diverged"]:
            more.append(fact("diverged-beside", **_divergence(row["diverged"])))
        if apart := final["difference"]:
            code = "final-apart-by-pairs" if final["by_pairs"] else "final-apart"
            more.append(fact(code, value=apart["value"], verdict=fact(apart["verdict"])))
        of = {"metric": document["metric"], "mean": final["mean"]}
        facts.append(fact("final", **_of(row), **of, runs=runs, more=more))
    return facts


def _against(ratio: Document | None) -> list[Fact]:
    if not ratio:
        return []
    doubt = [] if ratio["verdict"] in (HIGHER, LOWER) else [fact(ratio["verdict"])]
    return [fact("times-the-baseline", value=ratio["value"], doubt=doubt)]


def _of(row: Document) -> dict[str, Any]:
    return {"label": row["label"], "kind": row["kind"]}


def _divergence(stated: Document) -> dict[str, Any]:
    return {**stated, "when": [when["text"] for when in stated["when"]]}


def interval_of(ratio: Document, row: Document, other: Document) -> str:
    """The label of the row if a ratio's interval comes from it alone; "" if it comes from both."""
    varying = [r["label"] for r in (row, other) if _varies(r["examples_per_second"])]
    return varying[0] if known(ratio["low"]) and len(varying) == 1 else ""


def _speed_of(row: Document) -> float:
    return row["examples_per_second"]["value"]


def _varies(speed: Document) -> bool:
    return speed["low"] is not None or len(speed["values"]) > 1
