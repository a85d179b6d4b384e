"""Times the kernels of a compiled program on a GPU, each by its bottleneck, and adds them up.

    seconds = sum over kernels of  count x (max(arithmetic, memory) + launch)

- *arithmetic*: a product's multiplications, in whole tiles on whole waves of multiprocessors, at
  the rate measured on that chip for large products of its type, times an efficiency. Elementwise
  work has the float32 rate of the vector units. Depthwise convolutions have the rate at which
  multiprocessors load operands.
- *memory*: the bytes at the catalogue's bandwidth, times an efficiency. Arrays that fit in half of
  L2 are read from there.
- *launch*: the cost of starting a kernel.

All programs and chips share the few efficiencies. `benchmarks/plan_fit.py` fits them to published
training throughputs, and writes them to `efficiencies.json` with the residuals and the resulting
interval.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from ..chips.catalogue import Chip, rows as rows_of
from .hlo.kernel import Kernel

USUAL = 0.8
"""The assumed share of its peak that a chip without measurements reaches. It is near the middle of
the others."""

UNLIKE = 3.0
"""The factor, down and up, within which a step on a GPU without matrix units should be. There are
only three published measurements of such GPUs, too few for a fit. The predictions are 0.5 to 1.2 of
them."""

L2_SPEED = 2.0
"""The least ratio of the second cache's bandwidth to the memory's. XLA's own cost model assumes the
same."""

ALLOWED = {"launch": 3.0, "interconnect": 2.0}
"""The factors, down and up, on the time of launches and of sums over devices. Hosts and networks
differ, and no fitted measurement isolates them."""

_SIXTEEN = ("bf16", "f16")
_SMALL = 8  # channels of a group, below which a convolution does not use matrix units


@cache
def efficiencies() -> dict[str, Any]:
    """The contents of `efficiencies.json`."""
    return json.loads(files(__package__).joinpath("efficiencies.json").read_text(encoding="utf-8"))


@cache
def product_rates() -> dict[str, tuple[float, float | None]]:
    """The TFLOP/s that cuBLAS reached with large square matrices, in float32 and in 16 bits, by
    chip. The second is `None` if it is unknown.

    `chips/product_rates.csv` has the best of 1,024 to 10,240 rows (or of 8,192, if only that was
    published), with its source. Power and shared units keep cards below their data sheets, an L4 by
    more than half.
    """
    return {
        row["chip"]: (float(row["f32_tflops"]), float(row["sixteen_tflops"] or 0) or None)
        for row in rows_of("product_rates.csv")
    }


ARITHMETIC = {
    "matmul_tensor": "matmul",
    "matmul_tf32": "matmul",
    "matmul_vector": "matmul",
    "convolution_tensor": "convolution",
    "convolution_tf32": "convolution_tf32",
    "convolution_vector": "vector",
    "attention": "attention",
    "winograd": "winograd",
    "depthwise": "depthwise",
    "elementwise": "elementwise",
}
"""The kind and unit of a kernel's arithmetic, with the name of its efficiency."""

_KINDS = tuple(ARITHMETIC)
_REACHES = ("memory", "passes")


@dataclass(frozen=True)
class Ideal:
    """The seconds of one execution of each kernel at full efficiency, as arrays with one entry for
    each kernel."""

    arithmetic: np.ndarray
    memory: np.ndarray
    count: np.ndarray
    kind: np.ndarray
    """The index into `ARITHMETIC`."""
    reach: np.ndarray
    """The index into the two efficiencies of memory."""


def ideal_times(kernels: Sequence[Kernel], chip: Chip) -> Ideal:
    """The times of the kernels at full efficiency.

    *Arguments:* `chip` is a GPU with every figure of `chips.gpus.NEEDED`.
    """
    assert chip.memory_GBps is not None and chip.l2_MiB is not None
    rows = []
    for kernel in kernels:
        memory = kernel.bytes / (chip.memory_GBps * 1e9)
        if kernel.bytes <= chip.l2_MiB * 2**19:
            memory /= L2_SPEED
        if kernel.flops:
            arithmetic, name = _product(kernel, chip, *_peak(chip, kernel.dtype))
        else:
            arithmetic = kernel.work / _peak(chip, "f32")[0]
            name = "elementwise"
        rows.append((arithmetic, memory, kernel.count, _KINDS.index(name), not kernel.flops))
    table = np.array(rows, dtype=float).reshape(-1, 5)
    arithmetic, memory, count = table[:, :3].T
    return Ideal(arithmetic, memory, count, *table[:, 3:].T.astype(int))


def _product(kernel: Kernel, chip: Chip, peak: float, unit: str) -> tuple[float, str]:
    """The seconds of a product at its peak, in whole tiles and waves, and its key in
    `ARITHMETIC`."""
    if kernel.kind == "attention" or len(kernel.shape) != 4:
        return (
            kernel.flops / peak,
            "attention" if kernel.kind == "attention" else f"{kernel.kind}_{unit}",
        )
    m, n, k, groups = kernel.shape
    if kernel.kind == "convolution" and groups > 1 and min(n, max(1, k)) < _SMALL:
        # Each operand that is loaded meets the n of its group
        return kernel.flops / 2 / n * 4 / _loads(chip), "depthwise"
    step = 1 if unit == "vector" else 8 if kernel.dtype in _SIXTEEN else 4
    n = -(-n // step) * step
    k = -(-k // step) * step
    cores = chip.streaming_multiprocessors or 1
    share = share_of_peak(m, n, k, groups, cores, "vector" if unit == "vector" else "tensor")
    name = "winograd" if unit == "vector" and _is_winograd(kernel) else f"{kernel.kind}_{unit}"
    return 2.0 * groups * m * n * k / share / peak, name


def _is_winograd(kernel: Kernel) -> bool:
    """Whether a convolution has a 3 x 3 window with stride one and more than a few channels. For
    such a convolution cuDNN needs 2.25 times fewer multiplications on vector units (Lavin & Gray
    2015, arXiv:1509.09308)."""
    m, n, k, groups = kernel.shape
    # There are nine taps, fewer at the edges
    enough = groups == 1 and n >= _SMALL and min(m, k) >= 6 * _SMALL
    return enough and kernel.window == (3, 3, 1, 1) and kernel.dtype in ("f32", "tf32")


LOADS = {"6.0": 64, "7.5": 64}
"""The bytes that a multiprocessor loads per clock from its own memory, by compute capability, where
they are not 128. Sources: Jia et al. 2018 (arXiv:1804.06826) and 2019 (arXiv:1903.07486) for P100,
V100 and T4, and NVIDIA's white paper of GA102 for the doubling since. They were not read again."""


def _loads(chip: Chip) -> float:
    """The bytes a second that all multiprocessors load together."""
    each = LOADS.get(chip.compute_capability, 128)
    return (chip.streaming_multiprocessors or 1) * (chip.clock_GHz or 1.0) * 1e9 * each


def _peak(chip: Chip, dtype: str) -> tuple[float, str]:
    """The FLOP/s of large products of `dtype`, and the unit, which is "tensor" (16 bits and less),
    "tf32" or "vector"."""
    assert chip.fp32_tflops is not None
    in_f32, in_sixteen = product_rates().get(chip.name, (None, None))
    vector = min(in_f32 or USUAL * chip.fp32_tflops, chip.fp32_tflops) * 1e12
    sixteen = chip.fp16_dense_tflops
    share = USUAL if sixteen is None or in_sixteen is None else min(in_sixteen / sixteen, 1.0)
    if not has_tensor_cores(chip):  # float16 products with float32 sums are no faster there
        peak = None
    elif dtype in _SIXTEEN:
        peak = sixteen if dtype == "f16" else chip.bf16_dense_tflops
    elif dtype.startswith("f8") or dtype in ("s8", "u8"):
        peak = chip.int8_dense_tops
    else:
        peak = chip.tf32_dense_tflops if dtype == "tf32" else None
    if peak is not None:
        return share * peak * 1e12, "tf32" if dtype == "tf32" else "tensor"
    if dtype == "f64":
        return vector / (2 if chip.compute_capability in _DOUBLE else 32), "vector"
    return vector, "vector"


_DOUBLE = ("6.0", "7.0", "8.0", "9.0", "10.0")
"""The compute capabilities with half as many float64 units as float32 units. The others have a
thirty-second or less."""


def has_tensor_cores(chip: Chip) -> bool:
    """Whether the chip has matrix units: Volta and later."""
    return bool(chip.compute_capability) and float(chip.compute_capability) >= 7


def split(ideal: Ideal, values: dict[str, float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The seconds of arithmetic, memory and launches of each kernel, for all its executions.

    *Arguments:* `values` are those of `efficiencies.json`, or others for the fit.
    """

    speed = np.array([values[ARITHMETIC[name]] for name in _KINDS])
    reach = np.array([values[name] for name in _REACHES])
    arithmetic = ideal.arithmetic / speed[ideal.kind]
    memory = ideal.memory / reach[ideal.reach]
    launch = np.full(len(ideal.count), values["launch_seconds"])
    return arithmetic * ideal.count, memory * ideal.count, launch * ideal.count


def timed(kernels: Sequence[Kernel], chip: Chip) -> list[Kernel]:
    """Returns the kernels with their `seconds` and `bound` on `chip`."""
    ideal = ideal_times(kernels, chip)
    arithmetic, memory, launch = split(ideal, efficiencies()["values"])
    result = []
    for i, kernel in enumerate(kernels):
        bounds = {
            "compute": float(arithmetic[i]),
            "memory": float(memory[i]),
            "launch": float(launch[i]),
        }
        seconds = max(bounds["compute"], bounds["memory"]) + bounds["launch"]
        bound = max(bounds, key=lambda name: bounds[name])
        dtype = "f32" if kernel.dtype == "tf32" and chip.tf32_dense_tflops is None else kernel.dtype
        result.append(dataclasses.replace(kernel, seconds=seconds, bound=bound, dtype=dtype))
    return result


def interval(chip: Chip, shares: Mapping[str, float]) -> tuple[float, float]:
    """The factors on a step's seconds between which nine of ten measurements should be. They come
    from nets and sources left out of the fit, and for a chip generation without fitted rows also
    from generations left out. A chip without matrix units has `UNLIKE`.

    *Arguments:* `shares` are the shares of the time by bound. Those in `ALLOWED` have their own
    factors.
    """
    fitted = efficiencies()
    kind = "known_chip" if chip.compute_capability in fitted["generations"] else "other"
    low, high = fitted["interval_90"][kind] if has_tensor_cores(chip) else (1 / UNLIKE, UNLIKE)
    own = {bound: shares.get(bound, 0.0) for bound in ALLOWED}
    rest = 1 - sum(own.values())
    return (
        rest * low + sum(share / ALLOWED[bound] for bound, share in own.items()),
        rest * high + sum(share * ALLOWED[bound] for bound, share in own.items()),
    )


# ---- how much of a GPU a product can occupy: whole tiles on whole waves of multiprocessors

# Rows, columns, and the share of the peak that a multiprocessor reaches with such a tile. Smaller
# tiles load more for each multiplication, which matters less if multiplications are slow. The
# shares are chosen, not measured. Tiles and waves are explained in
# https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/.
_TENSOR = (
    (256, 128, 1.0),
    (128, 128, 0.95),
    (128, 64, 0.85),
    (64, 64, 0.7),
    (64, 32, 0.5),
    (32, 32, 0.35),
)
_TILES = {
    "tensor": _TENSOR,
    "vector": ((128, 128, 1.0), (128, 64, 0.97), (64, 64, 0.92), (64, 32, 0.8), (32, 32, 0.65)),
}
# Time to fill and empty a tile's pipeline, in summands.
_FILL = {"tensor": 48, "vector": 8}
_SPLITS = (1, 2, 4, 8, 16, 32, 64)
_SHORTEST = 128  # summands, below which a sum is not split


@cache
def share_of_peak(m: int, n: int, k: int, groups: int, multiprocessors: int, unit: str) -> float:
    """The share of the peak that `groups` products `(m, k) @ (k, n)` reach, between 0 and 1. It is
    that of the best of a few tile sizes and ways to split the sum over several multiprocessors.

    *Arguments:* `unit` is "tensor" or "vector".
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
