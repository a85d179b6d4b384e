"""The share of its planned speed that a run has, by the record of `chipwise bench` in its folder.

Nothing is planned again. The record is `bench.json`, which `chipwise bench RECIPE --out
RUN/bench.json` writes, and counts if recipe, size, batch and devices are the run's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...base import DataError, Fact, fact
from ...base.json_types import Misfit, typed
from ...base.prediction import Range
from ...machine.record import read
from ...planner.measured_share import MeasuredShare
from ...run.folder.run_reader import StoredRun, disagreement
from ..row import part
from .time_spent import Speed

_SAME = (
    *("name", "precision", "parameters", "kind", "count", "hosts", "batch", "replicas", "shards"),
    "exact",
)


def of_plan(run: StoredRun, fast: Speed | None, devices: Mapping[str, Any]) -> Fact | None:
    """The share, why it is unknown, or `None` without a record or a speed."""
    file = run.path / "bench.json"
    if fast is None or not file.exists():
        return None
    try:
        record = read(file)
        measured = record.measured
        there = {**measured, **typed(dict, measured.get("devices")), "name": record.name}
        here = {**run.recipe, **devices}
        pairs = [(name, there.get(name), here.get(name)) for name in _SAME]
        changed = [pair for pair in pairs if pair[1] != pair[2]]
        if not changed:  # those of the recipe that are not among them
            rows = disagreement(typed(dict, measured.get("recipe")), run.recipe, beginning=False)
            changed = [row for row in rows if row[0] not in ("duration", "seed")]
        if changed:
            return fact("share-of-other-bench", changed=changed)
        planned = part(measured, "planned")
        if problem := part(planned, "problem").get("text"):
            return fact("share-not-in-bench", why=str(problem))
        step = typed(Range, planned.get("step_seconds"))
        seconds = typed(int, fast.batch) / fast.examples_per_second
        return MeasuredShare(typed(str, planned.get("target")), step, seconds, None).fact
    except Misfit:
        return fact("share-not-in-bench", why="")
    except DataError as error:
        return error.fact
