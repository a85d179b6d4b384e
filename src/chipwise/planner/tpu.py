"""A step on a TPU that is not there: its compiler's cycles and memory, put together for a layout."""

from __future__ import annotations

import collections
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

from ..chips.catalogue import Chip
from ..chips.targets import Target
from ..recipe import precision
from .collectives import all_reduce_seconds
from .compiler import (
    DIED,
    Compiled,
    Exported,
    ReduceRequest,
    Request,
    compile_all,
    export_program,
    flat_positions,
)
from .memory import held
from .plans import Memory, Range
from .programs import StepPrograms, Traceable, traced_program
from .timing import OTHER_HOST, StepTime, at_least, dispatch_seconds, interval

Facts = dict[str, Compiled]
"""Program name to what its compilation says."""

_PRODUCTS = ("matmul", "convolution")


def compile_steps(
    cases: Sequence[tuple[Target, StepPrograms]],
    *,
    cache: Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Facts]:
    """The facts of each case. A layout's programs are exported once, whatever the number of its chips."""
    exported: dict[int, list[Exported]] = {}
    requests: list[Request] = []
    owners: list[int] = []
    refused: dict[int, Compiled] = {}
    for i, (target, programs) in enumerate(cases):
        layout, topology = programs.layout, target.topology_arguments()
        bodies = exported.setdefault(id(programs), [])
        if not bodies:
            try:
                bodies += _exported(programs)
            except Exception as error:  # it traces, but has no form for a TPU: the answer for this target
                refused[i] = Compiled("replica", error=" ".join(str(error).split())[:400])
                continue
        speeds = device_speeds(target.chip)
        made = [
            Request(p.name, topology, body, flat_positions(p.specs, p.donate), *speeds)
            for p, body in zip(_pair(programs), bodies, strict=True)
        ]
        if layout.devices > 1 or programs.calls > 1:
            reduce = ReduceRequest(layout.devices, programs.local_vectors, programs.size, layout.exact)
            made.append(Request("reduce", topology, reduce, (), *speeds))
        requests += made
        owners += [i] * len(made)
    facts: dict[int, Facts] = collections.defaultdict(dict, {i: {"replica": f} for i, f in refused.items()})
    if requests:
        answers = compile_all(requests, cache_dir=cache, progress=progress)
        for owner, answer in zip(owners, answers, strict=True):
            facts[owner][answer.name] = answer
    return [facts[i] for i in range(len(cases))]


def device_speeds(chip: Chip) -> tuple[float | None, float | None]:
    """Clock in GHz and memory bandwidth in GB/s of one JAX device of `chip`."""
    memory = chip.memory_GBps
    return chip.clock_GHz, None if memory is None else memory / chip.jax_devices_per_chip


def _pair(programs: StepPrograms) -> tuple[Traceable, Traceable]:
    return programs.replica, programs.update


def _exported(programs: StepPrograms) -> list[Exported]:
    """f32 and tf32 products are compiled in one pass, and their cycles counted several times: the compiler
    takes minutes to search for the best convolution of six passes."""
    if precision.TPU_PASSES[programs.recipe.precision] == 1:
        return [export_program(p.function, p.specs) for p in _pair(programs)]
    with precision.one_pass():  # traced anew: what was traced before has all passes
        return [export_program(inspect.unwrap(p.function), p.specs) for p in _pair(programs)]


def timed(target: Target, programs: StepPrograms, facts: Facts) -> StepTime:
    """The step from the facts of its programs."""
    present = list(facts.values())
    failed = next((f for f in present if f.error is not None), None)
    passes = precision.TPU_PASSES[programs.recipe.precision]
    notes = ["Compiled by the chip's own compiler; the time is its cycles at the chip's clock."]
    if passes > 1:
        notes.append(
            f"{programs.recipe.precision} products take {passes} passes of bfloat16: compiled as one, "
            f"counted {passes} times. Training compiles all of them, which can take minutes."
        )
    operations = traced_program(programs.replica, "tpu")
    common = dict(
        method="compiled",
        flops=programs.calls * operations.flops,
        wire_bytes=sum(f.wire_bytes for f in present),
        memory=_memory(target, programs, present),
        compile_seconds=_compilation(sum(f.compile_seconds for f in present), passes),
        notes=tuple(notes),
        warnings=tuple(dict.fromkeys(text for f in present for text in f.notes)),
        dtypes=operations.dtypes,
    )
    if failed is not None:
        problem = None if failed.bytes_needed else f"does not compile ({failed.name}): {explained(failed)}"
        return StepTime(seconds=None, parts={}, bound=None, problem=problem, **common)  # type: ignore[arg-type]
    if any(f.seconds is None for f in present):
        problem = "compiles, but its time is unknown: the chip's clock is not in the catalogue"
        return StepTime(seconds=None, parts={}, bound=None, problem=problem, **common)  # type: ignore[arg-type]

    def seconds(name: str) -> float:
        f = facts.get(name)
        if f is None:
            return 0.0
        products = sum(f.seconds_by_kind.get(kind, 0.0) for kind in _PRODUCTS)
        return (f.seconds or 0.0) + (passes - 1) * products

    wire = all_reduce_seconds(4.0 * programs.size, programs.layout.devices, target.chip)
    parts = {
        "replica": programs.calls * seconds("replica"),
        "reduce": seconds("reduce") + wire,
        "update": seconds("update"),
    }
    device, dispatch = sum(parts.values()), dispatch_seconds(programs, target.hosts)
    return StepTime(
        seconds=at_least(interval(Range(device, device, device), "TPU"), dispatch),
        parts={**parts, "dispatch": dispatch},
        bound="launch" if dispatch > device else _bound(parts, facts["replica"], passes),
        **common,  # type: ignore[arg-type]
    )


def _compilation(seconds: float, passes: int) -> Range:
    """Of programs that took `seconds` here, with one pass: all passes take longer, up to minutes."""
    made = Range.around(seconds, OTHER_HOST)
    return dataclasses.replace(made, high=passes * made.high)


def _memory(target: Target, programs: StepPrograms, present: Sequence[Compiled]) -> Memory | None:
    """Of a program that was refused for memory, what it needs beyond its arguments."""
    if any(f.error is not None and f.bytes_needed is None for f in present):
        return None
    activations = 0
    for f in present:
        if f.bytes_needed is None:
            activations = max(activations, f.temp_bytes)
        else:
            arguments = programs.parameter_bytes + programs.state_bytes + programs.data_bytes
            activations = max(activations, f.bytes_needed - arguments)
    made = held(programs, target, activations, sum(f.code_bytes for f in present))
    said = next((f.bytes_available for f in present if f.bytes_available), None)
    if made is None or said is None:
        return made
    return dataclasses.replace(made, available=said, available_source="the compiler's refusal")


def _bound(parts: dict[str, float], replica: Compiled, passes: int) -> str:
    if parts["reduce"] > max(parts["replica"], parts["update"]):
        return "interconnect"
    if parts["update"] > parts["replica"]:
        return "memory"
    products = passes * sum(replica.seconds_by_kind.get(kind, 0.0) for kind in _PRODUCTS)
    others = sum(c for kind, c in replica.seconds_by_kind.items() if kind not in _PRODUCTS)
    return "compute" if products >= others else "memory"


def crashed(facts: Facts) -> str | None:
    """What the compiler died of, which says nothing about the program; `None` where it answered."""
    return next((f.error for f in facts.values() if f.error and DIED in f.error), None)


def explained(failed: Compiled) -> str:
    """The compiler's message with what to do about it."""
    message = failed.error or ""
    for sign, fix in _FIXES:
        if sign.lower() in message.lower():
            return f"{fix} The compiler says: {message}"
    return message


_FIXES = (
    ("lowering platform", "It calls back to the host (jax.debug.print, pure_callback): leave that out."),
    ("f64", "TPUs have no float64: use float32."),
    ("f16", "TPUs have no float16: use precision='bf16'."),
    ("dynamic", "TPUs want shapes that are known before: pad instead."),
    ("custom call", "The program calls a kernel that TPUs do not have: use plain JAX operations there."),
)
