"""A step on a GPU: its compiled kernels, timed, with the sums over devices by the catalogue's links."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from ..chips.gpus import compiled_as
from ..chips.targets import Target
from ..errors import DeviceError
from ..words.facts import fact
from .gpu_timing import interval, timed
from .kernels import Kernel
from .links import sum_seconds
from .programs import StepPrograms
from .steps import Answers, compiled_step, of_a_step, refused
from .timing import StepTime, dispatch_seconds

FRAMEWORK_BYTES = 0.8e9
"""What a process holds on a GPU before any array: CUDA context, cuDNN, cuBLAS and NCCL. An allowance."""


def timed_on_gpu(target: Target, programs: StepPrograms, answers: Answers) -> StepTime:
    """The step from its kernels. Nothing overlaps the sums over devices, which come after the gradients."""
    step = compiled_step(target, programs, answers, FRAMEWORK_BYTES)
    if refused(step, answers):
        return step
    chip = target.chip
    notes = [fact("kernels-timed")]
    if (stands_in := compiled_as(chip)) is not chip:
        notes.append(fact("compiled-as-another", chip=chip.name, other=stands_in.name))
    if programs.recipe.precision == "bf16" and chip.bf16_dense_tflops is None:
        notes.append(fact("chip-without-matrix-units", chip=chip.name, precision="bf16"))
    step = dataclasses.replace(step, notes=tuple(notes))
    kernels = {name: timed(answer.kernels, chip) for name, answer in answers.items()}
    try:
        wire = sum_seconds(4.0 * programs.size, target, programs.layout.devices, programs.layout.exact)
    except DeviceError as error:
        return dataclasses.replace(step, problem=fact(error.code, **error.facts))
    adds = max(programs.calls - programs.local_vectors, 0)  # as vectors come: two are read, one written
    adding = adds * 3 * 4.0 * programs.size / ((chip.memory_GBps or 1.0) * 1e9)
    seconds = {name: sum(kernel.seconds for kernel in own) for name, own in kernels.items()}
    parts = {
        "replica": programs.calls * seconds["replica"],
        "reduce": seconds.get("reduce", 0.0) + adding + wire,
        "update": seconds["update"],
    }
    step = dataclasses.replace(step, kernels=of_a_step(programs, kernels))
    by_bound = shares(step.kernels)
    bound = max(by_bound, key=lambda name: by_bound[name]) if by_bound else "memory"
    factors = interval(chip, by_bound.get("launch", 0.0))
    return step.timed(parts, factors, dispatch_seconds(programs, target.hosts), bound)


def shares(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Of the kernels' time, by what bounds them."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for kernel in kernels:
        seconds[kernel.bound] += kernel.seconds
    total = sum(seconds.values())
    return {bound: part / total for bound, part in seconds.items() if total}
