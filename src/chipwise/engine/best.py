"""The best evaluation of a run by one metric: when to keep the state, and when to stop early.

Decisions depend only on the run's rows, which are the same on any number of devices (`evaluate`), so every
machine decides alike, and a resumed run as if it had not been interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import RecipeError, near
from ..recipe.metrics import lower_is_better
from ..recipe.recipe import Recipe
from ..words.facts import Fact, fact

FOLDER = "best"  # in the run folder: the checkpoint of its best evaluation


@dataclass(frozen=True)
class Kept:
    """What `keep_best` kept of a run.

    *Fields:* `metric`, its best `value` and the `step` of it; `patience`, a duration, or `None`;
    `ended_early`, whether the run ended because none was better for so long.
    """

    metric: str
    value: float
    step: int
    ended_early: bool = False
    patience: str | None = None


class Best:
    """The best value of a metric so far.

    *Arguments:* `metric`, such as `"eval/accuracy"`, or `""` for none; `patience`, the duration without a
    better value after which the run ends; never if `None`.

    *Fields:* `value` and its `step`; `over`, whether the run ends early.
    """

    def __init__(self, recipe: Recipe, metric: str, patience: str | None):
        self.metric, self.patience = metric, patience
        self.value, self.step, self.over = math.nan, 0, False
        self._patience = None if patience is None else recipe.clock.steps(patience)

    @classmethod
    def of(cls, recipe: Recipe, metric: str | None, patience: str | None, run: Any) -> Best:
        """From the arguments of `fit`. Raises `RecipeError` for a metric that is not an evaluation's, without
        evaluation data or a run folder, and for `patience` without a metric."""
        if metric is None:
            if patience is not None:
                raise RecipeError("patience-without-best", patience=patience)
            return cls(recipe, "", None)
        if run is None:
            raise RecipeError("best-without-run", metric=metric)
        if recipe.task.eval is None:
            raise RecipeError("best-without-evaluation", metric=metric)
        if not metric.startswith("eval/"):
            raise RecipeError("best-of-evaluation", metric=metric)
        return cls(recipe, metric, patience)

    def check(self, known: list[str]) -> None:
        """Raises `RecipeError` for a metric that is none of the evaluation's, before anything is computed."""
        if self.metric and self.metric not in known:
            hint = near(self.metric, known)
            raise RecipeError("best-metric-unknown", metric=self.metric, known=sorted(known), hint=hint)

    def go_on(
        self, rows: Iterable[Mapping[str, Any]], kept: Collection[int], step: int,
        agree: Callable[[str, bool], bool],
    ) -> None:  # fmt: skip
        """Continues a run after `step` steps. Only the first host has its `rows`; it decides for all hosts. A
        best value without a checkpoint, at one of the `kept` steps, is forgotten."""
        self.value, self.step = math.nan, 0
        for row in rows:
            if self.metric in row:
                self.improved(row["step"], row)
        if self.step not in kept:
            self.value, self.step = math.nan, 0
        self.over = agree("patience", self.waited_enough(step))

    def improved(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Whether the evaluation after `step` is the best so far. The first is, if finite."""
        value = metrics[self.metric]
        if np.ndim(value):
            raise RecipeError("best-metric-array", metric=self.metric, shape=list(np.shape(value)))
        if not isinstance(value, float) or not math.isfinite(value):
            return False
        better = value < self.value if lower_is_better(self.metric) else value > self.value
        if not (better or math.isnan(self.value)):
            return False
        self.value, self.step = value, step
        return True

    def waited_enough(self, step: int) -> bool:
        """Whether the best value at `step` is older than `patience`."""
        return (
            self._patience is not None and not math.isnan(self.value) and step - self.step >= self._patience
        )

    @property
    def rule(self) -> dict[str, Any] | None:
        """What to keep and when to end, as a run notes it when it starts; `None` without a metric."""
        return {"metric": self.metric, "patience": self.patience} if self.metric else None

    def kept(self, ended_early: bool) -> Kept | None:
        """For the run's result; `None` without a metric."""
        return Kept(self.metric, self.value, self.step, ended_early, self.patience) if self.metric else None

    def story(self, step: int, total: int) -> Fact:
        """Which value is the best, and why a run of `total` steps that waited long enough ended at `step`."""
        facts = {"metric": self.metric, "value": self.value, "best": self.step, "patience": self.patience}
        return fact("ended-early", step=step, total=total, **facts)
