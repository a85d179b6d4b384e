"""A comparison as one HTML page that needs nothing else: no network, no files, no JavaScript but printing.

Names and notes come from files of others and are not trusted: all of it is escaped, and the page's own
policy lets no other script run and nothing be fetched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import DataError
from ...study.stats import NO_DIFFERENCE, Difference
from ...words.figures import counted, digits
from .. import page
from ..charts import Curve, Marks, Measure, Panel, bars, panel, series, strips
from .speed import NO_INTERVAL, Figure, ratio
from .table import values, verdict
from .words import interval, interval_of, pair, prices_used, said, sources, times, varies

Made = Mapping[str, Any]
SHAPES = {"measured": "●", "predicted": "◇", "published": "□"}


def render(document: Made) -> str:
    """The page of a document as `chipwise compare --json` prints it (`document.SCHEMA`).

    Raises `DataError` when it is none.
    """
    if not isinstance(document, Mapping) or not isinstance(document.get("rows"), list):
        raise DataError("not a comparison: it has no list of rows. Make one with chipwise compare --json.")
    rows: list[Made] = document["rows"]
    able = sorted(
        (r for r in rows if r["examples_per_second"]), key=lambda r: -r["examples_per_second"]["value"]
    )
    elsewhere = {row["label"] for group in document["relative"] for row in group["rows"]}
    pictures = _pictures(document)
    return page.render(
        "compare",
        _FILTERS,
        document=document,
        said=document["sentences"],
        rows=able + [r for r in rows if not r["examples_per_second"] and r["label"] not in elsewhere],
        cards=_cards(document, able),
        speeds=bars([_measure(row) for row in able]),
        by_label={row["label"]: row for row in rows},
        groups=[(group, _group(group)) for group in document["relative"]],
        panels=[made for _, made, _ in pictures if made is not None],
        undrawn=[f"{title.lower()}, {why}" for title, made, why in pictures if made is None and why],
        finals=_finals(document),
        shapes=SHAPES,
        prices=prices_used(document, amounts=True),
        sources=sources(document),
    )


def write(document: Made, path: str | os.PathLike) -> Path:
    """Writes the page whole or not at all. Raises `DataError` where it cannot be written."""
    return page.write(render(document), path)


_FILTERS: dict[str, Callable[..., Any]] = {
    "interval": interval,
    "said": said,
    "alone": lambda row, base: interval_of(row["ratio"], row, base),
    "pair": pair,
    "times": times,
    "values": values,
    "verdict": verdict,
}


# ---- what is drawn


def _cards(document: Made, able: Sequence[Made]) -> list[dict[str, Any]]:
    """One a kind: its fastest, and beside what."""
    cards = []
    for kind in ("measured", "predicted", "published"):
        rows = [row for row in able if row["kind"] == kind]
        if rows:
            top, speed = rows[0], rows[0]["examples_per_second"]
            within = f" ({varies(speed)})" if varies(speed) else ""
            cards.append(
                {
                    "kind": kind,
                    "who": top["label"],
                    "what": f"{digits(speed['value'])} examples/s{within}",
                    "why": _beside(document, rows),
                }
            )
        elif kind == "published" and document["relative"]:
            group = document["relative"][0]
            first, *others = group["rows"]
            left = ", ".join(
                f"{row['label']} {row['span']} ×" for row in others if row["label"] != group["anchor"]
            )
            cards.append(
                {
                    "kind": kind,
                    "who": first["label"],
                    "what": f"{first['span']} × its own CPU",
                    "why": f"{left}.",
                }
            )
    return cards


def _beside(document: Made, rows: Sequence[Made]) -> str:
    """The fastest of a kind beside the others of it, or beside the baseline where it is alone."""
    top, *others = rows
    at = f"Batch {said(top['batch'])}, replicas {said(top['replicas'])}, {top['device']}."
    if others:
        found = [_ratio(top, row) for row in others]
        shown = [f.verdict not in (NO_DIFFERENCE, NO_INTERVAL) for f in found]
        here = [_same_device(document, top, row) for row in others]
        parts = []
        for f, r, s, h in list(zip(found, others, shown, here, strict=True))[:3]:
            words = ["same device"] if h and not all(here) else []
            words += [f.verdict] if any(shown) and not s else []
            parts.append(f"{digits(f.value)} × {r['label']}" + (f" ({', '.join(words)})" if words else ""))
        left = len(others) - 3
        more = f" and {counted(left, 'other')}" if left > 0 else ""
        # of rows that were published without intervals, nothing is known either way
        verdicts = dict.fromkeys(f.verdict for f in found)
        doubt = "" if any(shown) else f"; {' or '.join(verdicts)}"
        same = ", on the same device" if all(here) else ""
        return f"{', '.join(parts)}{more}{same}{doubt}. {at}"
    return f"{times(top['ratio'])} {document['baseline']}. {at}" if top["ratio"] else at


def _ratio(row: Made, other: Made) -> Difference:
    a, b = (Figure(**r["examples_per_second"]) for r in (row, other))
    return ratio(a, b)


def _same_device(document: Made, row: Made, other: Made) -> bool:
    """As far as the rows say, each beside the baseline."""
    base = document["baseline"]
    return all(r["label"] == base or r["same_device"] for r in (row, other))


def _measure(row: Made) -> Measure:
    """Of too few values, each is a point of its own."""
    speed = row["examples_per_second"]
    few = tuple(speed["values"]) if pair(speed) else ()
    return Measure(row["label"], row["kind"], speed["value"], speed["low"], speed["high"], few)


def _group(group: Made) -> Marks | None:
    """Published ratios: a bar to the middle of each, and from the lowest to the highest that is said."""
    return bars(
        [
            Measure(
                row["label"], "published", (row["low"] + row["high"]) / 2,
                row["low"] if row["low"] < row["high"] else None, row["high"],
            )
            for row in group["rows"]
        ],
        linear=True,
    )  # fmt: skip


def _pictures(document: Made) -> list[tuple[str, Panel | None, str]]:
    """Curves of the rows that were measured, a subject each: its title, its picture, and where there is none
    but could be one, why."""
    metric = document["metric"] or ""
    rows = [(k, row) for k, row in enumerate(document["rows"]) if row["repeats"]]
    hourly = {row["label"]: c["usd_per_hour"] for _, row in rows for c in row["costs"][:1] if not c["spot"]}
    speed, losses, seconds, money = [], [], [], []
    for k, row in rows:
        name, style, own = f"{row['label']} ({row['kind']})", series(k), hourly.get(row["label"])
        for repeat in row["repeats"]:
            first = [p for p in repeat["losses"] if p[0] <= _loss_steps(document)]
            losses.append(Curve(name, style, first, aside=repeat["diverged"]))
            if repeat["diverged"]:
                continue
            if not repeat["warming_up"]:
                speed.append(Curve(name, style, repeat["speeds"]))
            timed = [
                (e["seconds"], e[metric]) for e in repeat["evaluations"] if "seconds" in e and metric in e
            ]
            seconds.append(Curve(name, style, timed))
            if own is not None:
                money.append(Curve(name, style, [(s * own / 3600, v) for s, v in timed]))
    aside = any(c.aside and c.points for c in losses)
    other = len({row["batch"] for _, row in rows}) > 1
    unpriced = [row["label"] for _, row in rows if row["label"] not in hourly]
    any_speed = any(r["speeds"] for _, row in rows for r in row["repeats"])
    evaluated = any(r["evaluations"] for _, row in rows for r in row["repeats"])
    found = [
        (
            "The first losses",
            panel(
                "The first losses", losses, y="mean loss of the step", y_log=True,
                caption="Rows that compute the same thing lie on one another; of runs, means over steps."
                + " Runs that diverged may leave it at the top." * aside,
            ),
            "",
        ),
        (
            "Speed over steps",
            panel(
                "Speed over steps", speed, y="examples/s", zero=True, y_log=True,
                caption="Each interval that was timed; of runs the first, the warm-up, is left out."
                + " Batches differ: examples/s, never steps/s." * other,
            ),
            "no run has an interval after its warm-up" if any_speed else "",
        ),
    ]  # fmt: skip
    if evaluated:
        over_time, over_money = f"{metric} over time", f"{metric} over dollars"
        why = "these runs did not log when they evaluated"
        found += [
            (
                over_time,
                panel(
                    over_time, seconds, x="wall time since the run began", x_unit="s", y=metric, x_log=True,
                    caption="Start-up, compilation and evaluation included.",
                ),
                why,
            ),
            (
                over_money,
                panel(
                    over_money, money, x="dollars, on demand", x_unit="$", y=metric, x_log=True,
                    caption=f"No price: {', '.join(unpriced)}." if unpriced else "",
                ),
                "what was measured has no price" if unpriced else why,
            ),
        ]  # fmt: skip
    return found


def _loss_steps(document: Made) -> float:
    """How far the picture of the first losses goes: as far as benchmarks keep them, or as runs need."""
    firsts = [r["losses"][0][0] for row in document["rows"] for r in row["repeats"] if r["losses"]]
    return max(50.0, 10.0 * max(firsts, default=1))


def _finals(document: Made) -> Marks | None:
    """The last value of the metric in each repeat, where any row has more than one."""
    rows = [row for row in document["rows"] if row["metric"]]
    if all(row["metric"]["n"] < 2 for row in rows):
        return None
    return strips(
        [
            Measure(row["label"], "", m["mean"], m["low"], m["high"], tuple(m["values"]))
            for row in rows
            for m in (row["metric"],)
        ]
    )
