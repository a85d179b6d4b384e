"""Computes whether a step fits in the memory of a device of an absent target, before and after it
is compiled.

The memory of parameters, their gradients and sums, and the optimizer's state follows from shapes.
If that alone is more than a device has, nothing is compiled. The answer then says with how many
shards, or on which target of the same chip, it would fit.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..base import Fact, fact
from ..chips.targets import Target, sizes
from ..compile.absent_device import available
from ..recipe.recipe import Recipe
from ..step.blueprint import Blueprint, Memory, Whole, waiting


def memory(
    step: Blueprint, target: Target, temporary: Mapping[str, float], program: float
) -> Memory | None:
    """The memory of `step` on a device of `target`, or `None` if the device's is unknown. The
    arguments are those of `Blueprint.memory`."""
    limit, source = available(target)
    return None if limit is None else step.memory(temporary, program, limit, source)


TOO_LARGE = "state-above-device"
"""The code of the answer of `too_large`."""


def too_large(step: Blueprint, target: Target) -> tuple[Memory, Fact] | None:
    """The memory of the state, and the problem, if the state alone needs more than a device of
    `target` has. `None` if the step may fit."""
    needed = memory(step, target, {}, 0)
    if needed is None or needed.fits:
        return None
    return needed, fact(
        TOO_LARGE,
        needed=needed.needed,
        available=needed.available,
        shards=step.shards,
        way=_way(step.recipe, step.whole, target, step.exact),
    )


def _way(recipe: Recipe, whole: Whole, target: Target, exact: bool) -> Fact:
    """A number of shards for this target, or the smallest target of the same chip that holds it."""
    for other in (target, *sizes(target.chip)):
        cut = smallest_cut(recipe, whole, other, exact)
        if cut is not None:
            shards, needed = cut
            code = "state-cut" if other is target else "state-cut-elsewhere"
            return fact(code, target=other.name, shards=shards, needed=needed)
    return fact("state-cut-nowhere", chip=target.chip.name)


def smallest_cut(
    recipe: Recipe, whole: Whole, target: Target, exact: bool
) -> tuple[int, int] | None:
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
    """Whether groups of `shards` devices are equal parts of a host, or whole hosts."""
    here = target.devices // target.hosts
    return here % shards == 0 or shards % here == 0
