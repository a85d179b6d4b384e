"""Traces some training steps for TensorBoard's profiler, and finds the operations that take the time.

A trace is an XSpace: planes (a device, or the host) with lines (a core, a stream or a thread) with events.
Each GPU and TPU has a plane, where every event is a run of an operation. The CPU's operations are on the
host's plane, each on its thread; helper threads of a parallel operation are not shown.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from ..engine.session import Session
from ..errors import DataError
from ..hlo.operations import parts as inside
from ..hlo.proto import parse, program_bytes

SHOWN = 10
_CHIP = re.compile(r"/device:\w+:\d+")  # other planes show parts of the chip, or the network
_OPS_LINE = "XLA Ops"  # on a TPU's plane; other lines show the same time as steps and modules


@dataclass(frozen=True)
class Operation:
    """One operation of the compiled step. Times are of one GPU or TPU, or of all threads of a CPU."""

    name: str  # from the compiler
    source: str  # JAX's name, or ""
    count: float  # runs per step
    milliseconds: float  # per step, without the time of operations inside it
    share: float  # of the time of all operations


@dataclass(frozen=True)
class Spent:
    """One operation of one program in a trace, summed over its events."""

    module: str  # the program's name, "" if the trace does not say
    name: str
    count: int
    nanoseconds: float


def make_folder(folder: str | Path) -> None:
    """Creates the folder before the measurement. Raises `DataError` if it cannot be written."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        text = "Cannot write a trace to {folder}: {reason}. Give --profile another folder."
        raise DataError("trace-unwritable", text, folder=folder, reason=reason) from None


def profiled(session: Session, folder: str | Path, seconds_a_step: float) -> dict[str, Any]:
    """A trace of some further steps, explained: about half a second, so that the file stays small."""
    steps = max(3, min(20, round(0.5 / seconds_a_step)))
    trace = capture(folder, steps, session.advance, session.wait)
    programs = [program_bytes(executable) for executable in session.programs.executables.values()]
    return explain(trace, programs, steps)


def capture(folder: str | Path, steps: int, step: Callable[[], Any], wait: Callable[[], Any]) -> Path:
    """Traces `steps` calls of `step`, between two calls of `wait`. *Returns* the file below `folder`."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing Python calls would slow the step
    before = _traces(folder)
    wait()
    with jax.profiler.trace(str(folder), profiler_options=options):
        for number in range(steps):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                step()
        wait()
    after = _traces(folder)
    new = sorted(after.keys() - before.keys()) or sorted(after, key=after.__getitem__)
    if not new:
        text = "The profiler wrote no trace to {folder}. Give --profile another folder."
        raise DataError("trace-missing", text, folder=folder)
    return new[-1]


def _traces(folder: str | Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in Path(folder).glob("plugins/profile/*/*.xplane.pb")}


def explain(trace: Path, programs: Sequence[bytes], steps: int) -> dict[str, Any]:
    """The trace of `steps` steps as plain JSON values.

    *Arguments:* `programs`: the compiled programs from `hlo.proto.program_bytes`, which have JAX's name of
    each operation.

    *Returns* `folder`, `steps`, `milliseconds_per_step` of all operations, and the costliest `operations`
    (`Operation`), longest first.
    """
    runs, devices = read(trace)
    listed = operations(runs, programs, steps * devices)
    return {
        "folder": str(trace.parents[3]),
        "steps": steps,
        "milliseconds_per_step": sum(operation.milliseconds for operation in listed),
        "operations": [asdict(operation) for operation in listed[:SHOWN]],
    }


def read(trace: str | Path) -> tuple[list[Spent], int]:
    """The operations in a trace file, and the number of device planes that they come from."""
    from jax.profiler import ProfileData

    planes = list(ProfileData.from_file(str(trace)).planes)
    chips = [plane for plane in planes if _CHIP.fullmatch(plane.name)]
    with warnings.catch_warnings():
        # Python 3.12 warns of a type in JAX's reader, and a warning that is an error there ends the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        measured = [events for plane in chips if (events := _of_plane(plane))]
        number = len(measured)
        if not measured:
            measured, number = [_of_plane(p) for p in planes if p.name.startswith("/host:")], 1
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for events in measured:
        for key, nanoseconds in events:
            sums[key][0] += 1
            sums[key][1] += nanoseconds
    return [Spent(*key, int(count), spent) for key, (count, spent) in sums.items()], number


def _of_plane(plane: Any) -> list[tuple[tuple[str, str], float]]:
    """((module, name), own nanoseconds) of each run of an operation."""
    lines = list(plane.lines)
    chosen = [line for line in lines if line.name == _OPS_LINE]
    own = []
    for line in chosen or lines:
        events = []
        for event in line.events:
            stats = {name: value for name, value in event.stats if name in _STATS}
            if "hlo_op" in stats or chosen:
                key = str(stats.get("hlo_module", "")), str(stats.get("hlo_op") or _named(event.name))
                events.append((event.start_ns, event.start_ns + event.duration_ns, key))
        own += own_time(events)
    return own


_STATS = ("hlo_op", "hlo_module")


def _named(text: str) -> str:
    """The name in `%fusion.3 = f32[8]{0} fusion(...)`, the form of a TPU's events."""
    match = re.match(r"%?([\w.\-]+)( = |$)", text)
    return match[1] if match else text


def own_time(events: Iterable[tuple[float, float, Any]]) -> list[tuple[Any, float]]:
    """(what, time without events inside it) for events (begin, end, what) on one line."""
    spent: list[list[Any]] = []
    open_: list[tuple[float, int]] = []  # (end, position in `spent`)
    for begin, end, operation in sorted(events, key=lambda event: (event[0], -event[1])):
        while open_ and open_[-1][0] <= begin:
            open_.pop()
        if open_:
            outer_end, outer = open_[-1]
            spent[outer][1] -= min(end, outer_end) - begin
        open_.append((end, len(spent)))
        spent.append([operation, end - begin])
    return [(operation, seconds) for operation, seconds in spent]


def operations(runs: Sequence[Spent], programs: Sequence[bytes], steps: int) -> list[Operation]:
    """Turns `runs` into operations per step, longest first; equal names in several programs stay separate."""
    total = sum(run.nanoseconds for run in runs)
    sources = _sources(programs)
    listed = [
        Operation(
            name=run.name,
            source=re.sub(r"^(jit\([^/]*\)/)+", "", sources.get((run.module, run.name), "")),
            count=run.count / steps,
            milliseconds=run.nanoseconds / 1e6 / steps,
            share=run.nanoseconds / total if total else 0.0,
        )
        for run in runs
    ]
    return sorted(listed, key=lambda operation: (-operation.milliseconds, operation.name))


def _sources(programs: Sequence[bytes]) -> dict[tuple[str, str], str]:
    """(program, operation) to JAX's name, for a fusion without one that of an operation in it. Operations
    that only one program has are also listed under the program "", for traces that do not name it."""
    sources: dict[tuple[str, str], str] = {}
    several: set[str] = set()
    for module in map(parse, programs):
        for computation in module.computations.values():
            for instruction in computation.instructions.values():
                fused = (part.source for part in inside(instruction) if part.source)
                name, seen = instruction.name, ("", instruction.name) in sources
                several |= {name} if seen else set()
                sources["", name] = sources[module.name, name] = instruction.source or next(fused, "")
    return {key: source for key, source in sources.items() if key[0] or key[1] not in several}
