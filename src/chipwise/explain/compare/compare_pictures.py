"""The curves of a comparison: speed over steps, and the metric over time."""

from __future__ import annotations

from collections.abc import Iterator

from ..charts import Panel, Trace, panel, style_of
from ..terminal import Document


def pictures(document: Document) -> Iterator[Panel]:
    """Curves of all rows, as far as their runs have the points."""
    metric = document["metric"] or ""
    speed = []
    seconds = []
    for k, row in enumerate(document["rows"]):
        name = row["label"]
        style = style_of(k)
        for repeat in row["repeats"]:
            if repeat["diverged"]:
                continue
            if not repeat["warming_up"]:
                speed.append(Trace(name, style, repeat["speeds"]))
            scores = [e for e in repeat["evaluations"] if "seconds" in e and metric in e]
            seconds.append(Trace(name, style, [(e["seconds"], e[metric]) for e in scores]))
    intervals = "each interval that was timed; of a run the first, the warm-up, is left out"
    drawn = panel(
        "Speed over steps", speed, y="examples/s", zero=True, y_log=True, caption=intervals
    )
    over_time = panel(
        f"{metric} over time",
        seconds,
        x="wall time",
        x_unit="s",
        x_log=True,
        caption="with start-up, compilation and evaluation",
    )
    yield from filter(None, (drawn, over_time))
