"""Round numbers along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDEST = 1e100


@dataclass(frozen=True)
class Tick:
    """A number on an axis: where it stands, and how it is written there."""

    at: float
    label: str


def spread_out(values: Sequence[float], factor: float) -> bool:
    """Whether values are all positive and more than a factor apart, so that a logarithmic axis shows them
    better; not where the factor is beyond what such an axis can be cut into."""
    return bool(values) and min(values) > 0 and factor < max(values) / min(values) < _WIDEST


def steps(low: float, high: float, most: int) -> list[float]:
    """At most about `most` multiples of 1, 2 or 5 times a power of ten within an interval."""
    if not high > low:
        return [low]
    raw = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def log_steps(low: float, high: float, most: int) -> list[float]:
    """Powers of ten within an interval above 0, with 2 and 5 between where there is room, or every few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        found = [d * 10.0**p for p in powers for d in digits if low <= d * 10.0**p <= high]
        if len(found) <= most:
            return found
    return found[:: math.ceil(len(found) / most)]
