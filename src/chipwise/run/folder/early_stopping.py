"""The best evaluation of a run by one metric: when to keep the state, and when to stop early.

Decisions depend only on the run's rows, which are the same on any number of devices (`evaluate`),
so every machine decides alike, and a resumed run as if it had not been interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...base import Fact, RecipeError, fact, near
from ...base.figures import one_line
from ...recipe.direction import LOWER, Directions, declared, direction, directions, judged
from ...recipe.recipe import Recipe

FOLDER = "best"  # in the run folder: the checkpoint of its best evaluation


@dataclass(frozen=True)
class Kept:
    """What `keep_best` kept of a run."""

    metric: str
    """The metric, such as `"eval/accuracy"`."""
    value: float | None
    """Its best value, `None` if it was never a number."""
    step: int
    """The step of the best value."""
    ended_early: bool = False
    """Whether the run ended because no value was better for the duration `patience`."""
    patience: str | None = None
    """A duration, or `None`."""
    better: str | None = None
    """The better values, "lower" or "higher". `None` in runs that did not store it."""

    def story(self, step: int, total: int | None) -> Fact:
        """Says which value is the best, and why a run of `total` steps that waited long enough
        ended at `step`."""
        code = "ended-early-never-a-number" if self.value is None else "ended-early"
        texts = {"metric": one_line(self.metric), "patience": one_line(self.patience)}
        about = {"value": self.value, "best": self.step, "better": self.better}
        return fact(code, **texts, **about, step=step, total=total)


class EarlyStopping:
    """The best value of a metric so far.

    *Arguments:* `metric`: such as `"eval/accuracy"`, or `""` for none. `patience`: the duration
    without a better value after which the run ends, or `None` if it never ends early.

    *Fields:* `value`, NaN without any, and its `step`. `since`: the step since which no value was
    better, `None` before the first evaluation. `over`: whether the run ends early. `better`: which
    way the metric is better. `known`: the directions of all metrics, as far as they are known.
    """

    def __init__(self, recipe: Recipe, metric: str, patience: str | None):
        self.metric, self.patience = metric, patience
        self.better, self.known = direction(metric, {}), dict[str, str]()
        self.value, self.step, self.over = math.nan, 0, False
        self.since: int | None = None
        self._patience = None if patience is None else recipe.clock.steps(patience)

    @classmethod
    def of(
        cls, recipe: Recipe, metric: str | None, patience: str | None, run: Any
    ) -> EarlyStopping:
        """Returns the state for the arguments of `fit`. Raises `RecipeError` for a metric that is
        not an evaluation's, for one without evaluation data or a run folder, and for `patience`
        without a metric."""
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

    def check(self, session: Any, typed: Directions) -> Fact | None:
        """Says which way the metric is better: as `typed`, else as the session's recipe says.
        Raises `RecipeError` if that is unknown, or the recipe's evaluation lacks the metric, before
        anything is computed."""
        evaluated = session.read(evaluation=True)
        sums, typed = {**session.abstract.sums, **evaluated}, declared(typed)
        stated = session.recipe.task.directions_of(sums)
        self.known = directions(sums, {**stated, **typed})
        if not self.metric:
            return None
        names = [f"eval/{name}" for name in evaluated]
        if self.metric not in names:
            hint = near(self.metric, names)
            raise RecipeError(
                "best-metric-unknown", metric=self.metric, known=sorted(names), hint=hint
            )
        said = judged(self.metric, typed, directions(sums, stated))
        self.better = said["better"]
        return said

    def go_on(
        self,
        rows: Iterable[Mapping[str, Any]],
        kept: Collection[int],
        step: int,
        agree: Callable[[str, Any], Any],
    ) -> None:
        """Continues a run after `step` steps. Only the first host has its `rows`, and it decides
        for all hosts. Forgets the best value if its step is none of the `kept` steps, which have a
        checkpoint."""
        self.value, self.step, self.since = math.nan, 0, None
        for row in rows:
            if self.metric in row:
                self.improved(row["step"], row)
        if self.step not in kept and not math.isnan(self.value):
            self.value, self.step, self.since = math.nan, 0, None
        known = self.value, self.step, self.since
        self.value, self.step, self.since = agree("best so far", known)
        self.over = self.waited_enough(step)

    def improved(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Whether the evaluation after `step` is the best so far. The first is, if finite."""
        value = metrics[self.metric]
        if np.ndim(value):
            raise RecipeError("best-metric-array", metric=self.metric, shape=list(np.shape(value)))
        self.since = step if self.since is None else self.since
        if not isinstance(value, float) or not math.isfinite(value):
            return False
        better = value < self.value if self.better == LOWER else value > self.value
        if not (better or math.isnan(self.value)):
            return False
        self.value, self.step, self.since = value, step, step
        return True

    def waited_enough(self, step: int) -> bool:
        """Whether no value was better for `patience`, at `step`."""
        if self._patience is None or self.since is None:
            return False
        return step - self.since >= self._patience

    @property
    def rule(self) -> dict[str, Any] | None:
        """What to keep and when to end, as a run records it when it starts, or `None` without a
        metric."""
        return {"metric": self.metric, "patience": self.patience} if self.metric else None

    def kept(self, ended_early: bool) -> Kept | None:
        """Returns the entry for the run's result, or `None` without a metric."""
        value = None if math.isnan(self.value) else self.value
        return (
            Kept(self.metric, value, self.step, ended_early, self.patience, self.better)
            if self.metric
            else None
        )
