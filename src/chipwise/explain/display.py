"""Displays results in a notebook: HTML with inline styles and without scripts, which notebooks may strip.

It shows the curves as pictures, and below them the terminal's output in colours.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import singledispatch
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from ..engine.result import Result
from ..planner.plans import Plan, Plans
from ..recipe.check import Findings
from ..study.find_lr import LrSearch
from ..study.study_file import FILE, Study
from ..study.transfer import Transfer
from ..words.facts import fact
from . import advice, terminal
from .charts import Panel, Trace, panel
from .compare import compare_table
from .compare.compare_page import pictures as pictures_of
from .compare.comparison import compare as compare_document
from .page import picture

PARTS = ("train", "eval")
_COLUMNS = 116
_CURVES = 4  # most pictures of a result or a report
_BOX = "overflow-x:auto;line-height:1.35;font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px"


class Shown(dict):
    """A document of `--json` that a notebook displays: `parts`, the terminal's output, below pictures of
    `curves`, by names such as "train/loss", or of `panels`."""

    def __init__(
        self, document: Mapping[str, Any], parts: Iterable[RenderableType], curves: Any = None,
        panels: Sequence[Panel | None] = (),
    ):  # fmt: skip
        super().__init__(document)
        self.parts, self.curves = list(parts), dict(curves or {})
        self.panels = [panel for panel in panels if panel is not None]

    @property
    def text(self) -> str:
        """The terminal's output, without colours."""
        console = Console(file=io.StringIO(), width=_COLUMNS, highlight=False, force_jupyter=False)
        terminal.printed(console, self.parts)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def _repr_html_(self) -> str:
        drawn = "".join(picture(panel) for panel in self.panels)
        return pictures(self.curves) + drawn + written(self.parts)


def report(run: str | os.PathLike) -> Shown:
    """The report of a run folder, as `chipwise report` gives it: a dict of the JSON document
    (docs/report.md), displayed as text and curves in a notebook; of a study, `compare` of its points. Raises
    `RunError` if the folder is neither a run nor a study."""
    from .report.report_text import parts
    from .report.run_report import report as run_report

    if (Path(run) / FILE).exists():
        return compare(run)
    document = run_report(run)
    points = {name: [(p[0], p[3]) for p in rows] for name, rows in document["curves"].items()}
    return Shown(document, parts(document), points)


def compare(
    *sources: str | os.PathLike, baseline: str | None = None, target: str | None = None,
    metric: str | None = None,
) -> Shown:  # fmt: skip
    """Compares records, runs and studies, as `chipwise compare` does: a dict of the JSON document
    (docs/compare.md), displayed as tables in a notebook.

    *Arguments:* `sources`: paths or `LABEL=PATH`; `baseline`: a label; `target`: such as
    `"eval/accuracy=0.94"`; `metric`: what is compared. Raises `DataError`, `RunError` or `RecipeError`.
    """
    how = {"baseline": baseline, "target": target, "metric": metric}
    document = compare_document([os.fspath(source) for source in sources], **how)
    return _compared(document, compare_table.parts(document))


@singledispatch
def shown(answer: Any) -> Shown:
    """What `print` and a notebook show of an answer of chipwise."""
    raise TypeError(type(answer).__name__)


@shown.register
def _(answer: Plans) -> Shown:
    from .plan_table import parts

    return Shown({}, parts(answer) if answer else ())


@shown.register
def _(answer: Result) -> Shown:
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in answer.history:
        for name, value in row.items():
            if name.startswith(("train/", "eval/")) and isinstance(value, float):
                curves.setdefault(name, []).append((row["step"], value))
    metrics = [(n, f"{v:.4g}") for n, v in answer.metrics.items() if isinstance(v, (int, float))]
    rate, kept = answer.examples_per_second, answer.kept
    speed = [] if rate is None else [("examples/s", f"{rate:,.0f}")]
    best = [] if kept is None else [("best", fact("best-kept", **vars(kept)))]
    rows = [("recipe", answer.recipe), ("steps", f"{answer.steps:,}"), *metrics, *best, *speed]
    return Shown({}, [terminal.grid([*rows, ("fingerprint", answer.fingerprint)])], curves)


@shown.register
def _(answer: Study) -> Shown:
    document = compare_document([os.fspath(answer.folder)])
    return _compared(document, compare_table.results(document))


shown.register(Plan, lambda answer: shown(Plans([answer])))
shown.register(LrSearch, lambda answer: Shown({}, advice.rates(answer), panels=[advice.curves(answer)]))
shown.register(Transfer, lambda answer: Shown({}, advice.moved(answer)))
shown.register(Findings, lambda answer: Shown({}, advice.doubts(answer)))


def _compared(document: Mapping[str, Any], parts: Iterable[RenderableType]) -> Shown:
    """A comparison with its curves."""
    return Shown(document, parts, panels=[drawn for _, drawn, _ in pictures_of(document)])


def written(parts: Iterable[RenderableType]) -> str:
    """HTML of parts as the terminal shows them, with colours."""
    console = Console(
        file=io.StringIO(), record=True, width=_COLUMNS, highlight=False, color_system="standard",
        force_jupyter=False,
    )  # fmt: skip
    blocks = []
    for part in parts:
        console.print(part, markup=False, soft_wrap=not isinstance(part, Table))
        text = console.export_html(inline_styles=True, code_format="{code}").replace("color: #000000; ", "")
        # On a narrow page lines break and tables scroll
        space = "pre" if isinstance(part, Table) else "pre-wrap"
        blocks.append(f'<pre style="margin:0;white-space:{space};{_BOX}">{text}</pre>')
    return "".join(blocks)


def pictures(curves: Mapping[str, Sequence[tuple[float, float | None]]]) -> str:
    """A picture for each metric, with training and evaluation together."""
    names = list(dict.fromkeys(name.partition("/")[2] for name in curves))
    drawn = []
    for name in sorted(names, key=lambda name: (name != "loss", name != "accuracy", name))[:_CURVES]:
        both = [(part, curves.get(f"{part}/{name}", ())) for part in PARTS]
        lines = [Trace(part, part, [(x, y) for x, y in points if y is not None]) for part, points in both]
        if (one := panel(name, lines, y_log="loss" in name)) is not None:
            drawn.append(picture(one, "narrow"))
    return f'<div style="display:flex;flex-wrap:wrap;gap:12px">{"".join(drawn)}</div>' if drawn else ""
