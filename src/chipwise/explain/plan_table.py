"""Output of `chipwise plan`: a table with its verdict, or a JSON document.

The document's schema is `plans.SCHEMA`; docs/plan.md describes every field. Fields may be added under the
same number; it is raised when a field changes its meaning or is removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..engine.blueprint import Memory
from ..planner.plans import SCHEMA, Plan
from ..planner.ranking import judge
from ..recipe.recipe import Recipe
from ..words.facts import Fact, fact, plain
from ..words.figures import byte_size, digits, dollars, duration, share, spread
from . import terminal


def document(recipe: Recipe, plans: Sequence[Plan]) -> dict[str, Any]:
    """The whole document as plain JSON values."""
    answer = {
        **terminal.heading(SCHEMA),
        "recipe": {
            "name": recipe.name,
            "parameters": plans[0].parameters,
            "batch": recipe.batch,
            "replicas": recipe.replicas,
            "precision": recipe.precision,
            "steps": recipe.clock.total,
            "examples": recipe.clock.examples,
            "evaluations": plans[0].evaluations,
            "rows": [[name, str(value)] for name, value in recipe.rows()],
        },
        "plans": [p.to_json() for p in plans],
        "verdict": plain(judge(plans)),
    }
    return json.loads(json.dumps(answer))  # tuples as lists


# ---- in the terminal


def parts(plans: Sequence[Plan]) -> Iterator[RenderableType]:
    """The parts to print, in order: verdict and deciding facts, table, other facts, sources."""
    for statement in first(plans):
        yield Text(str(statement))
    yield ""
    yield table(plans)
    rest, notes = statements(plans), list(_shared((p.target, p.notes) for p in plans))
    for some, style in ((rest, ""), (notes, "dim")):
        if some:
            yield ""
        for statement in some:
            yield Text(str(statement), style=style)


def first(plans: Sequence[Plan]) -> list[Fact]:
    """The facts above the table: which target to take, and what decides it."""
    verdict = judge(plans)
    cannot = [fact("plan-cannot", target=p.target, problem=p.problem) for p in plans if not p.runs]
    decisive = _shared((p.target, p.decisive) for p in plans)
    return [*verdict.fastest, *verdict.cheapest, *decisive, *cannot]


def statements(plans: Sequence[Plan]) -> list[Fact]:
    """The facts below the table, except notes."""
    return [*judge(plans).more, *_shared((p.target, p.advice) for p in plans)]


def _shared(texts: Iterable[tuple[str, Iterable[Fact]]]) -> Iterator[Fact]:
    """Notes on targets, each once with all its targets."""
    of: dict[str, list[str]] = {}
    for target, own in texts:
        for text in own:
            of.setdefault(str(text), []).append(target)
    return (fact("plan-says", targets=targets, words=text) for text, targets in of.items())


def table(plans: Sequence[Plan]) -> Table:
    """A row for each target, about 100 columns wide.

    Memory needed and available on a device, step time with its interval, examples/s of the whole target,
    share of peak, wall time, and dollars of the run with the cloud.
    """
    rows: list[list[Any]] = []
    for p in plans:
        row: list[Any] = [p.target, _memory(p.memory)]
        if not p.runs or p.examples_per_second is None or p.wall_seconds is None:
            rows.append([*row, Text("-", style="red"), *"------"])
            continue
        one = p.step_seconds
        row += ["-" if one is None else spread(vars(one.times(1e3))), digits(p.examples_per_second.value)]
        row += ["-" if p.share_of_peak is None else share(p.share_of_peak)]
        row += [(p.bound or "").replace("interconnect", "links"), duration(p.wall_seconds.value)]
        for cost in (p.cheapest(), p.cheapest(spot=True)):
            # With its cloud: one cloud's spot price may be above another's on-demand price
            row.append("-" if cost is None else f"{dollars(cost.usd.value)} {cost.cloud}")
        rows.append(row)
    columns = ("target", "memory", "ms a step", "examples/s", "peak", "bound by", "wall", "$", "$ spot")
    return terminal.table(columns, rows, left=("target", "bound by"), fold=columns[-2:], padding=(0, 1))


def _memory(memory: Memory | None) -> Text:
    if memory is None:
        return Text("-")
    held = f"{byte_size(memory.needed)} of {byte_size(memory.available)}"
    return Text(held, style="" if memory.fits else "red")
