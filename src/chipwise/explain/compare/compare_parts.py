"""The parts of a comparison, for the terminal, the page and notebooks: tables, and sentences on how
to read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ...base import fact
from ...base.figures import digits, dollars, duration, figure, interval, pair, printable
from ...study.stats import HIGHER, LOWER, NO_DIFFERENCE
from ..terminal import Document, Part, Title, table, texts
from .compare_pictures import pictures

_MANY = 4  # rows; with more, the values of a difference are grouped
_VERDICTS = {HIGHER: "faster", LOWER: "slower", NO_DIFFERENCE: "no difference"}


def page(document: Document) -> Iterator[Part]:
    """The parts of a page."""
    yield Title(f"{' and '.join(document['recipes'])}: which is better", level=1)
    yield from parts(document)


def parts(document: Document) -> Iterator[Part]:
    """The parts of a document of `comparison.document` to show, in order."""
    sentences = {subject: texts(facts) for subject, facts in document["sentences"].items()}
    yield from results(document)
    yield Title("Speed")
    yield speeds(document)
    yield from map(_line, sentences["speed"])
    yield from pictures(document)
    yield from _part("Time to the target", sentences["target"])
    yield from _part("Wall time", sentences["wall"])
    differing = [f"{d['setting']}: {values(d['values'])}" for d in document["differing"]]
    yield from _part("What differs", differing)
    yield from _part("Where the figures come from", sources(document))


def results(document: Document) -> Iterator[Part]:
    """The headline, the summary table and the result of each row. A study shows only these."""
    for line in texts(document["sentences"]["headline"]):
        yield _line(line, "", "bold")
    yield Text()
    yield summary(document)
    yield from _part("Result", texts(document["sentences"]["metric"]))


def _part(title: str, lines: Sequence[str]) -> Iterator[Part]:
    if lines:
        yield Title(title)
    yield from map(_line, lines)


# ---- tables


def summary(document: Document) -> Table:
    """A table with a row for each `Row`: its result and verdict, its speed, and its run's time and
    cost."""
    rows = document["rows"]
    metric = document["metric"]
    base = document["baseline"]
    columns = {"": [row["label"] for row in rows]}
    if any(row["metric"] for row in rows):
        columns[metric] = [final(row) for row in rows]
        columns["result"] = [
            "baseline" if row["label"] == base else result(row, document["better"]) for row in rows
        ]
    if len({row["parameters"] for row in rows} - {None}) > 1:
        columns["parameters"] = [_count(row["parameters"]) for row in rows]
    pairs = [(row["examples_per_second"], row["ratio"]) for row in rows]
    columns["speed"] = [times(ratio) if ratio else "1" if speed else "-" for speed, ratio in pairs]
    if any(row["wall_seconds"] for row in rows):
        columns["wall"] = [
            duration(w["value"]) if (w := row["wall_seconds"]) else "-" for row in rows
        ]
    if any(row["cost"] for row in rows):
        columns["cost"] = [dollars(cost["usd"]) if (cost := row["cost"]) else "-" for row in rows]
    return _table(columns, ("", "result"))


def speeds(document: Document) -> Table:
    """A table with a row for each `Row`: its speed, and how it compares with the baseline."""
    rows = document["rows"]
    base = document["baseline"]
    pairs = [(row["examples_per_second"], row["ratio"]) for row in rows]
    columns = {
        "": [row["label"] for row in rows],
        "on": [row["device"] for row in rows],
        "batch": [_count(row["batch"]) for row in rows],
        "examples/s": [f"{digits(s['value'])}{_within(s)}" if s else "-" for s, _ in pairs],
        "× baseline": [f"{times(r)}{_within(r)}" if r else "1" if s else "-" for s, r in pairs],
        "says": ["baseline" if row["label"] == base else verdict(row) for row in rows],
    }
    if any(row["steps_per_second"] for row in rows):
        columns["steps/s"] = [digits(n) if (n := row["steps_per_second"]) else "-" for row in rows]
    return _table(columns, ("", "on", "says"))


def _table(columns: Mapping[str, Sequence[str]], words: Sequence[str]) -> Table:
    cells = zip(*columns.values(), strict=True)
    return table(list(columns), cells, left=words, fold=("", "on"), padding=(0, 1))


# ---- cells and lines


def times(ratio: Document) -> str:
    """`2.1 ×`."""
    return f"{digits(ratio['value'])} ×"


def final(row: Document) -> str:
    """`0.971 (0.965-0.977)`: the mean of the metric over seeds."""
    return (
        "-" if row["metric"] is None else f"{figure(row['metric']['mean'])}{_within(row['metric'])}"
    )


def result(row: Document, better: str | None) -> str:
    """`better`, `worse`, `no difference shown` or another verdict on a row's result. `higher` or
    `lower` if it is unknown which is `better`."""
    apart = row["metric"] and row["metric"]["difference"]
    if not apart:
        return "diverged" if row["diverged"] and not row["metric"] else "-"
    if apart["verdict"] not in (HIGHER, LOWER) or better is None:
        return str(fact(apart["verdict"]))
    return "better" if apart["verdict"] == better else "worse"


def verdict(row: Document) -> str:
    """`faster`, `slower` or another verdict on a row's speed."""
    if row["diverged"] and row["diverged"]["runs"] == row["diverged"]["of"]:
        return "diverged"
    if not row["ratio"]:
        return "-"
    code = row["ratio"]["verdict"]
    return _VERDICTS.get(code) or str(fact(code))


def stated(value: Any) -> str:
    """A setting's value."""
    if value is None:
        return "not stated"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def values(by_label: Document) -> str:
    """`a: 128; b: 256`, or for many rows by value: `128 (a, c); 256 (b)`."""
    if len(by_label) <= _MANY:
        return "; ".join(f"{label}: {stated(value)}" for label, value in by_label.items())
    by_value: dict[str, list[str]] = {}
    for label, value in by_label.items():
        by_value.setdefault(stated(value), []).append(label)
    return "; ".join(f"{value} ({', '.join(labels)})" for value, labels in by_value.items())


def sources(document: Document) -> list[str]:
    """The sources of each row's figures, grouped by source, with notes."""
    by_source: dict[str, list[Document]] = {}
    for row in document["rows"]:
        by_source.setdefault(row["source"]["text"], []).append(row)
    lines = []
    for source, rows in by_source.items():
        own = [(row["label"], "; ".join(texts(row["notes"]))) for row in rows if row["notes"]]
        notes = [notes if len(rows) == 1 else f"{label}: {notes}" for label, notes in own]
        extra = f" ({'; '.join(notes)})" if notes else ""
        lines.append(f"{', '.join(row['label'] for row in rows)}: {source}{extra}")
    return lines


def _within(figure: Document) -> str:
    """` (67-106)`, or ` (67 and 106)` for two values."""
    within = pair(figure) or interval(figure, between="-")
    return f" ({within})" if within else ""


def _count(value: Any) -> str:
    return "-" if value is None else f"{value:,}"


def _line(text: str, indent: str = "  ", style: str = "") -> Text:
    # names come from files: without markup and line breaks
    return Text(indent + printable(" ".join(text.split())), style=style)
