"""The process that runs a compiler: `python -m chipwise.compile.worker FOLDER`.

After a line on its standard input it reads `requests.json` in the folder, compiles each program for
its absent chip, and prints a line of JSON before and after each. `processes` starts it, and sets
its environment. It ends when its standard input ends, so it does not outlive its parent. It
compiles one program per core at a time, at most four. All threads share the topologies, and the
compiler releases the GIL.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import pkgutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding

from ..models.large import SHARD
from .answers import Answer, refusal
from .hlo import gpu, tpu
from .hlo.proto import program_bytes


def main(folder: Path) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the compiler also prints to standard output
    jax.devices()  # loads the CUDA plugin
    # A third of the time to read a program is collecting objects that stay
    gc.set_threshold(20_000)
    if not sys.stdin.readline():
        return
    threading.Thread(target=_end_with_parent, daemon=True).start()
    requests = json.loads((folder / "requests.json").read_text(encoding="utf-8"))
    for request in requests:  # before the threads start: one topology at a time
        _devices(request["platform"], json.dumps(request["topology"], sort_keys=True))
    writing = threading.Lock()

    def send(key: str, answer: dict[str, Any] | None) -> None:
        with writing:
            print(json.dumps({"key": key, "answer": answer}), file=answers, flush=True)

    def answer(request: dict[str, Any]) -> None:
        send(request["key"], None)
        devices = _devices(request["platform"], json.dumps(request["topology"], sort_keys=True))
        if isinstance(devices, Exception):
            send(request["key"], asdict(refusal(request["name"], devices, "", "topology-unknown")))
        else:
            send(request["key"], asdict(compiled(request, folder, devices)))

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(answer, requests))


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


@functools.cache
def _devices(platform: str, topology: str) -> list | Exception:
    """The devices of a topology, or the error for a topology that the compiler does not know."""
    try:
        return list(topologies.get_topology_desc(platform=platform, **json.loads(topology)).devices)
    except Exception as error:
        return error


def compiled(request: dict[str, Any], folder: Path, devices: list) -> Answer:
    """Compiles one program and reads its figures. A compiler's error becomes a refusal."""
    try:
        program = _lower(request, folder, devices).compile()
    except Exception as error:
        # any error of the compiler is an answer, not a failure of this process
        return refusal(request["name"], error, request["platform"])
    memory = program.memory_analysis()
    if request["platform"] == "cuda":
        cost = gpu.read(program_bytes(program))
    else:
        known = {
            name: request[name] for name in ("clock_GHz", "memory_GBps", "chip") if request[name]
        }
        cost = tpu.read(program_bytes(program), **known)
    return Answer(
        request["name"],
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        wire_bytes=cost.wire_bytes,
        flops=cost.product_flops,
        kernels=cost.kernels,
        notes=cost.notes,
        hlo=program.as_text() if request["text"] else "",
    )


def _lower(request: dict[str, Any], folder: Path, devices: list):
    asked = request["program"]
    options = request["options"]
    if "path" in asked:
        collective = pkgutil.resolve_name(asked["path"])(**asked["arguments"])
        program, spec = collective.over(devices)
        return jax.jit(program, compiler_options=options).lower(spec)
    exported = export.deserialize(bytearray((folder / asked["file"]).read_bytes()))
    places: Any = [SingleDeviceSharding(devices[0])] * len(exported.in_avals)
    if exported.nr_devices > 1:  # a group's program
        group = Mesh(np.asarray(devices[: exported.nr_devices]), (SHARD,))
        places = exported.in_shardings_jax(group)
    specs = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to)
        for a, to in zip(exported.in_avals, places, strict=True)
    ]
    donate = tuple(request["donate"])
    jitted = jax.jit(
        exported.call, donate_argnums=donate, keep_unused=True, compiler_options=options
    )
    return jitted.lower(*specs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
