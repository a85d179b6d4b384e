"""A step on an absent target, from the answers of its chip's compiler."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..chips.catalogue import Chip
from ..chips.gpus import compiled_as, target_config
from ..chips.targets import Target
from ..engine.blueprint import Memory
from ..engine.reduce import Exchange
from ..engine.step import compiler_options
from ..errors import DeviceError
from ..recipe import precision
from ..recipe.recipe import Recipe
from ..words.facts import fact
from .compiled import Compiled, Request, refusal
from .compiler import Progress, compile_each
from .compilers import COMPILERS
from .cutting import sizes
from .exporting import ExchangeRequest, Exported
from .plans import unique
from .programs import StepPrograms, Traceable, held
from .timing import StepTime

Answers = dict[str, Compiled]
"""Program name to what its compilation says."""

Topology = dict[str, Any]


class Programs(Protocol):
    """The programs of a device for a recipe: `programs`, and `exchanges`, those of all devices, by name."""

    @property
    def recipe(self) -> Recipe: ...
    @property
    def programs(self) -> tuple[Traceable, ...]: ...
    @property
    def exchanges(self) -> Mapping[str, Exchange]: ...
    @property
    def exact(self) -> bool: ...
    @property
    def shards(self) -> int: ...


PLATFORM = {"GPU": "cuda", "TPU": "tpu"}


def compile_steps(
    cases: Sequence[tuple[Target, Programs]],
    *,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[int, Answers]]:
    """Yields the index of each case with the compiler's answers as soon as all are ready: of each kind of
    chip cached ones first, then those with the smallest programs. The first GPU is `urgent`. A layout's
    programs are exported once for all chips with the same kernels: those that need no tracing, then those for
    GPUs, then those for TPUs.

    If a compiler is missing, or the catalogue lacks figures of a chip, the answer says so.
    """
    possible = dict[int, tuple[Target, Programs]]()
    for i, (target, programs) in enumerate(cases):
        try:
            COMPILERS[PLATFORM[target.chip.kind]]()
            topologies(target)
            possible[i] = target, programs
        except DeviceError as error:
            yield i, {"replica": Compiled("replica", fact(error.code, **error.facts))}
    if not possible:
        return
    owners: list[int] = []  # of each request
    names: dict[int, list[str]] = {}
    not_lowered: list[tuple[int, Answers]] = []
    untraced = _untraced(possible.values())

    def batches() -> Iterator[list[Request]]:
        for kind in sorted(PLATFORM, key=lambda kind: kind in untraced):
            platform = PLATFORM[kind]
            asked: list[tuple[int, list[Request]]] = []
            for i, (target, programs) in possible.items():
                if target.chip.kind != kind:
                    continue
                try:
                    bodies = _exported(programs, target.chip)
                except Exception as error:  # it can be traced, but not lowered for this chip
                    answer = refusal("replica", str(error), platform=platform)
                    not_lowered.append((i, {answer.name: answer}))
                else:
                    asked.append((i, _requests(target, programs, bodies)))
            asked.sort(key=lambda case: _effort(possible[case[0]][0], case[1]))
            if asked and kind == "GPU":  # whose compiler uses all cores for one program
                first, requests = asked[0]
                asked[0] = first, [dataclasses.replace(request, urgent=True) for request in requests]
            owners.extend(i for i, requests in asked for _ in requests)
            names.update((i, [request.name for request in requests]) for i, requests in asked)
            yield [request for _, requests in asked for request in requests]

    answers: dict[int, Answers] = collections.defaultdict(dict)
    expected = PLATFORM[untraced[0]] if untraced else None
    for place, answer in compile_each(batches(), expected=expected, cache_dir=cache, progress=progress):
        i = owners[place]
        answers[i][answer.name] = answer
        if len(answers[i]) == len(names[i]):
            yield i, {name: answers[i][name] for name in names[i]}  # in a fixed order
    yield from not_lowered


def _untraced(cases: Collection[tuple[Target, Programs]]) -> list[str]:
    """The kinds of chips for which programs have to be traced."""
    exports = [(program, target.chip) for target, programs in cases for program in programs.programs]
    return [kind for kind in PLATFORM if any(c.kind == kind and not p.known(c) for p, c in exports)]


def _effort(target: Target, requests: Sequence[Request]) -> tuple[float, int]:
    """Rises with the compilation time: before 2020 GPUs have no kernels by Triton, which take half of it."""
    return sum(request.effort for request in requests), target.chip.year or 0


def _requests(target: Target, programs: Programs, bodies: list[Exported]) -> list[Request]:
    platform = PLATFORM[target.chip.kind]
    one, whole = topologies(target)
    speeds = device_speeds(target.chip) if platform == "tpu" else (None, None)
    kind = target.chip.device_kinds[0]
    options = compiler_options(platform, programs.exact, kind, programs.shards)
    if programs.shards > 1 and platform == "cuda":
        one = one | {"topology": f"1x1x{programs.shards}"}
    elif programs.shards > 1:
        one = _spanning(target, programs.shards, whole)
    chip = target.chip.name if platform == "tpu" else None
    asked = [
        Request(p.name, one, body, p.donated, *speeds, platform, options, chip, shards=programs.shards)
        for p, body in zip(programs.programs, bodies, strict=True)
    ]
    for name, exchange in programs.exchanges.items():
        over = whole if platform == "cuda" else _spanning(target, exchange.devices, whole)
        asked.append(Request(name, over, ExchangeRequest(exchange), (), *speeds, platform))
    return asked


def _spanning(target: Target, devices: int, whole: Topology) -> Topology:
    """The TPU slice with so many devices, since the compiler crashes if a program spans a part of its
    topology. `whole` if there is no such slice."""
    if devices in (1, target.devices):
        return whole
    return next((topologies(other)[1] for other in sizes(target.chip) if other.devices == devices), whole)


def topologies(target: Target) -> tuple[Topology, Topology]:
    """The arguments of `get_topology_desc` for one device of `target`, and for all of them.

    Raises `DeviceError` for a GPU whose figures are not in the catalogue.
    """
    if target.chip.kind == "TPU":
        return (target.topology_arguments(),) * 2
    config = {"topology_name": "", "target_config": target_config(compiled_as(target.chip))}
    hosts = target.hosts
    return config | {"topology": "1x1x1"}, config | {"topology": f"1x{hosts}x{target.devices // hosts}"}


def device_speeds(chip: Chip) -> tuple[float | None, float | None]:
    """Clock in GHz and memory bandwidth in GB/s of one JAX device of `chip`."""
    memory = chip.memory_GBps
    return chip.clock_GHz, None if memory is None else memory / chip.jax_devices_per_chip


def _exported(programs: Programs, chip: Chip) -> list[Exported]:
    """Exports programs. For TPUs f32 and tf32 products are compiled in one pass, and their cycles multiplied:
    the compiler takes minutes to search for the best convolution of six passes."""
    one_pass = chip.kind == "TPU" and precision.TPU_PASSES[programs.recipe.precision] > 1
    return [program.exported(chip, one_pass=one_pass) for program in programs.programs]


def compiled_step(target: Target, programs: StepPrograms, answers: Answers, framework: float = 0) -> StepTime:
    """The step from the answers, without its time.

    *Arguments:* `framework`: bytes of a device that libraries take.
    """
    present = list(answers.values())
    flops = {name: a.flops * (programs.calls if name == "replica" else 1) for name, a in answers.items()}
    step = StepTime(
        method="compiled",
        flops=sum(flops.values()),
        wire_bytes=sum(a.wire_bytes for a in present),
        memory=_memory(target, programs, answers, framework),
        dtypes=programs.replica.contents(target.chip).dtypes,
        xla_seconds=_xla_seconds(programs, answers),
        notes=(fact("compiled-by-own-compiler"),),
        warnings=unique(note for a in present for note in a.notes),
    )
    problem = next((a.problem for a in present if a.problem is not None), None)
    if problem is None or problem.code == "refused-for-memory":  # which `memory` says
        return step
    return dataclasses.replace(step, problem=problem)


def _xla_seconds(programs: StepPrograms, answers: Answers) -> float | None:
    """The seconds of the step by XLA's cost analysis, without sums over devices; `None` if there is none, or
    it is negative for one of the programs."""
    alone = {name: 1 for name in answers if name not in ("reduce", "gather")}
    runs = alone | {"replica": programs.calls, "update": 1}
    optimal = {name: (answers[name].optimal_seconds or 0.0) if name in answers else 0.0 for name in runs}
    if min(optimal.values()) <= 0:
        return None
    return sum(runs[name] * seconds for name, seconds in optimal.items())


def refused(step: StepTime, answers: Answers) -> bool:
    """Whether the step has no time."""
    return step.problem is not None or any(a.problem is not None for a in answers.values())


def _memory(target: Target, programs: StepPrograms, answers: Answers, framework: float) -> Memory | None:
    """The memory of the step; for a program that was refused for memory, what it needs beyond its
    arguments."""
    problems = [a.problem for a in answers.values() if a.problem is not None]
    if any(problem.code != "refused-for-memory" for problem in problems):
        return None
    arguments = programs.parameter_bytes + programs.state_bytes + programs.data_bytes
    temporary = {name: a.temp_bytes for name, a in answers.items()}
    temporary |= {p["program"]: p["needed"] - arguments for p in problems}
    code = framework + sum(a.code_bytes for a in answers.values())
    memory = held(programs, target, temporary, code)
    if memory is None or not problems:
        return memory
    source = fact("memory-as-refused")
    return dataclasses.replace(memory, available=problems[0]["available"], available_source=source)
