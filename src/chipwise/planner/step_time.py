"""The time of a step on an absent target: its timed kernels, the sums over replicas, and the sums over
devices by the catalogue's links. Within a group, what the compiled program computes while a collective is
under way hides as much of it; sums over groups wait for the last replica."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from ..chips.gpus import compiled_as
from ..chips.targets import Target
from ..errors import DeviceError
from ..hlo.kernel import Kernel
from ..recipe.precision import TPU_PASSES
from ..words.facts import fact
from . import gpu_timing, tpu_timing
from .links import sum_seconds
from .programs import StepPrograms
from .steps import Answers, compiled_step, refused
from .timing import StepTime, dispatch_seconds

FRAMEWORK_BYTES = 0.8e9
"""What a process holds on a GPU before any array: CUDA context, cuDNN, cuBLAS and NCCL. An allowance."""

_RING = Kernel("all-reduce", "collective", bound="interconnect", dtype="f32", source="devices/all-reduce")
_GATHER = dataclasses.replace(_RING, name="all-gather", source="devices/all-gather")


def timed_away(target: Target, programs: StepPrograms, answers: Answers) -> StepTime:
    """The step on a TPU or a GPU, from its compiler's answer for each program."""
    gpu, chip, wanted = target.chip.kind == "GPU", target.chip, programs.recipe.precision
    step = compiled_step(target, programs, answers, FRAMEWORK_BYTES if gpu else 0)
    if refused(step, answers):
        return step
    notes = [fact("kernels-timed")] if gpu else list(step.notes)
    if not gpu and (passes := TPU_PASSES[wanted]) > 1:
        notes.append(fact("passes-counted", precision=wanted, passes=passes))
    if gpu and (stands_in := compiled_as(chip)) is not chip:
        notes.append(fact("compiled-as-another", chip=chip.name, other=stands_in.name))
    if gpu and wanted == "bf16" and chip.bf16_dense_tflops is None:
        notes.append(fact("chip-without-matrix-units", chip=chip.name, precision="bf16"))
    step = dataclasses.replace(step, notes=tuple(notes))
    try:
        kernels = {name: timed(target, wanted, answer.kernels) for name, answer in answers.items()}
        kernels["replica"] = within(target, programs, kernels["replica"])
        kernels["reduce"] = between(target, programs, kernels.get("reduce", []) + kernels.pop("gather", []))
    except DeviceError as error:
        return dataclasses.replace(step, problem=fact(error.code, **error.facts))
    return finished(step, target, programs, kernels)


def timed(target: Target, precision: str, kernels: Sequence[Kernel]) -> list[Kernel]:
    """The kernels of a program with their seconds on `target`. Raises `DeviceError` if the chip's clock is
    unknown."""
    if target.chip.kind == "GPU":
        return gpu_timing.timed(kernels, target.chip)
    if target.chip.clock_GHz is None:
        raise DeviceError("chip-without-clock", chip=target.chip.name)
    return tpu_timing.timed(kernels, target.chip, TPU_PASSES[precision])


def factors(target: Target, precision: str, kernels: Sequence[Kernel]) -> tuple[float, float]:
    """The factors on the time of `timed` kernels between which nine of ten measurements should lie."""
    if target.chip.kind == "GPU":
        return gpu_timing.interval(target.chip, shares(kernels))
    return tpu_timing.interval(kernels, target.chip, TPU_PASSES[precision])


def shares(kernels: Iterable[Kernel]) -> dict[str, float]:
    """The shares of the kernels' time by bound, largest first."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for kernel in kernels:
        seconds[kernel.bound] += kernel.seconds
    total = sum(seconds.values())
    parts = {bound: part / total for bound, part in seconds.items() if total}
    return dict(sorted(parts.items(), key=lambda one: -one[1]))


def additions(programs: StepPrograms) -> list[Kernel]:
    """The kernels that add a device's replicas if `reduce` does not: two vectors are read and one is written.
    Not timed yet."""
    count, size = programs.calls - programs.local_vectors, float(programs.size)
    one = Kernel("add", "elementwise", count, bytes=12 * size, work=size, dtype="f32", source="replicas/add")
    return [dataclasses.replace(one, bound="memory")] if count > 0 else []


def between(target: Target, programs: StepPrograms, reduce: Sequence[Kernel]) -> list[Kernel]:
    """All kernels of the sum over replicas, with timed kernels of its programs: the links' time replaces the
    memory traffic of collectives."""
    layout, chip, size = programs.layout, target.chip, float(programs.size)
    kernels = [kernel for kernel in reduce if kernel.kind != "collective"]
    if chip.kind == "GPU":
        kernels += gpu_timing.timed(additions(programs), chip)
    elif chip.memory_GBps:
        each = chip.memory_GBps * 1e9 / chip.jax_devices_per_chip
        kernels += [dataclasses.replace(k, seconds=k.count * k.bytes / each) for k in additions(programs)]
    wire = sum_seconds(4 * size, target, layout.groups, layout.exact, layout.shards)
    if wire:
        sent = 8 * size * (layout.groups - 1) / layout.groups
        compiled = sum(kernel.count * kernel.bytes for kernel in reduce if kernel.kind == "collective")
        if compiled and not layout.exact:  # a TPU may scatter, or gather, by adding up whole arrays
            wire, sent = wire * compiled / sent, compiled
        kernels.append(dataclasses.replace(_RING, seconds=wire, bytes=sent))
    if programs.gathered:  # a sum is a scatter and a gathering
        lengths = 4.0 * programs.gathered
        wire = sum_seconds(lengths, target, layout.groups, layout.exact, layout.shards) / 2
        sent = lengths * (layout.groups - 1) / layout.groups
        kernels.append(dataclasses.replace(_GATHER, seconds=wire, bytes=sent))
    return kernels


def within(target: Target, programs: StepPrograms, timed: Sequence[Kernel]) -> list[Kernel]:
    """The kernels of a replica, `timed`. In a group, a collective takes the links' time, less that of what
    the program runs beside it. Links carry one collective after another, so a kernel hides only once."""
    shards = programs.shards
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
        kernels.append(dataclasses.replace(one, seconds=left, bound="interconnect", beside=()))
    return kernels


def finished(
    step: StepTime, target: Target, programs: StepPrograms, kernels: Mapping[str, Sequence[Kernel]]
) -> StepTime:
    """`step` with its time, from the timed `kernels` of each program; those for norms are the update's."""
    whole = tuple(
        dataclasses.replace(
            kernel.times(programs.calls if name == "replica" else 1),
            program=name if name in ("replica", "reduce") else "update",
        )
        for name, own in kernels.items()
        for kernel in own
    )
    parts: dict[str, float] = dict.fromkeys(("replica", "reduce", "update"), 0.0)
    for kernel in whole:
        parts[kernel.program] += kernel.seconds
    bound = next(iter(shares(whole)), "memory")
    span = factors(target, programs.recipe.precision, whole)
    host = dispatch_seconds(programs, target.hosts)
    return dataclasses.replace(step, kernels=whole).timed(parts, span, host, bound)
