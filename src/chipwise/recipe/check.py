"""`cw.check(recipe)`: settings that are probably not meant, each with what is usual, why, and what to type.

It starts from `recipe.warnings()`, which says what a recipe cannot do, and adds what rarely works. What is
usual comes from the recipe's own `validated` point, moved to the given batch by the rules of
`chipwise.transfer`, and where a recipe has none from bands that hold for most nets.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ..chips.targets import Target, parse
from ..engine.layout import exact_counts
from ..errors import RecipeError
from ..study.move.limits import HIGHEST_ADAM, LEAST_FOR_BATCH_NORM, has_batch_norm, starts_at_its_peak
from ..study.move.rules import WANG, forgetting, rate_factor
from ..study.move.values import peak, rounded
from .duration import Clock
from .optimizers import adam, adamw, sgd
from .recipe import Recipe, Validated
from .schedules import as_schedule, exponential, function, warmup

_FAR = 10.0  # times the rate that the rules give
_USUAL_RATES = {"sgd": (1e-3, 3.0), "adam": (1e-6, HIGHEST_ADAM), "adamw": (1e-6, HIGHEST_ADAM)}
_SUDDEN = 2.0  # SGD's rate over (1 - momentum) from which a run should not start with it
_SUBLANES = 8  # a TPU pads the rows of an array to so many


@dataclass(frozen=True)
class Finding:
    """One doubt: what was `given`, what is `usual`, `why`, and what to `type`. `str()` is one line."""

    given: str
    usual: str
    why: str
    type: str

    def __str__(self) -> str:
        return f"{self.given}; usual: {self.usual}, because {self.why}. Type {self.type}."


def check(recipe: Recipe, on: str | None = None) -> list[Finding]:
    """What is probably not meant in `recipe`; empty when nothing was found. Nothing is computed or read.

    *Arguments*: `on`: a target such as `"v3-8"` or `"a100:8"`, for doubts about that device; without it, the
    TPU's rules are checked for any.

    Raises `RecipeError` when the replicas do not divide the batch, `DeviceError` for an unknown target.
    """
    target = None if on is None else parse(on)
    if recipe.batch % recipe.replicas:
        near = recipe.batch // recipe.replicas * recipe.replicas or recipe.replicas
        raise RecipeError(
            f"batch={recipe.batch} is not divisible by replicas={recipe.replicas}: try --set batch={near}."
        )
    found = [_sentence(text) for text in recipe.warnings()]
    if not recipe.clock.total:
        return found
    found += _schedules(recipe)
    found += _rates(recipe)
    if recipe.validated is not None and recipe.validated.point is not None:
        found += _band(recipe, recipe.validated, recipe.validated.point)
    found += _replicas(recipe)
    found += _device(recipe, target)
    if recipe.task.eval is None:
        why = "the training loss does not tell learning from memorising"
        given = "the task has no evaluation examples"
        found.append(Finding(given, "some held out", why, "eval=... in its cw.Task"))
    return found


def _sentence(text: str) -> Finding:
    """A sentence of `recipe.warnings()`, which says what cannot happen in this run."""
    given = text.rstrip(".")
    if text.startswith("duration="):
        return Finding(given, "at least one step", "nothing is trained", "--set duration=1ep")
    if text.startswith("batch="):
        why = "a step that holds an example twice counts it twice"
        return Finding(given, "a batch below the training set", why, "a smaller --set batch=...")
    why = "what a schedule does after the last step never happens"
    return Finding(
        given, "a schedule that fits the run", why, "a longer --set duration=..., or lengths in percent"
    )


def _schedules(recipe: Recipe) -> list[Finding]:
    """Rates that never peak or never end. Only schedules whose length is not the run's can do that."""
    name, clock = recipe.optimizer.lr_name, recipe.clock
    schedule = recipe.optimizer.hyper[name]
    free = schedule
    while isinstance(free, warmup):
        free = as_schedule(free.schedule)
    table = schedule.table(clock).astype(np.float64)
    highest = float(table.max())
    if not isinstance(free, function | exponential) or len(table) < 2 or highest <= 0:
        return []
    last, steps = float(table[-1]), len(table)
    fix = 'a schedule of this library, which knows the run, such as one_cycle(0.4, warmup="5ep")'
    shown = f"{name}={schedule!r}"
    if last == highest and last > table[-2]:
        given = f"{shown} still rises at the last of {steps} steps"
        return [Finding(given, "a peak within the run", "its length is longer than the run's", fix)]
    if last >= highest / 2 and last != table[-2]:
        given = f"{shown} ends at {last / highest:.0%} of its peak and still falling"
        return [Finding(given, "an end below a tenth", "its length is longer than the run's", fix)]
    idle = steps - 1 - int(np.flatnonzero(table > 1e-5 * highest)[-1])
    if idle >= steps / 10:
        given = f"{shown} is 0 for the last {idle} of {steps} steps"
        return [
            Finding(
                given, "an end at the end", "its length is shorter than the run's, the rest is wasted", fix
            )
        ]
    if isinstance(free, function) and "piecewise_interpolate" in repr(free) and table[0] == highest:
        given = f"{shown} starts at its peak"
        why = "optax's one-cycle drops a warm-up of less than a step without a word"
        return [Finding(given, "a rise from a lower rate", why, fix)]
    return []


def _rates(recipe: Recipe) -> list[Finding]:
    optimizer, clock = recipe.optimizer, recipe.clock
    if not isinstance(optimizer, sgd | adam | adamw):
        return []
    kind, rate = type(optimizer).__name__, peak(optimizer.lr, clock)
    low, high = _USUAL_RATES[kind]
    found = []
    if recipe.validated is None and not low <= rate <= high:
        why = "the rate multiplies a mean gradient here, never a sum over the batch"
        found.append(
            Finding(
                f"{kind}'s peak lr={rate:g}",
                f"{low:g} to {high:g}",
                why,
                f"--set lr={_clip(rate, low, high):g}",
            )
        )
    if isinstance(optimizer, sgd) and starts_at_its_peak(optimizer.hyper["lr"], recipe):
        sudden = rounded(rate / (1 - peak(optimizer.momentum, clock)))
        if sudden > _SUDDEN:
            given = f"lr={rate:g} from the first step, {sudden:.3g} with momentum"
            why = "gradients are largest at the start (Goyal et al. 2017, arXiv:1706.02677, section 2.2)"
            found.append(
                Finding(given, f"a warm-up above {_SUDDEN:g}", why, 'lr=cw.warmup(..., "5%") in the recipe')
            )
    return found


def _band(recipe: Recipe, validated: Validated, point: Recipe) -> list[Finding]:
    """How far the settings are from where the recipe worked."""
    found: list[Finding] = []
    kinds = type(recipe.optimizer), type(point.optimizer)
    if kinds[0] is not kinds[1] or not isinstance(recipe.optimizer, sgd | adam | adamw):
        return found
    assert isinstance(point.optimizer, sgd | adam | adamw)
    rate = peak(recipe.optimizer.lr, recipe.clock)
    factor = rate_factor(point.optimizer, Fraction(recipe.batch, point.batch))
    expected = rounded(peak(point.optimizer.lr, point.clock) * float(factor), 3)
    if rate <= expected / _FAR or rate >= expected * _FAR:
        given = f"peak lr={rate:g} at batch {recipe.batch}"
        why = f"that is the rate it worked with at batch {point.batch}, moved here by the rule"
        found.append(Finding(given, f"about {expected:g}", why, f"--set lr={expected:g}"))
    now, then = forgetting(recipe), forgetting(point)
    if now is not None and then:
        low, high = validated.forgetting or (rounded(then / 2, 3), rounded(then * 2, 3))
        # Two figures are what a band has; half and twice the point itself belong to it.
        if not low * 0.98 <= now <= high * 1.02:
            assert isinstance(recipe.optimizer, sgd | adamw)
            decay = peak(recipe.optimizer.weight_decay, recipe.clock)
            steps = recipe.clock.examples / recipe.batch
            given = f"peak lr {rate:g} × weight_decay {decay:g} × {steps:.4g} steps an epoch = {now:.3g}"
            why = f"it sets how fast weights forget ({WANG}), and there the recipe worked: {validated.source}"
            fix = f"--set weight_decay={rounded(then / (rate * steps), 3):g}" if rate else "--set lr=..."
            found.append(Finding(given, f"{low:g} to {high:g}", why, fix))
    epochs = [_epochs(r) for r in (recipe, point)]
    if epochs[0] < epochs[1] / 2:
        given = f"{epochs[0]:.3g} epochs"
        why = f"there the recipe worked: {validated.source}"
        found.append(
            Finding(
                given,
                f"{epochs[1]:.3g}",
                why,
                f"--set duration={point.duration}, if it is not for trying out",
            )
        )
    return found


def _replicas(recipe: Recipe) -> list[Finding]:
    group = recipe.batch // recipe.replicas
    point = recipe.validated and recipe.validated.point
    least = min(LEAST_FOR_BATCH_NORM, point.batch // point.replicas) if point else LEAST_FOR_BATCH_NORM
    if group >= least or not has_batch_norm(recipe.task):
        return []
    fewer = max(recipe.batch // least, 1)
    while recipe.batch % fewer:
        fewer -= 1
    given = (
        f"batch norm over {group} example{'s' * (group != 1)} a replica ({recipe.batch} / {recipe.replicas})"
    )
    why = "statistics over few are noise (Wu & He 2018, arXiv:1803.08494, figure 1)"
    return [Finding(given, f"{least} or more", why, f"--set replicas={fewer}")]


def _device(recipe: Recipe, target: Target | None) -> list[Finding]:
    found = []
    group, replicas = recipe.batch // recipe.replicas, recipe.replicas
    if (target is None or target.chip.kind == "TPU") and group % _SUBLANES:
        full = -(-group // _SUBLANES) * _SUBLANES
        given = f"{group} example{'s' * (group != 1)} a replica"
        why = f"a TPU pads them to {full}, and {1 - group / full:.0%} of its work is on padding"
        usual = "a multiple of 8, best of 128, on a TPU"
        below = full - _SUBLANES  # where there are not examples enough for more
        fits = full if full * replicas <= recipe.clock.examples or not below else below
        found.append(Finding(given, usual, why, f"--set batch={fits * replicas}"))
    if target is None or target.devices == 1:
        return found
    if replicas % target.devices:
        works = max(n for n in exact_counts(replicas) if n <= target.devices)
        given = f"replicas={replicas} on the {target.devices} devices of {target.name}"
        why = f"devices share replicas evenly, and here {works} of {target.devices} would work"
        usual = f"a multiple of {target.devices}"
        fix = -(-replicas // target.devices) * target.devices
        batch = "" if recipe.batch % fix == 0 else f" --set batch={-(-recipe.batch // fix) * fix}"
        found.append(Finding(given, usual, why, f"--set replicas={fix}{batch}"))
    return found


def _epochs(recipe: Recipe) -> float:
    clock: Clock = recipe.clock
    return (clock.total or 0) * clock.batch / clock.examples


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
