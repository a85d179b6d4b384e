"""Times the kernels of a step, in a process of its own: `python -m chipwise.run.tune FOLDER N`.

XLA keeps all kernels that it has timed until a process ends, also those that add in any order. So
the process that trains only loads the others.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import inspect
import os
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import psutil
from jax import export
from jax.sharding import SingleDeviceSharding

from ..base import DeviceError, RunError, fact
from ..base.json_types import part
from ..compile.exports import export_program
from ..machine.hosts import Pace
from ..machine.kernels import (
    DUMP,
    FILE,
    FOLDER,
    TUNED,
    Kernels,
    load,
    loaded,
    probe,
    product,
    read,
    steady,
)
from .folder.run_reader import read_processes
from .on import On

if TYPE_CHECKING:
    from .programs import Programs

TIMED = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_experimental_enable_fusion_autotuner": False,
    "xla_gpu_shard_autotuning": False,
    FOLDER: "",
}
"""XLA's options when it times: kernels for products and convolutions as exact programs have them,
all by this process."""


def take(asked: str | Path | None, programs: Programs) -> Kernels | None:
    """Loads the kernels of `On(kernels=asked)`, the first host's on every host, for `programs` that
    are not yet compiled.

    Raises `DeviceError` where nothing is tuned, and for files as `kernels.read` and `kernels.load`.
    """
    if asked is None:
        return None
    placement, text = programs.placement, None
    lead = placement.lead
    if lead.platform != "gpu":
        raise DeviceError("kernels-nowhere", kernels=str(asked), platform=lead.platform.upper())
    if placement.shards > 1:
        raise DeviceError("kernels-of-groups", kernels=str(asked), shards=placement.shards)
    if placement.hosts.first:
        made = read(asked) if asked != TUNED else loaded() or timed(programs)
        text = base64.b85encode(zlib.compress(made.text.encode())).decode()
    sent: Any = placement.agree("kernels", text)
    kernels = Kernels(zlib.decompress(base64.b85decode(sent)).decode())
    load(kernels, lead, str(asked))
    return kernels


def in_folder(on: On, run: str | Path | None) -> On:
    """`on` with the tuned kernels of a run folder, if it has some. Raises `RunError` if it lacks
    those that its run was trained with."""
    if on.kernels != TUNED or run is None or not Path(run).exists():
        return on
    if (file := Path(run) / FILE).exists():
        return dataclasses.replace(on, kernels=file)
    for start in read_processes(Path(run)):
        if digest := part(start, "computed").get("kernels"):
            raise RunError("kernels-missing", run=str(run), digest=digest)
    return on


def timed(programs: Programs) -> Kernels:
    """Times kernels for `programs` on this host's first device. Raises `DeviceError` if XLA does
    not do it."""
    device, pace = programs.placement.lead, programs.placement.hosts.pace
    print(fact("kernels-timing"), file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="chipwise-tune-") as place:
        folder = Path(place)
        asked: list[tuple[Any, Any]] = [(product, (probe(),))]
        asked += [(inspect.unwrap(one.function), one.specs) for one in programs.blueprint.programs]
        for i, (function, specs) in enumerate(asked):
            body = export_program(function, specs, "cuda").body
            (folder / f"{i}.bin").write_bytes(body)
        variables = os.environ | {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # this process has most of the memory
            "JAX_ENABLE_COMPILATION_CACHE": "false",  # what is read there is not timed
        }
        command = [sys.executable, "-P", "-m", __name__, place, str(device.local_hardware_id)]
        code, log = _run(command, variables, pace)
        if code or not (folder / FILE).exists():
            said = (log.strip().splitlines() if code else []) or ["XLA wrote no kernels"]
            raise DeviceError("kernels-not-timed", reason=said[-1][:300], device=device.device_kind)
        made = (folder / FILE).read_text("utf-8")
        (folder / FILE).write_text(steady(made), "utf-8")
        return read(folder / FILE)


def _run(command: list[str], variables: dict[str, str], pace: Pace) -> tuple[int, str]:
    """Runs a process, which moves as long as it computes. *Returns* its exit code and log."""
    pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    child, used = subprocess.Popen(command, env=variables, **pipes), 0.0
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                log = child.communicate(timeout=5.0)[1]
                return child.returncode, log
            before, used = used, sum(psutil.Process(child.pid).cpu_times()[:2])
            pace.beats += used > before
    finally:
        child.kill()
        child.wait()


def main(folder: str, ordinal: str) -> None:
    device = next(d for d in jax.local_devices() if d.local_hardware_id == int(ordinal))
    for file in sorted(Path(folder).glob("*.bin")):
        compiled(file.read_bytes(), device, str(Path(folder) / FILE))


def compiled(body: bytes, device: jax.Device, to: str) -> Any:
    """Compiles a program of `jax.export`, while XLA times kernels, and writes them all to a
    file."""
    exported, place = export.deserialize(bytearray(body)), SingleDeviceSharding(device)
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in exported.in_avals]
    jitted = jax.jit(exported.call, keep_unused=True, compiler_options={**TIMED, DUMP: to})
    return jitted.lower(*specs).compile()


if __name__ == "__main__":
    main(*sys.argv[1:])
