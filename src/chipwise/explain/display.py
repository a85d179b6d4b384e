"""Displays results in a notebook: HTML with inline styles and without scripts, which notebooks may strip.

It shows the curves as pictures, and below them the terminal's output in colours.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.table import Table

from . import terminal
from .charts import Trace, panel
from .page import picture

if TYPE_CHECKING:
    from ..engine.result import Result
    from ..planner.plans import Plan

PARTS = ("train", "eval")
_COLUMNS = 116
_CURVES = 4  # most pictures of a result or a report
_BOX = "overflow-x:auto;line-height:1.35;font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px"


class Shown(dict):
    """A document of `--json` that a notebook displays: `parts`, the terminal's output, below pictures of
    `curves`, by names such as "train/loss"."""

    def __init__(self, document: Mapping[str, Any], parts: Iterable[RenderableType], curves: Any = None):
        super().__init__(document)
        self.parts, self.curves = list(parts), dict(curves or {})

    def _repr_html_(self) -> str:
        return pictures(self.curves) + written(self.parts)


def report(run: str | os.PathLike) -> Shown:
    """The report of a run folder or a study, as `chipwise report` gives it: a dict of the JSON document
    (docs/report.md), displayed as text and curves in a notebook. Raises `RunError` if the folder is
    neither a run nor a study."""
    from .report.report_text import parts
    from .report.run_report import report as run_report

    document = run_report(run)
    curves = document.get("curves") if document["kind"] == "run" else None
    points = {name: [(p[0], p[3]) for p in rows] for name, rows in (curves or {}).items()}
    return Shown(document, parts(document), points)


def compare(*sources: str | os.PathLike, baseline: str | None = None, target: str | None = None) -> Shown:
    """Compares records, runs, studies and plans, as `chipwise compare` does: a dict of the JSON document
    (docs/compare.md), displayed as tables in a notebook.

    *Arguments:* `sources`: paths or `LABEL=PATH`; `baseline`: a label; `target`: such as
    `"eval/accuracy=0.94"`. Raises `DataError`, `RunError` or `RecipeError`.
    """
    from .compare.compare_table import parts
    from .compare.comparison import compare as document

    compared = document([os.fspath(source) for source in sources], baseline=baseline, target=target)
    return Shown(compared, parts(compared))


def of_plans(plans: Sequence[Plan]) -> str:
    """HTML of plans of one recipe: the verdict, and the table."""
    from .plan_table import parts

    return written(parts(plans)) if plans else ""


def of_result(result: Result) -> str:
    """HTML of a run: its curves and its result."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in result.history:
        for name, value in row.items():
            if name.startswith(("train/", "eval/")) and isinstance(value, float):
                curves.setdefault(name, []).append((row["step"], value))
    metrics = [(n, f"{v:.4g}") for n, v in result.metrics.items() if isinstance(v, (int, float))]
    rate = result.examples_per_second
    speed = [] if rate is None else [("examples/s", f"{rate:,.0f}")]
    rows = [("recipe", result.recipe), ("steps", f"{result.steps:,}"), *metrics, *speed]
    return pictures(curves) + written([terminal.grid([*rows, ("fingerprint", result.fingerprint)])])


def written(parts: Iterable[RenderableType]) -> str:
    """HTML of parts as the terminal shows them, with colours."""
    console = Console(
        file=io.StringIO(), record=True, width=_COLUMNS, highlight=False, color_system="standard",
        force_jupyter=False,
    )  # fmt: skip
    for part in parts:
        console.print(part, markup=False, soft_wrap=not isinstance(part, Table))
    text = console.export_html(inline_styles=True, code_format="{code}").replace("color: #000000; ", "")
    return f'<pre style="white-space:pre-wrap;{_BOX}">{text}</pre>'


def pictures(curves: Mapping[str, Sequence[tuple[float, float | None]]]) -> str:
    """A picture for each metric, with training and evaluation together."""
    names = list(dict.fromkeys(name.partition("/")[2] for name in curves))
    drawn = []
    for name in sorted(names, key=lambda name: (name != "loss", name != "accuracy", name))[:_CURVES]:
        both = [(part, curves.get(f"{part}/{name}", ())) for part in PARTS]
        lines = [Trace(part, part, [(x, y) for x, y in points if y is not None]) for part, points in both]
        if (one := panel(name, lines, y_log="loss" in name)) is not None:
            drawn.append(picture([one], size="narrow"))
    return f'<div style="display:flex;flex-wrap:wrap;gap:12px">{"".join(drawn)}</div>' if drawn else ""
