"""A report in the terminal: the page's story, compact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ...engine.stored import number
from . import study
from .pictures import bar, spark
from .words import beside, figure, metric, seconds, share

_CELLS = 40  # of the bar of time


def parts(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What to print, in order. Text of the run is never markup."""
    if document["kind"] == "study":
        yield from study.text(document)
        return
    yield _title(f"{document['name']}: the run")
    yield " · ".join(document["about"])
    yield document["run"]
    for note in document["notes"]:
        yield Text(f"note: {note}", style="yellow")
    yield document["status"]["sentence"]
    yield ""
    yield table(_metrics(document) + _figures(document))
    yield _title("\nSettings")
    yield table([(name, value) for name, value in document["settings"]])
    if document["schedule"].get("note"):
        yield Text(document["schedule"]["note"], style="dim")
    yield ""
    yield table([(f"to {c['what']}", c["command"]) for c in document["commands"]])
    if document["curves"]:
        yield _title("\nCurves")
        yield _curves(document)
    yield _title("\nWhere the time went")
    if document["seconds"] is not None:
        yield _time(document["seconds"])
    else:
        yield "Nothing was timed."
    if document["warm_up"] is not None:
        yield document["warm_up"]["sentence"]
    yield _title("\nWhat stood out, and what to try")
    yield from advice(document)
    yield _title("\nWhere the figures come from")
    yield table([(what, f"{how}.") for what, how in document["sources"]], "dim")


def advice(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    for a in document["advice"]:
        yield Text(f"- {a['what']}", style="bold")
        yield f"  {a['evidence']}"
        for text in a["try"]:
            yield Text(f"  try: {text}", style="green")
    if not document["advice"]:
        yield "Nothing stood out: no rule of this report found a figure past its threshold."
    if document["unasked"]:
        yield Text(f"The settings were not checked (chipwise check): {document['unasked']}.", style="dim")


def table(rows: Sequence[tuple[str, str]], style: str = "") -> Table:
    made = Table(show_header=False, box=None, pad_edge=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(style=style, overflow="fold")
    for name, value in rows:
        made.add_row(Text(name), Text(value))
    return made


def _title(text: str) -> Text:
    return Text(text, style="bold underline" if text.startswith("\n") else "bold")


def _metrics(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    made, steps = [], document["metric_steps"]
    for name, value in document["metrics"].items():
        step = steps.get(name.partition("/")[0])
        made.append((name, metric(value) + (f" at step {step:,}" if step is not None else "")))
    return made


def _figures(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    made = []
    fast, time = document["speed"], document["seconds"]
    if fast is not None:
        text = f"{fast['examples_per_second']:,.0f} examples/s"
        if fast["quartiles"]:
            text += f" ({fast['quartiles'][0]:,.0f} to {fast['quartiles'][1]:,.0f})"
        text += f" at {beside(fast['batch'], fast['replicas'])}"
        if number(fast["share_of_peak"]) is not None:
            text += f", {share(fast['share_of_peak'])} of peak"
        made.append(("speed", text))
    if time is not None:
        made.append(("time", f"{seconds(time['total'])}, {time['covers']}"))
    if document["fingerprint"]:
        made.append(("fingerprint", document["fingerprint"]))
    return made


def _curves(document: Mapping[str, Any]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("metric", overflow="fold", max_width=40)
    for name in ("first", "lowest", "highest", "last"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("over the steps", no_wrap=True)
    for name, points in document["curves"].items():
        values = [p[3] for p in points]
        shown = [figure(v) for v in (values[0], min(values), max(values), values[-1])]
        made.add_row(Text(name), *shown, spark(values))
    speeds = [i["speed"] for i in document["intervals"]]
    if speeds:
        shown = [f"{v:,.0f}" for v in (speeds[0], min(speeds), max(speeds), speeds[-1])]
        made.add_row("examples/s", *shown, spark(speeds))
    waits = [i["waited"] for i in document["intervals"] if i["waited"] is not None]
    if any(waits):
        shown = [share(v) for v in (waits[0], min(waits), max(waits), waits[-1])]
        made.add_row("waiting for data", *shown, spark(waits))
    return made


def _time(time: Mapping[str, Any]) -> Table:
    made = Table(show_header=False, box=None, pad_edge=False)
    for justify in ("left", "right", "right", "left"):
        made.add_column(justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for part in bar(time):
        made.add_row(part.words, seconds(part.seconds), share(part.share), "█" * round(_CELLS * part.share))
    return made
