"""`--target eval/accuracy=0.94`: what a run is to reach."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import RecipeError
from ..recipe.metrics import lower_is_better


@dataclass(frozen=True)
class Goal:
    """A value of a metric for a run to reach."""

    metric: str  # "eval/accuracy"
    value: float

    @property
    def downwards(self) -> bool:
        return lower_is_better(self.metric)

    def __str__(self) -> str:
        return f"{self.metric} {'≤' if self.downwards else '≥'} {self.value:g}"

    def reached(self, value: float | None) -> bool:
        return value is not None and (value <= self.value if self.downwards else value >= self.value)

    @classmethod
    def parse(cls, text: str) -> Goal:
        """Parses `0.94` (of `eval/accuracy`) or `eval/loss=0.3`, for any metric. Raises `RecipeError`."""
        metric, equals, value = text.rpartition("=")
        name = metric.strip() if equals else "eval/accuracy"
        if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value.strip()) or not name:
            wrong = (
                "--target {given:plain}: expected a number such as 0.94, or a metric such as eval/loss=0.3."
            )
            raise RecipeError("target-unreadable", wrong, given=text)
        return cls(name if "/" in name else f"eval/{name}", float(value))
