"""Displays results in a notebook, as `print` and as the pages show them: HTML without scripts and
style sheets, which notebooks may strip."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from functools import singledispatch
from pathlib import Path
from typing import Any

from ..base import fact
from ..base.annotations import as_annotated
from ..compile.compiled import Compiled
from ..planner.plans import Plan, Plans
from ..recipe.check import Findings
from ..run.folder.result import Result
from ..study.find_lr import LrSearch
from ..study.study_file import FILE, Study
from ..study.transfer import Transfer
from . import advice, plan_kernels, plan_parts, terminal
from .charts import metric_panels
from .compare import compare_parts
from .compare.compare_pictures import pictures
from .compare.comparison import compare as compare_document
from .page import fragment

_COLUMNS = 116


class Shown(dict):
    """A document of `--json` that a notebook displays as its `parts`."""

    def __init__(self, document: Mapping[str, Any], parts: Iterable[terminal.Part]):
        super().__init__(document)
        self.parts = list(parts)

    @property
    def text(self) -> str:
        """The terminal's output, without colours."""
        out = io.StringIO()
        terminal.printed(terminal.console(out, _COLUMNS), self.parts)
        return out.getvalue().rstrip()

    def _repr_html_(self) -> str:
        return fragment(self.parts)


@as_annotated
def report(run: str | os.PathLike) -> Shown:
    """The report of a run folder, as `chipwise report` gives it: a dict of the JSON document
    (docs/report.md). A notebook displays it as text and curves. For a study, returns `compare` of
    its points. Raises `RunError` if the folder is neither a run nor a study."""
    from .report.report_parts import parts
    from .report.run_report import report as run_report

    if (Path(run) / FILE).exists():
        return compare(run)
    document = run_report(run)
    return Shown(document, parts(document))


@as_annotated
def compare(
    *sources: str | os.PathLike,
    baseline: str | None = None,
    target: str | None = None,
    metric: str | None = None,
    better: Mapping[str, str] = {},
) -> Shown:
    """Compares records, runs and studies, as `chipwise compare` does. Returns a dict of the JSON
    document (docs/compare.md). A notebook displays it as tables and curves.

    *Arguments:*

    - `sources`: paths or `LABEL=PATH`.
    - `baseline`: a label.
    - `target`: such as `"eval/accuracy=0.94"`.
    - `metric`: the metric to compare.
    - `better`: which way metrics are better, before what the runs say: `{"bpb": "lower"}`.

    Raises `DataError`, `RunError` or `RecipeError`.
    """
    document = compare_document(
        [os.fspath(source) for source in sources],
        baseline=baseline,
        target=target,
        metric=metric,
        better=better,
    )
    return Shown(document, compare_parts.parts(document))


@singledispatch
def shown(answer: Any) -> Shown:
    """What `print` and a notebook show for one of chipwise's answers. Raises `TypeError` for other
    types."""
    raise TypeError(type(answer).__name__)


@shown.register
def _(answer: Plans) -> Shown:
    return Shown({}, plan_parts.parts(plan_parts.verdict(answer)) if answer else ())


@shown.register
def _(answer: Result) -> Shown:
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in answer.history:
        for name, value in row.items():
            if name.startswith(("train/", "eval/")) and isinstance(value, float):
                curves.setdefault(name, []).append((row["step"], value))
    metrics = [(n, f"{v:.4g}") for n, v in answer.metrics.items() if isinstance(v, (int, float))]
    rate = answer.examples_per_second
    kept = answer.kept
    speed = [] if rate is None else [("examples/s", f"{rate:,.0f}")]
    best = [] if kept is None else [("best", fact("best-kept", **vars(kept)))]
    rows = [("recipe", answer.recipe), ("steps", f"{answer.steps:,}"), *metrics, *best, *speed]
    table = terminal.grid([*rows, ("fingerprint", answer.fingerprint)])
    return Shown({}, [*metric_panels(curves), table])


@shown.register
def _(answer: Study) -> Shown:
    document = compare_document([os.fspath(answer.folder)])
    return Shown(document, [*compare_parts.results(document), *pictures(document)])


@shown.register
def _(answer: LrSearch) -> Shown:
    return Shown({}, [advice.curves(answer), *advice.rates(answer)])


shown.register(Compiled, lambda answer: Shown({}, plan_kernels.compiled(answer)))
shown.register(Plan, lambda answer: shown(Plans([answer])))
shown.register(Transfer, lambda answer: Shown({}, advice.moved(answer)))
shown.register(Findings, lambda answer: Shown({}, advice.doubts(answer)))
