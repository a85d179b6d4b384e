"""Asks the compilers of absent chips about the programs of steps. The cache keeps their answers.

A compiler runs in a separate process (`compile_processes`). Programs are passed as exported modules, so that
process does not run the user's code. The compilers of GPUs and TPUs run at the same time.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..atomic import read_regular, replace_file
from ..chips.catalogue import Chip
from ..chips.gpus import compiled_as, target_config
from ..chips.targets import Target
from ..data.remote import home
from ..engine.step import compiler_options
from ..errors import DataError, DeviceError
from ..recipe import precision
from .compile_answers import FAILED_HERE, Compiled, CompileRequest, refusal
from .compile_processes import COMPILERS, CompilerProcesses
from .device_memory import sizes
from .tracing import Exported, TracedStep

Answers = dict[str, Compiled]
"""Program name to what its compilation says."""

Topology = dict[str, Any]

Progress = Callable[[int, int], None]
"""Called with how many programs are compiled, of how many that are known to be missing."""

PLATFORM = {"GPU": "cuda", "TPU": "tpu"}


def compile_steps(
    cases: Sequence[tuple[Target, TracedStep]], *, cache: Path | None = None, progress: Progress | None = None
) -> Iterator[tuple[int, Answers]]:
    """Yields the index of each case with the compiler's answers as soon as all are ready: cached ones first,
    then those with the smallest programs. A layout's programs are exported once for all chips with the same
    kernels.

    If a compiler is missing, or the catalogue lacks figures of a chip, the answer says so.
    """
    possible = dict[int, tuple[Target, TracedStep]]()
    for i, (target, step) in enumerate(cases):
        try:
            COMPILERS[PLATFORM[target.chip.kind]]()
            topologies(target)
            possible[i] = target, step
        except DeviceError as error:
            yield i, {"replica": Compiled("replica", error.fact)}
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
            found.append((size, target.chip.year or 0, i, _requests(target, step, bodies)))
    # By what rises with the time to compile: GPUs before 2020 have no Triton, which takes half of it
    asked = [(i, requests) for *_, i, requests in sorted(found, key=lambda case: case[:3])]
    owners = [i for i, requests in asked for _ in requests]
    names = {i: [request.name for request in requests] for i, requests in asked}
    answers: dict[int, Answers] = collections.defaultdict(dict)
    flat = [request for _, requests in asked for request in requests]
    for place, answer in compile_each(flat, cache_dir=cache, progress=progress):
        i = owners[place]
        answers[i][answer.name] = answer
        if len(answers[i]) == len(names[i]):
            yield i, {name: answers[i][name] for name in names[i]}  # in a fixed order
    yield from not_lowered


def _requests(target: Target, step: TracedStep, bodies: list[Exported]) -> list[CompileRequest]:
    platform = PLATFORM[target.chip.kind]
    one, whole = topologies(target)
    speeds = device_speeds(target.chip) if platform == "tpu" else (None, None)
    kind = target.chip.device_kinds[0]
    options = compiler_options(platform, step.exact, kind, step.shards)
    if platform == "cuda":  # nothing can be tuned here, and some of Triton's products do not compile untuned
        options = {**(options or {}), "xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    if step.shards > 1 and platform == "cuda":
        one = one | {"topology": f"1x1x{step.shards}"}
    elif step.shards > 1:
        one = _spanning(target, step.shards, whole)
    chip = target.chip.name if platform == "tpu" else None
    asked = [
        CompileRequest(p.name, one, body, p.donated, *speeds, platform, options, chip)
        for p, body in zip(step.programs, bodies, strict=True)
    ]
    for name, exchange in step.exchanges.items():
        over = whole if platform == "cuda" else _spanning(target, exchange.devices, whole)
        asked.append(CompileRequest(name, over, exchange, (), *speeds, platform))
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


def _exported(step: TracedStep, chip: Chip) -> list[Exported]:
    """Exports programs. For TPUs f32 and tf32 products are compiled in one pass, and their cycles multiplied:
    the compiler takes minutes to search for the best convolution of six passes."""
    one_pass = chip.kind == "TPU" and precision.TPU_PASSES[step.recipe.precision] > 1
    return [program.exported(chip, one_pass=one_pass) for program in step.programs]


# ---- the cache, and the processes for what it lacks


def cache_folder(given: str | os.PathLike | None) -> Path:
    """The folder `given`, or `plan` in the user's cache, made. Raises `DataError` if files cannot be written
    there."""
    folder = home() / "plan" if given is None else Path(given)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise DataError("plan-cache-unwritable", path=folder, reason=error) from error
    return folder


def compile_each(
    requests: Sequence[CompileRequest], *, cache_dir: Path | None = None, progress: Progress | None = None
) -> Iterator[tuple[int, Compiled]]:
    """Yields the index of each request with its answer as soon as it is ready: cached ones first, then in
    order, on all compilers at once. `progress` counts the programs to compile.

    Waits while another plan uses the same compiler. Raises `DeviceError` if a compiler is not installed, or
    its process cannot be started, and `DataError` if the cache cannot be written to.
    """
    folder = cache_folder(cache_dir)
    compilers = {platform: COMPILERS[platform]() for platform in sorted({r.platform for r in requests})}
    owners: dict[str, list[int]] = {}  # by key
    missing: dict[str, CompileRequest] = {}
    for i, request in enumerate(requests):
        key = request.key(compilers[request.platform].versions)
        owners.setdefault(key, []).append(i)
        if key not in missing and (known := _load(folder / f"{key}.json")) is not None:
            yield i, known.at(request.places).named(request.name)
        else:
            missing[key] = request
    if not missing:
        return
    with contextlib.closing(CompilerProcesses(folder)) as processes:
        for platform, compiler in compilers.items():
            processes.ask(compiler, {key: r for key, r in missing.items() if r.platform == platform})
        tell = progress or (lambda done, total: None)
        tell(0, len(missing))
        for done, (key, answer) in enumerate(processes.answers(), 1):
            answer = replace(answer, places=list(missing[key].places))
            if answer.problem is None or answer.problem.code not in FAILED_HERE:
                value = asdict(answer)
                text = json.dumps({**value, "seal": _seal(key, value)})
                replace_file(folder / f"{key}.json", text, "plan-cache-unwritable")
            tell(done, len(missing))
            yield from ((i, answer.named(requests[i].name)) for i in owners[key])


def _load(path: Path) -> Compiled | None:
    """A cached answer; `None` if there is none, or it was changed, so that it is compiled again."""
    try:
        value = json.loads(read_regular(path))
        seal = value.pop("seal", None)
        if seal not in (None, _seal(path.stem, value)):  # entries of earlier versions have none
            return None
        return Compiled.from_json(value)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _seal(key: str, value: dict[str, Any]) -> str:
    return hashlib.sha256(f"{key}{json.dumps(value)}".encode()).hexdigest()
