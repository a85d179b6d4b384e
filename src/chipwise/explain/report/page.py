"""A report as one HTML page that needs nothing else: no network, no files.

Names, settings and messages in a run folder are not trusted: all of it is escaped, and the page's own policy
lets no script run but the one that opens everything for printing, and nothing be fetched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...atomic import replace_text
from ...engine.stored import number
from ...errors import DataError
from ...words.figures import counted
from ..page import render as page
from . import study
from .pictures import NARROW, WIDE, Chart, bar, chart
from .words import UNKNOWN, beside, figure, metric, seconds, share

CHARTS = 8  # metrics that are drawn; more are in the JSON
COMMANDS = ("chipwise ", "--", "export ")  # how what one types begins; other advice is prose
_FIRST = ("loss", "accuracy")


def render(document: Mapping[str, Any]) -> str:
    """The page of a document of `document.report`. Raises `DataError` when it is none."""
    kind = document.get("kind") if isinstance(document, Mapping) else None
    if kind not in ("run", "study"):
        raise DataError(
            "not a report's document: it is of no run or study. Make one with chipwise report --json."
        )
    pictures = _run(document) if kind == "run" else _study(document)
    return page("report", _FILTERS, document=document, study=kind == "study", **pictures)


def write(document: Mapping[str, Any], path: str | os.PathLike) -> Path:
    """Writes the page whole or not at all. Raises `DataError` where it cannot be written."""
    return replace_text(path, render(document), "the page", "another --html")


def _run(document: Mapping[str, Any]) -> dict[str, Any]:
    curves, rate, time = document["curves"], document["schedule"], document["seconds"]
    marks = [start["step"] for start in document["resumes"]]
    epochs = _epochs_a_step(curves)
    over_steps: dict[str, Any] = {"epochs_a_step": epochs, "marks": marks}
    panels = []
    names = sorted({name.partition("/")[2] for name in curves}, key=_order)
    for name in names[:CHARTS]:
        both = [(part, curves.get(f"{part}/{name}", [])) for part in ("train", "eval")]
        loss = "loss" in name
        steps = [(_PARTS[part], part, [(p[0], p[3]) for p in points]) for part, points in both]
        times = [
            (w, k, [(p[2], p[3]) for p in points]) for (w, k, _), (_, points) in zip(steps, both, strict=True)
        ]
        panels.append(_panel(f"{name} over steps", steps, log=loss, **over_steps))
        panels.append(_panel(f"{name} over time", times, over="seconds", log=loss, caption=document["clock"]))
    found = document["intervals"]
    speeds = [("examples/s", "train", [(i["last"], i["speed"]) for i in found])]
    waits = [
        (
            "waiting for data",
            "eval",
            [(i["last"], 100 * i["waited"]) for i in found if i["waited"] is not None],
        )
    ]
    median = (document["speed"] or {}).get("examples_per_second")
    fast = document["speed"] or {}
    at = beside(fast.get("batch"), fast.get("replicas"))
    panels.append(
        _panel(
            "examples/s over steps", speeds, zero=True, level=median,
            level_words="the median without warm-up", caption=f"all devices together; {at}", **over_steps,
        )
    )  # fmt: skip
    if any(y > 0 for _, y in waits[0][2]):
        panels.append(
            _panel(
                "waiting for data over steps", waits, zero=True, caption="% of training time", **over_steps
            )
        )
    points = list(zip(rate.get("steps") or [], rate.get("values") or [], strict=True))
    schedule = _panel(
        f"{rate['name']} over steps", [(rate["name"] or "", "rate", points)], zero=True, epochs_a_step=epochs
    )
    return {
        "panels": [panel for panel in panels if panel is not None],
        "left_out": names[CHARTS:],
        "schedule": schedule,
        "bar": bar(time) if time is not None else [],
        "first_metric": _best_known(document["metrics"]),
        "metrics_of": _by_step(document),
        "never_waited": bool(waits[0][2]) and not any(y > 0 for _, y in waits[0][2]),
        "beside": beside,
    }


_PARTS = {"train": "training", "eval": "evaluation"}


def _panel(
    title: str, lines: Any, caption: str = "", level_words: str = "", **how: Any
) -> dict[str, Any] | None:
    """A chart in both sizes, or `None` where there is nothing to draw."""
    both = [
        (size, made) for size, wh in (("wide", WIDE), ("narrow", NARROW)) if (made := chart(lines, wh, **how))
    ]
    if not both:
        return None
    first: Chart = both[0][1]
    said = [
        f"{name}: {figure(points[0][1])} at first, {figure(points[-1][1])} at last"
        for name, _, all_points in lines
        if (points := [p for p in all_points if None not in p])
    ]
    return {
        "title": title,
        "caption": caption
        + (", logarithmic" if caption and first.log else "logarithmic" if first.log else ""),
        "charts": both,
        "lines": first.lines,
        "marks": bool(first.marks),
        "level": level_words if first.level is not None else "",
        "words": f"{title}. {'; '.join(said)}.",
    }


def _study(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "panels": study.panels(document, _panel),
        "strips": study.strips(document),
        "title": study.title(document),
        "several": len(document["points"]) > 1,
        "against": study.against,
        "beside": beside,
    }


def _epochs_a_step(curves: Mapping[str, Any]) -> float | None:
    """None where a run is shorter than an epoch, and steps alone say it better."""
    last = max((p for points in curves.values() for p in points if p[1]), key=lambda p: p[0], default=None)
    return last[1] / last[0] if last is not None and last[0] and last[1] >= 1 else None


def _order(name: str) -> tuple[int, str]:
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)


def _by_step(document: Mapping[str, Any]) -> list[tuple[int | None, list[tuple[str, float | None]]]]:
    """The metrics, those of one step together; its number is `None` for those of a run's result."""
    made: dict[int | None, list[tuple[str, float | None]]] = {}
    for name, value in sorted(document["metrics"].items(), key=lambda item: not item[0].startswith("eval/")):
        made.setdefault(document["metric_steps"].get(name.partition("/")[0]), []).append((name, value))
    return list(made.items())


def _best_known(metrics: Mapping[str, float | None]) -> str | None:
    """The metric that a reader asks for first."""
    wanted = ("eval/accuracy", "eval/loss", "train/accuracy", "train/loss")
    return next((name for name in wanted if name in metrics), next(iter(metrics), None))


_FILTERS: dict[str, Callable[..., Any]] = {
    "command": lambda text: text.startswith(COMMANDS),
    "count": counted,
    "duration": seconds,
    "figure": figure,
    "metric": metric,
    "share": share,
    "whole": lambda value: UNKNOWN if number(value) is None else f"{value:,.0f}",
}
