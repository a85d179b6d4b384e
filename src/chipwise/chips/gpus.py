"""Describes a GPU for XLA's compiler: the text of a `GpuTargetConfigProto`, from the catalogue's row.

Figures of a generation are here, by compute capability; those of a chip (cores, clock, memory, L2) are in
`chips.csv`. With that text the compiler needs neither the GPU nor its driver. The texts agree with XLA's own,
for some twenty chips, in https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import DeviceError
from .catalogue import Chip, named


@dataclass(frozen=True)
class Generation:
    """Figures of a streaming multiprocessor: resident threads, bytes of shared memory, the most of these for
    a block, float32 multiply-adds per clock. `accelerated`: XLA compiles for the chip's own instructions
    (sm_90a), which later chips do not have."""

    threads: int
    shared: int
    shared_per_block: int
    lanes: int
    accelerated: bool = False


GENERATIONS = {
    "6.0": Generation(2048, 64 << 10, 48 << 10, 64),
    "7.0": Generation(2048, 96 << 10, 96 << 10, 64),
    "7.5": Generation(1024, 64 << 10, 64 << 10, 64),
    "8.0": Generation(2048, 164 << 10, 163 << 10, 64),
    "8.6": Generation(1536, 100 << 10, 99 << 10, 128),
    "8.9": Generation(1536, 100 << 10, 99 << 10, 128),
    "9.0": Generation(2048, 228 << 10, 227 << 10, 128, accelerated=True),
    "10.0": Generation(2048, 228 << 10, 227 << 10, 128, accelerated=True),
}
"""By compute capability: "Technical Specifications per Compute Capability" and "Arithmetic Instructions" of
https://docs.nvidia.com/cuda/cuda-c-programming-guide. 65,536 registers in all of them."""

OLDEST = "p100"
"""In whose place an older chip's program is compiled: its own generation left the compiler."""

NEEDED = ("streaming_multiprocessors", "clock_GHz", "l2_MiB", "memory_GB", "memory_GBps", "fp32_tflops")
"""Figures without which nothing can be compiled or timed."""


def compiled_as(chip: Chip) -> Chip:
    """The chip for which programs of `chip` are compiled: itself, or the oldest that the compiler knows.

    Raises `DeviceError` if the catalogue lacks a figure that compiling or timing needs.
    """
    missing = [name for name in NEEDED if getattr(chip, name) is None]
    if missing or not chip.compute_capability:
        raise DeviceError("chip-without-figures", chip=chip.name, missing=missing or ["compute_capability"])
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
    feature = "ACCELERATED_FEATURES" if one.accelerated else "NONE"
    assert chip.memory_GBps is not None and chip.memory_GB is not None and chip.l2_MiB is not None
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_core": one.shared,
        "shared_memory_per_block_optin": one.shared_per_block,
        "threads_per_core_limit": one.threads,
        "core_count": chip.streaming_multiprocessors,
        "fpus_per_core": one.lanes,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "memory_bandwidth": round(chip.memory_GBps * 1e9),
        # Of most GPUs a little less than there is: where memory is short, programs save some more of it
        "device_memory_size": round(chip.memory_GB * 1e9),
        "l2_cache_size": round(chip.l2_MiB * 2**20),
        "clock_rate_ghz": chip.clock_GHz,
    }
    return "\n".join(
        [
            "gpu_device_info {",
            *(f"  {name}: {value}" for name, value in fields.items()),
            f"  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}",
            "}",
            'platform_name: "CUDA"',
            CUDNN,
            f'device_description_str: "{chip.device_kinds[0]}"',
        ]
    )


CUDNN = "dnn_version_info { major: 9 minor: 10 }"
"""The cuDNN whose calls programs may contain: what `jax[cuda12]` brings today, or a little older."""
