"""The contents of a run folder beside its ledger: rows of metrics, the result, the best checkpoint.

An audit computes all that a person or a command reads there again, or names it as not audited.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..base.figures import known
from ..base.json_types import part
from ..recipe.direction import direction
from ..recipe.recipe import Recipe
from ..run.folder.early_stopping import EarlyStopping
from ..run.folder.run_reader import StoredRun, number
from ..run.log import epoch_of, rate_of
from ..run.noise import SCALE

METRICS = ("train/", "eval/")


class Rows:
    """The rows of a run's metrics.jsonl, merged by step.

    *Fields:*

    - `at`: step to name to value, as in the file, such as None for a value that was not finite.
    - `twice`: the steps that have two values of a metric, and the names.
    """

    def __init__(self, run: StoredRun, recipe: Recipe):
        self.recipe = recipe
        self.at: dict[int, dict[str, Any]] = {}
        self.twice: dict[int, list[str]] = {}
        for row in run.rows:
            merged = self.at.setdefault(row["step"], {})
            again = [name for name in row if name in merged and _is_computed(name)]
            # A row of training and one of evaluation have the same one
            again += ["epoch"] * (merged.get("epoch", row.get("epoch")) != row.get("epoch"))
            if again:
                self.twice.setdefault(row["step"], []).extend(again)
            merged |= row

    @property
    def columns(self) -> list[str]:
        """The names that no audit computes, such as speeds and a user's own numbers."""
        names = dict.fromkeys(name for row in self.at.values() for name in row)
        return [name for name in names if not _is_computed(name) and name not in ("step", "epoch")]

    def has(self, step: int, split: str) -> bool:
        """Whether the row of `step` has metrics of a split, "train/" or "eval/"."""
        return any(name.startswith(split) for name in self.at.get(step, ()))

    def unlike(
        self, step: int, made: Mapping[str, Any], parts: tuple[str, ...], apart: float
    ) -> list[str]:
        """The names in the row of `step` whose values differ from those of `made` by more than
        `apart`, in the `parts` of its metrics that were computed. Also names that only one of them
        has, `lr` and `epoch` if they differ from the recipe's, and the names of `twice`."""
        there = self.at.get(step, {})
        scalars = {name: value for name, value in made.items() if not np.ndim(value)}
        names = dict.fromkeys(filter(_is_computed, [*there, *scalars]))
        found = [
            n
            for n in names
            if n.startswith(parts)
            and (n not in there or n not in scalars or not equal(there[n], scalars[n], apart))
        ]
        rate = rate_of(self.recipe, step) if self.has(step, "train/") else None
        if not equal(there.get("lr"), rate, 1e-12):
            found.append("lr")
        if there and not equal(there.get("epoch"), epoch_of(self.recipe, step), 1e-12):
            found.append("epoch")
        return list(dict.fromkeys([*found, *self.twice.get(step, ())]))


def _is_computed(name: str) -> bool:
    return name == "lr" or (name.startswith(METRICS) and name != SCALE)  # of noise


def equal(there: Any, made: Any, apart: float) -> bool:
    """Whether a value of a file equals the computed value `made`, within the relative and absolute
    tolerance `apart`. A value that is not finite is null in the file."""
    if isinstance(there, list) or np.ndim(made):
        a, b = np.asarray(there, dtype=object), np.asarray(made)
        return a.shape == b.shape and all(
            equal(*pair, apart) for pair in zip(a.flat, b.flat, strict=True)
        )
    if there is None or made is None or not math.isfinite(made):
        return there is None and (made is None or not math.isfinite(made))
    return known(there) and math.isclose(there, made, rel_tol=apart, abs_tol=apart)


def result_unlike(
    run: StoredRun,
    rows: Rows,
    step: int,
    fingerprint: str | None,
    computed: Mapping[str, Any],
    apart: float,
) -> Iterator[str]:
    """The fields of result.json that differ from the computed ones: its `fingerprint`, if bits are
    compared, and the metrics `computed` after its last `step`. Other metrics of training are those
    of the last rows. Also `recipe`, `steps` and `best`, if they differ from the recipe and the
    rows."""
    stated = run.result or {}
    if stated.get("recipe") != rows.recipe.name:
        yield "recipe"
    if stated.get("steps") != step:
        yield "steps"
    if fingerprint is not None and stated.get("fingerprint") != fingerprint:
        yield "fingerprint"
    last: dict[str, Any] = {}
    for at in sorted(rows.at):
        last |= {n: v for n, v in rows.at[at].items() if n.startswith("train/")}
    there = part(stated, "metrics")
    made = {**last, **computed}
    for name in dict.fromkeys([*there, *made]):
        if name not in there or name not in made or not equal(there[name], made[name], apart):
            yield name
    kept = stated.get("best")
    if one_rule(run) and (made_again := _best(run, rows, step)) != (
        {**(made_again or {}), **kept} if isinstance(kept, dict) else kept
    ):
        yield "best"


def one_rule(run: StoredRun) -> bool:
    """Whether all processes of a run kept its best evaluation by the same rule. Otherwise the best
    one depends on where each began."""
    return all(start.get("best") == run.starts[0].get("best") for start in run.starts)


def _best(run: StoredRun, rows: Rows, step: int) -> dict[str, Any] | None:
    """The record of the best evaluation of a run that ended after `step`, from its rows."""
    if (kept := run.kept) is None:
        return None
    best = EarlyStopping(rows.recipe, kept.metric, kept.patience)
    best.better = direction(kept.metric, run.better)
    for at in sorted(rows.at):
        if kept.metric in rows.at[at]:
            best.improved(at, {kept.metric: number(rows.at[at][kept.metric])})
            best.over = best.waited_enough(at)
    if any(start.get("best") != best.rule for start in run.starts):
        return None
    return vars(best.kept(best.over and step < (rows.recipe.clock.total or 0)))
