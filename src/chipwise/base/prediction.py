"""A predicted number with its interval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """A prediction, and the interval that should contain nine of ten measurements."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, factor: float) -> Range:
        """The range from `value / factor` to `value * factor`."""
        return cls(value, value / factor, value * factor)

    def times(self, factor: float) -> Range:
        return Range(self.value * factor, self.low * factor, self.high * factor)

    def plus(self, other: Range) -> Range:
        return Range(self.value + other.value, self.low + other.low, self.high + other.high)

    def inverse(self, numerator: float) -> Range:
        """`numerator / self`, with exchanged ends."""
        return Range(numerator / self.value, numerator / self.high, numerator / self.low)

    def overlaps(self, other: Range) -> bool:
        return self.low <= other.high and other.low <= self.high
