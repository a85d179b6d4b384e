"""Asks the compilers of absent chips about the programs of steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from ..base import DeviceError
from ..chips.catalogue import Chip
from ..chips.targets import Target, sizes
from ..compile.absent_device import PLATFORM, UNTUNED, Topology, figures, topologies
from ..compile.answers import Answer, CompileRequest, refusal
from ..compile.cache import Progress, begin_if_missing, cache_folder, compile_each
from ..compile.exports import Collective, Exported
from ..compile.processes import COMPILERS, CompilerProcesses
from ..machine.compiler import compiler_options
from ..models.large import SHARD
from ..recipe import precision
from ..step.blueprint import Blueprint
from ..step.program_digest import digest
from ..step.reduce import AXIS, Exchange

Answers = dict[str, Answer]
"""The answer of the compiler for each program, by name."""


def compile_steps(
    cases: Sequence[tuple[Target, Blueprint]],
    *,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[int, Answers]]:
    """Yields the index of each case with the compiler's answers as soon as all are ready: cached
    ones first, then those with the smallest programs. A layout's programs are exported once for all
    chips with the same kernels.

    If a compiler is missing, or the catalogue lacks figures of a chip, the answer says so.
    """
    possible = dict[int, tuple[Target, Blueprint]]()
    for i, (target, step) in enumerate(cases):
        try:
            COMPILERS[PLATFORM[target.chip.kind]]()
            topologies(target)
            possible[i] = target, step
        except DeviceError as error:
            yield i, {"replica": Answer("replica", error.fact)}
    folder = cache_folder(cache)
    with contextlib.closing(CompilerProcesses(folder)) as processes:
        found: list[tuple[int, int, int, list[CompileRequest]]] = []
        not_lowered: list[tuple[int, Answers]] = []
        for i, (target, step) in possible.items():
            try:
                bodies = _exported(step, target.chip)
            except Exception as error:  # it can be traced, but not lowered for this chip
                answer = refusal("replica", error, PLATFORM[target.chip.kind])
                not_lowered.append((i, {answer.name: answer}))
            else:
                size = sum(len(body.body) for body in bodies)
                requests = _requests(target, step, bodies)
                begin_if_missing(requests[0], processes, folder)
                found.append((size, target.chip.year or 0, i, requests))
        # By what rises with the time to compile: GPUs before 2020 have no Triton, which takes half
        # of it
        found.sort(key=lambda case: case[:3])
        asked = [(i, request) for *_, i, requests in found for request in requests]
        answers: dict[int, dict[str, Any]] = {  # in a fixed order
            i: dict.fromkeys(request.name for request in requests) for *_, i, requests in found
        }
        flat = [request for _, request in asked]
        for place, answer in compile_each(
            flat, cache_dir=folder, progress=progress, processes=processes
        ):
            i, _ = asked[place]
            answers[i][answer.name] = answer
            if all(answers[i].values()):
                yield i, answers[i]
    yield from not_lowered


def _requests(target: Target, step: Blueprint, bodies: list[Exported]) -> list[CompileRequest]:
    about = figures(target.chip)
    on_gpu = target.chip.kind == "GPU"
    one, whole = topologies(target)
    kind = target.chip.device_kinds[0]
    options = compiler_options(about["platform"], step.exact, kind, step.shards)
    if on_gpu:
        options = {**(options or {}), **UNTUNED}
    if step.shards > 1:
        over = one | {"topology": f"1x1x{step.shards}"}
        one = over if on_gpu else _spanning(target, step.shards, whole)
    asked = [
        CompileRequest(p.name, one, body, p.donated, options=options, **about)
        for p, body in zip(step.programs, bodies, strict=True)
    ]
    for name, exchange in step.exchanges.items():
        over = whole if on_gpu else _spanning(target, exchange.devices, whole)
        asked.append(CompileRequest(name, over, collective(exchange), **about))
    return asked


@functools.lru_cache(256)
def collective(exchange: Exchange) -> Collective:
    """An exchange as a program for a compiler's process."""
    grid = exchange.groups, exchange.shards
    mesh = AbstractMesh(grid, (AXIS, SHARD), axis_types=2 * (AxisType.Auto,))
    key = digest([jax.make_jaxpr(exchange.program(mesh))(exchange.specs(mesh))])
    return Collective(key, "chipwise.step.reduce:Exchange", asdict(exchange))


def _spanning(target: Target, devices: int, whole: Topology) -> Topology:
    """The TPU slice with this number of devices, since the compiler crashes if a program spans a
    part of its topology. `whole` if there is no such slice."""
    if devices in (1, target.devices):
        return whole
    return next(
        (topologies(other)[1] for other in sizes(target.chip) if other.devices == devices), whole
    )


def _exported(step: Blueprint, chip: Chip) -> list[Exported]:
    """Exports programs. For TPUs f32 and tf32 products are compiled in one pass, and their cycles
    multiplied: the compiler takes minutes to search for the best convolution of six passes."""
    one_pass = chip.kind == "TPU" and precision.TPU_PASSES[step.recipe.precision] > 1
    return [program.exported(chip, one_pass=one_pass) for program in step.programs]
