"""The conclusions of a comparison, as facts from a document's values: which result is better and
whether the difference is significant, which row is faster, and the time and cost of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...base import Fact, fact
from ...base.figures import known
from ...study.stats import CONFIDENCE, HIGHER, LOWER, NO_DIFFERENCE, UNKNOWN
from ..terminal import Document
from .row_figures import FEW, SAME_BITS

_MANY = 3  # comparisons, from which on chance is worth a word


def conclusions(document: Document, said: Fact | None) -> dict[str, list[Fact]]:
    """The facts by subject. `headline` has the result first and then the speed. `speed` has notes
    on the speeds. The others are `wall`, `target` and `metric`. *Arguments:* `said`: which way the
    metric is better."""
    rows = [row for row in document["rows"] if row["examples_per_second"]]
    result = _better(document, said)
    speed = _faster(document, rows) if len(rows) > 1 else []
    metric = list(_metric(document))
    return {
        "headline": [*result, *speed] or metric[:1] or [fact("nothing-to-compare")],
        "speed": [*_speed(rows)],
        "wall": [*_wall(document["rows"])],
        "target": [*_target(document)],
        "metric": metric,
    }


def _better(document: Document, said: Fact | None) -> list[Fact]:
    """Compares the result of the best other row with the baseline's. If it is unknown which way
    the metric is better, compares the highest, and none is better."""
    metric = document["metric"]
    finals = [row for row in document["rows"] if row["metric"]]
    base = next((row for row in finals if row["label"] == document["baseline"]), None)
    others = [row for row in finals if row is not base and row["metric"]["difference"]]
    if base is None or not others or said is None:
        return []
    better = said["better"]
    sign = -1 if better == LOWER else 1
    best = max(others, key=lambda row: sign * row["metric"]["mean"])
    apart = best["metric"]["difference"]
    turned = sign * apart["value"] < 0  # the baseline is better
    one, two = (base, best) if turned else (best, base)
    value, low, high = (apart[name] for name in ("value", "low", "high"))
    if turned:
        value, low, high = -value, high and -high, low and -low
    names = {"a": one["label"], "b": two["label"], "metric": metric}
    means = {"a_mean": one["metric"]["mean"], "b_mean": two["metric"]["mean"]}
    numbers = {**names, **means, "value": value, "low": low, "high": high, "better": better}
    if apart["verdict"] in (HIGHER, LOWER) and better is None:
        code = "results-differ"
    elif apart["verdict"] in (HIGHER, LOWER):
        code = "better-by-pairs" if best["metric"]["by_pairs"] else "better"
    elif apart["verdict"] == NO_DIFFERENCE:
        code = "no-better-shown"
    elif apart["verdict"] == SAME_BITS:
        code = "same-runs"
    else:
        code = "one-seed-each" if apart["verdict"] == UNKNOWN else "results-alike"
    result = Fact(code, {**numbers, "n": min(one["metric"]["n"], two["metric"]["n"])})
    return [result] if said.code == "direction" else [result, said]


def _faster(document: Document, rows: list[Document]) -> list[Fact]:
    """Compares the fastest row with the baseline. If the baseline is the fastest, compares it with
    the next one."""
    base = next((row for row in rows if row["label"] == document["baseline"]), None)
    first, second, *_ = sorted(rows, key=lambda row: -row["examples_per_second"]["value"])
    if base is None:
        return []
    other = second if first is base else first
    ratio = {name: other["ratio"][name] for name in ("value", "low", "high")}
    if first is base:
        low, high = (ratio[name] and 1 / ratio[name] for name in ("high", "low"))
        ratio = {"value": 1 / ratio["value"], "low": low, "high": high}
    names = {"a": first["label"], "b": (second if first is base else base)["label"]}
    code = "faster" if known(ratio["low"]) and known(ratio["high"]) else "faster-without-interval"
    code = "no-difference-shown" if other["ratio"]["verdict"] == NO_DIFFERENCE else code
    told = [Fact(code, {**names, **ratio})]
    if other["same_device"] and code != "no-difference-shown":
        told.append(fact("same-device"))
    return told


def _speed(rows: list[Document]) -> Iterator[Fact]:
    batches = sorted({row["batch"] for row in rows if row["batch"] is not None})
    if len(batches) > 1:
        yield fact("batches-differ", batches=batches)
    if single := [row["label"] for row in rows if row["within_one_run"]]:
        yield fact("interval-within-one-run", labels=single)


def _wall(rows: list[Document]) -> Iterator[Fact]:
    for row in rows:
        if row["wall_seconds"]:
            parts = {name: s for name, s in row["seconds"].items() if name != "total" and s}
            more = [
                *_against(row["wall_ratio"]),
                *([fact("wall-parts", parts=parts)] if parts else []),
            ]
            if row["cost"]:
                more.append(
                    fact("run-cost", usd=row["cost"]["usd"], how=row["cost"]["how"]["text"])
                )
            yield fact("wall-time", label=row["label"], wall=row["wall_seconds"], more=more)


def _target(document: Document) -> Iterator[Fact]:
    for row in document["rows"] if document["target"] is not None else ():
        time = row["target"]
        times = []
        if time["training"]:
            times.append(
                fact("training-time", seconds=time["training"], more=_against(row["target_ratio"]))
            )
        if time["wall"]:
            times.append(fact("wall-time-to-target", seconds=time["wall"]))
        of = {
            "label": row["label"],
            "target": document["target"]["words"],
            "why": time["how"]["text"],
        }
        yield fact("time-to-target", **of, times=times) if times else fact("target-unreached", **of)


def _metric(document: Document) -> Iterator[Fact]:
    for row in document["rows"]:
        if not (final := row["metric"]):
            if some := row["diverged"]:
                code = "row-diverged" if some["runs"] == some["of"] else "some-diverged"
                yield fact(code, label=row["label"], **_divergence(some))
            continue
        runs = fact("final-of-one")
        if known(final["low"]):
            runs = fact("final-of-runs", n=final["n"], low=final["low"], high=final["high"])
        elif final["n"] == 2:
            runs = fact("final-of-two", low=min(final["values"]), high=max(final["values"]))
        more = []
        if final["best_at"]:
            more.append(fact("final-of-best", steps=final["best_at"]))
        if row["diverged"]:
            more.append(fact("diverged-beside", **_divergence(row["diverged"])))
        if apart := final["difference"]:
            code = "final-apart-by-pairs" if final["by_pairs"] else "final-apart"
            more.append(fact(code, value=apart["value"], verdict=fact(apart["verdict"])))
        yield fact(
            "final",
            label=row["label"],
            metric=document["metric"],
            mean=final["mean"],
            runs=runs,
            more=more,
        )
    finals = [row["metric"] for row in document["rows"] if row["metric"]]
    if any(1 < final["n"] < FEW for final in finals):
        yield fact("few-seeds", enough=FEW)
    compared = sum(
        bool(final["difference"]) and known(final["difference"]["low"]) for final in finals
    )
    if compared >= _MANY:
        yield fact("many-comparisons", n=compared, chance=1 - CONFIDENCE**compared)


def _against(ratio: Document | None) -> list[Fact]:
    if not ratio:
        return []
    doubt = [] if ratio["verdict"] in (HIGHER, LOWER) else [fact(ratio["verdict"])]
    return [fact("times-the-baseline", value=ratio["value"], doubt=doubt)]


def _divergence(stated: Document) -> dict[str, Any]:
    return {**stated, "when": [when["text"] for when in stated["when"]]}
