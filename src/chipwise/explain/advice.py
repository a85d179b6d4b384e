"""The answers of `find_lr`, `transfer` and `check` as the terminal and notebooks show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import RenderableType

from ..base import fact
from ..base.figures import sparkline
from ..recipe.check import Finding
from ..study.find_lr import MARKS, LrSearch
from ..study.transfer import UNAFFECTED, Transfer
from .charts import Panel, Trace, panel, style_of
from .terminal import table


def rates(search: LrSearch) -> Iterator[RenderableType]:
    """The loss curve in one line, the marks, and the notes and doubts about them."""
    recipe = search.old
    each = search.curve.rates
    curve = search.curve.smoothed
    yield str(
        fact(
            "lr-sweep",
            recipe=recipe.name,
            batch=recipe.batch,
            steps=len(each),
            low=each[0],
            high=each[-1],
        )
    )
    # One line, cut off at its first value
    shown = curve[:: max(1, -(-len(curve) // 80))].clip(max=curve[0])
    bars = sparkline(shown.tolist(), float(curve.min()), float(curve[0]))
    yield f"{bars}  {fact('lr-losses', first=curve[0], lowest=curve.min())}\n"
    marks = (search.suggestion, search.last_stable, curve.min())
    columns = ("suggestion", "last stable", "lowest loss")
    yield table(columns, [[f"{mark:.3g}" for mark in marks]])
    suggested = ", ".join(f"{name}={value:g}" for name, value in search.settings.items())
    yield f"\n{fact('lr-suggested', settings=suggested)}"
    yield str(fact("lr-own-peak", peak=search.own_peak))
    yield from (str(text) for text in (*search.notes, search.stopped, *search.curve.doubts) if text)


def curves(search: LrSearch) -> Panel:
    """The losses over the rates. Raw losses are faint, smoothed ones strong, the marks are dots. A
    dashed line is at the recipe's own peak."""
    curve = search.curve
    start = float(curve.smoothed[0])
    fall = max(start - float(curve.smoothed.min()), 1e-9 * abs(start))
    smoothed = curve.smoothed.clip(max=start + 0.6 * fall)  # a divergence is clipped
    raw, smooth = (
        list(zip(curve.rates.tolist(), y.tolist(), strict=True)) for y in (curve.losses, smoothed)
    )
    style = style_of(0)
    traces = [Trace("", f"{style} faint", raw, aside=True), Trace("smoothed loss", style, smooth)]
    for k, mark in enumerate(MARKS, 1):
        rate = getattr(curve, mark)
        height = float(np.interp(np.log(rate), np.log(curve.rates), curve.smoothed))
        name = f"{mark.replace('_', ' ')} {rate:.3g}"
        traces.append(Trace(name, style_of(k), [(rate, height)]))
    drawn = panel(
        f"{search.old.name}: one step a rate, batch {search.old.batch}",
        traces,
        x="learning rate",
        y="training loss",
        x_log=True,
        marks=[search.own_peak],
        mark_words=f"recipe's own peak {search.own_peak:.3g}",
    )
    assert drawn is not None  # a search whose losses are not finite has raised
    return drawn


def moved(move: Transfer) -> Iterator[RenderableType]:
    """The changed settings with reasons, and the cases where the rules are known to fail."""
    columns = ("setting", "old", "new", "why", "source")
    changes = table(columns, left=columns, fold=("why", "source"))
    for change in move.changes:
        cells = [change.setting, *change.shown, change.why, change.source]
        changes.add_row(*map(str, cells), style="bold" if change.changed else "dim")
    yield changes
    yield f"\n{UNAFFECTED}"
    if move.limits:
        yield f"\n{fact('may-fail')}"
        yield from (f"- {limit}" for limit in move.limits)


def doubts(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    """A table with a row for each doubt."""
    columns = ("given", "usual", "why", "type")
    if not findings:
        yield "No doubts."
        return
    cells = [[getattr(one, part) for part in columns] for one in findings]
    yield table(columns, cells, left=columns, fold=columns)
