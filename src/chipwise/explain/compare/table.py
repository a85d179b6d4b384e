"""A comparison in the terminal: one table, and around it the sentences that say how to read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...study.stats import HIGHER, LOWER, NO_DIFFERENCE
from ...words.figures import digits, dollars, printable
from .words import interval, pair, prices_used, said, sources, times

Made = Mapping[str, Any]
_MANY = 4  # rows; of more, the values of a difference are grouped


def show(document: Made, console: Console) -> None:
    """Prints a document of `document.document`."""

    def part(title: str, lines: list[str]) -> None:
        if lines:
            console.print(f"\n{title}", style="bold")
        for line in lines:
            _line(console, f"  {line}")

    told = document["sentences"]
    _line(console, told["headline"], style="bold")
    for line in (told["kinds"], *document["notes"]):
        _line(console, line)
    part("What differs", [f"{d['setting']}: {values(d['values'])}" for d in document["differing"]])
    part("The same computation?", [a["sentence"] for a in document["agreement"]])
    console.print("\nSpeed", style="bold")
    console.print(speeds(document))
    for group in document["relative"]:
        console.print()
        console.print(relative(group))
    for line in told["speed"] + told["published"]:
        _line(console, f"  {line}")
    part("Time to the target", told["target"])
    part("Wall time", told["wall"])
    if any(row["costs"] and row["examples_per_second"] for row in document["rows"]):
        part("Money", told["money"])
        console.print(costs(document))
        for line in prices_used(document):
            _line(console, f"  {line}")
    else:
        part("Money", prices_used(document))
    part("Result", told["metric"])
    part("Where the figures come from", sources(document))


def speeds(document: Made) -> Table:
    """A row each that has, or could have, a speed of its own: ratios alone have a table of theirs."""
    elsewhere = {row["label"] for group in document["relative"] for row in group["rows"]}
    rows = [row for row in document["rows"] if row["label"] not in elsewhere]
    per_step = any(row["steps_per_second"] for row in rows)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    for name in ("", "figures", "on"):
        table.add_column(name, overflow="fold", no_wrap=name == "figures")
    for name in ("batch", "replicas", "examples/s", *(["steps/s"] if per_step else []), "× baseline"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("says", no_wrap=True)
    for row in rows:
        speed, ratio = row["examples_per_second"], row["ratio"]
        base = row["label"] == document["baseline"]
        cells = [row["label"], row["kind"], row["device"], _number(row["batch"]), _number(row["replicas"])]
        cells.append(f"{digits(speed['value'])}{_within(speed)}" if speed else "-")
        if per_step:
            cells.append(digits(row["steps_per_second"]) if row["steps_per_second"] else "-")
        cells.append("1" if base else f"{times(ratio)}{_within(ratio)}" if ratio else "-")
        cells.append("baseline" if base else verdict(row))
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def costs(document: Made) -> Table:
    """Dollars a row, on demand and spot: of a million examples, of the run and to the target."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    for name in ("", "price", "a million examples", "the run", "to the target"):
        table.add_column(name, justify="left" if name in ("", "price") else "right")
    for row in document["rows"]:
        for cost in row["costs"] if row["examples_per_second"] else ():
            amounts = [cost[k] for k in ("per_million_examples", "run", "target")]
            kind = f"{'spot' if cost['spot'] else 'on demand'}, {cost['date']}"
            cells = [dollars(a["value"]) if a else "-" for a in amounts]
            if cost["target"]:
                cells[-1] += f", {cost['target_basis']}"
            table.add_row(*(Text(printable(cell)) for cell in (row["label"], kind, *cells)))
    return table


def verdict(row: Made) -> str:
    """`faster`, `slower` or why not more; with a dagger where it may not be the same computation."""
    if row["diverged"] and row["diverged"]["runs"] == row["diverged"]["of"]:
        return "diverged"
    if not row["ratio"]:
        return "-"
    verdict = row["ratio"]["verdict"]
    words = {HIGHER: "faster", LOWER: "slower", NO_DIFFERENCE: "no difference"}.get(verdict, verdict)
    return f"{words} †" if row["same_computation"] is False else words


def relative(group: Made) -> Table:
    """Published ratios of one source."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    table.add_column(Text(printable(f"published, relative to its own {group['anchor']}")))
    table.add_column("×", justify="right")
    table.add_column("$/hour then", justify="right")
    for row in group["rows"]:
        price = f"{dollars(row['usd_per_hour'])}" if row["usd_per_hour"] else "-"
        table.add_row(Text(printable(row["label"])), row["span"], price)
    return table


def values(found: Mapping[str, Any]) -> str:
    """`a: 128; b: 256`; of many rows by value: `128 (a, c); 256 (b)`."""
    if len(found) <= _MANY:
        return "; ".join(f"{label}: {said(value)}" for label, value in found.items())
    by_value: dict[str, list[str]] = {}
    for label, value in found.items():
        by_value.setdefault(said(value), []).append(label)
    return "; ".join(f"{value} ({', '.join(labels)})" for value, labels in by_value.items())


def _within(found: Made) -> str:
    """` (67-106)`; of two values ` (67 and 106)`."""
    if "n" in found and (two := pair(found)):
        return f" ({two})"
    return f" ({'-'.join(interval(found).split(' to '))})" if interval(found) else ""


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:,}"


def _line(console: Console, text: str, style: str = "") -> None:
    # names come from files: no markup, and no line breaks of theirs
    indent = " " * (len(text) - len(text.lstrip(" ")))
    console.print(Text(indent + printable(" ".join(text.split())), style=style), soft_wrap=True)
