"""Models larger than a device: which target holds one, with how many shards.

The memory of parameters, their gradients and sums, and the optimizer's state follows from shapes. If that
alone is more than a device has, nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..chips.catalogue import Chip
from ..chips.targets import MOST_CHIPS, SLICES, Target, parse
from ..engine.blueprint import Whole, waiting
from ..engine.layout import shares, usable
from ..errors import ChipwiseError
from ..recipe.recipe import Recipe
from ..words.facts import Fact, fact
from .programs import StepPrograms, available, held
from .timing import StepTime

TOO_LARGE = "state-above-device"
"""The code of the answer."""


def too_large(target: Target, programs: StepPrograms) -> StepTime | None:
    """The problem, if the state alone is more than a device of `target` has; `None` if it may fit."""
    memory = held(programs, target, {}, 0)
    if memory is None or memory.fits:
        return None
    return StepTime(
        method="compiled",
        flops=0.0,
        wire_bytes=0.0,
        memory=memory,
        dtypes=frozenset(),
        notes=(),
        problem=fact(
            TOO_LARGE,
            needed=memory.needed,
            available=memory.available,
            shards=programs.layout.shards,
            way=_way(programs.recipe, programs.whole, target, programs.layout.exact),
        ),
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


def smallest_cut(recipe: Recipe, whole: Whole, target: Target, exact: bool) -> tuple[int, int] | None:
    """The fewest shards with which the state fits on a device of `target`, and its bytes there."""
    room = available(target)[0]
    for shards in (2**n for n in range(1, target.devices.bit_length())):
        if not lies_on_hosts(shards, target) or (recipe.batch // recipe.replicas) % shards:
            continue
        groups = usable(shares(recipe, exact), target.devices // shards, exact)
        sums = waiting(recipe.block_count // groups if exact else 1, whole.trained // shards)
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
