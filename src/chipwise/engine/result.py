"""What a run came to."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..recipe.task import Tree


@dataclass(frozen=True)
class Result:
    """What a run came to.

    *Fields:* `metrics`, the last `"train/..."` and `"eval/..."` values; `fingerprint`, SHA-256 of
    the parameters' bytes; `steps` done; `examples_per_second` (global, median) and `speed` (with
    quartiles and the batch); `seconds` by section; `feed`: how the data came, whether the device waited
    for it and what would help (empty when no step was made); `devices`; `machine`, as
    `machine.fingerprint.Fingerprint` tells it; `params`, `state` as NumPy arrays
    (`params` are the averaged ones when the recipe has an EMA, `fingerprint` is of the trained ones);
    `history`, every logged row.
    """

    recipe: str
    steps: int
    metrics: dict[str, Any]
    fingerprint: str
    devices: dict[str, Any]
    machine: dict[str, Any]
    examples_per_second: float | None
    speed: dict[str, Any]
    seconds: dict[str, float]
    feed: dict[str, Any]
    run: str | None
    params: Tree = field(repr=False)
    state: Tree = field(repr=False)
    history: list[dict[str, Any]] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Everything but the arrays and the history, as JSON values (NaN, which JSON lacks, as null)."""
        skipped = ("params", "state", "history")
        made = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in skipped}
        return json.loads(json.dumps(made, default=_plain), parse_constant=lambda _: None)


def _plain(value):
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else str(value)


def rounded(seconds: dict[str, float]) -> dict[str, float]:
    """Seconds to a tenth of a millisecond."""
    return {name: round(value, 4) for name, value in seconds.items() if math.isfinite(value)}
