"""Writes the row of `chips.csv` for a GPU that is here and not in the catalogue."""

from __future__ import annotations

import csv
import io
from dataclasses import fields

from .catalogue import Chip, spelled

READ = "cuda_MiB, SMs and compute capability: JAX, on the device"


def row(
    device_kind: str, cores: int | None, compute_capability: str, memory_bytes: float | None
) -> str:
    """The row, without what CUDA does not tell: peaks, bandwidth, clock, L2, links and source. They
    are empty."""
    cells = {
        "name": device_kind.removeprefix("NVIDIA ").removeprefix("GeForce "),
        "names": spelled(device_kind),
        "vendor": "NVIDIA",
        "kind": "GPU",
        "scope": "GPU",
        "memory_GB": memory_bytes and round(memory_bytes / 2**30),
        "cuda_MiB": memory_bytes and int(memory_bytes / 2**20),
        "jax_devices_per_chip": 1,
        "chips_per_host": 8,
        "streaming_multiprocessors": cores,
        "compute_capability": compute_capability,
        "device_kinds": device_kind,
        "verified": READ,
    }
    line = io.StringIO()
    csv.DictWriter(line, [field.name for field in fields(Chip)]).writerow(cells)
    return line.getvalue().strip()
