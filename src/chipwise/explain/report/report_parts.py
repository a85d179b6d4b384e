"""The parts of a report, for the terminal, the page and notebooks. Text from a run is never
markup."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ...base.figures import (
    counted,
    duration as seconds,
    figure,
    known,
    or_unknown,
    share,
    sparkline,
)
from ..charts import CHARTS, LOG_FROM, Trace, metric_names, metric_panels, panel, spread_out
from ..terminal import Document, Part, Tiles, Title, grid, table, texts
from .time_spent import PARTS

_CELLS = 24  # of a bar of time and of a curve: they fit beside figures on a phone


def parts(document: Document) -> Iterator[Part]:
    """The parts to show, in order."""
    yield Title(f"{document['name']}: the run", level=1)
    yield " · ".join(texts(document["about"]))
    yield document["run"]
    yield from (Text(f"note: {text}", style="yellow") for text in texts(document["notes"]))
    yield " ".join(texts(document["status"]["facts"]))
    yield ""
    yield grid([*_metrics(document), *_figures(document)])
    if document["curves"]:
        yield Title("Curves")
        yield from _panels(document)
        yield _curves(document)
    yield Title("Settings")
    yield grid(document["settings"])
    yield from _schedule(document)
    yield ""
    yield grid([(one["text"], one["how"]) for one in document["commands"]])
    if document["predictions"] is not None:
        yield Title("Predictions")
        yield from _predictions(document["predictions"])
    yield Title("Where the time went")
    yield _time(document["seconds"]) if document["seconds"] is not None else "Nothing was timed."
    yield Title("What stood out, and what to try")
    yield from _advice(document)
    yield Title("Where the figures come from")
    yield grid([(one["about"], one["text"]) for one in document["sources"]], "dim")


def _schedule(document: Document) -> Iterator[Part]:
    rate = document["schedule"]
    if "note" in rate:
        yield Text(rate["note"]["text"], style="dim")
        return
    points = list(zip(rate["steps"], rate["values"], strict=True))
    title = f"{rate['name']} over steps"
    curve = Trace("", "rate", points)
    yield from filter(None, [panel(title, [curve], zero=True, second=_epochs(document))])


def _panels(document: Document) -> Iterator[Part]:
    """Draws each metric over steps and over time, and the speed over steps."""
    over_steps: dict[str, Any] = {
        "second": _epochs(document),
        "marks": [start["step"] for start in document["resumes"]],
        "mark_words": "resumed",
    }
    curves = document["curves"]
    fast = document["speed"] or {}
    steps = {name: [(p[0], p[3]) for p in points] for name, points in curves.items()}
    times = {name: [(p[2], p[3]) for p in points] for name, points in curves.items()}
    yield from metric_panels(steps, **over_steps)
    yield from metric_panels(times, "time", x="time, with start and compilation", x_unit="s")
    speed = panel(
        "examples/s over steps",
        [Trace("", "train", [(i["last"], i["speed"]) for i in document["intervals"]])],
        zero=True,
        level=fast.get("examples_per_second"),
        level_words="the median without warm-up",
        **over_steps,
    )
    yield from filter(None, [speed])
    if left_out := metric_names(curves)[CHARTS:]:
        yield Text(f"Not drawn, but in the JSON: {', '.join(left_out)}.", style="dim")


def _epochs(document: Document) -> tuple[str, float] | None:
    """Epochs per step, for a second axis. `None` if the run is shorter than an epoch."""
    points = (p for points in document["curves"].values() for p in points if p[1])
    last = max(points, key=lambda p: p[0], default=None)
    return ("epoch", last[1] / last[0]) if last is not None and last[0] and last[1] >= 1 else None


def _advice(document: Document) -> Iterator[Part]:
    for finding in document["advice"]:
        yield Text(f"- {finding['text']}", style="bold")
        yield f"  {finding['evidence']}"
        for text in texts(finding["try"]):
            yield Text(f"  try: {text}", style="green")
    if not document["advice"]:
        yield "Nothing stood out: no rule of this report found a figure past its threshold."


def metric(value: float | None) -> str:
    """A metric of a report. `None` means a value that is not finite, since JSON has no NaN."""
    return "NaN" if value is None else figure(value)


def beside(batch: Any, replicas: Any) -> str:
    """The text beside every speed, with global numbers, such as `batch 512, 8 replicas`."""
    of = counted(replicas, "replica") if type(replicas) is int else "replicas unknown"
    return f"batch {batch if type(batch) is int else 'unknown'}, {of}"


def _metrics(document: Document) -> Iterator[tuple[str, str]]:
    steps = document["metric_steps"]
    if (best := document["best"]) is not None:
        at = f" at step {best['step']:,}"
        yield from ((f"best {name}", metric(value) + at) for name, value in best["metrics"].items())
    for name, value in document["metrics"].items():
        step = steps.get(name.partition("/")[0])
        yield name, metric(value) + (f" at step {step:,}" if step is not None else "")


def _figures(document: Document) -> Iterator[tuple[str, str]]:
    fast = document["speed"]
    time = document["seconds"]
    if fast is not None:
        text = f"{fast['examples_per_second']:,.0f} examples/s"
        if fast["quartiles"]:
            text += f" ({fast['quartiles'][0]:,.0f} to {fast['quartiles'][1]:,.0f})"
        text += f" at {beside(fast['batch'], fast['replicas'])}"
        if known(fast["share_of_peak"]):
            text += f", {share(fast['share_of_peak'])} of peak"
        yield "speed", text
    if document["of_plan"]:
        yield "of the plan", document["of_plan"]["text"]
    if time is not None:
        yield "time", f"{seconds(time['total'])}, {time['covers']['text']}"
    if document["fingerprint"]:
        yield "fingerprint", document["fingerprint"]


def _curves(document: Document) -> Table:
    rows = [(name, figure, [p[3] for p in points]) for name, points in document["curves"].items()]
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
    """A curve as a line of text, such as `█▆▄▂▁`. It is logarithmic if the values span a large
    range."""
    if spread_out(values, LOG_FROM):
        values = [math.log(v) for v in values]
    size = max(len(values) / _CELLS, 1.0)
    ends = [(int(k * size), int((k + 1) * size)) for k in range(int(len(values) / size))]
    cells = [values[begin : max(end, begin + 1)] for begin, end in ends]
    return sparkline([sum(cell) / len(cell) for cell in cells if cell])


def _predictions(found: Document) -> Iterator[Part]:
    right = f"{found['accuracy']:.2%}"
    many = f"{found['examples']:,}"
    yield f"{right} of {many} examples are right, with the parameters of step {found['steps']:,}."
    rows = [
        (kind, one["name"], one["actual"], one["predicted"], or_unknown(share)(one["probability"]))
        for kind in ("worst", "best")
        for one in found[kind]
    ]
    columns = ("", "example", "actual", "predicted", "probability of actual")
    yield table(columns, rows, left=columns[:4], fold=columns[1:4])
    yield Tiles([*found["worst"], *found["best"]])
    for pair in found["confused"]:
        names = ", ".join(one["name"] for one in pair["tiles"])
        times = counted(pair["count"], "time")
        yield (
            f"{pair['actual']} predicted as {pair['predicted']}: {times}, such as examples {names}"
        )
        yield Tiles(pair["tiles"])


def _time(time: Document) -> Table:
    named = ((words, time["parts"].get(name)) for name, words in PARTS.items())
    rows = [(words, value, value / time["total"]) for words, value in named if value]
    cells = [
        (words, seconds(value), share(part), "█" * round(_CELLS * part))
        for words, value, part in rows
    ]
    return table(("part", "seconds", "share", ""), cells, left=("part", ""), show_header=False)
