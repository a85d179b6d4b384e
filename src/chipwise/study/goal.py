"""The goal of a run, such as `--target eval/accuracy=0.94`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..base import RecipeError
from ..recipe.direction import LOWER, judged


@dataclass(frozen=True)
class Goal:
    """A value of a metric for a run to reach."""

    metric: str  # "eval/accuracy"
    value: float
    better: str  # "lower" or "higher"

    @property
    def downwards(self) -> bool:
        return self.better == LOWER

    def __str__(self) -> str:
        return f"{self.metric} {'≤' if self.downwards else '≥'} {self.value:g}"

    def reached(self, value: float | None) -> bool:
        return value is not None and (
            value <= self.value if self.downwards else value >= self.value
        )

    @classmethod
    def parse(cls, text: str, better: Mapping[str, str] = {}, *runs: Mapping[str, str]) -> Goal:
        """Parses `0.94` (of `eval/accuracy`) or `eval/loss=0.3`, for any metric. Which way it is
        better, `better` says, else the `runs`. Raises `RecipeError`."""
        metric, equals, value = text.rpartition("=")
        name = metric.strip() if equals else "eval/accuracy"
        if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value.strip()) or not name:
            raise RecipeError("target-unreadable", given=text)
        name = name if "/" in name else f"eval/{name}"
        return cls(name, float(value), judged(name, better, *runs)["better"])
