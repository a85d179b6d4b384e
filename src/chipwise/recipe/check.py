"""`cw.check(recipe)`: lists the settings that are probably not meant. For each it gives the usual
value, the reason, and what to type.

It starts from `recipe.warnings()`, which lists what a recipe cannot do, and adds what rarely works.
The usual values come from the recipe's own `validated` point, moved to the given batch by the rules
of `cw.transfer`. For a recipe without such a point they are bands that hold for most nets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from ..base import Fact, fact, say, text_of
from ..base.annotations import as_annotated
from ..base.displayed import Displayed
from ..chips.targets import Target, parse
from .recipe import Recipe, Validated
from .schedules import as_schedule, function, rounded, warmup

LEAST_FOR_BATCH_NORM = 16
"""Examples below which batch norm's accuracy falls (Wu & He 2018, arXiv:1803.08494, figure 1: a
ResNet-50's error is 23.6 % at 32 examples, 23.7 at 16, 24.8 at 8, 27.3 at 4)."""
_UNMOVED = 0.05  # of an average, after three times the steps that it averages over
_FAR = 10.0  # times the rate that the rules give
_SUDDEN = 2.0  # SGD's rate over (1 - momentum) from which a run should not start with it
IN_TURN = 4  # programs that a device runs one after another, from which `blocks` is worth a word
SUBLANES = 8  # a TPU pads the rows of an array to so many


@dataclass(frozen=True)
class Finding:
    """One doubt: a `fact` with four texts, which are what was `given`, what is `usual`, `why`, and
    what to `type`.

    `str()` gives one line. `code` identifies the kind of doubt.
    """

    fact: Fact

    given = text_of()
    usual = text_of("usual")
    why = text_of("why")
    type = text_of("type")

    @property
    def code(self) -> str:
        return self.fact.code

    @property
    def sentence(self) -> Fact:
        """The four texts as one fact."""
        return fact("finding", given=self.given, usual=self.usual, why=self.why, type=self.type)

    def __str__(self) -> str:
        return say(self.sentence)

    def json(self) -> dict[str, Any]:
        """The fact's code and numbers, and the four texts."""
        texts = {"given": self.given, "usual": self.usual, "why": self.why, "type": self.type}
        return {"code": self.code, **texts, "numbers": dict(self.fact.numbers)}


class Findings(Displayed, list[Finding]):
    """Doubts about a recipe: a list that is shown as a table."""


@as_annotated
def check(recipe: Recipe, on: str | None = None) -> Findings:
    """The settings of `recipe` that are probably mistakes, or an empty list. Computes and reads
    nothing.

    *Arguments*: `on`: a target such as `"v3-8"` or `"a100:8"`, to check for that device too.

    Raises `RecipeError` when replicas or shards do not divide the batch, and `DeviceError` for an
    unknown target.
    """
    target = None if on is None else parse(on)
    recipe.check_batch()
    facts = recipe.warnings()
    if recipe.clock.total:
        facts += [*_schedules(recipe), *_rates(recipe)]
        if recipe.validated is not None and recipe.validated.point is not None:
            facts += _band(recipe, recipe.validated, recipe.validated.point)
        facts += [*misleading(recipe), *_device(recipe, target)]
        if recipe.task.eval is None:
            facts.append(fact("no-evaluation"))
    return Findings(Finding(one) for one in facts)


def _schedules(recipe: Recipe) -> list[Fact]:
    """The rates that never peak or never end. Only schedules whose length is not the run's can do
    that."""
    name = recipe.optimizer.lr_name
    clock = recipe.clock
    schedule = recipe.optimizer.hyper[name]
    table = schedule.table(clock).astype(np.float64)
    highest = float(table.max())
    inner = schedule
    while isinstance(inner, warmup):
        inner = as_schedule(inner.schedule)
    if inner.fits_any_run or len(table) < 2 or highest <= 0:
        return []
    last = float(table[-1])
    about = {"setting": name, "schedule": repr(schedule), "steps": len(table)}
    if last == highest and last > table[-2]:
        return [Fact("rate-still-rising", about)]
    if last >= highest / 2 and last != table[-2]:
        return [Fact("rate-ends-high", about | {"share": last / highest})]
    idle = len(table) - 1 - int(np.flatnonzero(table > 1e-5 * highest)[-1])
    if idle >= len(table) / 10:
        return [Fact("rate-idle", about | {"idle": idle})]
    call = getattr(inner.call, "__qualname__", "") if isinstance(inner, function) else ""
    # One of optax's one-cycles, which drop a warm-up of less than a step
    if call.startswith("piecewise_interpolate_schedule.") and table[0] == highest:
        return [Fact("rate-starts-at-peak", about)]
    return []


def _rates(recipe: Recipe) -> Iterator[Fact]:
    optimizer = recipe.optimizer
    clock = recipe.clock
    if optimizer.usual_rates is None:
        return
    rate, (low, high) = optimizer.hyper["lr"].highest(clock), optimizer.usual_rates
    if recipe.validated is None and not low <= rate <= high:
        kind = optimizer.describe()["optimizer"]
        clipped = min(max(rate, low), high)
        yield fact("rate-unusual", optimizer=kind, lr=rate, low=low, high=high, near=clipped)
    if "momentum" in optimizer.settings and recipe.starts_at_its_peak:
        momentum = as_schedule(optimizer.settings["momentum"]).highest(clock)
        if momentum < 1 and (sudden := rounded(rate / (1 - momentum))) > _SUDDEN:
            yield fact("rate-sudden", lr=rate, with_momentum=sudden, limit=_SUDDEN)


def _band(recipe: Recipe, validated: Validated, point: Recipe) -> Iterator[Fact]:
    """How far the settings are from where the recipe worked."""
    factor = point.optimizer.rate_factor(Fraction(recipe.batch, point.batch))
    if factor is None or type(recipe.optimizer) is not type(point.optimizer):
        return
    rate = recipe.optimizer.hyper["lr"].highest(recipe.clock)
    expected = rounded(point.optimizer.hyper["lr"].highest(point.clock) * float(factor), 3)
    if rate <= expected / _FAR or rate >= expected * _FAR:
        yield fact(
            "rate-far", lr=rate, batch=recipe.batch, expected=expected, point_batch=point.batch
        )
    now = recipe.forgetting
    then = point.forgetting
    source = validated.source
    if now is not None and then:
        low, high = validated.forgetting or (rounded(then / 2, 3), rounded(then * 2, 3))
        # Two figures are what a band has; half and twice the point itself belong to it.
        if not low * 0.98 <= now <= high * 1.02:
            steps = recipe.clock.examples / recipe.batch
            decay = as_schedule(recipe.optimizer.settings["weight_decay"]).highest(recipe.clock)
            about = {
                "lr": rate,
                "weight_decay": decay,
                "steps": steps,
                "product": now,
                "low": low,
                "high": high,
                "source": source,
            }
            if rate:
                near = rounded(then / (rate * steps), 3)
                yield Fact("forgetting-far", about | {"near": near})
            else:
                yield Fact("forgetting-zero", about)
    epochs = recipe.epochs
    usual = point.epochs
    if epochs < usual / 2:
        yield fact(
            "epochs-few", epochs=epochs, usual=usual, source=source, duration=str(point.duration)
        )


def misleading(recipe: Recipe) -> list[Fact]:
    """The settings with which an evaluation says little about the training. A run warns of them in
    its first lines too."""
    return [*_replicas(recipe), *long_average(recipe, recipe.clock.total or 0)]


def long_average(recipe: Recipe, steps: int) -> list[Fact]:
    """The average of weights, if much of it is still the net before this training after `steps`
    steps. Nothing of one that continues the average of another run."""
    if recipe.ema is None or recipe.task.start_state is not None or not steps:
        return []
    if (left := recipe.ema**steps) < _UNMOVED:
        return []
    return [
        fact(
            "ema-long",
            ema=recipe.ema,
            memory=1 / (1 - recipe.ema),
            steps=steps,
            left=left,
            near=1 - rounded(10 / (steps + 10), 1),
        )
    ]


def _replicas(recipe: Recipe) -> list[Fact]:
    batch = recipe.batch
    replicas = recipe.replicas
    point = recipe.validated and recipe.validated.point
    least = (
        min(LEAST_FOR_BATCH_NORM, point.batch // point.replicas) if point else LEAST_FOR_BATCH_NORM
    )
    group = batch // replicas
    if group >= least or not recipe.task.has_batch_norm:
        return []
    fewer = max(batch // least, 1)
    while batch % fewer:
        fewer -= 1
    return [
        fact("batch-norm-few", group=group, batch=batch, replicas=replicas, least=least, near=fewer)
    ]


def _device(recipe: Recipe, target: Target | None) -> Iterator[Fact]:
    batch = recipe.batch
    replicas = recipe.replicas
    group = batch // replicas
    if target is not None and target.chip.kind == "TPU" and group % SUBLANES:
        full = -(-group // SUBLANES) * SUBLANES
        below = full - SUBLANES  # where there are not examples enough for more
        fits = full if full * replicas <= recipe.clock.examples or not below else below
        yield fact("padding", group=group, full=full, share=1 - group / full, near=fits * replicas)
    if target is not None and recipe.precision == "bf16" and target.chip.kind == "GPU":
        chip = target.chip
        half = chip.fp16_dense_tflops
        single = chip.fp32_tflops
        if chip.bf16_dense_tflops is None and half is not None and single is not None:
            yield fact("bf16-emulated-on", target=target.name, ratio=half / single)
    blocks = recipe.block_count
    if target is None or replicas % target.devices:
        return
    if blocks >= IN_TURN * target.devices:
        devices = target.devices  # each runs many small programs in turn
        yield fact(
            "blocks-in-turn",
            blocks=blocks,
            target=target.name,
            calls=blocks // devices,
            devices=devices,
            examples=recipe.batch // blocks,
            all=recipe.batch // devices,
        )
