"""The parts of `chipwise plan`, for the terminal, the page and notebooks, and its JSON document.

The document's schema is `plans.SCHEMA`. docs/plan.md describes every field. New fields keep the
schema's number. The number rises when a field changes its meaning or is removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ..base import fact, plain
from ..base.figures import byte_size, digits, dollars, duration, price, share, spread
from ..base.json_types import as_stored
from ..planner.plans import SCHEMA, Plan
from ..planner.ranking import judge
from ..recipe.described import title
from ..recipe.recipe import Recipe
from . import plan_kernels, terminal
from .charts import Panel, Trace
from .terminal import Document, Part, Title, grid, texts

CATEGORIES = {
    "parameters": "parameters",
    "optimizer": "optimizer",
    "state": "state",
    "replica_sums": "replicas' sums",
    "activations": "activations",
    "data": "data",
    "program": "program",
    "needed": "together",
    "available": "available",
}
"""The fields of a plan's memory, with their labels."""


def document(recipe: Recipe, plans: Sequence[Plan]) -> dict[str, Any]:
    """The whole document as plain JSON values."""
    answer = {
        **terminal.heading(SCHEMA),
        "recipe": {
            "name": title({"name": recipe.name, "source": recipe.source}),
            "parameters": plans[0].parameters,
            "batch": recipe.batch,
            "replicas": recipe.replicas,
            "precision": recipe.precision,
            "steps": recipe.clock.total,
            "examples": recipe.clock.examples,
            "evaluations": plans[0].evaluations,
            "rows": [[name, str(value)] for name, value in recipe.rows()],
        },
        **verdict(plans),
    }
    return as_stored(answer)


def verdict(plans: Sequence[Plan]) -> dict[str, Any]:
    """The fields of a document that need no recipe. `parts` reads these."""
    return {"plans": [p.to_json() for p in plans], "verdict": plain(judge(plans))}


def page(document: Document) -> Iterator[Part]:
    """The parts of a page."""
    recipe = document["recipe"]
    plans = document["plans"]
    yield Title(f"{recipe['name']}: where to train it", level=1)
    yield from parts(document)
    yield Title("Memory of one device")
    yield _memories([p for p in plans if p["memory"]])
    yield from plan_kernels.parts([p for p in plans if p["kernels"]])
    yield Title("Prices of the run")
    rows = [
        (p["target"], dollars(cost["usd"]["value"]), price(cost))
        for p in plans
        for cost in p["costs"]
    ]
    yield terminal.table(("target", "$", "at"), rows, left=("target", "at"))
    yield Title("The recipe")
    yield grid(recipe["rows"])


def parts(document: Document) -> Iterator[Part]:
    """The parts to show, in order: verdict and deciding facts, table, other facts, sources."""
    plans = document["plans"]
    verdict = document["verdict"]
    yield from first(document)
    yield ""
    yield table(plans)
    if drawn := scatter(plans, [] if verdict["ranked_by"] == "step" else verdict["pareto"]):
        yield drawn
    advice = [*_front(verdict["pareto"]), *_shared(plans, "advice")]
    for some, style in ((advice, ""), (_shared(plans, "notes"), "dim")):
        if some:
            yield ""
        for statement in some:
            yield Text(statement, style=style)


def first(document: Document) -> Iterator[Text]:
    """The lines above the table: which target to take, and what decides it."""
    plans = document["plans"]
    verdict = document["verdict"]
    cannot = [f"{p['target']}: {p['problem']['text']}" for p in plans if p["problem"]]
    for facts in (verdict["fastest"], verdict["cheapest"]):
        for k, text in enumerate(texts(facts)):
            yield Text(text, style="" if k else "bold")
    yield from map(Text, [*_shared(plans, "decisive"), *cannot])


def _front(pareto: Sequence[str]) -> list[str]:
    """Where a higher price saves time."""
    return [str(fact("plan-front", targets=pareto))] if len(pareto) > 1 else []


def _shared(plans: Iterable[Document], name: str) -> list[str]:
    """Facts about targets, each once with all its targets."""
    of: dict[str, list[str]] = {}
    for p in plans:
        for text in texts(p[name]):
            of.setdefault(text, []).append(p["target"])
    return [str(fact("plan-says", targets=targets, words=text)) for text, targets in of.items()]


# ---- tables


def table(plans: Sequence[Document]) -> Table:
    """A row for each target, about 100 columns wide.

    Memory needed and available on a device, step time with its interval, examples/s of the whole
    target, share of peak, wall time, and dollars of the run with the cloud.
    """
    rows: list[list[Any]] = []
    for p in plans:
        row = [p["target"], _memory(p["memory"])]
        if p["problem"]:
            rows.append([*row, Text("-", style="red"), *"------"])
            continue
        row += [
            spread(p["step_seconds"], lambda seconds: digits(1e3 * seconds)),
            digits(p["examples_per_second"]["value"]),
            "-" if p["share_of_peak"] is None else share(p["share_of_peak"]),
            (p["bound"] or "").replace("interconnect", "links"),
            duration(p["wall_seconds"]["value"]),
        ]
        for cost in (p["cheapest"], p["cheapest_spot"]):
            # With its cloud: one cloud's spot price may be above another's on-demand price
            row.append("-" if not cost else f"{dollars(cost['usd']['value'])} {cost['cloud']}")
        rows.append(row)
    columns = (
        "target",
        "memory",
        "ms a step",
        "examples/s",
        "peak",
        "bound by",
        "wall",
        "$",
        "$ spot",
    )
    return terminal.table(
        columns, rows, left=("target", "bound by"), fold=columns[-2:], padding=(0, 1)
    )


def _memory(memory: Document | None) -> Text:
    if memory is None:
        return Text("-")
    held = f"{byte_size(memory['needed'])} of {byte_size(memory['available'])}"
    return Text(held, style="" if memory["fits"] else "red")


def _memories(plans: Sequence[Document]) -> Table:
    """What takes the memory of a device of each target."""
    rows = [(p["target"], *(byte_size(p["memory"][name]) for name in CATEGORIES)) for p in plans]
    return terminal.table(("target", *CATEGORIES.values()), rows, left=("target",))


# ---- a picture


def scatter(plans: Sequence[Document], pareto: Sequence[str]) -> Panel | None:
    """Wall time against dollars, at the cheapest price of each target, on demand and on spot.

    At a fixed hourly price, time and dollars are proportional, so an interval is a line.
    """
    traces: list[Trace] = []
    for name, words, style in (("cheapest", "on demand", "s0"), ("cheapest_spot", "spot", "s1")):
        priced = [(p["target"], p["wall_seconds"], p[name]["usd"]) for p in plans if p[name]]
        for _, wall, usd in priced:
            ends = [(wall[end], usd[end]) for end in ("low", "high")]
            traces.append(Trace("", f"{style} faint", ends))
        points = [(wall["value"], usd["value"]) for _, wall, usd in priced]
        labels = [target for target, *_ in priced] if name == "cheapest" else []
        if points:
            traces.append(Trace(words, f"{style} dots", points, labels=labels))
        best = sorted(p for p, label in zip(points, labels, strict=False) if label in pareto)
        if len(best) > 1:
            traces.append(Trace("best of both", "rate dash1", best))
    return (
        Panel(
            "Time against dollars",
            traces,
            x="wall time",
            x_unit="s",
            y="dollars",
            y_unit="$",
            x_log=True,
            y_log=True,
            caption="of the whole run; time and dollars of an interval rise together",
        )
        if traces
        else None
    )
