"""The rules: what a change of batch does to each number of an optimizer, and the papers that say so.

With `k` = new batch / old batch, an epoch has 1/k as many steps. Three quantities are kept:

- the noise. SGD: rate times `k`, since k small steps and one step of k times the rate move alike
  (Krizhevsky 2014; Goyal et al. 2017). Adam: rate times the root of `k`, since it divides by the
  gradient's size, which is mostly noise (Malladi et al. 2022);
- memory, counted in examples. A decay a step `d` becomes `d ** k` (Busbridge et al. 2023). Malladi et
  al. write `1 - k (1 - d)`, which is the same to first order and leaves (0, 1) where k is large;
- forgetting: peak rate x weight decay x steps an epoch, one over the epochs over which weights
  average their updates (Wang & Aitchison 2024). It fixes the decay for any rate, so a rate chosen by hand
  is made up for by the decay.

The last one is also what separates the six archived runs of DavidNet at 64, 128 and 512 examples a step:
0.019 to 0.039 reached 94 %, 0.005 and 0.155 did not.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ...errors import RecipeError
from ...recipe.duration import Clock, Duration
from ...recipe.optimizers import Optimizer, adam, adamw, sgd
from .values import lengths, peak, rounded, scaled, stretched, to_the_power

if TYPE_CHECKING:
    from ...recipe.recipe import Recipe

GOYAL = "Goyal et al. 2017, arXiv:1706.02677, section 2.1"
MALLADI = "Malladi et al. 2022, arXiv:2205.10287, section 5"
BUSBRIDGE = "Busbridge et al. 2023, arXiv:2307.13813"
WANG = "Wang & Aitchison 2024, arXiv:2405.13698"
PAGE = "Page 2018: peak at 5 of 24 epochs, and at 2 of 10 (github.com/davidcpage/cifar10-fast)"
DEFINITION = "by definition"


@dataclass(frozen=True)
class Change:
    """One setting: what it was, what it is, why, and who says so. `old == new` where it has to stay."""

    setting: str
    old: Any
    new: Any
    why: str
    source: str

    @property
    def changed(self) -> bool:
        return self.old != self.new

    @property
    def shown(self) -> tuple[str, str]:
        """The old and the new value as text."""
        return _text(self.old), _text(self.new)


@dataclass(frozen=True)
class Move:
    """From one recipe to another: `batch`, new over old; `run`, examples of the whole run, new over old."""

    batch: Fraction
    run: Fraction

    def length(self, text: str) -> str:
        """A duration inside a schedule, so that it keeps its share of the run."""
        duration = Duration.parse(text)
        if not duration or duration.unit == "%":
            return str(duration)
        factor = self.run / self.batch if duration.unit == "st" else self.run
        if factor == 1:
            return str(duration)
        if duration.unit == "ep":
            return f"{rounded(float(duration.value * factor)):g}ep"
        return f"{max(math.floor(duration.value * factor + Fraction(1, 2)), 1)}{duration.unit}"


def forgetting(recipe: Recipe) -> float | None:
    """Peak rate x weight decay x steps an epoch; None for an optimizer that does not decay weights.

    Raises `DataError` when the training source is empty.
    """
    return recipe.forgetting


def optimizer_for(
    optimizer: Optimizer, move: Move, clock: Clock, lr: float | None = None
) -> tuple[Optimizer, list[Change]]:
    """The optimizer after `move`, with its changes. `lr`: the peak rate instead of the rule's.

    `clock` is the old run's. Raises `RecipeError` where there is no rule: for optimizers of `from_optax`
    at another batch, and for schedules that are functions of the step.
    """
    if isinstance(optimizer, sgd | adam | adamw):
        return _known(optimizer, move, clock, lr)
    if move.batch != 1 or lr is not None:
        raise RecipeError("no-rule-for-optimizer", optimizer=repr(optimizer), names=list(optimizer.hyper))
    new = {name: stretched(schedule, move.length) for name, schedule in optimizer.hyper.items()}
    changes = [change for name in new for change in _lengths(name, optimizer.hyper[name], new[name], move)]
    if not any(change.changed for change in changes):
        return optimizer, changes
    return optimizer.replace(**new), changes


def _known(
    optimizer: sgd | adam | adamw, move: Move, clock: Clock, lr: float | None
) -> tuple[Optimizer, list[Change]]:
    k = move.batch
    linear = isinstance(optimizer, sgd)
    old_lr, factor = peak(optimizer.lr, clock), optimizer.rate_factor(k)
    assert factor is not None
    if lr is not None:
        if not isinstance(lr, int | float) or isinstance(lr, bool) or not 0 < lr < math.inf or not old_lr:
            raise RecipeError("lr-not-above-zero", lr=lr, peak=old_lr)
        factor = Fraction(repr(float(lr))) / Fraction(repr(old_lr))
    new: dict[str, Any] = {"lr": optimizer.lr if factor == 1 else scaled(optimizer.lr, factor)}
    new_lr = peak(new["lr"], clock)
    rule = f"× {float(k):g}, as the batch" if linear else f"× √{float(k):g}: Adam divides by the noise"
    why = "chosen by hand" if lr is not None else "the batch is the same" if k == 1 else rule
    changes = [
        Change("lr", old_lr, new_lr, why, DEFINITION if lr or k == 1 else GOYAL if linear else MALLADI)
    ]
    if isinstance(optimizer, sgd | adamw) and (decay := peak(optimizer.weight_decay, clock)):
        change_of_decay = k / Fraction(factor)
        if change_of_decay != 1:
            new["weight_decay"] = scaled(optimizer.weight_decay, change_of_decay)
        after = peak(new.get("weight_decay", optimizer.weight_decay), clock)
        kept = rounded(old_lr * decay * clock.examples / clock.batch, 3)
        why = f"keeps peak rate × decay × steps an epoch at {kept:g}"
        changes.append(Change("weight_decay", decay, after, why, WANG))
    if isinstance(optimizer, sgd):
        if "momentum" in optimizer.hyper:
            m = peak(optimizer.momentum, clock)
            why = f"over {1 / (1 - m):.3g} steps at any batch: the linear rule was found with it kept"
            changes.append(Change("momentum", m, m, why, GOYAL))
    elif k != 1:
        for name in ("b1", "b2"):
            before = getattr(optimizer, name)
            new[name] = to_the_power(before, k)
            why = f"^ {float(k):g}: as many examples in the average"
            changes.append(Change(name, peak(before, clock), peak(new[name], clock), why, MALLADI))
        new["eps"] = scaled(optimizer.eps, 1 / math.sqrt(k))
        why = f"/ √{float(k):g}, as the noise it is added to"
        changes.append(Change("eps", optimizer.eps, new["eps"], why, MALLADI))
    if optimizer.clip is not None:
        clip = peak(optimizer.clip, clock)
        changes.append(Change("clip", clip, clip, "a norm of the mean gradient, at any batch", DEFINITION))
    for name in optimizer.hyper:
        before = getattr(optimizer, name)
        after = stretched(new.get(name, before), move.length)
        changes += _lengths(name, before, after, move)
        if after != before:
            new[name] = after
    return dataclasses.replace(optimizer, **new), changes


def _lengths(name: str, before: Any, after: Any, move: Move) -> list[Change]:
    why = "the same share of the run" if move.run != 1 else "as many examples in fewer steps"
    if move.run == 1 and move.batch < 1:
        why = "as many examples in more steps"
    pairs = zip(lengths(before), lengths(after), strict=True)
    return [
        Change(f"{name}: {what}", old, new, why, PAGE if move.run != 1 else DEFINITION)
        for (what, old), (_, new) in pairs
        if old != new
    ]


def _text(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)
