"""Whether a step fits in the memory of a device of an absent target, before and after it is compiled.

The memory of parameters, their gradients and sums, and the optimizer's state follows from shapes. If that
alone is more than a device has, nothing is compiled, and the answer says with how many shards, or on which
target of the same chip, it would fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..chips.catalogue import Chip
from ..chips.targets import MOST_CHIPS, SLICES, Target, parse
from ..engine.blueprint import Memory, Whole, waiting
from ..errors import ChipwiseError
from ..machine.detect import GPU_SHARE
from ..recipe.recipe import Recipe
from ..words.facts import Fact, fact
from .tracing import TracedStep

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


def memory(step: TracedStep, target: Target, temporary: Mapping[str, float], program: float) -> Memory | None:
    """The memory of `step` on a device of `target`; `None` if the device's is unknown. Arguments as of
    `Blueprint.memory`."""
    limit, source = available(target)
    return None if limit is None else step.memory(temporary, program, limit, source)


TOO_LARGE = "state-above-device"
"""The code of the answer."""


def too_large(step: TracedStep, target: Target) -> tuple[Memory, Fact] | None:
    """The memory of the state, and the problem, if that alone is more than a device of `target` has; `None`
    if the step may fit."""
    needed = memory(step, target, {}, 0)
    if needed is None or needed.fits:
        return None
    way = _way(step.recipe, step.whole, target, step.exact)
    numbers = {"needed": needed.needed, "available": needed.available, "shards": step.shards}
    return needed, fact(TOO_LARGE, **numbers, way=way)


def _way(recipe: Recipe, whole: Whole, target: Target, exact: bool) -> Fact:
    """A number of shards for this target, or the smallest target of the same chip that holds it."""
    for other in (target, *sizes(target.chip)):
        cut = smallest_cut(recipe, whole, other, exact)
        if cut is not None:
            shards, needed = cut
            code = "state-cut" if other is target else "state-cut-elsewhere"
            return fact(code, target=other.name, shards=shards, needed=needed)
    return fact("state-cut-nowhere", chip=target.chip.name)


def smallest_cut(recipe: Recipe, whole: Whole, target: Target, exact: bool) -> tuple[int, int] | None:
    """The fewest shards with which the state fits on a device of `target`, and its bytes there."""
    room = available(target)[0]
    for shards in (2**n for n in range(1, target.devices.bit_length())):
        if not lies_on_hosts(shards, target) or (recipe.batch // recipe.replicas) % shards:
            continue
        groups = min(recipe.block_count if exact else recipe.replicas, target.devices // shards)
        sums = waiting(-(-recipe.block_count // groups), whole.trained // shards)
        if groups > 1:  # a gradient and the sum
            sums = max(sums, 2 * 4 * whole.trained // shards)
        needed = whole.kept // shards + sums
        if room is not None and needed <= room:
            return shards, needed
    return None


def lies_on_hosts(shards: int, target: Target) -> bool:
    """Whether groups of so many devices are equal parts of a host, or whole hosts."""
    here = target.devices // target.hosts
    return here % shards == 0 or shards % here == 0


def sizes(chip: Chip, group: int = 1) -> Iterator[Target]:
    """The targets of `chip` that are whole groups of `group` devices, smallest first."""
    short = chip.names[0]
    if chip.kind == "TPU":
        names = [f"{short}-{size}" for size in SLICES[short]]
    else:
        names = [f"{short}:{group * 2**n}" for n in range(MOST_CHIPS.bit_length())]
    for name in names:
        try:
            target = parse(name)
        except ChipwiseError:  # GPUs: parts of a host, or too many
            continue
        if target.devices % group == 0:
            yield target
