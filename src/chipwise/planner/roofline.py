"""How long a traced program takes on a GPU or a CPU: each operation by what it is short of, then the sum.

    seconds = sum over operations of  count × (max(arithmetic, memory) + launch)

- *arithmetic*: multiplications, rounded up to what matrix units take and to whole tiles on whole waves of
  streaming multiprocessors, at the peak of the catalogue for their type times an efficiency;
- *memory*: bytes at the catalogue's bandwidth times an efficiency;
- *launch*: what starting a kernel costs.

Which peak: bf16 and fp16 run on tensor cores where the chip has them for that type. bf16 on a GPU without
(V100, T4, P100, K80) runs at float32 speed. float32 runs without tensor cores with precision "f32", with
them otherwise where the chip knows TF32.

The few efficiencies are shared by all models. They are fitted to published training throughputs by
`benchmarks/plan_fit.py`, and stand in `efficiencies.json` with what they were fitted to, the residuals and
the interval that these justify.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..chips.catalogue import Chip, named
from ..errors import DeviceError
from ..words.facts import Fact, fact
from .operations import Product, Traced
from .plans import unique

SOFTWARE = ("compiled", "eager", "tuned")
"""XLA and its like; one kernel for each layer's operation, as PyTorch without `compile`; hand-tuned kernels,
as in MLPerf submissions."""

FRAMEWORK_BYTES = 0.8e9
"""What a process holds on a GPU before any array: CUDA context, cuDNN, cuBLAS and NCCL. An allowance."""

SUSTAINED_TFLOPS = {"T4": 24.0}
"""Of 16-bit products on cards whose power limit, here 70 W, lets the clock reach its peak only for moments:
cuBLAS at 4096 x 4096 x 4096 (https://forums.developer.nvidia.com/t/about-gpu-peak-performance/264462)."""

_SIDE = 1024
_COPY_BYTES = 128 * 2**20

_SIXTEEN = ("bfloat16", "float16")


@dataclass(frozen=True)
class Timed:
    """Seconds of one execution on one device, and the interval that holds nine of ten measurements.

    `bound`: "compute", "memory" or "launch", whichever takes most of the time. `notes`: what the chip lacks,
    and what was not counted.
    """

    seconds: float
    low: float
    high: float
    bound: str
    notes: tuple[Fact, ...] = ()


@cache
def efficiencies() -> dict[str, Any]:
    """`efficiencies.json`."""
    return json.loads(files(__package__).joinpath("efficiencies.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Ideal:
    """What each operation would take at full efficiency: arrays with one entry for each, and the names of the
    efficiencies that apply to them."""

    arithmetic: np.ndarray
    memory: np.ndarray
    count: np.ndarray
    arithmetic_class: list[str]
    memory_class: list[str]
    balance: float  # of the chip, against that of `_REFERENCE_BALANCE`
    sustained: float  # share of the 16-bit peak that the chip's power allows
    notes: tuple[Fact, ...]


def time_on(
    traced: Traced, chip: Chip, precision: str, *, software: str = "compiled", fused_attention: bool = False
) -> Timed:
    """Predicts one execution of `traced` on one device of `chip`, a GPU or a measured CPU.

    *Arguments:* `precision`: "bf16", "fp16", "tf32" or "f32"; `software`: one of `SOFTWARE`;
    `fused_attention`: attention runs in hand-written kernels, which never write its weights and skip what a
    mask hides.

    Raises `DeviceError` when the catalogue lacks the chip's peak or bandwidth.
    """
    fitted = efficiencies()
    ideal = ideal_times(traced, chip, precision, fused_attention=fused_attention)
    arithmetic, memory, launch = split(ideal, fitted["values"], software)
    seconds = float(np.sum(np.maximum(arithmetic, memory) + launch))
    computing = arithmetic >= memory
    bounds = {
        "compute": float(np.sum(arithmetic[computing])),
        "memory": float(np.sum(memory[~computing])),
        "launch": float(np.sum(launch)),
    }
    bound = max(bounds, key=lambda name: bounds[name])
    factor = _interval(fitted, chip, bounds["launch"] / max(seconds, 1e-12))
    notes = (*traced.notes, *ideal.notes)
    return Timed(seconds, seconds / factor, seconds * factor, bound, notes)


def _interval(fitted: dict[str, Any], chip: Chip, launches: float) -> float:
    """The factor up and down that holds 90 % of measurements: larger on chips without a measurement, and
    where `launches`, a share of the time, is more than in any of them; a guess on CPUs and on
    GPUs before Volta."""
    if not _has_tensor_cores(chip):
        return float(fitted["interval_90"]["unlike"])
    known = chip.name in fitted["chips"] and launches <= fitted["largest_launch_share"]
    return float(fitted["interval_90"]["known_chip" if known else "other"])


def ideal_times(traced: Traced, chip: Chip, precision: str, *, fused_attention: bool = False) -> Ideal:
    """See `Ideal`."""
    if chip.memory_GBps is None or chip.fp32_tflops is None:
        missing = "bandwidth" if chip.memory_GBps is None else "peak"
        raise DeviceError(f"chip-without-{missing}", chip=chip.name)
    sm = chip.streaming_multiprocessors or 1
    notes: list[Fact] = []
    rows, classes = [], []
    for op in traced.operations:
        nbytes = op.bytes_read + op.bytes_written - (op.score_bytes if fused_attention else 0.0)
        memory = nbytes / (chip.memory_GBps * 1e9)
        if (product := op.product) is not None and product.flops:
            peak, unit = _peak(chip, op.dtype, precision, notes)
            if op.kind == "depthwise":
                peak, unit = chip.fp32_tflops * 1e12, "vector"
            n, k = _padded(product, op.dtype, unit)
            work = 2.0 * product.groups * product.m * n * k
            if fused_attention and op.masked:
                work /= 2
            if chip.kind == "GPU" and op.kind != "depthwise":
                tiles = "vector" if unit == "vector" else "tensor"
                work /= share_of_peak(product.m, n, k, product.groups, sm, tiles)
            arithmetic = work / peak
            name = "vector" if unit == "vector" else f"{op.kind}_{unit}"
            passes = "depthwise_memory" if op.kind == "depthwise" else "memory"
        else:
            hidden = fused_attention and op.score_bytes > 0.5 * (op.bytes_read + op.bytes_written)
            # on the float32 units
            arithmetic, name = (0.0 if hidden else op.work) / (chip.fp32_tflops * 1e12), "elementwise"
            passes = "passes"
        rows.append((arithmetic, memory, op.count))
        classes.append((name, passes))
    table = np.array(rows, dtype=float).reshape(-1, 3)
    return Ideal(
        arithmetic=table[:, 0],
        memory=table[:, 1],
        count=table[:, 2],
        arithmetic_class=[c[0] for c in classes],
        memory_class=[c[1] for c in classes],
        balance=_balance(chip),
        sustained=SUSTAINED_TFLOPS.get(chip.name, math.inf) / (chip.fp16_dense_tflops or 1.0),
        notes=unique(notes),
    )


MOST = 0.95
"""Of their peak that matrix units reach, however slow against memory they are."""

_REFERENCE_BALANCE = 312e12 / 2039e9  # of an A100 with 80 GB: FLOP per byte


def _balance(chip: Chip) -> float:
    """How fast matrix units are against memory, compared with an A100: the faster, the less is reached."""
    if not _has_tensor_cores(chip) or chip.fp16_dense_tflops is None or chip.memory_GBps is None:
        return 1.0
    return chip.fp16_dense_tflops * 1e12 / (chip.memory_GBps * 1e9) / _REFERENCE_BALANCE


def _has_tensor_cores(chip: Chip) -> bool:
    """Volta and later: from 2017 on."""
    return chip.kind == "GPU" and chip.fp16_dense_tflops is not None and (chip.year or 0) >= 2017


def split(ideal: Ideal, values: dict[str, float], software: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of arithmetic, memory and launches of each operation, all its executions together."""

    def units(name: str) -> float:
        return min(values[name] * ideal.balance ** -values["balance_exponent"], MOST)

    speed = {
        "vector": values["vector"],
        "elementwise": values["elementwise"],
        "matmul_tensor": min(units("matmul"), ideal.sustained),
        "matmul_tf32": units("matmul"),
        "convolution_tensor": min(units("convolution"), ideal.sustained),
        "convolution_tf32": units("convolution_tf32"),
    }
    arithmetic = ideal.arithmetic / np.array([speed[n] for n in ideal.arithmetic_class])
    traffic = {"compiled": 1.0, "eager": values["eager"], "tuned": values["tuned"]}[software]
    speeds = {
        "memory": values["memory"],
        "passes": values["memory"] / traffic,
        "depthwise_memory": values["memory"] * values["depthwise"],
    }
    memory = ideal.memory / np.array([speeds[n] for n in ideal.memory_class])
    launch = np.full(len(ideal.count), values["launch_seconds"])
    return arithmetic * ideal.count, memory * ideal.count, launch * ideal.count


def _peak(chip: Chip, dtype: str, precision: str, notes: list[Fact]) -> tuple[float, str]:
    """FLOP/s for products of `dtype`, and the unit: "tensor" (16 bits), "tf32" or "vector"."""
    assert chip.fp32_tflops is not None
    vector = (chip.fp32_tflops * 1e12, "vector")
    if dtype in _SIXTEEN:
        if precision == "fp16" or dtype == "float16":
            peak, missing = chip.fp16_dense_tflops, "fp16"
        else:
            peak, missing = chip.bf16_dense_tflops, "bf16"
        if peak is None:
            notes.append(fact("chip-without-matrix-units", chip=chip.name, precision=missing))
            return vector
        # Without tensor cores (P100) fp16 runs twice as fast as float32, on the same units.
        cores = chip.streaming_multiprocessors is not None and _has_tensor_cores(chip)
        return (peak * 1e12, "tensor" if cores else "vector")
    if dtype == "float32" and precision != "f32" and chip.tf32_dense_tflops is not None:
        return (chip.tf32_dense_tflops * 1e12, "tf32")
    if dtype == "float32" and precision == "tf32":
        notes.append(fact("chip-without-matrix-units", chip=chip.name, precision="TF32"))
    return vector


def _padded(product: Product, dtype: str, unit: str) -> tuple[int, int]:
    """`n` and `k` with channels in multiples of what tensor cores take: eight, or four for TF32."""
    if unit == "vector" or not all(product.channels):
        return product.n, product.k
    step = 8 if dtype in _SIXTEEN else 4
    inner, outer = (math.ceil(c / step) * step / c for c in product.channels)
    return round(product.n * outer), round(product.k * inner)


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
    for rows, columns, quality in _TILES[unit]:
        tiles = groups * math.ceil(m / rows) * math.ceil(n / columns)
        for parts in _SPLITS:
            if parts > 1 and k / parts < _SHORTEST:
                break
            waves = math.ceil(tiles * parts / multiprocessors)
            best = min(best, waves * rows * columns * (k / parts + _FILL[unit]) / quality)
    return groups * m * n * k / (best * multiprocessors)


# ---- chips as the model wants them


def device_chip(chip: Chip) -> Chip:
    """`chip` as the model wants it: one JAX device of it, with every figure that the model reads.

    The host's CPU is measured. A TPU's float32 products are six passes of bfloat16, TF32's three.
    """
    if chip.kind == "CPU":
        return host_cpu_chip()
    if chip.kind != "TPU" or chip.bf16_dense_tflops is None or chip.memory_GBps is None:
        return chip
    peak = chip.bf16_dense_tflops / chip.jax_devices_per_chip
    return dataclasses.replace(
        chip,
        bf16_dense_tflops=peak,
        fp32_tflops=peak / 6,
        tf32_dense_tflops=peak / 3,
        memory_GBps=chip.memory_GBps / chip.jax_devices_per_chip,
    )


@cache
def host_cpu_chip() -> Chip:
    """The catalogue's CPU with `fp32_tflops` of a product of 1,024 x 1,024 matrices and `memory_GBps` of
    adding one to 128 MB, both by JAX on all cores. Measured once a process, best of a few."""
    chip = named("cpu")
    assert chip is not None
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        a = jnp.ones((_SIDE, _SIDE), jnp.float32)
        product = _best(jax.jit(lambda a: jax.lax.dot(a, a, precision="highest")), a)
        x = jnp.zeros((_COPY_BYTES // 4,), jnp.float32)
        copy = _best(jax.jit(lambda x: x + jnp.float32(1)), x)
    return dataclasses.replace(
        chip,
        fp32_tflops=2 * _SIDE**3 / product / 1e12,
        memory_GBps=2 * _COPY_BYTES / copy / 1e9,
        notes="peak and bandwidth measured on this host",
    )


def _best(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Seconds of the fastest of some calls, within about a fifth of a second."""
    function(x).block_until_ready()
    best, end = float("inf"), time.perf_counter() + 0.2
    while time.perf_counter() < end:
        start = time.perf_counter()
        function(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return best
