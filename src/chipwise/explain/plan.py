"""The plans of a recipe as `chipwise plan` prints them: a table and what it says, or one JSON document.

The document's schema is `plans.SCHEMA`; docs/plan.md describes every field. A field may be added under
the same number; one that changes its meaning or goes raises it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..planner.plans import SCHEMA, Memory, Plan, Range
from ..planner.timing import evaluations
from ..planner.verdict import judge
from ..recipe.recipe import Recipe
from ..words.facts import Fact, fact
from ..words.figures import dollars, duration
from . import terminal


def document(recipe: Recipe, plans: Sequence[Plan]) -> dict[str, Any]:
    """The whole answer as plain JSON values."""
    answer = {
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
    return json.loads(json.dumps(answer))  # tuples as lists


# ---- in the terminal


def parts(plans: Sequence[Plan]) -> Iterator[RenderableType]:
    """What to print, in order: the table, what cannot run, the verdict, advice, and where the figures come
    from."""
    yield table(plans)
    yield ""
    for statement in statements(plans):
        yield Text(str(statement))
    notes = list(_shared((p.target, p.notes) for p in plans))
    if notes:
        yield ""
    for note in notes:
        yield Text(str(note), style="dim")


def statements(plans: Sequence[Plan]) -> list[Fact]:
    """Everything that stands below the table, but for the notes."""
    facts = [fact("plan-cannot", target=p.target, problem=str(p.problem)) for p in plans if not p.runs]
    facts += judge(plans).facts
    facts += _shared((p.target, p.advice) for p in plans)
    methods = {p.method for p in plans if p.runs}
    if "modelled" in methods:
        facts.append(fact("plan-some-modelled") if "compiled" in methods else fact("plan-all-modelled"))
    return facts


def _shared(texts: Iterable[tuple[str, Iterable[Fact]]]) -> Iterator[Fact]:
    """What is said of targets, once for all of whom it is said."""
    of: dict[str, list[str]] = {}
    for target, own in texts:
        for text in own:
            of.setdefault(str(text), []).append(target)
    return (fact("plan-says", targets=targets, words=text) for text, targets in of.items())


def table(plans: Sequence[Plan]) -> Table:
    """One row a target: memory needed and available on a device, a step with its interval, examples/s of the
    whole target, the share of its peak, wall time, and dollars of the run with whose price it is. Some 100
    columns wide."""
    rows: list[list[Any]] = []
    for p in plans:
        memory = _memory(p.memory)
        if not p.runs:
            rows.append([p.target, memory, Text("-", style="red"), *"------"])
            continue
        assert p.step_seconds is not None and p.examples_per_second is not None and p.wall_seconds is not None
        rows.append(
            [
                p.target + ("" if p.method == "compiled" else " *"),
                memory,
                _range(p.step_seconds.times(1e3)),
                f"{p.examples_per_second.value:,.0f}",
                "-" if p.share_of_peak is None else f"{p.share_of_peak:.0%}",
                (p.bound or "").replace("interconnect", "links"),
                duration(p.wall_seconds.value),
                _price(p, False),
                _price(p, True),
            ]
        )
    columns = ("target", "GB", "ms a step", "examples/s", "peak", "bound by", "wall", "$", "$ spot")
    return terminal.table(columns, rows, left=("target", "bound by"), fold=("$", "$ spot"), padding=(0, 1))


def _memory(memory: Memory | None) -> Text:
    if memory is None:
        return Text("-")
    held = f"{memory.needed / 1e9:.1f} of {memory.available / 1e9:.0f}"
    return Text(held, style="" if memory.fits else "red")


def _range(r: Range) -> str:
    """`76.7 (67-106)`."""
    form = "{:.2g}" if r.high < 10 else "{:.0f}"
    return f"{r.value:.3g} ({form.format(r.low)}-{form.format(r.high)})"


def _price(plan: Plan, spot: bool) -> str:
    """`$12.30 gcp`: spot prices of one cloud may be above another's on demand."""
    cost = plan.cheapest(spot)
    return "-" if cost is None else f"{dollars(cost.usd.value)} {cost.cloud}"
