"""A comparison as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...study.stats import NO_DIFFERENCE, Difference
from ...words.facts import fact
from ...words.figures import counted, interval, pair, spread
from .. import page
from ..charts import BarChart, Measure, Panel, Trace, bars, panel, strips, style_of
from ..row import KINDS
from .compare_table import prices_used, sources, stated, texts, times, values, verdict
from .conclusions import interval_of
from .row_figures import NO_INTERVAL, Figure, ratio

Document = Mapping[str, Any]
SHAPES = dict(zip(KINDS, "●◇□", strict=True))
_BESIDE = 3  # rows named in a card


def render(document: Document) -> str:
    """The page of a document of `chipwise compare --json` (`document.SCHEMA`)."""
    rows: list[Document] = document["rows"]
    able = [row for row in rows if row["examples_per_second"]]
    able.sort(key=lambda row: -row["examples_per_second"]["value"])
    elsewhere = {row["label"] for group in document["relative"] for row in group["rows"]}
    pictures = _pictures(document)
    return page.render(
        "compare",
        _FILTERS,
        document=document,
        said={subject: texts(facts) for subject, facts in document["sentences"].items()},
        notes=texts(document["notes"]),
        same=[a["fact"]["text"] for a in document["agreement"]],
        rows=able + [row for row in rows if not row["examples_per_second"] and row["label"] not in elsewhere],
        cards=_cards(document, able),
        speeds=bars([_measure(row) for row in able]),
        by_label={row["label"]: row for row in rows},
        groups=[(group, _group(group)) for group in document["relative"]],
        panels=[drawn for _, drawn, _ in pictures if drawn is not None],
        undrawn=[f"{title}, {why}" for title, drawn, why in pictures if drawn is None and why],
        finals=_finals(document),
        shapes=SHAPES,
        prices=prices_used(document, amounts=True),
        sources=sources(document),
    )


_FILTERS: dict[str, Callable[..., Any]] = {
    "interval": interval,
    "stated": stated,
    "alone": lambda row, base: interval_of(row["ratio"], row, base),
    "pair": pair,
    "times": times,
    "values": values,
    "verdict": verdict,
}


def _cards(document: Document, able: Sequence[Document]) -> list[dict[str, Any]]:
    """A card for each kind: its fastest row, and what it is compared with."""
    cards = []
    for kind in KINDS:
        rows = [row for row in able if row["kind"] == kind]
        if rows:
            text = spread(rows[0]["examples_per_second"]).replace(" (", " examples/s (", 1)
            text = text if " (" in text else f"{text} examples/s"
            card = {"who": rows[0]["label"], "what": text, "why": _beside(document, rows)}
            cards.append({"kind": kind, **card})
        elif kind == "published" and document["relative"]:
            first, *others = document["relative"][0]["rows"]
            anchor = document["relative"][0]["anchor"]
            left = [f"{row['label']} {row['span']} ×" for row in others if row["label"] != anchor]
            text = f"{first['span']} × its own CPU"
            cards.append({"kind": kind, "who": first["label"], "what": text, "why": f"{', '.join(left)}."})
    return cards


def _beside(document: Document, rows: Sequence[Document]) -> str:
    """Compares the fastest of a kind with the others of the kind, or with the baseline if it is alone."""
    top, *others = rows
    at = f"Batch {stated(top['batch'])}, replicas {stated(top['replicas'])}, {top['device']}."
    if not others:
        return f"{times(top['ratio'])} {document['baseline']}. {at}" if top["ratio"] else at
    beside = [(_ratio(top, row), row, _same_device(document, top, row)) for row in others]
    any_shown, all_here = any(_shown(f) for f, *_ in beside), all(here for *_, here in beside)
    parts = []
    for f, row, here in beside[:_BESIDE]:
        words = ["same device"] if here and not all_here else []
        words += [str(fact(f.verdict))] if any_shown and not _shown(f) else []
        parts.append(
            f"{times({'value': f.value})} {row['label']}" + (f" ({', '.join(words)})" if words else "")
        )
    left = len(others) - _BESIDE
    more = f" and {counted(left, 'other')}" if left > 0 else ""
    # without published intervals, nothing is known
    doubt = "" if any_shown else f"; {' or '.join(dict.fromkeys(str(fact(f.verdict)) for f, *_ in beside))}"
    return f"{', '.join(parts)}{more}{', on the same device' if all_here else ''}{doubt}. {at}"


def _ratio(row: Document, other: Document) -> Difference:
    a, b = (Figure(**r["examples_per_second"]) for r in (row, other))
    return ratio(a, b)


def _shown(apart: Difference) -> bool:
    return apart.verdict not in (NO_DIFFERENCE, NO_INTERVAL)


def _same_device(document: Document, row: Document, other: Document) -> bool:
    """Whether both rows are known to be on one device, by their comparisons with the baseline."""
    base = document["baseline"]
    return all(r["label"] == base or r["same_device"] for r in (row, other))


# ---- pictures


def _measure(row: Document) -> Measure:
    """A figure to draw; of too few values each is a point."""
    speed = row["examples_per_second"]
    few = tuple(speed["values"]) if pair(speed) else ()
    return Measure(row["label"], row["kind"], speed["value"], speed["low"], speed["high"], few)


def _group(group: Document) -> BarChart | None:
    """Published ratios: a bar to the middle of each, with the stated range."""
    measures = []
    for row in group["rows"]:
        low, high = row["low"], row["high"]
        ends = (low, high) if low < high else (None, None)
        measures.append(Measure(row["label"], "published", (low + high) / 2, *ends))
    return bars(measures, linear=True)


def _pictures(document: Document) -> list[tuple[str, Panel | None, str]]:
    """Curves of the measured rows by subject: title, picture, and the reason if a picture is missing."""
    metric = document["metric"] or ""
    rows = [(k, row) for k, row in enumerate(document["rows"]) if row["repeats"]]
    hourly = {row["label"]: c["usd_per_hour"] for _, row in rows for c in row["costs"][:1] if not c["spot"]}
    speed, losses, seconds, money = [], [], [], []
    for k, row in rows:
        name, style, own = f"{row['label']} ({row['kind']})", style_of(k), hourly.get(row["label"])
        for repeat in row["repeats"]:
            first = [p for p in repeat["losses"] if p[0] <= _loss_steps(document)]
            losses.append(Trace(name, style, first, aside=repeat["diverged"]))
            if repeat["diverged"]:
                continue
            if not repeat["warming_up"]:
                speed.append(Trace(name, style, repeat["speeds"]))
            scores = [e for e in repeat["evaluations"] if "seconds" in e and metric in e]
            seconds.append(Trace(name, style, [(e["seconds"], e[metric]) for e in scores]))
            if own is not None:
                points = [(e["seconds"] * own / 3600, e[metric]) for e in scores]
                money.append(Trace(name, style, points))
    repeats = [r for _, row in rows for r in row["repeats"]]
    aside = " Runs that diverged may leave it at the top." * any(c.aside and c.points for c in losses)
    batches = " Batches differ: examples/s, never steps/s." * (len({row["batch"] for _, row in rows}) > 1)
    unpriced = [row["label"] for _, row in rows if row["label"] not in hourly]
    warm = "no run has an interval after its warm-up" if any(r["speeds"] for r in repeats) else ""
    kinds: list[tuple[str, list[Trace], dict[str, Any], str]] = [
        ("The first losses", losses, {"y": "mean loss of the step", "y_log": True, "caption":
            f"Rows that compute the same thing lie on one another; of runs, means over steps.{aside}"}, ""),
        ("Speed over steps", speed, {"y": "examples/s", "zero": True, "y_log": True, "caption":
            f"Each interval that was timed; of runs the first, the warm-up, is left out.{batches}"}, warm),
    ]  # fmt: skip
    if any(r["evaluations"] for r in repeats):
        why = "these runs did not log when they evaluated"
        priced = f"No price: {', '.join(unpriced)}." if unpriced else ""
        time = {"x": "wall time since the run began", "x_unit": "s", "y": metric, "x_log": True}
        usd = {"x": "dollars, on demand", "x_unit": "$", "y": metric, "x_log": True, "caption": priced}
        kinds += [
            (f"{metric} over time", seconds,
             {**time, "caption": "Start-up, compilation and evaluation included."}, why),
            (f"{metric} over dollars", money, usd, "what was measured has no price" if unpriced else why),
        ]  # fmt: skip
    return [(title, panel(title, curves, **how), why) for title, curves, how, why in kinds]


def _loss_steps(document: Document) -> float:
    """The number of steps in the picture of first losses: all that benchmarks store, or enough for runs."""
    firsts = [r["losses"][0][0] for row in document["rows"] for r in row["repeats"] if r["losses"]]
    return max(50.0, 10.0 * max(firsts, default=1))


def _finals(document: Document) -> BarChart | None:
    """The last value of the metric in each repeat, if any row has several."""
    rows = [(row["label"], row["metric"]) for row in document["rows"] if row["metric"]]
    if all(m["n"] < 2 for _, m in rows):
        return None
    return strips([Measure(name, "", m["mean"], m["low"], m["high"], tuple(m["values"])) for name, m in rows])
