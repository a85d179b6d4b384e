"""The time of a step on an absent target, from its compiler's answers: its timed kernels, the sums
over replicas, and the sums over devices by the catalogue's links.

The time is at least that which the host needs to start the programs.

Within a group, the compiled program computes while a collective is under way, and this computation
hides as much of the collective's time. Sums over groups wait for the last replica.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..base import DeviceError, Fact, fact
from ..base.prediction import Range
from ..chips.catalogue import Chip
from ..chips.targets import Target
from ..compile.absent_device import shares, sources, timed, total_seconds
from ..compile.answers import Answer
from ..compile.hlo.kernel import Kernel
from ..compile.time_links import sum_seconds
from ..recipe.precision import TPU_PASSES
from ..step.blueprint import Blueprint, Memory
from ..step.program import Program
from . import device_memory
from .compile_step import Answers
from .plans import unique
from .tracing import EVALUATION

FRAMEWORK_BYTES = 0.8e9
"""Assumed memory that a process takes on a GPU before any array: CUDA context, cuDNN, cuBLAS and
NCCL."""

CALL_SECONDS, ARGUMENT_SECONDS = 5e-6, 0.3e-6
"""The host's time to start a program on a device, and for each array that it passes, measured on
one machine."""

DISPATCH_FACTOR = 2.0
"""The factor, down and up, of the host's time, since hosts differ."""

_OWN = ("replica", "reduce")  # programs that are a part of a step; the others are its update
_RING = Kernel(
    "all-reduce", "collective", bound="interconnect", dtype="f32", source="devices/all-reduce"
)


@dataclass(frozen=True)
class StepTime:
    """A step on one target, per device. `seconds` is `None` if there is a `problem` or the step
    does not fit."""

    memory: Memory | None = None
    flops: float = 0.0
    wire_bytes: float = 0.0
    dtypes: frozenset[str] = frozenset()  # that its first program computes in
    notes: tuple[Fact, ...] = ()
    warnings: tuple[Fact, ...] = ()
    problem: Fact | None = None
    seconds: Range | None = None
    parts: dict[str, float] = field(default_factory=dict)
    bound: str | None = None
    kernels: tuple[Kernel, ...] = ()  # of a whole step
    evaluation: Range | None = None  # of one block


def at_least(device: Range, host: float) -> Range:
    """The time of a step: `device`, but at least the `host` seconds, with their interval."""
    return Range(
        max(device.value, host),
        max(device.low, host / DISPATCH_FACTOR),
        max(device.high, host * DISPATCH_FACTOR) if host > device.low else device.high,
    )


def local_devices(step: Blueprint, target: Target) -> int:
    """The devices of one host that run `step`."""
    return -(-step.layout.devices // max(target.hosts, 1))


def dispatch_seconds(step: Blueprint, target: Target) -> float:
    """The host's time to start a step: each local device's replicas and update, the picking of its
    examples, and the reduction."""
    local, (first, *others) = local_devices(step, target), step.programs
    others = [program for program in others if program.name != EVALUATION]
    others += [] if step.pick is None else [step.pick]
    reduce = CALL_SECONDS + ARGUMENT_SECONDS * local * step.local_vectors
    return local * (step.calls * _call(first) + sum(map(_call, others))) + reduce


def _call(program: Program) -> float:
    return CALL_SECONDS + ARGUMENT_SECONDS * program.arguments


def absent_step_time(step: Blueprint, target: Target, answers: Answers) -> StepTime:
    """The step on a TPU or a GPU, from its compiler's answer for each program."""
    chip = target.chip
    precision = step.recipe.precision
    problems = [one.problem for one in answers.values() if one.problem is not None]
    stepping = {name: one for name, one in answers.items() if name != EVALUATION}
    made = StepTime(
        memory=memory_needed(step, target, answers),
        flops=sum(
            one.flops * (step.calls if name == "replica" else 1) for name, one in stepping.items()
        ),
        wire_bytes=sum(one.wire_bytes for one in stepping.values()),
        dtypes=step.programs[0].contents(target.chip).dtypes,
        warnings=unique(note for one in answers.values() for note in one.notes),
    )
    if problems:  # `memory` says what was refused for memory
        return replace(
            made, problem=None if problems[0].code == "refused-for-memory" else problems[0]
        )
    made = replace(made, notes=(*sources(chip), *_in_precision(chip, precision)))
    try:
        passes = TPU_PASSES[precision]
        kernels = {name: timed(target.chip, one.kernels, passes) for name, one in stepping.items()}
        if EVALUATION in answers:
            made = replace(made, evaluation=one_call(step, target, answers[EVALUATION]))
        kernels["replica"] = within(step, target, kernels["replica"])
        reduce = kernels.get("reduce", []) + kernels.pop("gather", [])
        kernels["reduce"] = between(step, target, reduce)
    except DeviceError as error:
        return replace(made, problem=error.fact)
    return finished(made, step, target, kernels)


def _in_precision(chip: Chip, precision: str) -> Iterator[Fact]:
    """How a chip computes products in `precision`, if not as it says."""
    if chip.kind == "TPU" and (passes := TPU_PASSES[precision]) > 1:
        yield fact("passes-counted", precision=precision, passes=passes)
    if precision == "bf16" and chip.bf16_dense_tflops is None:
        yield fact("chip-without-matrix-units", chip=chip.name, precision="bf16")


def one_call(step: Blueprint, target: Target, answer: Answer) -> Range:
    """The time of one call of a program that is not part of the step."""
    (program,) = (one for one in step.programs if one.name == answer.name)
    passes = TPU_PASSES[step.recipe.precision]
    device = total_seconds(target.chip, timed(target.chip, answer.kernels, passes), passes)
    return device.plus(Range.around(_call(program), DISPATCH_FACTOR))


def memory_needed(step: Blueprint, target: Target, answers: Answers) -> Memory | None:
    """The memory of the step. A program that was refused for memory counts with its need beyond its
    arguments."""
    problems = [one.problem for one in answers.values() if one.problem is not None]
    if any(problem.code != "refused-for-memory" for problem in problems):
        return None
    arguments = step.parameter_bytes + step.state_bytes + step.data_bytes
    temporary = {name: float(one.temp_bytes) for name, one in answers.items()}
    temporary |= {problem["program"]: problem["needed"] - arguments for problem in problems}
    if EVALUATION in temporary:
        temporary[EVALUATION] += step.eval_merged_bytes
    framework = FRAMEWORK_BYTES if target.chip.kind == "GPU" else 0
    code = framework + sum(one.code_bytes for one in answers.values())
    memory = device_memory.memory(step, target, temporary, code)
    if memory is None or not problems:
        return memory
    return replace(
        memory, available=problems[0]["available"], available_source=fact("memory-as-refused")
    )


def additions(step: Blueprint) -> list[Kernel]:
    """The kernels that add a device's replicas if `reduce` does not. They read two vectors and
    write one, and are not timed yet."""
    count = step.calls - step.local_vectors
    size = float(step.size)
    one = Kernel(
        "add", "elementwise", count, bytes=12 * size, work=size, dtype="f32", source="replicas/add"
    )
    return [replace(one, bound="memory")] if count > 0 else []


def between(step: Blueprint, target: Target, reduce: Sequence[Kernel]) -> list[Kernel]:
    """All kernels of the sum over replicas, with timed kernels of its programs. The links' time
    replaces the memory traffic of collectives."""
    layout = step.layout
    chip = target.chip
    size = float(step.size)
    kernels = [kernel for kernel in reduce if kernel.kind != "collective"]
    if chip.kind == "GPU":
        kernels += timed(chip, additions(step))
    elif chip.memory_GBps:
        each = chip.memory_GBps * 1e9 / chip.jax_devices_per_chip
        kernels += [replace(k, seconds=k.count * k.bytes / each) for k in additions(step)]
    times = layout.vectors  # that the exchange takes, of one vector
    wire = sum_seconds(4 * size, target, layout.groups, layout.exact, layout.shards, times)
    if wire:
        sent = (1 + times) * 4 * size * (layout.groups - 1) / layout.groups
        compiled = sum(
            kernel.count * kernel.bytes for kernel in reduce if kernel.kind == "collective"
        )
        if compiled and not layout.exact:  # a TPU may scatter, or gather, by adding up whole arrays
            wire = wire * compiled / sent
            sent = compiled
        kernels.append(replace(_RING, seconds=wire, bytes=sent))
    return kernels


def within(step: Blueprint, target: Target, timed: Sequence[Kernel]) -> list[Kernel]:
    """The kernels of a replica, `timed`. In a group, a collective takes the links' time, less the
    time of the kernels that the program runs beside it. Links carry one collective after another,
    so a kernel hides only once."""
    shards = step.shards
    if shards == 1:
        return list(timed)
    collectives = [kernel for kernel in timed if kernel.kind == "collective"]
    kernels = [kernel for kernel in timed if kernel.kind != "collective"]
    hiding: dict[str, float] = collections.defaultdict(float)
    for kernel in kernels:
        hiding[kernel.name] += kernel.seconds
    for one in collectives:
        rounds = 2 if one.name == "all-reduce" else 1  # which is a scatter of sums and a gathering
        array = one.bytes * shards / (rounds * (shards - 1))
        left = one.count * rounds / 2 * sum_seconds(array, target, shards, exact=False)
        for name in one.beside:
            hidden = min(left, hiding[name])
            left -= hidden
            hiding[name] -= hidden
        kernels.append(replace(one, seconds=left, bound="interconnect", beside=()))
    return kernels


def finished(
    made: StepTime, step: Blueprint, target: Target, kernels: Mapping[str, Sequence[Kernel]]
) -> StepTime:
    """`made` with its time, from the timed `kernels` of each program."""
    whole = tuple(
        replace(kernel.times(step.calls if name == "replica" else 1), program=part)
        for name, own in kernels.items()
        for part in (name if name in _OWN else "update",)
        for kernel in own
    )
    parts = dict.fromkeys(("replica", "reduce", "update"), 0.0)
    for kernel in whole:
        parts[kernel.program] += kernel.seconds
    busiest = next(iter(shares(whole)), "memory")
    dispatch = dispatch_seconds(step, target)
    device = total_seconds(target.chip, whole, TPU_PASSES[step.recipe.precision])
    largest = max(parts, key=lambda name: parts[name])
    bound = {"update": "memory", "reduce": "interconnect"}.get(largest, busiest)
    return replace(
        made,
        kernels=whole,
        seconds=at_least(device, dispatch),
        parts={**parts, "dispatch": dispatch},
        bound="launch" if dispatch > device.value else bound,
    )
