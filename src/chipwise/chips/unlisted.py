"""Writes the row of `chips.csv` for a GPU that is here and not in the catalogue."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import fields

from .catalogue import Chip, called, spelled

READ = "cuda_MiB, SMs and compute capability: JAX, on the device; chips_per_host: assumed"


def row(
    device_kind: str, cores: int | None, compute_capability: str, memory_bytes: float | None
) -> str | None:
    """The row, without what CUDA does not tell: peaks, bandwidth, clock, L2, links and source. They
    are empty. `chips_per_host`, without which no target can be named, is that of most GPUs. A card
    whose device name has another memory in the catalogue is named by its memory too.

    `None` if it may be a listed chip, as its memory would tell, or is not NVIDIA's: the compute
    capability of an AMD GPU is a word such as `gfx942`.
    """
    name = device_kind.removeprefix("NVIDIA ").removeprefix("GeForce ")
    typed = spelled(device_kind)
    memory_GB = memory_bytes and round(memory_bytes / 2**30)
    listed = called(device_kind)
    if listed and memory_GB:
        name = f"{name} ({memory_GB} GB)"
        typed = f"{typed}-{memory_GB}gb"
        listed = called(typed)
    if listed or not re.fullmatch(r"\d+\.\d+", compute_capability):
        return None
    cells = {
        "name": name,
        "names": typed,
        "vendor": "NVIDIA",
        "kind": "GPU",
        "scope": "GPU",
        "memory_GB": memory_GB,
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
