"""A step on a target that is not there: by its chip's own compiler, or modelled operation by operation."""

from __future__ import annotations

import collections
import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..chips.catalogue import Chip
from ..chips.targets import Target
from ..errors import DeviceError
from ..models.target import Target as Kernels
from ..models.target import traced_for
from ..recipe import precision
from ..words.facts import fact
from .compiler import (
    PIP,
    Compiled,
    Exported,
    Progress,
    ReduceRequest,
    Request,
    compile_each,
    export_program,
    flat_positions,
    refusal,
)
from .kernels import Kernel
from .plans import Memory, Range, unique
from .programs import StepPrograms, Traceable, held, traced_program
from .roofline import FRAMEWORK_BYTES, device_chip, time_on
from .timing import (
    ALLOWANCE,
    OTHER_HOST,
    TPU_FACTORS,
    StepTime,
    all_reduce_seconds,
    dispatch_seconds,
)

Answers = dict[str, Compiled]
"""Program name to what its compilation says."""

_PRODUCTS = ("matmul", "convolution")
_PLATFORM = {"GPU": "cuda", "CPU": "cpu", "TPU": "tpu"}
_COMPILE_SECONDS = {"GPU": 10.0, "CPU": 3.0, "TPU": 30.0}
_COMPILE_SECONDS_PER_OPERATION = 0.02

UNLIKE = 3.0
"""Up and down, of the interval on chips unlike those that the efficiencies were fitted to."""


# ---- by the chip's own compiler


def compile_steps(
    cases: Sequence[tuple[Target, StepPrograms]],
    *,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[int, Answers]]:
    """The place of each case with the compiler's answers, as it has them all: what the cache knows, then the
    smallest programs first. A layout's programs are exported once for all chips with
    the same kernels."""
    exported: dict[tuple[int, Kernels], list[Exported]] = {}
    asked: list[tuple[int, list[Request]]] = []
    for i, (target, programs) in enumerate(cases):
        bodies = exported.setdefault((id(programs), Kernels.of(target.chip)), [])
        if not bodies:
            try:
                with traced_for(target.chip):
                    bodies += _exported(programs)
            except Exception as error:  # it traces, but has no form for a TPU: the answer for this target
                yield i, {"replica": refusal("replica", str(error))}
                continue
        asked.append((i, _requests(target, programs, bodies)))
    asked.sort(key=lambda case: sum(request.size for request in case[1]))
    by_case = dict(asked)
    owners = [i for i, requests in asked for _ in requests]
    requests = [request for _, requests in asked for request in requests]
    answers: dict[int, Answers] = collections.defaultdict(dict)
    missing = collections.Counter(owners)
    for place, answer in compile_each(requests, cache_dir=cache, progress=progress) if requests else ():
        i = owners[place]
        answers[i][answer.name] = answer
        missing[i] -= 1
        if not missing[i]:
            names = (request.name for request in by_case[i])
            yield i, {name: answers[i][name] for name in names}  # in one order, whichever came first


def _requests(target: Target, programs: StepPrograms, bodies: Sequence[Exported]) -> list[Request]:
    layout, topology = programs.layout, target.topology_arguments()
    speeds = device_speeds(target.chip)
    asked = [
        Request(p.name, topology, body, flat_positions(p.specs, p.donate), *speeds)
        for p, body in zip((programs.replica, programs.update), bodies, strict=True)
    ]
    if layout.devices > 1 or programs.calls > 1:
        reduce = ReduceRequest(layout.devices, programs.local_vectors, programs.size, layout.exact)
        asked.append(Request("reduce", topology, reduce, (), *speeds))
    return asked


def device_speeds(chip: Chip) -> tuple[float | None, float | None]:
    """Clock in GHz and memory bandwidth in GB/s of one JAX device of `chip`."""
    memory = chip.memory_GBps
    return chip.clock_GHz, None if memory is None else memory / chip.jax_devices_per_chip


def _exported(programs: StepPrograms) -> list[Exported]:
    """f32 and tf32 products are compiled in one pass, and their cycles counted several times: the compiler
    takes minutes to search for the best convolution of six passes."""
    pair = (programs.replica, programs.update)
    if precision.TPU_PASSES[programs.recipe.precision] == 1:
        return [export_program(p.function, p.specs) for p in pair]
    with precision.one_pass():  # traced anew: what was traced before has all passes
        return [export_program(inspect.unwrap(p.function), p.specs) for p in pair]


def timed_by_compiler(target: Target, programs: StepPrograms, answers: Answers) -> StepTime:
    """The step from the compiler's answers to its programs."""
    present = list(answers.values())
    passes = precision.TPU_PASSES[programs.recipe.precision]
    notes = [fact("compiled-by-own-compiler")]
    if passes > 1:
        notes.append(fact("passes-counted", precision=programs.recipe.precision, passes=passes))
    operations = traced_program(programs.replica, "tpu")
    step = StepTime(
        method="compiled",
        flops=programs.calls * operations.flops,
        wire_bytes=sum(a.wire_bytes for a in present),
        memory=_memory(target, programs, answers),
        compile_seconds=_compilation(sum(a.compile_seconds for a in present), passes),
        dtypes=operations.dtypes,
        notes=tuple(notes),
        warnings=unique(note for a in present for note in a.notes),
    )
    problem = next((a.problem for a in present if a.problem is not None), None)
    if problem is not None:  # for memory, `memory` says it
        return step if problem.code == "refused-for-memory" else dataclasses.replace(step, problem=problem)
    if target.chip.clock_GHz is None:
        return dataclasses.replace(step, problem=fact("chip-without-clock", chip=target.chip.name))

    def products(name: str) -> float:
        """Seconds of a program's products, in one pass."""
        return sum(answers[name].seconds_by_kind.get(kind, 0.0) for kind in _PRODUCTS)

    def seconds(name: str) -> float:
        return answers[name].seconds + (passes - 1) * products(name) if name in answers else 0.0

    wire = all_reduce_seconds(4.0 * programs.size, programs.layout.devices, target.chip)
    parts = {
        "replica": programs.calls * seconds("replica"),
        "reduce": seconds("reduce") + wire,
        "update": seconds("update"),
    }
    step = dataclasses.replace(step, kernels=_kernels(programs, answers, passes))
    others = sum(answers["replica"].seconds_by_kind.values()) - products("replica")
    busiest = "compute" if passes * products("replica") >= others else "memory"
    return step.timed(parts, TPU_FACTORS, dispatch_seconds(programs, target.hosts), busiest)


def _kernels(programs: StepPrograms, answers: Answers, passes: int) -> tuple[Kernel, ...]:
    """Every kernel of a step; of several passes only products have more than one."""
    made = []
    for name, answer in answers.items():
        runs = programs.calls if name == "replica" else 1
        for kernel in answer.kernels:
            times = runs * (passes if kernel.kind in _PRODUCTS else 1)
            seconds = kernel.seconds * times
            kernel = dataclasses.replace(kernel, program=name, count=kernel.count * runs, seconds=seconds)
            made.append(kernel)
    return tuple(made)


def _compilation(seconds: float, passes: int) -> Range:
    """Of programs that took `seconds` here, with one pass: all passes take longer, up to minutes."""
    here = Range.around(seconds, OTHER_HOST)
    return dataclasses.replace(here, high=passes * here.high)


def _memory(target: Target, programs: StepPrograms, answers: Answers) -> Memory | None:
    """Of a program that was refused for memory, what it needs beyond its arguments."""
    problems = [a.problem for a in answers.values() if a.problem is not None]
    if any(problem.code != "refused-for-memory" for problem in problems):
        return None
    arguments = programs.parameter_bytes + programs.state_bytes + programs.data_bytes
    temporary = {name: a.temp_bytes for name, a in answers.items()}
    temporary |= {p["program"]: p["needed"] - arguments for p in problems}
    replica = temporary.pop("replica", 0)
    code = sum(a.code_bytes for a in answers.values())
    memory = held(programs, target, replica, max(temporary.values(), default=0), code)
    if memory is None or not problems:
        return memory
    source = fact("memory-as-refused")
    return dataclasses.replace(memory, available=problems[0]["available"], available_source=source)


# ---- by the model


def timed_by_model(target: Target, programs: StepPrograms) -> StepTime:
    """The step on `target` from the operations of its programs.

    The replicas' sums are added to the end: nothing overlaps them. Compilation is an allowance for each
    program and operation.
    """
    kind, layout = target.chip.kind, programs.layout
    replica, update = (_traced(program, kind) for program in (programs.replica, programs.update))
    framework = FRAMEWORK_BYTES if kind == "GPU" else 0.0
    operations = len(replica.operations) + len(update.operations)
    compilation = _COMPILE_SECONDS[kind] + _COMPILE_SECONDS_PER_OPERATION * operations
    notes = [fact("modelled", chip=target.chip.name)]
    step = StepTime(
        method="modelled",
        flops=programs.calls * replica.flops,
        wire_bytes=2 * (layout.devices - 1) / layout.devices * 4.0 * programs.size,
        memory=held(programs, target, replica.peak_temp_bytes, update.peak_temp_bytes, framework),
        compile_seconds=Range.around(compilation, ALLOWANCE),
        dtypes=replica.dtypes,
        notes=tuple(notes),
    )
    try:
        chip = device_chip(target.chip)
        one, last = (time_on(p, chip, programs.recipe.precision) for p in (replica, update))
        wire = all_reduce_seconds(4.0 * programs.size, layout.devices, target.chip)
    except DeviceError as error:
        return dataclasses.replace(step, problem=fact(error.code, **error.facts))
    add = max(programs.calls - 1, 0) * 3 * 4.0 * programs.size / ((chip.memory_GBps or 1) * 1e9)
    parts = {"replica": programs.calls * one.seconds, "reduce": wire + add, "update": last.seconds}
    factors = (one.low / one.seconds, one.high / one.seconds)
    if kind == "TPU":
        factors = (1 / UNLIKE, UNLIKE)
        notes.append(fact("compiler-would-know", install=PIP))
    step = dataclasses.replace(step, notes=unique([*notes, *replica.notes, *one.notes]))
    return step.timed(parts, factors, dispatch_seconds(programs, target.hosts), one.bound)


def _traced(program: Traceable, kind: str):
    """The operations of a program in the form that a kind of chip would run."""
    return traced_program(program, _PLATFORM[kind])
