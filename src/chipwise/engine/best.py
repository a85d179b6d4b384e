"""The best evaluation of a run by one metric: when to keep the state, and when to wait no longer.

Everything follows from the run's rows, so a resumed run decides as one that never stopped. An evaluation's
last digits depend on the number of devices, so two values that agree to six digits count as equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import RecipeError, near
from ..recipe.recipe import Recipe

FOLDER = "best"  # of the run's: the checkpoint of its best evaluation
_EQUAL = 1e-6  # relative
_LOWER = (
    "loss",
    "error",
    "perplexity",
    "rmse",
    "mse",
    "mae",
)  # better when they are smaller, as in their names


class Best:
    """The best value of `metric` so far, and its `step`; `over`: the run ends because no better one came.

    *Arguments:* `metric`, such as `"eval/accuracy"`; `patience`, a duration: after that many steps without a
    better value the run ends, `None` never.

    Raises `RecipeError` for a metric that no evaluation has, and for a recipe without evaluation data.
    """

    def __init__(self, recipe: Recipe, metric: str, patience: str | None):
        if recipe.task.eval is None:
            raise RecipeError("best-without-evaluation", metric=metric)
        if not metric.startswith("eval/"):
            raise RecipeError("best-of-evaluation", metric=metric)
        self.metric = metric
        self.value, self.step, self.over = math.nan, 0, False
        self._patience = None if patience is None else recipe.clock.steps(patience)

    @classmethod
    def of(cls, recipe: Recipe, metric: str | None, patience: str | None, run: Any) -> Best | None:
        """From the arguments of `fit`; `None` where no best is asked for. Raises `RecipeError` also for
        `patience` alone, and where there is no run folder to keep it in."""
        if metric is None:
            if patience is not None:
                raise RecipeError("patience-without-best", patience=patience)
            return None
        if run is None:
            raise RecipeError("best-without-run", metric=metric)
        return cls(recipe, metric, patience)

    def go_on(self, rows: Iterable[Mapping[str, Any]], step: int, agree: Callable[[str, bool], bool]) -> None:
        """After `step` steps with these `rows`, which the first host alone has: it decides for all."""
        for row in rows:
            if self.metric in row:
                self.improved(row["step"], row)
        self.over = agree("patience", self.waited_enough(step))

    def improved(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Whether the evaluation after `step` is better than all before; the first always is."""
        if self.metric not in metrics:
            known = sorted(name for name in metrics if name.startswith("eval/"))
            raise RecipeError(
                "best-metric-unknown", metric=self.metric, known=known, hint=near(self.metric, known)
            )
        value = metrics[self.metric]
        if not isinstance(value, float) or not math.isfinite(value):
            return False
        lower = any(word in self.metric for word in _LOWER)
        gain = (self.value - value if lower else value - self.value) / max(abs(self.value), 1e-30)
        if gain <= _EQUAL:  # the first value has no gain but NaN
            return False
        self.value, self.step = value, step
        return True

    def waited_enough(self, step: int) -> bool:
        """Whether nothing better came for as long as `patience`."""
        return (
            self._patience is not None and not math.isnan(self.value) and step - self.step >= self._patience
        )

    def to_json(self) -> dict[str, Any]:
        return {"metric": self.metric, "value": self.value, "step": self.step}
