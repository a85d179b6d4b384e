"""Times the kernels of a program for a TPU from its compiler's cycles, with corrections.

The compiler states cycles to choose among its own implementations. Programs of libtpu 0.0.42 for
chips from v3 to 7x show:

- **Products** agree with published times: for 1,024 to 8,192 rows and columns on a v6e and a 7x
  they are 0.82 to 1.28 of the measured time.
- **Memory traffic counts four bytes for each element**, whatever its size: `x + 1` takes as many
  cycles for bfloat16 as for float32. That is 75 to 94 % of the memory's bandwidth for float32, and
  half of that for bfloat16. A v6e was measured at 83 % for bfloat16. Sums reach 17 to 43 %. So
  kernels that only move data are timed by their bytes, at the published speed of copies.
- **Products with few operations for their bytes** (the 1 x 1 convolutions of ResNet-50 beside its
  batch norm, attention whose weights are stored) have the cycles of their traffic, counted in the
  same way. So they are timed by their bytes too, which takes a tenth off ResNet-50 on a v3 and a
  third on a v6e, whose arithmetic is faster for its bandwidth.
- **Transposing an array** (`hlo.operations.turned`) uses a separate unit, at 39 to 62 elements per
  cycle of a core on every chip. Such kernels keep the compiler's cycles.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from importlib.resources import files

from ..chips.catalogue import Chip
from .hlo.kernel import Kernel

MEMORY_SHARE, START_SECONDS = 0.86, 1.4e-6
"""The share of the bandwidth that a copy reaches, and its additional seconds. They come from
thirteen sizes, 2 MB to 8 GB, that Google published for a 7x. They predict a v6e's copy of 32 MB to
1 % (AI-Hypercomputer/tpu-recipes@c8cfe2f, `microbenchmarks/ironwood/hbm/hbm.md`,
`microbenchmarks/README.md`)."""

ARITHMETIC = 1.75
"""An elementwise kernel is bound by arithmetic, such as erf, if the compiler's cycles are this many
times the cycles that its elements in float32 take at full bandwidth. Kernels that only move data
have 1.07 to 1.34 times."""

PRODUCTS = ("matmul", "convolution")
FULL = 0.5
"""The least share of the peak that a product reaches. If its bytes take longer than that, memory
bounds it."""

_HALF = ("bf16", "f16")
_BYTE = ("pred", "s8", "u8")

_FITTED = json.loads(files(__package__).joinpath("allowances.json").read_text(encoding="utf-8"))[
    "tpu"
]
FACTORS: dict[str, list[float]] = _FITTED["interval_90"]
"""The factors on a predicted time between which nine of ten measurements should be, for a
"known_chip" of the fit (`benchmarks/plan_fit_tpu.py`), and for an "other" one."""


def timed(kernels: Sequence[Kernel], chip: Chip, passes: int = 1) -> list[Kernel]:
    """Returns the kernels with their seconds on `chip`. Products were compiled in one pass and run
    in `passes`."""
    bandwidth = _bandwidth(chip)
    peak = _peak(chip, passes)
    result = []
    for kernel in kernels:
        seconds = kernel.seconds
        bound = kernel.bound
        moving = kernel.count * (START_SECONDS + kernel.bytes / (MEMORY_SHARE * bandwidth))
        if kernel.kind in PRODUCTS:
            seconds *= passes
            if kernel.flops / (FULL * peak) < kernel.bytes / bandwidth and moving < seconds:
                seconds = moving
                bound = "memory"
        elif _moves(kernel, bandwidth):
            seconds = min(seconds, moving)
        elif kernel.kind == "elementwise" and kernel.bytes:
            bound = "compute"
        result.append(dataclasses.replace(kernel, seconds=seconds, bound=bound))
    return result


def _moves(kernel: Kernel, bandwidth: float) -> bool:
    """Whether the time of `kernel` depends only on memory."""
    if kernel.bound != "memory" or not kernel.bytes:
        return False
    each = (
        2
        if kernel.dtype in _HALF
        else 4
        if kernel.dtype in _BYTE or kernel.dtype.startswith("f8")
        else 1
    )
    as_counted = kernel.count * kernel.bytes * each / bandwidth
    return kernel.kind in ("reduce", "copy") or (
        kernel.kind == "elementwise" and kernel.seconds < ARITHMETIC * as_counted
    )


def interval(kernels: Sequence[Kernel], chip: Chip, passes: int = 1) -> tuple[float, float]:
    """The factors on seconds between which nine of ten measurements should be, from `timed`
    kernels.

    The upper factor is fitted. The lower factor is the fitted one, or half of the (logarithmic) way
    to the chip's bandwidth and peak if that is lower. The further the compiler's estimate is above
    that bound, the less certain it is.
    """
    bandwidth = _bandwidth(chip)
    peak = _peak(chip, passes)
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
    """The memory bandwidth of one JAX device, in bytes a second."""
    return (chip.memory_GBps or math.inf) * 1e9 / chip.jax_devices_per_chip


def _peak(chip: Chip, passes: int) -> float:
    """The FLOP/s of one JAX device, for products in `passes`."""
    return (chip.bf16_dense_tflops or math.inf) * 1e12 / chip.jax_devices_per_chip / passes
