"""`cw.transfer(recipe, batch=128)`: the recipe at another batch, and why each number changed.

With `k` = new batch / old batch, an epoch has 1/k as many steps. Three quantities stay the same:

- the noise. SGD: rate times `k`, since k small steps go as far as one step of k times the rate
  (Krizhevsky 2014, Goyal et al. 2017). Adam: rate times the root of `k`, since it divides by the
  gradient's size, which is mostly noise (Malladi et al. 2022).
- the averaging time in examples. A decay per step `d` becomes `d ** k` (Busbridge et al. 2023).
  Malladi et al. write `1 - k (1 - d)`, which is the same to first order and leaves (0, 1) if k is
  large.
- forgetting: peak rate x weight decay x steps an epoch, the inverse of the epochs over which
  weights average their updates (Wang & Aitchison 2024). It determines the decay for any rate, so
  the decay is also adjusted to a rate chosen by hand.

The last one also separates the six archived runs of DavidNet at 64, 128 and 512 examples a step:
0.019 to 0.039 reached 94 %, 0.005 and 0.155 did not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..base import Fact, RecipeError, fact, plain, say
from ..base.annotations import as_annotated
from ..base.displayed import Displayed
from ..base.figures import known
from ..recipe.check import LEAST_FOR_BATCH_NORM, SUBLANES
from ..recipe.duration import Clock, Duration
from ..recipe.optimizers import HIGHEST_ADAM, Optimizer
from ..recipe.recipe import Recipe
from ..recipe.schedules import Schedule, as_given, as_schedule, exponential, rounded

UNAFFECTED = fact("move-unaffected")


@dataclass(frozen=True)
class Change:
    """One setting: its old and new value, and why. `old == new` if it must stay."""

    setting: str
    old: Any
    new: Any
    why: Fact

    @property
    def changed(self) -> bool:
        return self.old != self.new

    @property
    def source(self) -> str:
        """The source of the rule."""
        return say(self.why, "source")

    @property
    def shown(self) -> tuple[str, str]:
        """The old and the new value as text."""
        old, new = (f"{v:.10g}" if isinstance(v, float) else str(v) for v in (self.old, self.new))
        return old, new


@dataclass(frozen=True)
class Transfer(Displayed):
    """A recipe made from another: `old` and `recipe`, the new one. `print` shows everything."""

    old: Recipe
    recipe: Recipe
    changes: tuple[Change, ...]
    """The settings that depend on the batch, the replicas and the length. Includes those that stay
    for a reason."""
    limits: tuple[Fact, ...]
    """The cases where the rules are known to fail."""

    @property
    def forgetting(self) -> tuple[float | None, float | None]:
        """Peak rate x weight decay x steps an epoch, old and new. None without a decay."""
        return self.old.forgetting, self.recipe.forgetting

    @property
    def settings(self) -> list[str]:
        """The changed settings as texts for `--set`, such as `["batch=128", "lr=0.1"]`. A schedule
        has its peak here. Lengths in a schedule cannot be typed this way."""
        old = self.old
        new = self.recipe
        inner = self.old.optimizer.settings
        names = [
            n
            for n in ("batch", "replicas", "duration", "ema")
            if getattr(old, n) != getattr(new, n)
        ]
        values = {name: getattr(new, name) for name in names}
        values |= {name: v for name, v in new.optimizer.settings.items() if v != inner[name]}
        peaks = {
            n: v.highest(new.clock) if isinstance(v, Schedule) else v for n, v in values.items()
        }
        return [f"{name}={value}" for name, value in peaks.items()]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values: the new recipe's description, the changes and the limits."""
        old, new = self.forgetting
        return {
            "schema": "chipwise.transfer/1",
            "recipe": self.recipe.describe(),
            "changes": [plain(change) | {"source": change.source} for change in self.changes],
            "peak_rate_x_decay_x_steps_an_epoch": {"old": old, "new": new},
            "limits": plain(self.limits),
        }


@dataclass(frozen=True)
class Move:
    """The factors of a transfer, new over old."""

    batch: Fraction
    """The factor of the batch."""
    run: Fraction = Fraction(1)
    """The factor of the examples of the whole run."""

    def length(self, text: str) -> str:
        """A duration in a schedule, scaled to keep its share of the run."""
        duration = Duration.parse(text)
        if not duration or duration.unit == "%":
            return str(duration)
        factor = self.run / self.batch if duration.unit == "st" else self.run
        if factor == 1:
            return str(duration)
        if duration.unit == "ep":
            return f"{rounded(float(duration.value * factor)):g}ep"
        return f"{max(math.floor(duration.value * factor + Fraction(1, 2)), 1)}{duration.unit}"


@as_annotated
def transfer(
    recipe: Recipe,
    *,
    batch: int | None = None,
    replicas: int | None = None,
    duration: str | None = None,
    lr: float | None = None,
) -> Transfer:
    """`recipe` at another batch, number of replicas or length, with the same dynamics.

    *Arguments*:

    - `batch` and `replicas`: global, as in a `Recipe`.
    - `duration`: such as `"48ep"`.
    - `lr`: a peak rate to use instead of the rule's. The weight decay is adjusted to it.

    By default batch, replicas and duration stay, except that a duration in steps is scaled with the
    batch. Rules and sources: `docs/transfer.md`.

    *Returns* a `Transfer`. Raises `RecipeError` if no argument is given, if the replicas do not
    divide the batch, and for an optimizer or schedule without a rule.
    """
    if batch is None and replicas is None and duration is None and lr is None:
        raise RecipeError("transfer-nothing")
    old_clock = recipe.clock
    given: dict[str, Any] = {"batch": batch, "replicas": replicas, "duration": duration}
    new = dataclasses.replace(
        recipe, **{name: value for name, value in given.items() if value is not None}
    )
    new.check_batch()
    k = Fraction(new.batch, recipe.batch)
    run = Fraction(1)
    if duration is None and Duration.parse(recipe.duration).unit == "st":
        new = dataclasses.replace(new, duration=Move(k).length(recipe.duration))
    if duration is not None and (before := _examples(recipe.duration, old_clock)):
        run = _examples(new.duration, new.clock) / before
    move = Move(k, run)
    optimizer, changes = _moved(recipe.optimizer, move, old_clock, lr)
    # An average over less than a step is the parameters themselves: `None`.
    ema = recipe.ema if recipe.ema is None or k == 1 else _to_the_power(recipe.ema, k) or None
    new = dataclasses.replace(new, optimizer=optimizer, ema=ema)
    changes = [*_counts(recipe, new, run), *changes]
    if recipe.ema is not None:
        changes.append(Change("ema", recipe.ema, ema, fact("move-ema", k=float(k))))
    return Transfer(
        recipe, new, tuple(changes), tuple(limits(recipe, new, k, run, by_hand=lr is not None))
    )


def _counts(old: Recipe, new: Recipe, run: Fraction) -> list[Change]:
    before = old.batch // old.replicas
    group = new.batch // new.replicas
    regrouped = "move-replicas" if before == group else "move-replicas-regrouped"
    length = "move-as-many-examples" if run == 1 else "move-other-length"
    return [
        Change("batch", old.batch, new.batch, fact("move-as-asked")),
        Change("replicas", old.replicas, new.replicas, fact(regrouped, before=before, group=group)),
        Change("duration", old.duration, new.duration, fact(length, times=float(run))),
        Change("steps", old.clock.total, new.clock.total, fact("move-steps")),
    ]


def _moved(
    optimizer: Optimizer, move: Move, clock: Clock, lr: float | None
) -> tuple[Optimizer, list[Change]]:
    """The optimizer after `move`, with its changes. `lr` is the peak rate instead of the rule's.
    `clock` is the old run's. Raises `RecipeError` if there is no rule."""
    settings: dict[str, Any] = {}
    changes: list[Change] = []
    factor = optimizer.rate_factor(move.batch)
    if factor is not None:
        settings, changes = _values(optimizer, move.batch, factor, clock, lr)
    elif move.batch != 1 or lr is not None:
        raise RecipeError(
            "no-rule-for-optimizer",
            "{optimizer} has no rule for another batch. Keep the batch, or --set batch and "
            "{names:and} "
            "yourself.",
            optimizer=repr(optimizer),
            names=list(optimizer.hyper),
        )
    for name in optimizer.hyper:
        before = settings.get(name, optimizer.settings[name])
        after = as_given(before, as_schedule(before).stretched(move.length))
        changes += _lengths(name, as_schedule(before), as_schedule(after), move)
        if after != before:
            settings[name] = after
    return optimizer.replace(**settings) if settings else optimizer, changes


def _values(
    optimizer: Optimizer, k: Fraction, factor: Fraction | float, clock: Clock, lr: float | None
) -> tuple[dict[str, Any], list[Change]]:
    """The settings that change at `k` times the batch and `factor` times the rate, and why."""
    given = optimizer.settings
    linear = optimizer.rate_power == 1

    def peak(value: Any) -> float:
        return as_schedule(value).highest(clock)

    old_lr = peak(given["lr"])
    code = "move-rate-linear" if linear else "move-rate-root"
    if lr is not None:
        if not known(lr) or lr <= 0 or not old_lr:
            raise RecipeError("lr-not-above-zero", lr=lr, peak=old_lr)
        factor = Fraction(repr(float(lr))) / Fraction(repr(old_lr))
        code = "move-rate-by-hand"
    elif k == 1:
        code = "move-rate-same"
    new = {"lr": given["lr"] if factor == 1 else _scaled(given["lr"], factor)}
    changes = [Change("lr", old_lr, peak(new["lr"]), fact(code, k=float(k)))]
    if (own := given.get("adam_lr")) is not None:
        new["adam_lr"] = own if factor == 1 else _scaled(own, factor)
        changes.append(Change("adam_lr", peak(own), peak(new["adam_lr"]), fact(code, k=float(k))))
    if decay := peak(given.get("weight_decay", 0)):
        if (change := k / Fraction(factor)) != 1:
            new["weight_decay"] = _scaled(given["weight_decay"], change)
        product = rounded(old_lr * decay * clock.examples / clock.batch, 3)
        after = peak(new.get("weight_decay", decay))
        changes.append(Change("weight_decay", decay, after, fact("move-decay", product=product)))
    if linear and "momentum" in optimizer.hyper:
        momentum = peak(given["momentum"])
        changes.append(
            Change("momentum", momentum, momentum, fact("move-momentum", steps=1 / (1 - momentum)))
        )
    if not linear and k != 1:
        for name in [name for name in ("b1", "b2", "rho", "momentum") if given.get(name)]:
            new[name] = _to_the_power(given[name], k)
            why = fact("move-average", k=float(k))
            changes.append(Change(name, peak(given[name]), peak(new[name]), why))
        new["eps"] = _scaled(given["eps"], 1 / math.sqrt(k))
        changes.append(Change("eps", given["eps"], new["eps"], fact("move-eps", k=float(k))))
    if given.get("clip") is not None:
        clip = peak(given["clip"])
        changes.append(Change("clip", clip, clip, fact("move-clip")))
    return new, changes


def _lengths(name: str, before: Schedule, after: Schedule, move: Move) -> list[Change]:
    code = "move-length-share"
    if move.run == 1:
        code = "move-length-more-steps" if move.batch < 1 else "move-length-fewer-steps"
    pairs = zip(before.lengths(), after.lengths(), strict=True)
    return [
        Change(f"{name}: {what}", old, new, fact(code))
        for (what, old), (_, new) in pairs
        if old != new
    ]


def _scaled(value: Any, factor: Fraction | float) -> Any:
    """A number or schedule with its values times `factor`, to six digits."""
    return as_given(value, as_schedule(value).scaled(factor))


def _to_the_power(value: Any, exponent: Fraction) -> Any:
    """A decay per step, such as Adam's `b1` or an EMA's, for steps that are `exponent` times as
    large.

    The distance to 1 has four digits. Raises `RecipeError` for an exponential schedule, whose power
    is not an exponential schedule.
    """
    if isinstance(value, exponential):
        raise RecipeError("average-decays", schedule=repr(value))

    def change(decay: float) -> float:
        return (
            0.0
            if decay <= 0
            else rounded(1 - rounded(-math.expm1(exponent * math.log(decay)), 4), 12)
        )

    return as_given(value, as_schedule(value).mapped(change))


def _examples(duration: str, clock: Clock) -> Fraction:
    length = Duration.parse(duration)
    return length.value * {"st": clock.batch, "ep": clock.examples, "ex": 1}[length.unit]


_LARGEST_LINEAR = 8192  # Goyal et al. 2017, figure 1
_FEWEST_STEPS = 200
_FEWEST_AN_EPOCH = 10


def limits(
    old: Recipe, new: Recipe, k: Fraction, run: Fraction, by_hand: bool = False
) -> Iterator[Fact]:
    """Reasons why `new`, the transferred recipe, may train differently from `old`.

    *Arguments:* `k` is new batch over old. `run` is the examples of the whole run, new over old.
    `by_hand` is whether the caller set the rate.
    """
    if k > 1:
        yield from _of_the_optimizer(new)
    if k != 1 or run != 1:
        steps = new.clock.total or 0
        an_epoch = new.clock.examples / new.batch
        if steps < _FEWEST_STEPS:
            yield fact("limit-few-steps", steps=steps, fewest=_FEWEST_STEPS)
        elif k > 1 and an_epoch < _FEWEST_AN_EPOCH:
            yield fact("limit-few-steps-an-epoch", steps=an_epoch, fewest=_FEWEST_AN_EPOCH)
    if run != 1:
        yield fact("limit-other-length")
    if by_hand:
        yield fact("limit-rate-by-hand")
    before = old.batch // old.replicas
    group = new.batch // new.replicas
    if new.task.has_batch_norm:
        yield from _of_batch_norm(new.batch, before, group, float(k))
    elif group < min(SUBLANES, before):
        yield fact("limit-padding", group=group)


def _of_the_optimizer(new: Recipe) -> Iterator[Fact]:
    """Limits of the optimizer's rules at a larger batch."""
    optimizer = new.optimizer
    clock = new.clock
    yield fact("limit-critical-batch")
    if optimizer.rate_power == 1:
        if new.batch > _LARGEST_LINEAR:
            yield fact("limit-linear-rule", batch=new.batch, largest=_LARGEST_LINEAR)
        if new.starts_at_its_peak:
            yield fact("limit-no-warmup")
    elif optimizer.rate_power is not None:
        highest = optimizer.hyper["lr"].highest(clock)
        memory = optimizer.hyper.get("b1")  # RMSprop has none
        if highest > HIGHEST_ADAM:
            yield fact("limit-adam-rate", lr=highest, highest=HIGHEST_ADAM)
        if memory is not None and memory.highest(clock) < 0.5:
            yield fact("limit-adam-memory", b1=memory.highest(clock))


def _of_batch_norm(batch: int, before: int, group: int, k: float) -> Iterator[Fact]:
    if group != before:
        same, rest = divmod(batch, before)
        code = "limit-batch-norm-group" if rest else "limit-batch-norm-group-mended"
        yield fact(code, group=group, before=before, replicas=same)
    if group < min(LEAST_FOR_BATCH_NORM, before):
        yield fact("limit-batch-norm-few", group=group, least=LEAST_FOR_BATCH_NORM)
    if k != 1:
        yield fact("limit-batch-norm-momentum", k=k, example=0.9**k)
