"""The time of a step on an absent target, from its compiler's answers: its timed kernels, the sums over
replicas, and the sums over devices by the catalogue's links.

Within a group, what the compiled program computes while a collective is under way hides as much of it; sums
over groups wait for the last replica.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..chips.gpus import compiled_as
from ..chips.targets import Target
from ..engine.blueprint import Memory
from ..errors import DeviceError
from ..hlo.kernel import Kernel
from ..recipe.precision import TPU_PASSES
from ..words.facts import Fact, fact
from . import device_memory, time_gpu, time_tpu
from .compile_answers import Compiled
from .compile_step import Answers
from .plans import Range, unique
from .time_links import sum_seconds
from .tracing import EVALUATION, Traceable, TracedStep

FRAMEWORK_BYTES = 0.8e9
"""Assumed memory that a process takes on a GPU before any array: CUDA context, cuDNN, cuBLAS and NCCL."""

CALL_SECONDS, ARGUMENT_SECONDS = 5e-6, 0.3e-6
"""The host's time to start a program on a device, and for each array that it passes: measured on one
machine."""

DISPATCH_FACTOR = 2.0
"""The factor, down and up, of the host's time, since hosts differ."""

_OWN = ("replica", "reduce")  # programs that are a part of a step; the others are its update
_RING = Kernel("all-reduce", "collective", bound="interconnect", dtype="f32", source="devices/all-reduce")


@dataclass(frozen=True)
class StepTime:
    """A step on one target, per device. `seconds` is `None` if there is a `problem` or it does not fit."""

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


def local_devices(step: TracedStep, target: Target) -> int:
    """The devices of one host that run `step`."""
    return -(-step.layout.devices // max(target.hosts, 1))


def dispatch_seconds(step: TracedStep, target: Target) -> float:
    """The host's time to start a step: each local device's replicas and update, and the reduction."""
    local, (first, *others) = local_devices(step, target), step.programs
    others = [program for program in others if program.name != EVALUATION]
    reduce = CALL_SECONDS + ARGUMENT_SECONDS * local * step.local_vectors
    return local * (step.calls * _call(first) + sum(map(_call, others))) + reduce


def _call(program: Traceable) -> float:
    return CALL_SECONDS + ARGUMENT_SECONDS * program.arguments


def timed_away(step: TracedStep, target: Target, answers: Answers) -> StepTime:
    """The step on a TPU or a GPU, from its compiler's answer for each program."""
    precision = step.recipe.precision
    problems = [one.problem for one in answers.values() if one.problem is not None]
    stepping = {name: one for name, one in answers.items() if name != EVALUATION}
    made = StepTime(
        memory=memory_needed(step, target, answers),
        flops=sum(one.flops * (step.calls if name == "replica" else 1) for name, one in stepping.items()),
        wire_bytes=sum(one.wire_bytes for one in stepping.values()),
        dtypes=step.programs[0].contents(target.chip).dtypes,
        warnings=unique(note for one in answers.values() for note in one.notes),
    )
    if problems:  # `memory` says what was refused for memory
        return replace(made, problem=None if problems[0].code == "refused-for-memory" else problems[0])
    made = replace(made, notes=tuple(sources(target, precision)))
    try:
        kernels = {name: timed(target, precision, one.kernels) for name, one in stepping.items()}
        if EVALUATION in answers:
            made = replace(made, evaluation=one_call(step, target, answers[EVALUATION]))
        kernels["replica"] = within(step, target, kernels["replica"])
        reduce = kernels.get("reduce", []) + kernels.pop("gather", [])
        kernels["reduce"] = between(step, target, reduce)
    except DeviceError as error:
        return replace(made, problem=error.fact)
    return finished(made, step, target, kernels)


def sources(target: Target, precision: str) -> Iterator[Fact]:
    """Where the figures come from."""
    chip = target.chip
    if chip.kind == "TPU":
        yield fact("compiled-by-own-compiler")
        if (passes := TPU_PASSES[precision]) > 1:
            yield fact("passes-counted", precision=precision, passes=passes)
        return
    yield fact("kernels-timed")
    if (stands_in := compiled_as(chip)) is not chip:
        yield fact("compiled-as-another", chip=chip.name, other=stands_in.name)
    if precision == "bf16" and chip.bf16_dense_tflops is None:
        yield fact("chip-without-matrix-units", chip=chip.name, precision="bf16")


def one_call(step: TracedStep, target: Target, answer: Compiled) -> Range:
    """The time of one call of a program that is not part of the step."""
    (program,) = (one for one in step.programs if one.name == answer.name)
    kernels = timed(target, step.recipe.precision, answer.kernels)
    seconds, span = sum(one.seconds for one in kernels), factors(target, step.recipe.precision, kernels)
    device = Range(seconds, span[0] * seconds, span[1] * seconds)
    return device.plus(Range.around(_call(program), DISPATCH_FACTOR))


def memory_needed(step: TracedStep, target: Target, answers: Answers) -> Memory | None:
    """The memory of the step; for a program that was refused for memory, what it needs beyond its
    arguments."""
    problems = [one.problem for one in answers.values() if one.problem is not None]
    if any(problem.code != "refused-for-memory" for problem in problems):
        return None
    arguments = step.parameter_bytes + step.state_bytes + step.data_bytes
    temporary = {name: float(one.temp_bytes) for name, one in answers.items()}
    temporary |= {problem["program"]: problem["needed"] - arguments for problem in problems}
    framework = FRAMEWORK_BYTES if target.chip.kind == "GPU" else 0
    code = framework + sum(one.code_bytes for one in answers.values())
    memory = device_memory.memory(step, target, temporary, code)
    if memory is None or not problems:
        return memory
    return replace(memory, available=problems[0]["available"], available_source=fact("memory-as-refused"))


def timed(target: Target, precision: str, kernels: Sequence[Kernel]) -> list[Kernel]:
    """The kernels of a program with their seconds on `target`. Raises `DeviceError` if the chip's clock is
    unknown."""
    if target.chip.kind == "GPU":
        return time_gpu.timed(kernels, target.chip)
    if target.chip.clock_GHz is None:
        raise DeviceError("chip-without-clock", chip=target.chip.name)
    return time_tpu.timed(kernels, target.chip, TPU_PASSES[precision])


def factors(target: Target, precision: str, kernels: Sequence[Kernel]) -> tuple[float, float]:
    """The factors on the time of `timed` kernels between which nine of ten measurements should lie."""
    if target.chip.kind == "GPU":
        return time_gpu.interval(target.chip, shares(kernels))
    return time_tpu.interval(kernels, target.chip, TPU_PASSES[precision])


def shares(kernels: Iterable[Kernel]) -> dict[str, float]:
    """The shares of the kernels' time by bound, largest first."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for kernel in kernels:
        seconds[kernel.bound] += kernel.seconds
    total = sum(seconds.values())
    parts = {bound: part / total for bound, part in seconds.items() if total}
    return dict(sorted(parts.items(), key=lambda one: -one[1]))


def additions(step: TracedStep) -> list[Kernel]:
    """The kernels that add a device's replicas if `reduce` does not: two vectors are read and one is written.
    Not timed yet."""
    count, size = step.calls - step.local_vectors, float(step.size)
    one = Kernel("add", "elementwise", count, bytes=12 * size, work=size, dtype="f32", source="replicas/add")
    return [replace(one, bound="memory")] if count > 0 else []


def between(step: TracedStep, target: Target, reduce: Sequence[Kernel]) -> list[Kernel]:
    """All kernels of the sum over replicas, with timed kernels of its programs: the links' time replaces the
    memory traffic of collectives."""
    layout, chip, size = step.layout, target.chip, float(step.size)
    kernels = [kernel for kernel in reduce if kernel.kind != "collective"]
    if chip.kind == "GPU":
        kernels += time_gpu.timed(additions(step), chip)
    elif chip.memory_GBps:
        each = chip.memory_GBps * 1e9 / chip.jax_devices_per_chip
        kernels += [replace(k, seconds=k.count * k.bytes / each) for k in additions(step)]
    times = layout.vectors  # that the exchange takes, of one vector
    wire = sum_seconds(4 * size, target, layout.groups, layout.exact, layout.shards, times)
    if wire:
        sent = (1 + times) * 4 * size * (layout.groups - 1) / layout.groups
        compiled = sum(kernel.count * kernel.bytes for kernel in reduce if kernel.kind == "collective")
        if compiled and not layout.exact:  # a TPU may scatter, or gather, by adding up whole arrays
            wire, sent = wire * compiled / sent, compiled
        kernels.append(replace(_RING, seconds=wire, bytes=sent))
    return kernels


def within(step: TracedStep, target: Target, timed: Sequence[Kernel]) -> list[Kernel]:
    """The kernels of a replica, `timed`. In a group, a collective takes the links' time, less that of what
    the program runs beside it. Links carry one collective after another, so a kernel hides only once."""
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
    made: StepTime, step: TracedStep, target: Target, kernels: Mapping[str, Sequence[Kernel]]
) -> StepTime:
    """`made` with its time, from the timed `kernels` of each program."""
    whole = tuple(
        replace(kernel.times(step.calls if name == "replica" else 1), program=part)
        for name, own in kernels.items()
        for part in (name if name in _OWN else "update",)
        for kernel in own
    )
    parts: dict[str, float] = dict.fromkeys(("replica", "reduce", "update"), 0.0)
    for kernel in whole:
        parts[kernel.program] += kernel.seconds
    busiest, span = next(iter(shares(whole)), "memory"), factors(target, step.recipe.precision, whole)
    device, dispatch = sum(parts.values()), dispatch_seconds(step, target)
    largest = max(parts, key=lambda name: parts[name])
    bound = {"update": "memory", "reduce": "interconnect"}.get(largest, busiest)
    return replace(
        made,
        kernels=whole,
        seconds=at_least(Range(device, device * span[0], device * span[1]), dispatch),
        parts={**parts, "dispatch": dispatch},
        bound="launch" if dispatch > device else bound,
    )
