"""The time of a run by section, and its speed with quartiles."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..chips import Chip, peak_flops_per_device
from ..machine.hosts import hosts

NEGLIGIBLE = 1e-3  # seconds of code between steps
SECTIONS = ("start", "compile", "train", "wait_data", "evaluate", "checkpoint")


@dataclass
class Meter:
    """Seconds by section, and the speed of training between log steps.

    `train` is the time between log steps without evaluation and checkpoints. `wait_data` is the
    part of it in which the device was idle. `total` is the wall time since the start, including
    what belongs to no section (logging, the fingerprint). `own_code`, if present, is the time of
    the user's code in which the device waited.
    """

    batch: int
    began: float = field(default_factory=lambda: time.perf_counter())
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SECTIONS, 0.0))
    speeds: list[float] = field(default_factory=list)  # steps/s of each log interval
    earlier: float = 0.0  # seconds of the run's earlier processes
    _mark: tuple[float, int] | None = None
    _paused: float = 0.0

    @contextlib.contextmanager
    def section(self, name: str, *, unless_busy: bool = False):
        """A context whose time is added to `name`, and does not count for the training speed. With
        `unless_busy`, its time is added only if the device is idle afterwards. Then the steps that
        were queued do not count either."""
        before, pace = time.perf_counter(), hosts().pace
        pace.stepping, queued = False, len(pace.unready()) if unless_busy else 0
        try:
            yield
        finally:
            spent = time.perf_counter() - before
            if not (unless_busy and (spent < NEGLIGIBLE or pace.unready())):
                self.seconds[name] = self.seconds.get(name, 0.0) + spent
                self._paused += spent
                if self._mark is not None:
                    self._mark = self._mark[0], self._mark[1] + queued

    def mark(self, step: int, *, first: bool = False) -> float | None:
        """Records that `step` steps are done. The caller has waited for the device.

        *Returns* the steps/s since the last mark, or `None` for the first.
        """
        now, last = time.perf_counter(), self._mark
        self._mark, paused, self._paused = (now, step), self._paused, 0.0
        if first or last is None or step <= last[1]:
            return None
        spent = max(now - last[0] - paused, 1e-9)
        self.seconds["train"] += spent
        speed = (step - last[1]) / spent
        self.speeds.append(speed)
        return speed

    def summary(self) -> dict[str, Any]:
        """Median and quartiles of the speed, without the first interval (warm-up) if there are
        others."""
        steady = self.speeds[1:] if len(self.speeds) > 1 else self.speeds
        if not steady:
            return {"steps_per_second": None, "examples_per_second": None, "batch": self.batch}
        low, median, high = np.percentile(steady, [25, 50, 75])
        return {
            "batch": self.batch,
            "steps_per_second": float(median),
            "steps_per_second_quartiles": [float(low), float(high)],
            "examples_per_second": float(median * self.batch),
            "examples_per_second_quartiles": [float(low * self.batch), float(high * self.batch)],
            "intervals": len(steady),
        }

    def total(self) -> float:
        return time.perf_counter() - self.began

    @property
    def run_seconds(self) -> float:
        """The run's wall time so far, over all its processes."""
        return round(self.earlier + self.total(), 3)


def share_of_peak(
    flops_per_step_per_device: float | None,
    steps_per_second: float | None,
    chip: Chip | None,
    precision: str,
) -> float | None:
    """Returns model FLOP/s over the chip's dense peak in this precision, or `None` if either is
    unknown."""
    peak = peak_flops_per_device(chip, precision) if chip is not None else None
    if not peak or not flops_per_step_per_device or not steps_per_second:
        return None
    return flops_per_step_per_device * steps_per_second / peak
