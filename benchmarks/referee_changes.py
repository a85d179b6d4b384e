"""Changes of recipes whose worth is known, each judged as `chipwise referee` judges it.

Nulls change nothing: refactors, and first weights drawn from another key. The others change a setting that
matters. Each change has a book of its own, so each has the level of a first try. Nulls share the base's runs,
as changes in one folder do; a change that matters pays for its own.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

import chipwise as cw

FIELDS = (
    *("recipe", "kind", "change", "expected", "verdict", "pairs_predicted", "pairs"),
    *("seconds_predicted", "seconds", "low", "high", "level"),
)
"""Seconds are of the clock. low and high enclose the difference in `Case.metric`, change minus base."""
NULLS = 30

Change = Callable[[cw.Recipe], cw.Recipe]


@dataclasses.dataclass(frozen=True)
class Case:
    """A recipe whose changes are judged."""

    name: str
    words: tuple[str, ...]
    """The settings of the base."""
    real: dict[str, tuple[str | Change, str]]
    """Changes that matter, each a setting or a function, with the verdict that is expected."""
    spend: float
    """Seconds that a null may take. A change that matters may take five times that."""
    metric: str = "eval/loss"

    def base(self, data: str | None) -> cw.Recipe:
        return cw.load(self.name, self.words, data=data)

    def changed(self, base: cw.Recipe, setting: str, data: str | None) -> cw.Recipe:
        """The recipe with another setting. The data are those of `base`, so they are read once."""
        recipe = cw.load(self.name, [*self.words, setting], data=data)
        task = dataclasses.replace(recipe.task, train=base.task.train, eval=base.task.eval)
        return dataclasses.replace(recipe, task=task)


# ---- changes that change nothing


def with_loss(recipe: cw.Recipe, loss: Callable) -> cw.Recipe:
    return dataclasses.replace(recipe, task=dataclasses.replace(recipe.task, loss=loss))


def renamed(recipe: cw.Recipe) -> cw.Recipe:
    def another_name(params, state, batch, key, train):
        unused = batch["image"].shape  # noqa: F841
        return recipe.task.loss(params, state, batch, key, train)

    return dataclasses.replace(with_loss(recipe, another_name), name="another")


def in_a_class(recipe: cw.Recipe) -> cw.Recipe:
    """The loss as a method that calls another, with its dict in another order."""

    class Learner:
        def __init__(self, task):
            self.task = task

        def sums(self, *arguments):
            sums, state = self.task.loss(*arguments)
            return dict(reversed(sums.items())), state

        def __call__(self, params, state, batch, key, train):
            return self.sums(params, state, batch, key, train)

    return with_loss(recipe, Learner(recipe.task))


def dead_code(recipe: cw.Recipe) -> cw.Recipe:
    """The loss with a branch that is not taken, and a value that nobody reads."""

    def loss(params, state, batch, key, train):
        jax.numpy.square(batch["image"].astype("float32")).sum()
        if train is None:
            raise AssertionError
        return recipe.task.loss(params, state, batch, key, train)

    return with_loss(recipe, loss)


def partial(recipe: cw.Recipe) -> cw.Recipe:
    return with_loss(recipe, functools.partial(recipe.task.loss))


def other_weights(recipe: cw.Recipe, salt: int) -> cw.Recipe:
    """The recipe with other first weights for each seed: runs differ, and nothing is better."""
    init = recipe.task.init
    task = dataclasses.replace(recipe.task, init=lambda key: init(jax.random.fold_in(key, salt)))
    return dataclasses.replace(recipe, task=task)


REFACTORS: dict[str, Change] = {
    "the same": lambda recipe: recipe,
    "renamed": renamed,
    "in a class": in_a_class,
    "dead code": dead_code,
    "partial": partial,
}


# ---- changes that matter


def smoothed(recipe: cw.Recipe) -> cw.Recipe:
    """The recipe evaluated with labels of which 0.9 go to all classes: an evaluation of something else."""

    def loss(params, state, batch, key, train):
        sums, state = recipe.task.loss(params, state, batch, key, train)
        if not train:
            return sums, state
        logits = recipe.task.predict(params, state, {"image": batch["image"]})
        even = -jax.nn.log_softmax(logits).mean(axis=1)
        total = 0.1 * sums["loss"].total + 0.9 * even.sum()
        return {**sums, "loss": cw.Sum(total, sums["loss"].count)}, state

    return with_loss(recipe, loss)


CASES = {
    "digits": Case(
        "digits",
        ("duration=5ep",),
        {
            "a third of the rate": ("lr=0.001", "worse"),
            "three times the rate": ("lr=0.01", "better"),
            "batch 256": ("batch=256", "worse"),
            "batch 32": ("batch=32", "better"),
            "labels smoothed by 0.9": (smoothed, "worse"),
            "10 epochs": ("duration=10ep", "better"),
            "2 epochs": ("duration=2ep", "worse"),
            "a sixth more of the rate": ("lr=0.0035", "better"),
            "a sixth less of the rate": ("lr=0.0025", "worse"),
            "a thirtieth more of the rate": ("lr=0.0031", "better"),
            "a twelfth shorter": ("duration=103st", "worse"),
        },
        spend=25,
    ),
    "mnist": Case(
        "mnist",
        ("batch=64", "replicas=4", "duration=100st"),
        {
            "half as long": ("duration=50st", "worse"),
            "twice as long": ("duration=200st", "better"),
            "labels smoothed by 0.9": (smoothed, "worse"),
            "batch 16": ("batch=16", "worse"),
            "a tenth shorter": ("duration=90st", "worse"),
        },
        spend=60,
    ),
    "davidnet": Case(
        "cifar10-davidnet",
        ("width=16", "precision=f32", "batch=64", "replicas=4", "duration=40st", "lr=1.5"),
        {
            "a tenth of the rate": ("lr=0.15", "worse"),
            "twenty times the rate": ("lr=30", "worse"),
            "half as long": ("duration=20st", "worse"),
            "labels smoothed by 0.9": (smoothed, "worse"),
            "half the width": ("width=8", "worse"),
        },
        spend=80,
    ),
}


# ---- judging them


def judged(case: Case, base: cw.Recipe, change: cw.Recipe, folder: Path, spend: float) -> dict[str, Any]:
    """The verdict on a change, and what it was said to take and took."""
    costs: list[float | None] = []

    def hear(said) -> None:
        if said.code.startswith("referee-cost"):
            costs.append(said.numbers.get("seconds"))

    began, here = time.monotonic(), cw.On(devices=1)
    ruling = cw.referee.referee(base, change, metric=case.metric, run=folder, spend=spend, on=here, say=hear)
    return {
        **{name: getattr(ruling, name) for name in ("verdict", "low", "high", "level")},
        **{"pairs_predicted": ruling.predicted, "pairs": len(ruling.values)},
        **{"seconds_predicted": costs[0] if costs else None, "seconds": time.monotonic() - began},
        "base_runs": ruling.digests[0][:12],
    }


def changes_of(case: Case, base: cw.Recipe, data: str | None) -> Iterator[tuple[str, str, str, Change]]:
    """The kind, name and expected verdict of each change, and the change."""
    for name, change in REFACTORS.items():
        yield "null", name, "same", change
    for salt in range(1, NULLS - len(REFACTORS) + 1):
        yield "null", f"other weights, {salt}", "open", functools.partial(other_weights, salt=salt)
    for name, (change, expected) in case.real.items():
        if isinstance(change, str):
            setting = change
            yield "real", name, expected, lambda _, s=setting: case.changed(base, s, data)
        else:
            yield "real", name, expected, change


def measured(case: Case, data: str | None, rows: Path, until: float) -> None:
    """Judges the changes that have no row yet, and appends a row for each. None begins after `until`, by
    `time.monotonic()`."""
    known = rows_in(rows)
    with tempfile.TemporaryDirectory() as scratch:
        base, shared = case.base(data), Path(scratch) / "base"
        for number, (kind, name, expected, change) in enumerate(changes_of(case, base, data)):
            if time.monotonic() > until:
                break
            if any((row["recipe"], row["change"]) == (case.name, name) for row in known):
                continue
            folder, null = Path(scratch) / str(number), kind == "null"
            if null and shared.exists():
                shutil.copytree(shared, folder)
            row = judged(case, base, change(base), folder, case.spend * (1 if null else 5))
            own = folder / row.pop("base_runs")
            if null and own.exists():
                shutil.copytree(own, shared / own.name, dirs_exist_ok=True)
            row |= {"recipe": case.name, "kind": kind, "change": name, "expected": expected}
            append(rows, row)
            print(
                f"{case.name}: {name}: {row['verdict']}, {row['pairs']} pairs, {row['seconds']:.0f} s",
                flush=True,
            )


def rows_in(file: Path) -> list[dict[str, str]]:
    if not file.exists():
        return []
    with file.open() as opened:
        return list(csv.DictReader(opened))


def append(file: Path, row: dict[str, Any]) -> None:
    plain = {name: f"{x:.6g}" if isinstance(x, float) else x for name, x in row.items()}
    with file.open("a") as opened:
        writer = csv.DictWriter(opened, FIELDS, lineterminator="\n")
        if not opened.tell():
            writer.writeheader()
        writer.writerow(plain)
