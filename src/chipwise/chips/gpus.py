"""Describes a GPU for XLA's compiler: the text of a `GpuTargetConfigProto`, from the catalogue's
row.

`gpu_target.textproto` is that text, with names for the figures of a generation, which are in
`generations.csv`, and for those of a chip (cores, clock, memory, L2), which are in `chips.csv`.
With it the compiler needs neither the GPU nor its driver. The texts agree with XLA's own, for some
twenty chips, in https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs.
"""

from __future__ import annotations

from importlib.resources import files
from string import Template

from ..base import DeviceError
from .catalogue import Chip, named, rows

GENERATIONS = {row["compute_capability"]: row for row in rows("generations.csv")}
"""The rows of `generations.csv` by compute capability, from "Technical Specifications per Compute
Capability" and "Arithmetic Instructions" of https://docs.nvidia.com/cuda/cuda-c-programming-guide.
They have the resident threads, bytes of shared memory and float32 multiply-adds per clock of a
streaming multiprocessor. All generations have 65,536 registers. For 12.0 CUDA states 102,400 bytes
of shared memory, XLA's own text 131,072. `ACCELERATED_FEATURES`: XLA compiles for the chip's own
instructions (sm_90a), which later chips do not have."""

CUDNN = "dnn_version_info { major: 9 minor: 10 }"
"""The cuDNN whose calls programs may contain: the one that `jax[cuda12]` installs today, or a
little older."""

OLDEST = "p100"
"""The chip for which an older chip's program is compiled. The compiler no longer knows the older
generation."""

NEEDED = (
    "streaming_multiprocessors",
    "clock_GHz",
    "l2_MiB",
    "memory_GB",
    "memory_GBps",
    "fp32_tflops",
)
"""Figures without which nothing can be compiled or timed."""


def compiled_as(chip: Chip) -> Chip:
    """The chip for which programs of `chip` are compiled: itself, or the oldest that the compiler
    knows.

    Raises `DeviceError` if the catalogue lacks a figure that compiling or timing needs.
    """
    missing = [name for name in NEEDED if getattr(chip, name) is None]
    if missing or not chip.compute_capability:
        raise DeviceError(
            "chip-without-figures", chip=chip.name, missing=missing or ["compute_capability"]
        )
    if float(chip.compute_capability) >= 6:
        return chip
    oldest = named(OLDEST)
    assert oldest is not None
    return oldest


def target_config(chip: Chip) -> str:
    """The text for `chip`, a result of `compiled_as`.

    Raises `DeviceError` for an unknown compute capability.
    """
    one = GENERATIONS.get(chip.compute_capability)
    if one is None:
        raise DeviceError("chip-without-figures", chip=chip.name, missing=["compute_capability"])
    major, minor = chip.compute_capability.split(".")
    assert chip.memory_GBps is not None and chip.memory_GB is not None and chip.l2_MiB is not None
    text = Template(files(__package__).joinpath("gpu_target.textproto").read_text("utf-8").rstrip())
    return text.substitute(
        one,
        core_count=chip.streaming_multiprocessors,
        memory_bandwidth=round(chip.memory_GBps * 1e9),
        # Of most GPUs a little less than there is: where memory is short, programs save some more
        # of it
        device_memory_size=round(chip.memory_GB * 1e9),
        l2_cache_size=round(chip.l2_MiB * 2**20),
        clock_rate_ghz=chip.clock_GHz,
        major=major,
        minor=minor,
        cudnn=CUDNN,
        device=chip.device_kinds[0],
    )
