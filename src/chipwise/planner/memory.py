"""One device's memory: what a target has, what a step keeps in it, and the largest batch that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import psutil

from ..chips.targets import Target
from ..recipe.recipe import Recipe
from ..words.facts import Fact, fact
from .plans import Memory
from .programs import StepPrograms

JAX_SHARE_OF_GPU = 0.75
"""Of a GPU's memory, which JAX takes unless `XLA_PYTHON_CLIENT_MEM_FRACTION` says otherwise
(https://docs.jax.dev/en/latest/gpu_memory_allocation.html)."""

TPU_GIB = {"TPU v2": 7.48, "TPU v5e": 15.75, "TPU v6e (Trillium)": 31.25}
"""Of one device, what the compiler says is available when it refuses a program (libtpu 0.0.42)."""

TPU_SHARE = 7.48 / 8
"""Of the others' memory in GiB, whose compiler was not heard: the least of those above."""


def available(target: Target) -> tuple[int | None, Fact]:
    """Bytes of one JAX device of `target` for a program, and where the figure comes from."""
    chip = target.chip
    if chip.kind == "CPU":
        return psutil.virtual_memory().total, fact("memory-of-this-host")
    if chip.memory_GB is None:
        return None, fact("memory-unknown", chip=chip.name)
    if chip.kind == "TPU":
        each = TPU_GIB.get(chip.name, chip.memory_GB / chip.jax_devices_per_chip * TPU_SHARE)
        return int(each * 2**30), fact("memory-of-tpu", gib=chip.memory_GB)
    share = fact("memory-of-gpu", gb=chip.memory_GB, share=JAX_SHARE_OF_GPU)
    return int(chip.memory_GB * 1e9 * JAX_SHARE_OF_GPU), share


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


def largest_batch(recipe: Recipe, fits: Callable[[Recipe], tuple[bool, float]], limit: int) -> int | None:
    """The largest global batch, a multiple of the replicas and at most `limit`, for which `fits`.

    *Arguments:* `fits` returns whether a recipe's step fits, and the share of the memory that it needs.
    Memory grows almost linearly with the batch, so each try aims at where the share should be 1; eight
    tries suffice to within a fortieth, and all of them are remembered by the compiler's cache.

    *Returns* `None` when not even one example a replica fits.
    """
    unit = recipe.replicas
    most = limit // unit
    known: dict[int, tuple[bool, float]] = {}

    def ask(n: int) -> bool:
        if n not in known:
            known[n] = fits(dataclasses.replace(recipe, batch=n * unit))
        return known[n][0]

    good, bad = 0, most + 1
    guess = min(most, recipe.batch // unit)
    while bad - good > max(1, good // 40):
        if ask(guess):
            good = max(good, guess)
        else:
            bad = min(bad, guess)
        share = known[guess][1]
        aim = int(guess / share * 0.98) if share > 0 else 2 * guess
        guess = min(max(aim, good + 1), bad - 1)
        if len(known) > 8:
            guess = (good + bad) // 2
        if guess in known or guess <= good:
            guess = (good + bad) // 2
        if guess <= good:
            break
    return good * unit or None
