"""The process that holds libtpu: `python -m chipwise.planner.compile_child FOLDER`.

Reads `requests.json` in the folder, compiles each program for its absent chip, and prints a line of JSON when
it begins one and another when it is done. Started by `compiler`, in whose environment it must run; it ends
when its standard input does, so that it does not outlive who asked.

Two programs are compiled at a time on two cores: one process holds the topologies of all chips, each made in
milliseconds, and the compiler does not hold Python's lock.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from ..engine.reduce import AXIS, reducer
from .compiler import Compiled
from .hlo import read

# "Used 20.1G of 15.75G hbm", and, where a bound suffices to refuse, "the total memory required for HLO
# temporaries (60.42G) exceeds available HBM (7.48G)".
_MEMORY = (
    re.compile(r"[Uu]sed ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
    re.compile(r"memory required[^(]*\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
)
_UNIT = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main(folder: Path) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the compiler prints what it likes
    threading.Thread(target=_end_with_parent, daemon=True).start()
    requests = json.loads((folder / "requests.json").read_text(encoding="utf-8"))
    topologies_made: dict[str, list | Exception] = {}
    for request in requests:  # before the threads: one topology at a time
        topology = _topology(request)
        if topology not in topologies_made:
            topologies_made[topology] = _devices(request["topology"])
    writing = threading.Lock()

    def tell(**said: Any) -> None:
        with writing:
            print(json.dumps(said), file=answers, flush=True)

    def answer(request: dict[str, Any]) -> None:
        tell(key=request["key"], answer=None)
        found = topologies_made[_topology(request)]
        if isinstance(found, Exception):
            made = refusal(request["name"], f"no such topology: {found}", 0.0)
        else:
            made = compiled(request, folder, found)
        tell(key=request["key"], answer=asdict(made))

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(answer, requests))


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _topology(request: dict[str, Any]) -> str:
    return json.dumps(request["topology"], sort_keys=True)


def _devices(topology: dict[str, Any]) -> list | Exception:
    try:
        return list(topologies.get_topology_desc(platform="tpu", **topology).devices)
    except Exception as error:
        return error


def compiled(request: dict[str, Any], folder: Path, devices: list) -> Compiled:
    """Compiles one program and reads what there is to read."""
    start = time.perf_counter()
    try:
        lowered = _lower(request, folder, devices)
        program = lowered.compile()
    except Exception as error:  # whatever the compiler says of a program is the answer, not a failure here
        return refusal(request["name"], str(error), time.perf_counter() - start)
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    facts = read(program.as_text(), request["clock_GHz"], request["memory_GBps"])
    return Compiled(
        name=request["name"],
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        cycles=facts.cycles,
        seconds=facts.seconds,
        seconds_by_kind=facts.seconds_by_kind,
        flops=facts.product_flops,
        bytes_accessed=facts.bytes_accessed,
        wire_bytes=facts.wire_bytes,
        compile_seconds=seconds,
        notes=facts.notes,
    )


def _lower(request: dict[str, Any], folder: Path, devices: list):
    if "reduce" in request:
        reduce = request["reduce"]
        mesh = Mesh(np.asarray(devices[: reduce["devices"]]), (AXIS,))
        shape = (reduce["devices"], reduce["size"])
        spec = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(AXIS)))
        return jax.jit(reducer(mesh, reduce["exact"])).lower([spec] * reduce["local"])
    exported = export.deserialize(bytearray((folder / request["file"]).read_bytes()))
    here = SingleDeviceSharding(devices[0])
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here) for a in exported.in_avals]
    return jax.jit(exported.call, donate_argnums=tuple(request["donate"]), keep_unused=True).lower(*specs)


def refusal(name: str, message: str, seconds: float) -> Compiled:
    """The compiler's refusal, its first lines, and the bytes where it was for memory."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    needed = available = None
    match = next((found for pattern in _MEMORY if (found := pattern.search(message))), None)
    if match and "RESOURCE_EXHAUSTED" in message:
        needed = int(float(match[1]) * _UNIT[match[2]])
        available = int(float(match[3]) * _UNIT[match[4]])
    return Compiled(
        name,
        error=" ".join(lines[:2])[:400] or "no message",
        bytes_needed=needed,
        bytes_available=available,
        compile_seconds=seconds,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
