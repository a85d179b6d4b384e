"""A report in the terminal. Text from a run is never markup."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ...words.figures import counted, figure, known, share, sparkline
from ...words.figures import duration as seconds
from ..charts import LOG_FROM, Part, spread_out, stack
from ..terminal import grid, table, texts
from .time_spent import PARTS

_CELLS = 40  # of the bar of time
_SPARKS = 24  # of a curve


def parts(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The parts to print, in order."""
    yield _title(f"{document['name']}: the run")
    yield " · ".join(texts(document["about"]))
    yield document["run"]
    yield from (Text(f"note: {text}", style="yellow") for text in texts(document["notes"]))
    yield " ".join(texts(document["status"]["facts"]))
    yield ""
    yield grid([*_metrics(document), *_figures(document)])
    yield _title("\nSettings")
    yield grid(document["settings"])
    if "note" in document["schedule"]:
        yield Text(document["schedule"]["note"]["text"], style="dim")
    yield ""
    yield grid([(one["text"], one["how"]) for one in document["commands"]])
    if document["curves"]:
        yield _title("\nCurves")
        yield _curves(document)
    if document["predictions"] is not None:
        yield _title("\nPredictions")
        yield from _predictions(document["predictions"])
    yield _title("\nWhere the time went")
    yield _time(document["seconds"]) if document["seconds"] is not None else "Nothing was timed."
    yield _title("\nWhat stood out, and what to try")
    yield from _advice(document)
    yield _title("\nWhere the figures come from")
    yield grid([(one["about"], one["text"]) for one in document["sources"]], "dim")


def _title(text: str) -> Text:
    return Text(text, style="bold underline" if text.startswith("\n") else "bold")


def _advice(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    for finding in document["advice"]:
        yield Text(f"- {finding['text']}", style="bold")
        yield f"  {finding['evidence']}"
        for text in texts(finding["try"]):
            yield Text(f"  try: {text}", style="green")
    if not document["advice"]:
        yield "Nothing stood out: no rule of this report found a figure past its threshold."


def metric(value: float | None) -> str:
    """A metric of a report; `None` is a value that is not finite, since JSON has no NaN."""
    return "NaN" if value is None else figure(value)


def beside(batch: Any, replicas: Any) -> str:
    """The text beside every speed, with global numbers: `batch 512, 8 replicas`."""
    of = counted(replicas, "replica") if type(replicas) is int else "replicas unknown"
    return f"batch {batch if type(batch) is int else 'unknown'}, {of}"


def _metrics(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    steps = document["metric_steps"]
    if (best := document["best"]) is not None:
        at = f" at step {best['step']:,}"
        yield from ((f"best {name}", metric(value) + at) for name, value in best["metrics"].items())
    for name, value in document["metrics"].items():
        step = steps.get(name.partition("/")[0])
        yield name, metric(value) + (f" at step {step:,}" if step is not None else "")


def _figures(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    fast, time = document["speed"], document["seconds"]
    if fast is not None:
        text = f"{fast['examples_per_second']:,.0f} examples/s"
        if fast["quartiles"]:
            text += f" ({fast['quartiles'][0]:,.0f} to {fast['quartiles'][1]:,.0f})"
        text += f" at {beside(fast['batch'], fast['replicas'])}"
        if known(fast["share_of_peak"]):
            text += f", {share(fast['share_of_peak'])} of peak"
        yield "speed", text
    if time is not None:
        yield "time", f"{seconds(time['total'])}, {time['covers']['text']}"
    if document["fingerprint"]:
        yield "fingerprint", document["fingerprint"]


def _curves(document: Mapping[str, Any]) -> Table:
    rows: list[tuple[str, Callable[[float], str], list[float]]] = [
        (name, figure, [p[3] for p in points]) for name, points in document["curves"].items()
    ]
    rows.append(("examples/s", "{:,.0f}".format, [i["speed"] for i in document["intervals"]]))
    waits = [i["waited"] for i in document["intervals"] if i["waited"] is not None]
    rows.append(("waiting for data", share, waits if any(waits) else []))
    cells = [
        (name, *map(form, (values[0], min(values), max(values), values[-1])), spark(values))
        for name, form, values in rows
        if values
    ]
    columns = ("metric", "first", "lowest", "highest", "last", "over the steps")
    return table(columns, cells, left=(columns[0], columns[-1]), fold=columns[:1])


def spark(values: Sequence[float]) -> str:
    """A curve as a line of text, such as `█▆▄▂▁`; logarithmic if the values span much."""
    if spread_out(values, LOG_FROM):
        values = [math.log(v) for v in values]
    size = max(len(values) / _SPARKS, 1.0)
    ends = [(int(k * size), int((k + 1) * size)) for k in range(int(len(values) / size))]
    cells = [values[begin : max(end, begin + 1)] for begin, end in ends]
    return sparkline([sum(cell) / len(cell) for cell in cells if cell])


def _predictions(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    right, many = f"{found['accuracy']:.2%}", f"{found['examples']:,}"
    yield f"{right} of {many} examples are right, with the parameters of step {found['steps']:,}."
    rows = [
        (kind, one["name"], one["actual"], one["predicted"], share(one["probability"]))
        for kind in ("worst", "best")
        for one in found[kind]
    ]
    columns = ("", "example", "actual", "predicted", "probability of actual")
    yield table(columns, rows, left=columns[:4], fold=columns[1:4])
    for pair in found["confused"]:
        names = ", ".join(one["name"] for one in pair["tiles"])
        times = counted(pair["count"], "time")
        yield f"{pair['actual']} predicted as {pair['predicted']}: {times}, such as examples {names}"


def _time(time: Mapping[str, Any]) -> Table:
    cells = [
        (p.words, seconds(p.value), share(p.share), "█" * round(_CELLS * p.share)) for p in time_bar(time)
    ]
    return table(("part", "seconds", "share", ""), cells, left=("part", ""), show_header=False)


def time_bar(time: Mapping[str, Any]) -> list[Part]:
    """A bar of the parts of a report's `seconds`."""
    return stack((name, words, time["parts"].get(name)) for name, words in PARTS.items())
