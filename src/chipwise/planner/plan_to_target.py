"""`plan_like` predicts time and dollars to an accuracy at several batches, from one run with a
noise scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.annotations import as_annotated
from ..base.prediction import Range
from ..recipe.recipe import Recipe
from ..study.critical_batch import Steps, critical_batch
from ..study.transfer import transfer
from .ask import plan
from .plans import Plans


@as_annotated
def plan_like(
    recipe: Recipe,
    on: str | Sequence[str],
    *,
    run: str | Path,
    goal: str,
    batches: Sequence[int],
    better: Mapping[str, str] = {},
    **options: Any,
) -> Plans:
    """Plans a recipe to a goal at each batch, with the settings of `transfer`. The number of steps
    is the prediction of `critical_batch` from a run with a noise scale.

    *Arguments:*

    - `run`: the folder of a run with `--noise` that reached the goal.
    - `goal`: such as `"eval/accuracy=0.99"`.
    - `batches`: global batches.
    - `better`: which way metrics are better, before what the run says: `{"bpb": "lower"}`.
    - `on`, `options`: as in `plan`.

    *Returns* a plan for each batch and target. Its `target` names both. Intervals of time and
    dollars include that of the steps. Raises as `plan`, `critical_batch`, `CriticalBatch.steps` and
    `transfer` do.
    """
    law = critical_batch(recipe, run, goal, better)
    asked = [law.steps(batch) for batch in batches]
    made = Plans()
    for steps in asked:
        moved = transfer(recipe, batch=steps.batch, duration=f"{steps.steps}st")
        for one in plan(moved.recipe, on, **options):
            wall = one.wall_seconds and _to_goal(one.wall_seconds, steps)
            costs = tuple(replace(c, usd=_to_goal(c.usd, steps)) for c in one.costs)
            named = f"{one.target} at {steps.batch}"
            made.append(
                replace(
                    one,
                    target=named,
                    wall_seconds=wall,
                    costs=costs,
                    notes=(*one.notes, law.told(steps), *moved.limits),
                )
            )
    return made


def _to_goal(total: Range, steps: Steps) -> Range:
    """Seconds or dollars of a run of `steps.steps`. Its interval includes that of the steps."""
    return Range(
        total.value, total.low * steps.low / steps.steps, total.high * steps.high / steps.steps
    )
