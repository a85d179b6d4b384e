"""Advice for a plan: why a recipe cannot run, and how to run it, or to run it faster.

Advice does not change the numbers of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..base import Fact, fact
from ..chips.catalogue import CHIPS
from ..chips.targets import Target, sizes
from ..compile.absent_device import available
from ..data.cached import constant
from ..data.weighted import Weighted
from ..recipe.check import SUBLANES
from ..recipe.recipe import Recipe
from ..step.blueprint import Blueprint, Memory, waiting
from ..step.layout import Layout
from .plans import Plan
from .time_step import StepTime


def does_not_fit(memory: Memory, largest: int | None, recipe: Recipe) -> Fact:
    numbers = {"needed": memory.needed, "available": memory.available}
    if not largest:
        return fact("no-batch-fits", **numbers, least=recipe.least_batch)
    more = largest + recipe.least_batch <= recipe.clock.examples
    code = "batch-does-not-fit" if more else "batch-of-all-fits"
    return fact(code, **numbers, largest=largest)


def room(
    recipe: Recipe, target: Target, step: Blueprint, least: Memory, exact: bool
) -> tuple[Fact, ...]:
    """Advice for a target on which not even one example per replica fits, which needs `least`.

    Memory with fewer replicas and on other chips is computed. The rest is not.
    """
    facts: list[Fact] = []
    each_alone = recipe.block_count == recipe.replicas  # else activations are shared too
    # Of other programs fewer change nothing
    replica_binds = least.replica_sums == step.sums["replica"]
    for replicas in range(recipe.replicas // 2, 0, -1) if each_alone and replica_binds else ():
        if recipe.replicas % replicas:
            continue
        devices = recipe.shards * min(replicas, target.devices // recipe.shards)
        sums = waiting(-(-replicas * recipe.shards // devices), step.size)
        needed = least.needed - least.replica_sums + sums
        if devices == step.layout.devices and needed <= least.available:
            facts.append(fact("room-fewer-replicas", replicas=replicas, needed=needed))
            break
    without = least.needed - least.activations
    if without < least.available:
        facts.append(fact("room-remat", activations=least.activations))
        if recipe.precision not in ("bf16", "f16") and not _emulates_bf16(target):
            facts.append(fact("room-precision", activations=least.activations))
    elif target.devices > 1:
        facts.append(fact("room-whole", without=without, devices=target.devices))
    # the smallest target of each chip that can be rented, of whole groups
    smallest = (
        next(sizes(chip, recipe.shards), None) for chip in CHIPS if chip.kind in ("GPU", "TPU")
    )
    memory = {one.name: available(one)[0] or 0 for one in smallest if one is not None}
    holding = [(held, name) for name, held in memory.items() if held >= least.needed]
    if not holding:
        return (*facts, fact("room-no-chip", needed=least.needed))
    enough, name = min(holding, key=lambda one: one[0])
    return (*facts, fact("room-chip", target=name, available=enough, needed=least.needed))


def _emulates_bf16(target: Target) -> bool:
    """Whether the target is a GPU before Ampere. False if the catalogue has neither peak."""
    chip = target.chip
    return chip.kind == "GPU" and chip.bf16_dense_tflops is None and chip.fp32_tflops is not None


def decisive(recipe: Recipe, target: Target, plan: Plan) -> Iterator[Fact]:
    """Facts that matter more than any number: the chip lacks the recipe's precision, or the host
    cannot feed it."""
    if recipe.precision == "bf16" and _emulates_bf16(target):
        yield fact("bf16-emulated", chip=target.chip.name)
    if plan.bound == "input" and plan.feeding is not None and plan.feeding.cores_needed is not None:
        # What was packed once would be the same in every epoch
        source = recipe.task.train
        source = source.source if isinstance(source, Weighted) else source
        code = "advice-input" if constant(source) else "advice-input-drawn"
        yield fact(code, needed=plan.feeding.cores_needed, cores=plan.feeding.cores)


def advice(
    recipe: Recipe, target: Target, step: Blueprint, plan: Plan, time: StepTime
) -> Iterator[Fact]:
    """Advice for one target, most useful first. It may be empty."""
    if target.chip.kind == "GPU" and "float64" in time.dtypes:
        yield fact("advice-float64")
    groups, rest = divmod(plan.devices_found, recipe.shards)
    if not rest and not (step.layout.aligned and groups == step.layout.groups):
        yield _uneven(recipe, step.layout, groups)
    each = recipe.batch // recipe.replicas
    if plan.problem is not None and plan.problem.code in (
        "batch-does-not-fit",
        "batch-of-all-fits",
    ):
        yield from _smaller_programs(recipe, plan)
    padded = _multiple(each, SUBLANES)
    if target.chip.kind == "TPU" and each < padded and _fits(plan, padded / each):
        yield fact(
            "advice-padded",
            each=each,
            padded=padded,
            wasted=1 - each / padded,
            batch=padded * recipe.replicas,
        )
    yield from _speed(recipe, step, plan)
    yield from time.warnings


def _smaller_programs(recipe: Recipe, plan: Plan) -> Iterator[Fact]:
    """A number of replicas, or of blocks of the same replicas, with which a device computes the
    batch in parts that fit."""
    alone = recipe.blocks is None
    name, most = ("replicas", recipe.batch) if alone else ("blocks", recipe.replicas)
    units = recipe.block_count
    fits = (plan.largest_batch or 0) // units
    for count in range(2 * units, most + 1, units):
        each = recipe.batch // count
        # Parts that a group can share
        if most % count == 0 and each % recipe.shards == 0 and each <= fits:
            yield fact(f"room-more-{name}", batch=recipe.batch, each=each, **{name: count})
            return


def lacks(target: Target, dtypes: frozenset[str]) -> Fact | None:
    """Why a program cannot run on a TPU, if the compiler's own message would be unclear."""
    missing = [
        name for name in ("float64", "float16") if target.chip.kind == "TPU" and name in dtypes
    ]
    return fact(f"tpu-without-{missing[0]}") if missing else None


def _uneven(recipe: Recipe, layout: Layout, groups: int) -> Fact:
    """The cost of this number of blocks on `groups` groups, and the next one that leaves no group
    waiting."""
    blocks = layout.blocks
    most = layout.blocks_per_device
    even = _multiple(blocks, groups)
    better = []
    name = "replicas" if blocks == recipe.replicas else "blocks"  # other replicas are another net
    if even != blocks and (name == "replicas" or recipe.replicas % even == 0):
        better.append(
            fact(
                "blocks-cost",
                name=name,
                count=even,
                batch=_multiple(recipe.batch, even * recipe.shards),
            )
        )
    return fact(
        "advice-uneven",
        blocks=blocks,
        groups=groups,
        most=most,
        idle=1 - blocks / (groups * most),
        better=better,
    )


def _multiple(batch: int, of: int) -> int:
    return -(-batch // of) * of


def _fits(plan: Plan, times: float) -> bool:
    """Whether a program of `times` times the examples is known to fit. Activations grow by the same
    factor."""
    memory = plan.memory
    return (
        memory is not None and memory.needed + (times - 1) * memory.activations <= memory.available
    )


def _speed(recipe: Recipe, step: Blueprint, plan: Plan) -> Iterator[Fact]:
    if plan.bound == "launch":
        yield fact("advice-launches")
    if plan.bound == "interconnect":
        yield fact("advice-interconnect")
    if recipe.precision == "f32" and plan.chip.startswith("TPU") and plan.bound != "launch":
        yield fact("advice-precision")
    if step.calls > 1 and plan.bound in ("launch", "memory") and _fits(plan, step.calls):
        layout = step.layout
        code = "advice-blocks-in-turn" if step.exact else "advice-blocks-in-turn-free"
        yield fact(
            code,
            calls=step.calls,
            examples=layout.batch // layout.blocks,
            blocks=layout.blocks,
            devices=layout.devices,
        )
