"""One device of an absent chip: how its compiler names it, its memory, and the time of kernels
there."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..base import DeviceError, Fact, fact
from ..base.prediction import Range
from ..chips.catalogue import Chip
from ..chips.gpus import compiled_as, target_config
from ..chips.targets import Target
from ..machine.detect import GPU_SHARE
from . import time_gpu, time_tpu
from .hlo.kernel import Kernel

PLATFORM = {"GPU": "cuda", "TPU": "tpu"}

UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""XLA's options for a GPU. Nothing can be tuned here, and some of Triton's products do not compile
untuned."""

Topology = dict[str, Any]

TPU_GIB = {"TPU v2": 7.48, "TPU v5e": 15.75, "TPU v6e (Trillium)": 31.25}
"""The memory of one device, as the compiler states it when it refuses a program (libtpu 0.0.42)."""

TPU_SHARE = 7.48 / 8
"""The available share of the memory of other TPUs: the smallest of those above."""


def available(target: Target) -> tuple[int | None, Fact]:
    """The available bytes of one JAX device of `target`, and the source of the figure."""
    chip = target.chip
    if chip.memory_GB is None:
        return None, fact("memory-unknown", chip=chip.name)
    if chip.kind == "TPU":
        each = TPU_GIB.get(chip.name, chip.memory_GB / chip.jax_devices_per_chip * TPU_SHARE)
        return int(each * 2**30), fact("memory-of-tpu", gib=chip.memory_GB)
    total = chip.memory_GB * 1e9 if chip.cuda_MiB is None else chip.cuda_MiB * 2**20
    return int(total * GPU_SHARE), fact("memory-of-gpu", gb=total / 1e9, share=GPU_SHARE)


def topologies(target: Target) -> tuple[Topology, Topology]:
    """The arguments of `get_topology_desc` for one device of `target`, and for all of them.

    Raises `DeviceError` for a GPU whose figures are not in the catalogue.
    """
    if target.chip.kind == "TPU":
        return (target.topology_arguments(),) * 2
    config = {"topology_name": "", "target_config": target_config(compiled_as(target.chip))}
    hosts = target.hosts
    return config | {"topology": "1x1x1"}, config | {
        "topology": f"1x{hosts}x{target.devices // hosts}"
    }


def figures(chip: Chip) -> dict[str, Any]:
    """The fields of a `CompileRequest` about one JAX device of `chip`."""
    platform = PLATFORM[chip.kind]
    if platform == "cuda":
        return {"platform": platform}
    speed = chip.memory_GBps and chip.memory_GBps / chip.jax_devices_per_chip
    known = {"clock_GHz": chip.clock_GHz, "memory_GBps": speed, "chip": chip.name}
    return {"platform": platform, **known}


def timed(chip: Chip, kernels: Sequence[Kernel], passes: int = 1) -> list[Kernel]:
    """The kernels of a program with their seconds on `chip`, where products take `passes` on a TPU.
    Raises `DeviceError` if the chip's clock is unknown."""
    if chip.kind == "GPU":
        return time_gpu.timed(kernels, chip)
    if chip.clock_GHz is None:
        raise DeviceError("chip-without-clock", chip=chip.name)
    return time_tpu.timed(kernels, chip, passes)


def sources(chip: Chip) -> Iterator[Fact]:
    """The sources of a program's seconds."""
    yield fact("compiled-by-own-compiler" if chip.kind == "TPU" else "kernels-timed")
    if chip.kind == "GPU" and (stands_in := compiled_as(chip)) is not chip:
        yield fact("compiled-as-another", chip=chip.name, other=stands_in.name)


def total_seconds(chip: Chip, kernels: Sequence[Kernel], passes: int = 1) -> Range:
    """The time of `timed` kernels, one after another."""
    seconds = sum(kernel.seconds for kernel in kernels)
    if chip.kind == "GPU":
        low, high = time_gpu.interval(chip, shares(kernels))
    else:
        low, high = time_tpu.interval(kernels, chip, passes)
    return Range(seconds, low * seconds, high * seconds)


def shares(kernels: Iterable[Kernel]) -> dict[str, float]:
    """The shares of the kernels' time by bound, largest first."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for kernel in kernels:
        seconds[kernel.bound] += kernel.seconds
    total = sum(seconds.values())
    parts = {bound: part / total for bound, part in seconds.items() if total}
    return dict(sorted(parts.items(), key=lambda one: -one[1]))
