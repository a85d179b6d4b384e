"""Predicts how many steps another batch takes to the same result, from the noise scale of one run.

    S(B) = S_min (1 + B_noise / B)

The number of examples is E = B S (McCandlish et al. 2018, arXiv:1812.06162, section 2.3). The noise
scale grows while a net learns. So the law is applied to the steps between two rows of the run with
that row's scale, and the results are summed. The law supposes that each batch is trained with its
best rate, which `transfer` approximates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base import Fact, RecipeError, invalid
from ..recipe.recipe import Recipe
from ..run.folder.run_reader import disagreement, number, read_run
from ..run.noise import SCALE
from .goal import Goal

FACTOR = 2.0
"""The noise scale is assumed to be right within this factor. benchmarks/noise.md has the
measurements."""

SEEDS = 1.15
"""Runs of other seeds take at most this factor more or fewer steps (benchmarks/noise.md)."""

REACH = 8
"""A batch may be at most this many times as large or as small as the run's. Beyond, the law was off
by half and more."""


@dataclass(frozen=True)
class Steps:
    """Steps to a goal at a global batch, and their interval."""

    batch: int
    steps: int
    low: int
    high: int

    @property
    def examples(self) -> int:
        return self.steps * self.batch


@dataclass(frozen=True)
class CriticalBatch:
    """The prediction of a run for other batches."""

    run: str
    """The run's folder."""
    goal: Goal
    batch: int
    """The global batch of the run."""
    step: int
    """The step of the first evaluation that reached the goal."""
    before: int
    """The step of the last evaluation before it, or 0."""
    scales: tuple[tuple[int, float], ...]
    """Pairs of a number of steps and their noise scale in examples, up to `step`."""

    def _sum(self, batch: float, factor: float) -> float:
        """The steps of a batch, if the scales are `factor` times as large."""
        return sum(
            n * (1 + factor * noise / batch) / (1 + factor * noise / self.batch)
            for n, noise in self.scales
        )

    @property
    def examples(self) -> float:
        """The critical batch, E_min / S_min, in examples. At this batch a run takes twice the
        fewest steps and twice the fewest examples."""
        return self.critical(1.0)

    def critical(self, factor: float) -> float:
        least = self._sum(math.inf, factor)
        return (
            sum(n * f / (1 + f / self.batch) for n, f in ((n, factor * s) for n, s in self.scales))
            / least
        )

    def steps(self, batch: int) -> Steps:
        """The predicted steps of a batch. Raises `RecipeError` for a batch more than `REACH` times
        as large or as small as the run's."""
        if not self.batch <= batch * REACH <= self.batch * REACH**2:
            raise RecipeError(
                "like-too-far",
                batch=batch,
                own=self.batch,
                run=self.run,
                least=-(-self.batch // REACH),
                most=self.batch * REACH,
            )
        value, *ends = (self._sum(batch, factor) for factor in (1.0, 1 / FACTOR, FACTOR))
        low = min(ends) * self.before / self.step / SEEDS
        high = max(ends) * SEEDS
        return Steps(batch, math.ceil(value), max(math.floor(low), 1), math.ceil(high))

    def told(self, steps: Steps) -> Fact:
        """A sentence with `steps`, and with the batch above which more examples a step save few
        steps."""
        sentence = (
            "{steps:count step} of {batch} ({low} to {high}) to {goal}, by the noise scale "
            "of {run}; "
        )
        sentence += (
            "above {critical:whole} a batch twice as large saves less than a quarter of the steps"
        )
        facts = {"run": self.run, "goal": str(self.goal), "critical": self.examples}
        return Fact("plan-like", {**facts, **vars(steps)}, sentence)


def critical_batch(
    recipe: Recipe, run: str | Path, goal: str, better: Mapping[str, str] = {}
) -> CriticalBatch:
    """The prediction of the run in a folder for `recipe` at other batches.

    *Arguments:* `goal`: such as `"eval/accuracy=0.99"`. `better`: which way metrics are better,
    before what the run says.

    Raises `RecipeError` if the run is of another task or data set, has no noise scale (`--noise`),
    or did not reach the goal. Also raises what `read_run` and `Goal.parse` raise.
    """
    stored = read_run(run)
    tasks = ({"task": one.get("task")} for one in (stored.recipe, recipe.describe()))
    if disagreement(*tasks):
        text = "{run} is not a run of {recipe}: its task or data set is another one."
        raise RecipeError("like-other-task", text, run=str(run), recipe=recipe.name)
    if (clock := stored.clock) is None:
        raise invalid(
            "like-batch", f"the batch of {stored.path}", stored.recipe.get("batch"), "a number"
        )
    wanted = Goal.parse(goal, better, stored.better)
    return of_rows(str(run), stored.rows, clock.batch, wanted)


def of_rows(run: str, rows: Sequence[Mapping[str, Any]], batch: int, goal: Goal) -> CriticalBatch:
    """`critical_batch` of the rows of a run."""
    seen = [(row["step"], v) for row in rows if (v := number(row.get(goal.metric))) is not None]
    reached = next((step for step, value in seen if goal.reached(value)), None)
    if reached is None:
        text = "{run} did not reach {goal}: {found}. Name a --target that it reached."
        best = (min if goal.downwards else max)((v for _, v in seen), default=None)
        found = "it has no such metric" if best is None else f"its best is {best:g}"
        raise RecipeError("like-not-reached", text, run=run, goal=str(goal), best=best, found=found)
    known = [
        (row["step"], v) for row in rows if (v := number(row.get(SCALE))) is not None and v > 0
    ]
    if not known:
        text = "{run} has no noise scale: train it with --noise."
        raise RecipeError("like-without-noise", text, run=run)
    ends = [0, *(step for step, _ in known[:-1] if step < reached), reached]
    scales = [
        (b - a, scale) for (a, b), (_, scale) in zip(itertools.pairwise(ends), known, strict=False)
    ]
    before = max((step for step, _ in seen if step < reached), default=0)
    return CriticalBatch(run, goal, batch, reached, before, tuple(scales))
