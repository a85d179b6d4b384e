"""The learning-rate range test: a fresh run whose rate grows with every step, and how to read its losses.

The method is Smith's (2015, arXiv:1506.01186, section 3.3; 2018, arXiv:1803.09820, section 4.1): train while
the rate grows, and see where the loss falls, levels off and rises. Smith reads the curve by eye; here rules
do, which do not depend on the units of loss and rate: a shifted or scaled curve gives the same marks.

- `valley`: the middle of the longest falling stretch, fastai's default (`callback/schedule.py`). Safe, low;
- `steep`: where the loss falls fastest against the logarithm of the rate, fastai's alternative;
- `last_stable`: the highest rate up to which the loss keeps nine tenths of its fall;
- `suggestion`: the logarithmic middle of the bottom of the curve, which goes from the knee, where the loss
  has fallen by nine tenths, to `last_stable`. Smith takes the highest rate before the curve stops falling;
  the middle keeps away from both ends, which a longer run reaches earlier than a test.

All marks use smoothed losses. A causal mean lags, and would move all marks towards higher rates. This one
weighs neighbours on both sides equally, by `exp(-distance / width)`. The weights are normalised, so its ends
are unbiased too.
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
from ..recipe.recipe import Recipe
from ..recipe.schedules import Schedule, constant, exponential
from ..words.facts import Fact, fact

FEWEST = 10  # losses that a curve needs at least
NOT_FINITE, DIVERGED = "not-finite", "diverged"
TOO_HIGH = 4.0  # a test ends when the average loss is this many times the best
_MEMORY = 0.8  # of that average: about 5 steps
_WIDTH = 1 / 8  # decades: width of the smoothing of a finished curve
_KEPT = 0.9  # share of the fall of the loss that a stable rate keeps

BEHIND = 8
"""Steps by which the host reads losses late, so that the device never waits to be asked. What is done after
a divergence, until it is read of, is thrown away: the number changes no curve."""


# ---- the recipe of a test


def tested(recipe: Recipe, low: float, high: float, steps: int) -> Recipe:
    """`recipe` for `steps` steps with rates from `low` to `high`, evenly spaced on a logarithmic axis. Other
    hyperparameters have their value at the recipe's highest rate."""
    optimizer, at = recipe.optimizer, _peak_step(recipe)
    new: dict[str, Schedule] = {
        name: constant(float(schedule.table(recipe.clock, at, at + 1)[0]))
        for name, schedule in optimizer.hyper.items()
    }
    new[optimizer.lr_name] = exponential(low, high / low, decay=f"{max(steps - 1, 1)}st")
    return dataclasses.replace(
        recipe, optimizer=optimizer.replace(**new), duration=f"{steps}st", validated=None
    )


def _peak_step(recipe: Recipe) -> int:
    """The first step at which the recipe's rate is highest."""
    table = recipe.optimizer.hyper[recipe.optimizer.lr_name].table(recipe.clock)
    return int(np.argmax(table)) if table.size else 0


# ---- its run


@dataclass
class Losses:
    """The losses of a running test, one for each step.

    *Fields:* `finite`: the losses before the first that is not finite; `ended`: why the test ended early: "",
    `DIVERGED` or `NOT_FINITE`.
    """

    finite: list[float] = field(default_factory=list)
    ended: str = ""
    _sum: float = 0.0
    _weight: float = 0.0
    _best: float = math.inf

    def take(self, loss: float) -> bool:
        """Adds the next step's loss. *Returns* whether the test should continue.

        It ends at the first loss that is not finite, or when the exponential average of the last steps
        (bias-corrected) is above 4 times its best value and above the first loss. A small loss that
        fluctuates, as for a task already learned, is not a divergence.
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
    """The losses of a fresh run of `recipe`, up to its end or until it diverges.

    *Arguments:* `session`: of `recipe`, or of a recipe that differs only in hyperparameters and so has the
    same programs; `seen`: called with the number of each step, from 1, and its loss.
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


# ---- reading the curve


def _limit(best: float) -> float:
    # The limit is 4 x the loss, but losses of densities may be negative, and 4 x that would be lower still.
    return best + (TOO_HIGH - 1) * abs(best)


@dataclass(frozen=True)
class RangeCurve:
    """A finished test. *Fields:* `rates`, `losses` and `smoothed`: `(n,)` float64, all finite, n at least 1;
    the marks `valley`, `steep`, `last_stable` and `suggestion`: rates within `rates`; `fell`: whether the
    loss fell clearly at any rate (if not, the marks mean little); `doubts`: facts about doubtful marks."""

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
    """Reads the curve of `rates`, (n,) ascending and above 0, and `losses`, (m,) with m at most n.

    Only the losses before the first that is not finite count. If they are fewer than the rates, the test was
    stopped. Raises `ValueError` if there are none.
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
    # Nothing beyond the best counts: a fall there starts from a loss that is already too high.
    falling = smoothed[: best + 1]
    slopes = np.gradient(falling, np.log(rates[: best + 1])) if best else np.zeros(1)
    return RangeCurve(
        rates=rates,
        losses=losses,
        smoothed=smoothed,
        # Clipped, since the root of a product may leave the range by rounding.
        suggestion=float(min(max(math.sqrt(rates[knee] * rates[last_stable]), rates[0]), rates[last_stable])),
        valley=float(rates[_valley(falling)]),
        steep=float(rates[np.argmin(slopes)]),
        last_stable=float(rates[last_stable]),
        fell=fell,
        doubts=tuple(doubts),
    )


def smooth(rates: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Means of `losses`, `(n,)`, weighted by the distance in decades of `rates`, `(n,)`.

    Losses are clipped at the value that ends a test, since the last one may be any number.
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


def _bottom(smoothed: np.ndarray, best: int) -> tuple[int, int]:
    """The first and last index around `best` where the loss keeps nine tenths of its fall."""
    above = smoothed > smoothed[best] + (1 - _KEPT) * (smoothed[0] - smoothed[best])
    before, after = np.flatnonzero(above[:best]), np.flatnonzero(above[best:])
    return (
        int(before[-1]) + 1 if before.size else 0,
        best + int(after[0]) - 1 if after.size else len(smoothed) - 1,
    )


def _doubts(rates: np.ndarray, smoothed: np.ndarray, best: int, held: bool) -> list[Fact]:
    """Doubts about the curve of a loss that fell. `held`: it was still low at the last rate of a whole
    test."""
    doubts = [fact("loss-held-to-the-end", lr=float(rates[-1]))] if held else []
    if smoothed[0] - smoothed[min(3, best)] > (1 - _KEPT) * (smoothed[0] - smoothed[best]):
        doubts.append(fact("loss-fell-at-once", lr=float(rates[0])))
    return doubts
