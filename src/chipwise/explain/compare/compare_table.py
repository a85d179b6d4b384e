"""A comparison in the terminal: a table, and sentences on how to read it. The page uses the same texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ...study.stats import HIGHER, LOWER, NO_DIFFERENCE
from ...words.facts import fact
from ...words.figures import digits, interval, pair, printable
from ..terminal import table

Document = Mapping[str, Any]
_MANY = 4  # rows; with more, the values of a difference are grouped
_VERDICTS = {HIGHER: "faster", LOWER: "slower", NO_DIFFERENCE: "no difference"}


def parts(document: Document) -> Iterator[RenderableType]:
    """The parts of a document of `comparison.document` to print, in order."""

    def part(title: str, lines: Sequence[str]) -> Iterator[Text]:
        if lines:
            yield Text(f"\n{title}", style="bold")
        yield from map(_line, lines)

    sentences = {subject: texts(facts) for subject, facts in document["sentences"].items()}
    yield _line(" ".join(sentences["headline"]), "", "bold")
    for line in (" ".join(sentences["kinds"]), *texts(document["notes"])):
        yield _line(line, "")
    yield from part("What differs", [f"{d['setting']}: {values(d['values'])}" for d in document["differing"]])
    yield from part("The same computation?", [a["fact"]["text"] for a in document["agreement"]])
    yield Text("\nSpeed", style="bold")
    yield speeds(document)
    yield from map(_line, sentences["speed"])
    yield from part("Time to the target", sentences["target"])
    yield from part("Wall time", sentences["wall"])
    yield from part("Result", sentences["metric"])
    yield from part("Where the figures come from", sources(document))


def texts(facts: Sequence[Document]) -> list[str]:
    """The sentences of a document's facts."""
    return [fact["text"] for fact in facts]


# ---- tables


def speeds(document: Document) -> Table:
    """A row each: its speed, and how it compares with the baseline."""
    rows = document["rows"]
    per_step = ["steps/s"] * any(row["steps_per_second"] for row in rows)
    cells = []
    for row in rows:
        speed, ratio = row["examples_per_second"], row["ratio"]
        base = row["label"] == document["baseline"]
        steps = row["steps_per_second"]
        cells.append(
            [
                row["label"], row["kind"], row["device"], _count(row["batch"]), _count(row["replicas"]),
                f"{digits(speed['value'])}{_within(speed)}" if speed else "-",
                *([digits(steps) if steps else "-"] if per_step else []),
                "1" if base else f"{times(ratio)}{_within(ratio)}" if ratio else "-",
                "baseline" if base else verdict(row),
            ]
        )  # fmt: skip
    words = ("", "figures", "on", "says")
    columns = [*words[:3], "batch", "replicas", "examples/s", *per_step, "× baseline", "says"]
    return table(columns, cells, left=words, fold=words, padding=(0, 1))


# ---- cells and lines, on the page too


def times(ratio: Document) -> str:
    """`2.1 ×`."""
    return f"{digits(ratio['value'])} ×"


def verdict(row: Document) -> str:
    """`faster`, `slower` or another verdict; with a dagger if it may not be the same computation."""
    if row["diverged"] and row["diverged"]["runs"] == row["diverged"]["of"]:
        return "diverged"
    if not row["ratio"]:
        return "-"
    code = row["ratio"]["verdict"]
    words = _VERDICTS.get(code) or str(fact(code))
    return f"{words} †" if row["same_computation"] is False else words


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
    by_source: dict[tuple[str, str], list[Document]] = {}
    for row in document["rows"]:
        by_source.setdefault((row["kind"], row["source"]["text"]), []).append(row)
    lines = []
    for (kind, source), rows in by_source.items():
        own = [(row["label"], "; ".join(texts(row["notes"]))) for row in rows if row["notes"]]
        notes = [notes if len(rows) == 1 else f"{label}: {notes}" for label, notes in own]
        extra = f" ({'; '.join(notes)})" if notes else ""
        lines.append(f"{', '.join(row['label'] for row in rows)}: {kind}, {source}{extra}")
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
