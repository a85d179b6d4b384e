"""Reads the curve of a learning-rate range test: losses over rates that grow evenly in their
logarithm.

Smith (2015, arXiv:1506.01186, section 3.3) reads it by eye. Here a rule reads it. The rule does not
depend on the units of loss and rate: a shifted or scaled curve gives the same rates.

- `last_stable`: the highest rate up to which the loss keeps nine tenths of its fall.
- `suggestion`: the logarithmic middle of the bottom of the curve. The bottom goes from the knee,
  where the loss has fallen by nine tenths, to `last_stable`. Smith takes the highest rate before
  the curve stops falling. The middle keeps away from both ends, which a longer run reaches earlier
  than a test.

Both use smoothed losses. A causal mean lags, and would move both towards higher rates. This one
weighs neighbours on both sides equally, by `exp(-distance / width)`. The weights are normalised, so
its ends are unbiased too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..base import Fact, fact

FEWEST = 10  # losses that a curve needs at least
TOO_HIGH = 4.0  # a loss that is this many times the best is out of hand
_WIDTH = 1 / 8  # decades: width of the smoothing
_KEPT = 0.9  # share of the fall of the loss that a stable rate keeps


@dataclass(frozen=True)
class RangeCurve:
    """A finished test. `rates`, `losses` and `smoothed` are `(n,)` float64, all finite, with n at
    least 1. `suggestion` and `last_stable` are within `rates`."""

    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    suggestion: float
    last_stable: float
    fell: bool
    """Whether the loss fell clearly at any rate. If not, `suggestion` and `last_stable` mean
    little."""
    doubts: tuple[Fact, ...] = ()
    """Facts about doubtful rates."""


def limit(best: float) -> float:
    """The loss that is too high. Losses of densities may be negative, and 4 times such a loss would
    be even lower."""
    return best + (TOO_HIGH - 1) * abs(best)


def read(rates: np.ndarray, losses: np.ndarray) -> RangeCurve:
    """Reads the curve of `rates`, (n,) ascending and above 0, and `losses`, (m,) finite, with m
    from 1 to n. Fewer losses than rates mean that the test was stopped."""
    n = len(losses)
    stopped = n < len(rates)
    rates = np.asarray(rates[:n], np.float64)
    losses = np.asarray(losses, np.float64)
    smoothed = smooth(rates, losses)
    best = int(np.argmin(smoothed))
    fall = float(smoothed[0] - smoothed[best])
    noise = float(np.std((losses - smoothed)[: best + 1]))
    above = smoothed > smoothed[best] + (1 - _KEPT) * fall
    before = np.flatnonzero(above[:best])
    after = np.flatnonzero(above[best:])
    knee = rates[before[-1] + 1] if before.size else rates[0]
    last_stable = float(rates[best + after[0] - 1] if after.size else rates[-1])
    fell = n >= FEWEST and fall > 2 * noise
    doubts = []
    if not fell:
        doubts.append(fact("loss-never-fell", fall=fall, noise=noise))
    elif not after.size and not stopped:
        doubts.append(fact("loss-held-to-the-end", lr=last_stable))
    if fell and smoothed[0] - smoothed[min(3, best)] > (1 - _KEPT) * fall:
        doubts.append(fact("loss-fell-at-once", lr=float(rates[0])))
    # Clipped, since the root of a product may leave the range by rounding.
    suggestion = float(np.clip(math.sqrt(knee * last_stable), rates[0], last_stable))
    return RangeCurve(rates, losses, smoothed, suggestion, last_stable, fell, tuple(doubts))


def smooth(rates: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Means of `losses`, `(n,)`, weighted by the distance in decades of `rates`, `(n,)`.

    Losses are clipped at the value that ends a test, since the last one may be any number.
    """
    best = float(np.min(losses))
    capped = np.minimum(losses, max(limit(best), float(losses[0])))
    decades = np.log10(rates)
    weights = np.exp(-np.abs(decades[:, None] - decades[None, :]) / _WIDTH)
    return (weights @ (capped - best)) / weights.sum(axis=1) + best
