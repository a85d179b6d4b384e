"""A recipe's schedules, rebuilt from what a run stores, and its arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import ChipwiseError
from ...recipe.duration import Clock
from ...recipe.recipe import Recipe
from ...recipe.schedule import Schedule
from ...recipe.schedules import as_typed, from_json
from ...study.move.values import peak
from .words import figure, plain

_RATES = ("lr", "learning_rate")
_POINTS = 240  # of a curve: enough for any screen


def rebuilt(value: Any) -> Schedule | None:
    """The schedule that `value`, a number or what `Schedule.json` gave, describes; `None` for anything else,
    such as a function of the step, of which a run stores the name alone."""
    try:
        return from_json(value)
    except (ChipwiseError, ValueError, TypeError):
        return None


def curve(stored: Mapping[str, Any], clock: Clock | None, loaded: Recipe | None) -> dict[str, Any]:
    """The learning rate over the steps: `name`, `steps`, `values`, `peak`; `note` where it cannot be drawn.

    *Arguments:* `stored`, the recipe as the run describes it; `loaded`, the recipe itself, if at hand.
    """
    optimizer = stored.get("optimizer")
    if not isinstance(optimizer, dict):
        return {"name": None, "note": "The run says nothing of an optimizer."}
    name = next((n for n in _RATES if n in optimizer), None)
    if name is None:
        return {"name": None, "note": "The optimizer has no setting that is called a learning rate."}
    text = plain(as_typed(optimizer[name]))
    schedule = loaded.optimizer.hyper.get(name) if loaded is not None else rebuilt(optimizer[name])
    made: dict[str, Any] = {"name": name, "text": text}
    if schedule is None:
        note = (
            f"{name}={text} is code, of which a run stores the name alone: to draw it, name its recipe "
            f"with --recipe path.py:name, which runs that file."
        )
        return made | {"note": note}
    if clock is None or not clock.total:
        return made | {"note": "The run's length is not known."}
    try:
        steps = np.unique(np.linspace(0, clock.total - 1, _POINTS).round().astype(np.int64))
        values = [float(schedule.table(clock, int(step), int(step) + 1)[0]) for step in steps]
        return made | {"steps": steps.tolist(), "values": values, "peak": peak(schedule, clock)}
    except (ChipwiseError, ArithmeticError, ValueError) as error:
        return made | {"note": plain(f"{name}={text} cannot be drawn: {error}")}


def settings(stored: Mapping[str, Any], clock: Clock | None) -> list[list[str]]:
    """The recipe as run, with the arithmetic done: (setting, value)."""
    task = stored.get("task") if isinstance(stored.get("task"), dict) else {}
    rows = [["recipe", plain(stored.get("name"))]]
    for part, words in (("train", "training examples"), ("eval", "evaluation examples")):
        data = task.get(part)  # type: ignore[union-attr]
        if isinstance(data, dict):
            columns = ", ".join(f"{k} {v}" for k, v in data.items() if k != "examples")
            many = data.get("examples")
            shown = f"{many:,}" if isinstance(many, int) else plain(many)
            rows.append([words, plain(f"{shown} ({columns})")])
        else:
            rows.append([words, "none"])
    for part in ("augment", "mix"):
        if task.get(part):  # type: ignore[union-attr]
            rows.append([part, plain(task[part])])  # type: ignore[index]
    batch, replicas = stored.get("batch"), stored.get("replicas")
    if isinstance(batch, int) and isinstance(replicas, int) and replicas > 0:
        rows.append(
            ["batch", f"{batch:,} = {replicas} replica{'s' * (replicas != 1)} × {batch / replicas:g}"]
        )
    duration = plain(stored.get("duration"))
    if clock is not None:
        duration += f" = {clock.total:,} steps ({clock.examples / clock.batch:.4g} an epoch)"
    rows.append(["duration", duration])
    optimizer = stored.get("optimizer") if isinstance(stored.get("optimizer"), dict) else {}
    described = dict(optimizer)  # type: ignore[arg-type]
    rows.append(["optimizer", plain(described.pop("optimizer", "unknown"))])
    rows += [
        [f"  {plain(key)}", plain(as_typed(value))] for key, value in described.items() if value is not None
    ]
    forgets = _forgetting(described, clock)
    if forgets is not None:
        rows.append(["  peak rate × decay × steps an epoch", forgets])
    rows += [
        [name, plain(stored[name])] for name in ("precision", "seed", "ema") if stored.get(name) is not None
    ]
    return rows


def _forgetting(optimizer: Mapping[str, Any], clock: Clock | None) -> str | None:
    """The product that sets how fast weights forget (see docs/transfer.md)."""
    rate = rebuilt(next((optimizer[n] for n in _RATES if n in optimizer), None))
    decay = rebuilt(optimizer.get("weight_decay"))
    if clock is None or not clock.total or rate is None or decay is None:
        return None
    try:
        a, b, c = peak(rate, clock), peak(decay, clock), clock.examples / clock.batch
    except (ChipwiseError, ArithmeticError, ValueError):
        return None
    return f"{figure(a)} × {figure(b)} × {figure(c)} = {a * b * c:.3g}" if b else None
