"""One device's memory: what a target has, and what a step keeps in it."""

from __future__ import annotations

import psutil

from ..chips.targets import Target
from .plans import Memory
from .programs import StepPrograms

JAX_SHARE_OF_GPU = 0.75
"""Of a GPU's memory, which JAX takes unless `XLA_PYTHON_CLIENT_MEM_FRACTION` says otherwise
(https://docs.jax.dev/en/latest/gpu_memory_allocation.html)."""

TPU_GIB = {"TPU v2": 7.48, "TPU v5e": 15.75, "TPU v6e (Trillium)": 31.25}
"""Of one device, what the compiler says is available when it refuses a program (libtpu 0.0.42)."""

TPU_SHARE = 7.48 / 8
"""Of the others' memory in GiB, whose compiler was not heard: the least of those above."""


def available(target: Target) -> tuple[int | None, str]:
    """Bytes of one JAX device of `target` for a program, and where the figure comes from."""
    chip = target.chip
    if chip.kind == "CPU":
        return psutil.virtual_memory().total, "this host's memory"
    if chip.memory_GB is None:
        return None, "unknown"
    if chip.kind == "TPU":
        each = TPU_GIB.get(chip.name, chip.memory_GB / chip.jax_devices_per_chip * TPU_SHARE)
        return int(each * 2**30), f"{chip.memory_GB:g} GiB a chip, less what the compiler keeps"
    return (
        int(chip.memory_GB * 1e9 * JAX_SHARE_OF_GPU),
        f"{chip.memory_GB:g} GB, of which JAX takes {JAX_SHARE_OF_GPU:.0%} unless "
        f"XLA_PYTHON_CLIENT_MEM_FRACTION says more",
    )


def held(programs: StepPrograms, target: Target, activations: float, program: float) -> Memory | None:
    """What a step of `programs` holds on a device of `target`; `None` when its memory is unknown.

    *Arguments:* `activations`: temporary bytes of its hungriest program; `program`: bytes of code.
    """
    limit, source = available(target)
    if limit is None:
        return None
    return Memory(
        parameters=programs.parameter_bytes,
        optimizer=programs.optimizer_bytes,
        state=programs.state_bytes,
        replica_sums=programs.replica_sum_bytes,
        activations=int(activations),
        data=programs.data_bytes,
        program=int(program),
        available=limit,
        available_source=source,
    )
