"""A report as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .. import page
from ..charts import Panel, Trace, panel
from .report_text import beside, metric, time_bar

CHARTS = 8  # most metrics of a run in the page; the JSON has all
_FIRST = ("loss", "accuracy")
_PARTS = {"train": "training", "eval": "evaluation"}


def render(document: Mapping[str, Any]) -> str:
    """The page of a document of `run_report.report`."""
    return page.render("report", {"metric": metric}, document=document, beside=beside, **_run(document))


def _run(document: Mapping[str, Any]) -> dict[str, Any]:
    rate, time, waits = document["schedule"], document["seconds"], _waits(document)
    names = sorted({name.partition("/")[2] for name in document["curves"]}, key=_order)
    points = list(zip(rate.get("steps") or [], rate.get("values") or [], strict=True))
    schedule = panel(
        f"{rate['name']} over steps", [Trace("", "rate", points)], zero=True, second=_epochs(document)
    )
    return {
        "panels": [drawn for drawn in _panels(document, names[:CHARTS]) if drawn is not None],
        "left_out": names[CHARTS:],
        "schedule": schedule,
        "bar": time_bar(time) if time is not None else [],
        "metrics_of": _by_step(document),
        "never_waited": bool(waits) and not any(y > 0 for _, y in waits),
    }


def _panels(document: Mapping[str, Any], names: Sequence[str]) -> Iterator[Panel | None]:
    """Each metric over steps and over time; then the speed and the waiting, over steps."""
    marks = [start["step"] for start in document["resumes"]]
    over_steps: dict[str, Any] = {"second": _epochs(document), "marks": marks, "mark_words": "resumed"}
    for name in names:
        both = {part: document["curves"].get(f"{part}/{name}", []) for part in _PARTS}
        steps = [Trace(_PARTS[k], k, [(p[0], p[3]) for p in points]) for k, points in both.items()]
        times = [Trace(_PARTS[k], k, [(p[2], p[3]) for p in points]) for k, points in both.items()]
        log = "loss" in name
        yield panel(f"{name} over steps", steps, y_log=log, **over_steps)
        yield panel(
            f"{name} over time",
            times,
            x="time",
            x_unit="s",
            y_log=log,
            caption="start and compilation included",
        )
    fast = document["speed"] or {}
    yield panel(
        "examples/s over steps",
        [Trace("", "train", [(i["last"], i["speed"]) for i in document["intervals"]])],
        zero=True,
        level=fast.get("examples_per_second"),
        level_words="the median without warm-up",
        caption=f"all devices together; {beside(fast.get('batch'), fast.get('replicas'))}",
        **over_steps,
    )
    waits = _waits(document)
    if any(y > 0 for _, y in waits):
        lines = [Trace("", "eval", waits)]
        yield panel(
            "waiting for data over steps", lines, zero=True, caption="% of training time", **over_steps
        )


def _waits(document: Mapping[str, Any]) -> list[tuple[float, float]]:
    return [(i["last"], 100 * i["waited"]) for i in document["intervals"] if i["waited"] is not None]


def _epochs(document: Mapping[str, Any]) -> tuple[str, float] | None:
    """Epochs per step, for a second axis; None if the run is shorter than an epoch."""
    points = (p for points in document["curves"].values() for p in points if p[1])
    last = max(points, key=lambda p: p[0], default=None)
    return ("epoch", last[1] / last[0]) if last is not None and last[0] and last[1] >= 1 else None


def _order(name: str) -> tuple[int, str]:
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)


def _by_step(document: Mapping[str, Any]) -> list[tuple[int | None, list[tuple[str, float | None]]]]:
    """The metrics grouped by step; the step is `None` for those of a run's result."""
    steps: dict[int | None, list[tuple[str, float | None]]] = {}
    for name, value in sorted(document["metrics"].items(), key=lambda item: not item[0].startswith("eval/")):
        steps.setdefault(document["metric_steps"].get(name.partition("/")[0]), []).append((name, value))
    return list(steps.items())
