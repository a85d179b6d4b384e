"""A comparison as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...words.figures import interval, pair
from .. import page
from ..charts import Panel, Trace, panel, style_of
from ..terminal import texts
from .compare_table import result, sources, stated, times, values, verdict

Document = Mapping[str, Any]


def render(document: Document) -> str:
    """The page of a document of `chipwise compare --json` (`document.SCHEMA`)."""
    rows: list[Document] = document["rows"]
    drawn = pictures(document)
    return page.render(
        "compare",
        _FILTERS,
        document=document,
        title=" and ".join(document["recipes"]),
        said={subject: texts(facts) for subject, facts in document["sentences"].items()},
        panels=[one for _, one, _ in drawn if one is not None],
        undrawn=[f"{title}, {why}" for title, one, why in drawn if one is None and why],
        sources=sources(document),
        sized=len({row["parameters"] for row in rows} - {None}) > 1,
    )


_FILTERS: dict[str, Callable[..., Any]] = {
    "interval": interval,
    "stated": stated,
    "pair": pair,
    "result": result,
    "times": times,
    "values": values,
    "verdict": verdict,
}


# ---- pictures


def pictures(document: Document) -> list[tuple[str, Panel | None, str]]:
    """Curves of the rows by subject: title, picture, and the reason if a picture is missing."""
    metric = document["metric"] or ""
    rows = document["rows"]
    speed, seconds = [], []
    for k, row in enumerate(rows):
        name, style = row["label"], style_of(k)
        for repeat in row["repeats"]:
            if repeat["diverged"]:
                continue
            if not repeat["warming_up"]:
                speed.append(Trace(name, style, repeat["speeds"]))
            scores = [e for e in repeat["evaluations"] if "seconds" in e and metric in e]
            seconds.append(Trace(name, style, [(e["seconds"], e[metric]) for e in scores]))
    repeats = [r for row in rows for r in row["repeats"]]
    batches = " Batches differ: examples/s, never steps/s." * (len({row["batch"] for row in rows}) > 1)
    warm = "no run has an interval after its warm-up" if any(r["speeds"] for r in repeats) else ""
    kinds: list[tuple[str, list[Trace], dict[str, Any], str]] = [
        ("Speed over steps", speed, {"y": "examples/s", "zero": True, "y_log": True, "caption":
            f"Each interval that was timed; of runs the first, the warm-up, is left out.{batches}"}, warm),
    ]  # fmt: skip
    if any(r["evaluations"] for r in repeats):
        time = {"x": "wall time", "x_unit": "s", "y": metric, "x_log": True}
        time["caption"] = "Since the run began, with start-up, compilation and evaluation."
        why = "these runs did not log when they evaluated"
        kinds.append((f"{metric} over time", seconds, time, why))
    return [(title, panel(title, curves, **how), why) for title, curves, how, why in kinds]
