"""The plans of a recipe as one JSON document and as one table: what `chipwise plan` prints.

The document's schema is `plans.SCHEMA`; docs/plan.md describes every field. A field may be added under
the same number; one that changes its meaning or goes raises it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from .. import __version__
from ..recipe.recipe import Recipe
from ..words.figures import dollars, duration
from .plans import SCHEMA, Memory, Plan, Range
from .timing import evaluations
from .verdict import Verdict, judge


def document(recipe: Recipe, plans: Sequence[Plan]) -> dict[str, Any]:
    """The whole answer as plain JSON values."""
    made = {
        "schema": SCHEMA,
        "chipwise": __version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "recipe": {
            "name": recipe.name,
            "parameters": plans[0].parameters,
            "batch": recipe.batch,
            "replicas": recipe.replicas,
            "precision": recipe.precision,
            "steps": recipe.clock.total,
            "examples": recipe.clock.examples,
            "evaluations": evaluations(recipe),
            "rows": [[name, str(value)] for name, value in recipe.rows()],
        },
        "plans": [p.to_json() for p in plans],
        "verdict": judge(plans).to_json(),
    }
    return json.loads(json.dumps(made))  # tuples as lists


def table(plans: Sequence[Plan]) -> Table:
    """One row a target: memory needed and available on a device, a step with its interval, examples/s of the
    whole target, the share of its peak, wall time and dollars of the run. Some 85 columns wide."""
    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    for name in ("target", "GB", "ms a step", "examples/s", "peak", "bound by", "wall", "$", "$ spot"):
        made.add_column(name, justify="left" if name in ("target", "bound by") else "right", no_wrap=True)
    for p in plans:
        memory = _memory(p.memory)
        if not p.runs:
            made.add_row(p.target, memory, "[red]-[/red]", "-", "-", "-", "-", "-", "-")
            continue
        assert p.step_seconds is not None and p.examples_per_second is not None and p.wall_seconds is not None
        made.add_row(
            p.target + ("" if p.method == "compiled" else " *"),
            memory,
            _range(p.step_seconds.times(1e3)),
            f"{p.examples_per_second.value:,.0f}",
            "-" if p.share_of_peak is None else f"{p.share_of_peak:.0%}",
            (p.bound or "").replace("interconnect", "links"),
            duration(p.wall_seconds.value),
            _price(p, False),
            _price(p, True),
        )
    return made


def sentences(verdict: Verdict, plans: Sequence[Plan]) -> list[str]:
    """What cannot run, the verdict, the break-even ratios and the advice, a line each."""
    lines = [f"{p.target}: {p.problem}" for p in plans if not p.runs]
    lines += verdict.sentences
    if len(verdict.pareto) > 1:
        lines.append(f"Nothing else is both faster and cheaper than any of {', '.join(verdict.pareto)}.")
    lines += [b.sentence for b in verdict.break_even]
    told: dict[str, list[str]] = {}
    for p in plans:
        for text in p.advice:
            told.setdefault(text, []).append(p.target)
    lines += [f"{', '.join(targets)}: {text}" for text, targets in told.items()]
    if any(p.runs and p.method == "modelled" for p in plans):
        lines.append("* modelled operation by operation; the others were compiled by the chip's own compiler")
    return lines


def _memory(memory: Memory | None) -> str:
    if memory is None:
        return "-"
    text = f"{memory.needed / 1e9:.1f} of {memory.available / 1e9:.0f}"
    return text if memory.fits else f"[red]{text}[/red]"


def _range(r: Range) -> str:
    """`76.7 (67-106)`."""
    form = "{:.2g}" if r.high < 10 else "{:.0f}"
    return f"{r.value:.3g} ({form.format(r.low)}-{form.format(r.high)})"


def _price(plan: Plan, spot: bool) -> str:
    cost = plan.cheapest(spot)
    return "-" if cost is None else dollars(cost.usd.value)
