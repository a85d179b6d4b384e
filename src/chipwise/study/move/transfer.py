"""`cw.transfer(recipe, batch=128)`: the recipe at another batch, and why each number changed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ...engine.layout import Layout
from ...errors import RecipeError
from ...recipe.duration import Clock, Duration
from ...recipe.recipe import Recipe
from .limits import limits
from .rules import BUSBRIDGE, DEFINITION, Change, Move, forgetting, optimizer_for
from .values import to_the_power

UNAFFECTED = "Unaffected: precision, seed, augmentation, dropout, label smoothing, which know no batch."


@dataclass(frozen=True)
class Transfer:
    """A recipe made from another: `old` and `recipe`, the new one.

    `changes`: the settings that the batch, the replicas and the length touch, also those that stay for a
    reason. `limits`: where the rules are known to fail, one sentence each. `print` shows all of it.
    """

    old: Recipe
    recipe: Recipe
    changes: tuple[Change, ...]
    limits: tuple[str, ...]

    @property
    def forgetting(self) -> tuple[float | None, float | None]:
        """Peak rate x weight decay x steps an epoch, old and new; None without a decay."""
        return forgetting(self.old), forgetting(self.recipe)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values: the new recipe's description, the changes and the limits."""
        old, new = self.forgetting
        return {
            "schema": "chipwise.transfer/1",
            "recipe": self.recipe.describe(),
            "changes": [dataclasses.asdict(change) for change in self.changes],
            "peak_rate_x_decay_x_steps_an_epoch": {"old": old, "new": new},
            "limits": list(self.limits),
        }

    def __str__(self) -> str:
        rows = [("", "old", "new", "why", "source")]
        rows += [(c.setting, *c.shown, c.why, c.source) for c in self.changes]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", UNAFFECTED, *self.limits])


def transfer(
    recipe: Recipe,
    *,
    batch: int | None = None,
    replicas: int | None = None,
    duration: str | None = None,
    lr: float | None = None,
) -> Transfer:
    """`recipe` at another batch, number of replicas or length, with the same dynamics.

    *Arguments*: `batch` and `replicas`, global, as in a `Recipe`; `duration`, such as `"48ep"`; those not
    given stay, except that a duration in steps follows the batch. `lr`: a peak rate to use instead of the
    rule's; the weight decay then makes up for it. The rules and their sources are in
    `chipwise.study.move.rules`.

    Raises `RecipeError` when nothing is given, when the replicas do not divide the batch, and for an
    optimizer or schedule that no rule covers.
    """
    if batch is None and replicas is None and duration is None and lr is None:
        raise RecipeError("transfer-nothing")
    old_clock = recipe.clock
    assert old_clock.total is not None
    given: dict[str, Any] = {"batch": batch, "replicas": replicas, "duration": duration}
    new = dataclasses.replace(recipe, **{name: value for name, value in given.items() if value is not None})
    Layout(new.batch, new.replicas, devices=1)  # says which batches the replicas divide
    k = Fraction(new.batch, recipe.batch)
    if duration is None and Duration.parse(recipe.duration).unit == "st":
        new = dataclasses.replace(new, duration=Move(k, Fraction(1)).length(recipe.duration))
    run = Fraction(1)
    if duration is not None:
        before = _examples(recipe.duration, old_clock)
        run = _examples(new.duration, new.clock) / before if before else run
    move = Move(k, run)
    optimizer, changes = optimizer_for(recipe.optimizer, move, old_clock, lr)
    # A memory of less than a step is none: `None`, as an average over one step is the parameters.
    ema = recipe.ema if recipe.ema is None or k == 1 else to_the_power(recipe.ema, k) or None
    new = dataclasses.replace(new, optimizer=optimizer, ema=ema)
    listed = [*_counts(recipe, new, run), *changes]
    if recipe.ema is not None:
        why = f"^ {float(k):g}: as many examples in the average"
        listed.append(Change("ema", recipe.ema, ema, why, BUSBRIDGE))
    return Transfer(recipe, new, tuple(listed), tuple(limits(recipe, new, move, by_hand=lr is not None)))


def _counts(old: Recipe, new: Recipe, run: Fraction) -> list[Change]:
    groups = old.batch // old.replicas, new.batch // new.replicas
    each = f"{groups[0]}" if groups[0] == groups[1] else f"{groups[0]}, now {groups[1]}"
    shared = f"{each} examples each; decay and rate act once for all"
    spent = "as many examples" if run == 1 else f"{float(run):.4g} times the examples"
    return [
        Change("batch", old.batch, new.batch, "as asked for", DEFINITION),
        Change("replicas", old.replicas, new.replicas, shared, DEFINITION),
        Change("duration", old.duration, new.duration, spent, DEFINITION),
        Change("steps", old.clock.total, new.clock.total, "the duration over the batch", DEFINITION),
    ]


def _examples(duration: str, clock: Clock) -> Fraction:
    length = Duration.parse(duration)
    return length.value * {"st": clock.batch, "ep": clock.examples, "ex": 1}[length.unit]
