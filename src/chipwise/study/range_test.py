"""The learning-rate range test: a fresh run whose rate grows with every step, and what its losses say.

The idea is Smith's (2015, arXiv:1506.01186, section 3.3; 2018, arXiv:1803.09820, section 4.1): train while
the rate grows, and look where the loss falls, holds and breaks. Looking is made a rule here, in which neither
the unit of the loss nor that of the rate has a part: a curve shifted or stretched reads the same.

- `valley`: the middle of the longest falling stretch, fastai's default (`callback/schedule.py`). Safe, low;
- `steep`: where the loss falls fastest against the logarithm of the rate, fastai's other one;
- `last_stable`: the highest rate up to which the loss keeps nine tenths of what it has fallen;
- `suggestion`: the middle, in the logarithm, of the bottom of the curve: from where nine tenths of the fall
  are done, the knee, to `last_stable`. Smith takes a highest rate from where the curve stops falling, by
  eye; the middle is as far as can be from both ends, which a longer run meets earlier than a test.

Everything works on smoothed losses. A causal mean lags: it would move all marks towards higher rates.
This one weighs neighbours on both sides alike, by `exp(-distance / width)`, over those that there are, so
its ends are unbiased too.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ..engine.session import Session
from ..errors import RecipeError, near
from ..recipe.optimizer import Optimizer
from ..recipe.recipe import Recipe
from ..recipe.schedule import Schedule, as_schedule, constant, rounded
from ..recipe.schedules import exponential, piecewise
from ..words.facts import Fact, fact

FEWEST = 10  # losses from which a curve can be read at all
NOT_FINITE, DIVERGED = "not-finite", "diverged"
TOO_HIGH = 4.0  # times the best loss so far, on average, ends a test
_MEMORY = 0.8  # of the average that watches a test: about 5 steps
_WIDTH = 1 / 8  # of a decade: how far the smoothing of a finished curve reaches
_KEPT = 0.9  # of the fall of the loss, which a stable rate keeps

BEHIND = 8
"""Steps by which the host reads losses late, so that the device never waits to be asked. What is done after
a divergence, until it is read of, is thrown away: the number changes no curve."""


# ---- the recipe of a test


def tested(
    recipe: Recipe, low: float, high: float, steps: int, held: dict[str, float] | None = None
) -> Recipe:
    """`recipe` for `steps` steps with rates from `low` to `high`, evenly spaced on a logarithmic axis.

    Its other hyperparameters keep the value that they have where the recipe's rate is highest, or that of
    `held`. Each is an input of the step even where it is 0, so that all tests share the same programs.

    Raises `RecipeError` when `held` names something that is not a number of the optimizer.
    """
    optimizer, at = recipe.optimizer, _peak_step(recipe)
    for name in held or {}:
        hyperparameter(optimizer, name)
    values = {name: _at(schedule, recipe, at) for name, schedule in optimizer.hyper.items()} | (held or {})
    # A constant momentum or decay of exactly 0 would be left out of the program.
    new: dict[str, Schedule] = {
        name: constant(value) if value else piecewise({"0st": 0.0}) for name, value in values.items()
    }
    new[optimizer.lr_name] = exponential(low, high / low, decay=f"{max(steps - 1, 1)}st")
    return dataclasses.replace(
        recipe, optimizer=optimizer.replace(**new), duration=f"{steps}st", validated=None
    )


def value_of(recipe: Recipe, name: str) -> float:
    """A hyperparameter where the recipe's rate is highest, to the seven digits of float32.

    Raises `RecipeError` as `hyperparameter` does.
    """
    schedule = as_schedule(hyperparameter(recipe.optimizer, name), name)
    return rounded(_at(schedule, recipe, _peak_step(recipe)), 7)


def hyperparameter(optimizer: Optimizer, name: str) -> Any:
    """The setting `name` of an optimizer, a number or schedule, which a test may hold at other values.

    Raises `RecipeError` when it has none, or when it is the rate.
    """
    given = optimizer.settings
    known: list[str] = [n for n in ("momentum", "weight_decay", "b1", "b2") if n in given]
    known += [n for n in optimizer.hyper if n not in known and n != optimizer.lr_name]
    if name not in known:
        kind = optimizer.describe()["optimizer"]
        hint = "b1" if name == "momentum" and "b1" in known else near(name, known)  # Adam's momentum
        raise RecipeError("no-second-setting", optimizer=kind, name=name, hint=hint, known=known)
    return given[name]


def _peak_step(recipe: Recipe) -> int:
    """The first step at which the recipe's rate is highest."""
    table = recipe.optimizer.hyper[recipe.optimizer.lr_name].table(recipe.clock)
    return int(np.argmax(table)) if table.size else 0


def _at(schedule: Schedule, recipe: Recipe, step: int) -> float:
    return float(schedule.table(recipe.clock, step, step + 1)[0])


# ---- its run


@dataclass
class Losses:
    """The losses of a test as they come in, one a step.

    *Fields:* `finite`, those before the first that is not; `ended`, why no more are asked for: "", `DIVERGED`
    or `NOT_FINITE`.
    """

    finite: list[float] = field(default_factory=list)
    ended: str = ""
    _sum: float = 0.0
    _weight: float = 0.0
    _best: float = math.inf

    def take(self, loss: float) -> bool:
        """Notes the next step's loss; whether the test should go on.

        It ends at the first loss that is not finite, and where the average of the last steps, an
        exponential one without the bias of its start, is above 4 times the best that it was and above the
        first loss. A small loss that fluctuates, as for a task already learned, is not a divergence.
        """
        if not math.isfinite(loss):
            self.ended = NOT_FINITE
            return False
        self.finite.append(loss)
        self._sum = _MEMORY * self._sum + (1 - _MEMORY) * loss
        self._weight = _MEMORY * self._weight + (1 - _MEMORY)
        average = self._sum / self._weight
        self._best = min(self._best, average)
        if average > max(_limit(self._best), self.finite[0]):
            self.ended = DIVERGED
        return not self.ended


def run(
    session: Session, recipe: Recipe, seen: Callable[[int, float], None] = lambda step, loss: None
) -> Losses:
    """What a fresh run of `recipe` comes to, up to its end or to where it diverges.

    *Arguments:* `session` is of `recipe`, or of one that differs from it in hyperparameters alone, whose
    programs it then shares; `seen` is called with the number of each step whose loss was read, from 1, and
    that loss.
    """
    losses = Losses()
    waiting: deque[Any] = deque()

    def taken() -> bool:
        loss = _mean(waiting.popleft())
        going = losses.take(loss)
        seen(len(losses.finite) + (losses.ended == NOT_FINITE), loss)
        return going

    session.begin(recipe=recipe)
    while session.step < session.total:
        session.advance()
        waiting.append(session.drain()["loss"])
        if len(waiting) > min(BEHIND, session.ahead) and not taken():
            return losses
    while waiting and taken():
        pass
    return losses


def _mean(loss: Any) -> float:
    """The mean over one step's examples. Waits for that step."""
    total, count = jax.device_get((loss.total, loss.count))
    with np.errstate(all="ignore"):
        return float(np.float64(total) / np.float64(count))


# ---- what its losses say


def _limit(best: float) -> float:
    # 4 x a positive loss; a likelihood of continuous values may be below 0, and 4 x that is lower still.
    return best + (TOO_HIGH - 1) * abs(best)


@dataclass(frozen=True)
class RangeCurve:
    """A finished test. *Fields:* `rates`, `losses` and `smoothed`, `(n,)` float64, all finite, n at least 1;
    the marks, rates within `rates`; `fell`, whether the loss fell clearly at any rate, without which the
    marks mean little; `doubts`, what makes them doubtful."""

    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    suggestion: float
    valley: float
    steep: float
    last_stable: float
    fell: bool
    doubts: tuple[Fact, ...] = ()


def read(rates: np.ndarray, losses: np.ndarray) -> RangeCurve:
    """The curve through `rates`, (n,) ascending and above 0, and `losses`, (m,) with m at most n.

    Of the losses those before the first that is not finite count. Fewer of them than rates are a test that
    was stopped. Raises `ValueError` when there is none.
    """
    finite = np.isfinite(losses)
    n = len(losses) if finite.all() else int(np.argmin(finite))
    if not n:
        raise ValueError("a curve needs at least one finite loss")
    stopped = n < len(rates)
    rates, losses = np.asarray(rates[:n], np.float64), np.asarray(losses[:n], np.float64)
    smoothed = smooth(rates, losses)
    best = int(np.argmin(smoothed))
    knee, last_stable = _bottom(smoothed, best)
    noise = float(np.std((losses - smoothed)[: best + 1]))
    fall = float(smoothed[0] - smoothed[best])
    fell = n >= FEWEST and fall > 2 * noise
    doubts = [fact("loss-never-fell", fall=fall, noise=noise)]
    if fell:
        doubts = _doubts(rates, smoothed, best, held=last_stable == n - 1 and not stopped)
    # Nothing is looked for beyond the best: what falls there falls from where it should not be.
    valley = float(rates[_valley(smoothed[: best + 1])])
    steep = float(rates[_steep(np.log(rates[: best + 1]), smoothed[: best + 1])])
    return RangeCurve(
        rates=rates,
        losses=losses,
        smoothed=smoothed,
        # Held in its range: the root of a product may leave it by a rounding.
        suggestion=float(min(max(math.sqrt(rates[knee] * rates[last_stable]), rates[0]), rates[last_stable])),
        valley=valley,
        steep=steep,
        last_stable=float(rates[last_stable]),
        fell=fell,
        doubts=tuple(doubts),
    )


def smooth(rates: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Weighted means of `losses`, `(n,)`, by their distance in decades of `rates`, `(n,)`.

    A loss above what ends a test counts as that much: the last one may be any number.
    """
    best = float(np.min(losses))
    capped = np.minimum(losses, max(_limit(best), float(losses[0])))
    decades = np.log10(rates)
    weights = np.exp(-np.abs(decades[:, None] - decades[None, :]) / _WIDTH)
    return (weights @ (capped - best)) / weights.sum(axis=1) + best


def _valley(falling: np.ndarray) -> int:
    """The middle one of the longest strictly decreasing subsequence."""
    n = len(falling)
    length, before = np.ones(n, np.int64), np.full(n, -1, np.int64)
    for i in range(1, n):
        higher = np.flatnonzero(falling[:i] > falling[i])
        if higher.size:
            before[i] = higher[np.argmax(length[higher])]
            length[i] = length[before[i]] + 1
    at = int(np.argmax(length))
    for _ in range(int(length[at]) // 2):
        at = int(before[at]) if before[at] >= 0 else at
    return at


def _steep(logs: np.ndarray, falling: np.ndarray) -> int:
    """Where the slope is most negative; the first rate when there is one only."""
    return int(np.argmin(np.gradient(falling, logs))) if len(falling) > 1 else 0


def _bottom(smoothed: np.ndarray, best: int) -> tuple[int, int]:
    """The first and the last place around `best` where nine tenths of the fall are kept."""
    above = smoothed > smoothed[best] + (1 - _KEPT) * (smoothed[0] - smoothed[best])
    before, after = np.flatnonzero(above[:best]), np.flatnonzero(above[best:])
    return (
        int(before[-1]) + 1 if before.size else 0,
        best + int(after[0]) - 1 if after.size else len(smoothed) - 1,
    )


def _doubts(rates: np.ndarray, smoothed: np.ndarray, best: int, held: bool) -> list[Fact]:
    """Of a loss that fell. `held`: it still did at the last rate of a whole test."""
    doubts = [fact("loss-held-to-the-end", lr=float(rates[-1]))] if held else []
    if smoothed[0] - smoothed[min(3, best)] > (1 - _KEPT) * (smoothed[0] - smoothed[best]):
        doubts.append(fact("loss-fell-at-once", lr=float(rates[0])))
    return doubts
