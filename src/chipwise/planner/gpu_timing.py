"""How long the kernels of a compiled program take on a GPU: each by what it is short of, then the sum.

    seconds = sum over kernels of  count x (max(arithmetic, memory) + launch)

- *arithmetic*: a product's multiplications on whole tiles on whole waves of multiprocessors, at the
  catalogue's peak for the type that it multiplies in, times an efficiency; elementwise work at the float32
  peak;
- *memory*: bytes at the catalogue's bandwidth times an efficiency; what fits in half of L2 is found there;
- *launch*: what starting a kernel costs.

The few efficiencies are shared by all programs and chips. `benchmarks/plan_fit.py` fits them to published
training throughputs, and writes them to `efficiencies.json` with the residuals and the interval that these
justify.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from ..chips.catalogue import Chip
from .kernels import Kernel

SUSTAINED_TFLOPS = {"T4": 24.0}
"""Of 16-bit products on cards whose power limit, here 70 W, lets the clock reach its peak only for moments:
cuBLAS at 4096 x 4096 x 4096 (https://forums.developer.nvidia.com/t/about-gpu-peak-performance/264462)."""

MOST = 0.95
"""Of their peak that matrix units reach, however slow against memory they are."""

L2_SPEED = 2.0
"""How many times memory's bandwidth the second cache has, at least: what XLA's own cost model assumes."""

LAUNCH_FACTOR = 3.0
"""Up and down, of what starting kernels takes: their host does it, hosts differ, and no fitted row tells."""

_REFERENCE_BALANCE = 312e12 / 2039e9  # of an A100 with 80 GB: FLOP per byte
_SIXTEEN = ("bf16", "f16")
_SMALL = 8  # channels of a group, below which a convolution is not multiplied by matrix units


@cache
def efficiencies() -> dict[str, Any]:
    """`efficiencies.json`."""
    return json.loads(files(__package__).joinpath("efficiencies.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Ideal:
    """What one execution of each kernel would take at full efficiency: arrays with one entry for each, and
    the names of the efficiencies that apply to them."""

    arithmetic: np.ndarray
    memory: np.ndarray
    count: np.ndarray
    arithmetic_class: list[str]
    memory_class: list[str]
    balance: float  # of the chip, against that of `_REFERENCE_BALANCE`
    sustained: float  # share of the 16-bit peak that the chip's power allows


def ideal_times(kernels: Sequence[Kernel], chip: Chip) -> Ideal:
    """*Arguments:* `chip`: a GPU with every figure of `chips.gpus.NEEDED`."""
    assert chip.memory_GBps is not None and chip.fp32_tflops is not None and chip.l2_MiB is not None
    rows, classes = [], []
    for kernel in kernels:
        memory = kernel.bytes / (chip.memory_GBps * 1e9)
        if kernel.bytes <= chip.l2_MiB * 2**19:
            memory /= L2_SPEED
        if kernel.flops:
            peak, unit = _peak(chip, kernel.dtype)
            arithmetic, name = _product(kernel, chip, peak, unit)
        else:
            arithmetic, name = kernel.work / (chip.fp32_tflops * 1e12), "elementwise"
        rows.append((arithmetic, memory, kernel.count))
        classes.append((name, _memory_class(kernel, name)))
    table = np.array(rows, dtype=float).reshape(-1, 3)
    return Ideal(
        arithmetic=table[:, 0],
        memory=table[:, 1],
        count=table[:, 2],
        arithmetic_class=[c[0] for c in classes],
        memory_class=[c[1] for c in classes],
        balance=_balance(chip),
        sustained=SUSTAINED_TFLOPS.get(chip.name, math.inf) / (chip.fp16_dense_tflops or 1.0),
    )


def _memory_class(kernel: Kernel, arithmetic: str) -> str:
    if arithmetic == "depthwise":
        return "depthwise_memory"
    return "passes" if not kernel.flops else "memory"


def _product(kernel: Kernel, chip: Chip, peak: float, unit: str) -> tuple[float, str]:
    """Seconds of a product at its peak, whole tiles and waves included, and the name of its efficiency."""
    if kernel.kind == "attention" or len(kernel.shape) != 4:
        return kernel.flops / peak, "attention" if kernel.kind == "attention" else _class(kernel.kind, unit)
    m, n, k, groups = kernel.shape
    if kernel.kind == "convolution" and groups > 1 and min(n, max(1, k)) < _SMALL:
        return kernel.flops / ((chip.fp32_tflops or 0) * 1e12), "depthwise"
    step = 1 if unit == "vector" else 8 if kernel.dtype in _SIXTEEN else 4
    n, k = -(-n // step) * step, -(-k // step) * step
    cores = chip.streaming_multiprocessors or 1
    share = share_of_peak(m, n, k, groups, cores, "vector" if unit == "vector" else "tensor")
    return 2.0 * groups * m * n * k / share / peak, _class(kernel.kind, unit)


def _class(kind: str, unit: str) -> str:
    return "vector" if unit == "vector" else f"{kind}_{unit}"


def _peak(chip: Chip, dtype: str) -> tuple[float, str]:
    """FLOP/s for products of `dtype`, and the unit: "tensor" (16 bits and less), "tf32" or "vector"."""
    assert chip.fp32_tflops is not None
    vector = (chip.fp32_tflops * 1e12, "vector")
    if dtype in _SIXTEEN:
        peak = chip.fp16_dense_tflops if dtype == "f16" else chip.bf16_dense_tflops
        if peak is None:
            return vector
        # Without tensor cores (P100) float16 runs twice as fast as float32, on the same units.
        return peak * 1e12, "tensor" if has_tensor_cores(chip) else "vector"
    if dtype == "tf32" and chip.tf32_dense_tflops is not None:
        return chip.tf32_dense_tflops * 1e12, "tf32"
    if dtype.startswith("f8") or dtype in ("s8", "u8"):
        return (chip.int8_dense_tops or chip.fp32_tflops) * 1e12, "tensor"
    if dtype == "f64":
        return chip.fp32_tflops * 1e12 / (2 if chip.compute_capability in _DOUBLE else 32), "vector"
    return vector


_DOUBLE = ("6.0", "7.0", "8.0", "9.0", "10.0")
"""Compute capabilities with half as many float64 units as float32 ones; the others have a thirty-second
or less."""


def _balance(chip: Chip) -> float:
    """How fast matrix units are against memory, compared with an A100: the faster, the less is reached."""
    if not has_tensor_cores(chip) or chip.fp16_dense_tflops is None or chip.memory_GBps is None:
        return 1.0
    return chip.fp16_dense_tflops * 1e12 / (chip.memory_GBps * 1e9) / _REFERENCE_BALANCE


def has_tensor_cores(chip: Chip) -> bool:
    """Volta and later."""
    return bool(chip.compute_capability) and float(chip.compute_capability) >= 7


def split(ideal: Ideal, values: dict[str, float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of arithmetic, memory and launches of each kernel, all its executions together.

    *Arguments:* `values`: those of `efficiencies.json`, or others to try.
    """

    def units(name: str) -> float:
        return min(values[name] * ideal.balance ** -values["balance_exponent"], MOST)

    speed = {
        "matmul_tensor": min(units("matmul"), ideal.sustained),
        "matmul_tf32": min(units("matmul"), MOST),
        "convolution_tensor": min(units("convolution"), ideal.sustained),
        "convolution_tf32": units("convolution_tf32"),
        "attention": min(units("attention"), ideal.sustained),
        "vector": values["vector"],
        "depthwise": values["depthwise"],
        "elementwise": values["elementwise"],
    }
    reach = {
        "memory": values["memory"],
        "passes": values["passes"],
        "depthwise_memory": values["memory"] * values["depthwise"],
    }
    arithmetic = ideal.arithmetic / np.array([speed[name] for name in ideal.arithmetic_class])
    memory = ideal.memory / np.array([reach[name] for name in ideal.memory_class])
    launch = np.full(len(ideal.count), values["launch_seconds"])
    return arithmetic * ideal.count, memory * ideal.count, launch * ideal.count


def timed(kernels: Sequence[Kernel], chip: Chip) -> list[Kernel]:
    """The kernels with their `seconds` on `chip` and what bounds them."""
    ideal = ideal_times(kernels, chip)
    arithmetic, memory, launch = split(ideal, efficiencies()["values"])
    made = []
    for i, kernel in enumerate(kernels):
        bounds = {"compute": float(arithmetic[i]), "memory": float(memory[i]), "launch": float(launch[i])}
        seconds = max(bounds["compute"], bounds["memory"]) + bounds["launch"]
        bound = max(bounds, key=lambda name: bounds[name])
        dtype = "f32" if kernel.dtype == "tf32" and chip.tf32_dense_tflops is None else kernel.dtype
        made.append(dataclasses.replace(kernel, seconds=seconds, bound=bound, dtype=dtype))
    return made


def interval(chip: Chip, launches: float) -> tuple[float, float]:
    """The factors on a step's seconds between which nine of ten measurements should lie: from the
    cross-validated residuals.

    Wider on chips without a measurement, a guess on GPUs before Volta; of `launches`, a share of the time,
    `LAUNCH_FACTOR` up and down.
    """
    fitted = efficiencies()
    kind = "known_chip" if chip.name in fitted["chips"] else "other"
    low, high = fitted["interval_90"][kind if has_tensor_cores(chip) else "unlike"]
    rest = 1 - launches
    return rest * low + launches / LAUNCH_FACTOR, rest * high + launches * LAUNCH_FACTOR


# ---- how much of a GPU a product can occupy: whole tiles on whole waves of multiprocessors

# Rows, columns, and the share of the peak that a multiprocessor reaches with such tiles: smaller ones load
# more for each multiplication, which matters less where multiplications are slow. Chosen, not measured; tiles
# and waves as in https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/.
_TILES = {
    "tensor": (
        (256, 128, 1.0),
        (128, 128, 0.95),
        (128, 64, 0.85),
        (64, 64, 0.7),
        (64, 32, 0.5),
        (32, 32, 0.35),
    ),
    "vector": ((128, 128, 1.0), (128, 64, 0.97), (64, 64, 0.92), (64, 32, 0.8), (32, 32, 0.65)),
}
# Summands' worth of time to fill and to empty a tile's pipeline.
_FILL = {"tensor": 48, "vector": 8}
_SPLITS = (1, 2, 4, 8, 16, 32, 64)
_SHORTEST = 128  # summands, below which a sum is not split


@cache
def share_of_peak(m: int, n: int, k: int, groups: int, multiprocessors: int, unit: str) -> float:
    """Of `groups` products `(m, k) @ (k, n)`: useful over possible multiplications, with the best of a few
    tile sizes and of ways to split the sum over several multiprocessors. Above 0, below 1.

    *Arguments:* `unit`: "tensor" or "vector", what multiplies.
    """
    best = math.inf
    for high, wide, quality in _TILES[unit]:
        for rows, columns in {(high, wide), (wide, high)}:
            tiles = groups * math.ceil(m / rows) * math.ceil(n / columns)
            for parts in _SPLITS:
                if parts > 1 and k / parts < _SHORTEST:
                    break
                waves = math.ceil(tiles * parts / multiprocessors)
                best = min(best, waves * rows * columns * (k / parts + _FILL[unit]) / quality)
    return groups * m * n * k / (best * multiprocessors)
