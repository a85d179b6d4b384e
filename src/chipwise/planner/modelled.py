"""A step on a chip whose compiler is not here: its programs operation by operation."""

from __future__ import annotations

import dataclasses

from ..chips.catalogue import Chip
from ..chips.targets import Target
from ..errors import DeviceError
from .collectives import all_reduce_seconds
from .host import host_cpu_chip
from .memory import held
from .operations import Traced
from .plans import Range
from .programs import StepPrograms, Traceable, traced_program
from .roofline import FRAMEWORK_BYTES, Timed, time_on
from .timing import ALLOWANCE, StepTime, at_least, dispatch_seconds

_PLATFORM = {"GPU": "cuda", "CPU": "cpu", "TPU": "tpu"}
_COMPILE_SECONDS = {"GPU": 10.0, "CPU": 3.0, "TPU": 30.0}
_COMPILE_SECONDS_PER_OPERATION = 0.02


def traced(program: Traceable, target: Target) -> Traced:
    """The operations of a program in the form that the target's platform would run."""
    return traced_program(program, _PLATFORM[target.chip.kind])


def timed_by_model(target: Target, programs: StepPrograms) -> StepTime:
    """The step on `target` from the operations of its programs.

    The replicas' sums are added to the end: nothing overlaps them. Compilation is an allowance for each
    program and operation.
    """
    replica, update = traced(programs.replica, target), traced(programs.update, target)
    notes = [f"Modelled operation by operation; {target.chip.name}'s own compiler was not asked."]
    framework = FRAMEWORK_BYTES if target.chip.kind == "GPU" else 0.0
    memory = held(programs, target, max(replica.peak_temp_bytes, update.peak_temp_bytes), framework)
    flops = programs.calls * replica.flops
    precision, layout = programs.recipe.precision, programs.layout
    compilation = _COMPILE_SECONDS[target.chip.kind] + _COMPILE_SECONDS_PER_OPERATION * (
        len(replica.operations) + len(update.operations)
    )
    common = dict(
        method="modelled",
        flops=flops,
        wire_bytes=2 * (layout.devices - 1) / layout.devices * 4.0 * programs.size,
        memory=memory,
        compile_seconds=Range.around(compilation, ALLOWANCE),
        dtypes=replica.dtypes,
    )
    try:
        chip = device_chip(target.chip)
        one, last = time_on(replica, chip, precision), time_on(update, chip, precision)
        wire = all_reduce_seconds(4.0 * programs.size, layout.devices, target.chip)
    except DeviceError as error:
        return StepTime(seconds=None, parts={}, bound=None, problem=str(error), notes=tuple(notes), **common)  # type: ignore[arg-type]
    add = max(programs.calls - 1, 0) * 3 * 4.0 * programs.size / ((chip.memory_GBps or 1) * 1e9)
    parts = {"replica": programs.calls * one.seconds, "reduce": wire + add, "update": last.seconds}
    device, dispatch = sum(parts.values()), dispatch_seconds(programs, target.hosts)
    low, high = one.low / one.seconds, one.high / one.seconds
    if target.chip.kind == "TPU":
        low, high = 1 / UNLIKE, UNLIKE
        notes.append("Install the TPU's compiler for a better answer: pip install 'chipwise[plan]'.")
    notes += [*replica.notes, *one.notes]
    return StepTime(
        seconds=at_least(Range(device, device * low, device * high), dispatch),
        parts={**parts, "dispatch": dispatch},
        bound="launch" if dispatch > device else _bound(parts, one),
        notes=tuple(dict.fromkeys(notes)),
        **common,  # type: ignore[arg-type]
    )


UNLIKE = 3.0
"""Up and down, of the interval on chips unlike those that the efficiencies were fitted to."""


def device_chip(chip: Chip) -> Chip:
    """`chip` as the model wants it: one JAX device of it, with every figure that the model reads.

    The host's CPU is measured. A TPU's float32 products are six passes of bfloat16, TF32's three.
    """
    if chip.kind == "CPU":
        return host_cpu_chip()
    if chip.kind != "TPU" or chip.bf16_dense_tflops is None or chip.memory_GBps is None:
        return chip
    peak = chip.bf16_dense_tflops / chip.jax_devices_per_chip
    return dataclasses.replace(
        chip,
        bf16_dense_tflops=peak,
        fp32_tflops=peak / 6,
        tf32_dense_tflops=peak / 3,
        memory_GBps=chip.memory_GBps / chip.jax_devices_per_chip,
    )


def _bound(parts: dict[str, float], replica: Timed) -> str:
    if parts["reduce"] > max(parts["replica"], parts["update"]):
        return "interconnect"
    return "memory" if parts["update"] > parts["replica"] else replica.bound
