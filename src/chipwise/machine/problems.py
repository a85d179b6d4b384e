"""What stands between this host and a good run, each with its reason and its remedy.

Pure: everything arrives in a `Situation`, so that a test can describe any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from . import guard
from .facts import HostFacts
from .hosts import Place
from .limits import Cores, Disk, Memory

GiB = 2**30

# Eight TPU v3 cores fed with JPEG decoded and augmented on the host wanted 16 logical cores or more.
# With augmentation on the device, as here, decoding remains: two cores a device is a floor, not a promise.
CORES_PER_DEVICE = 2
LOW_DISK_BYTES = 5 * GiB
LOW_MEMORY_BYTES = 2 * GiB

SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Problem:
    """`severity` is `"error"` (training here cannot go as asked), `"warning"` (it will, but badly) or
    `"note"` (a choice worth knowing)."""

    severity: str
    what: str
    why: str
    fix: str


@dataclass(frozen=True)
class Situation:
    """Everything that `problems` looks at. `platform` is `None` when JAX gave no devices at all."""

    facts: HostFacts
    place: Place
    cores: Cores
    memory: Memory
    disk: Disk
    platform: str | None
    kinds: tuple[str, ...] = ()  # JAX's device kind of each local device
    processes: int = 1
    jax_platforms: str | None = None
    jax_errors: dict[str, str] = field(default_factory=dict)  # by platform; "" when JAX did not start
    broken: dict[int, str] = field(default_factory=dict)  # device id to what it said
    float64: bool = False


def problems(s: Situation) -> list[Problem]:
    """The problems of a situation, errors first."""
    found = [*_devices(s), *_settings(s), *_host(s)]
    return sorted(found, key=lambda p: SEVERITIES.index(p.severity))


def _devices(s: Situation) -> list[Problem]:
    found = []
    unused = guard.unused(s.facts, s.jax_platforms)
    if s.platform is None:
        said = " ".join(next(iter(s.jax_errors.values()), "").split())
        if unused:
            reason = guard.why_unused(s.facts, unused[0].platform, said)
            found.append(Problem("error", "JAX found no devices", _sentence(reason.why), reason.fix))
        else:
            fix = "Correct or unset JAX_PLATFORMS, or use the CPU with --devices cpu."
            found.append(Problem("error", "JAX found no devices", said[:600] or "JAX did not start.", fix))
    elif s.platform == "cpu":
        for accelerator in unused:
            reason = guard.why_unused(
                s.facts, accelerator.platform, s.jax_errors.get(accelerator.platform, "")
            )
            what = f"the {accelerator.platform.upper()} is not used: JAX fell back to the CPU"
            found.append(Problem("error", what, _sentence(reason.why), f"{reason.fix}; {guard.OVERRIDE}"))
    for device, said in s.broken.items():
        why = f"It is listed but does not compute: {' '.join(said.split())[:400]}"
        fix = "End other processes that use it; then restart the runtime or the machine."
        found.append(Problem("error", f"device {device} does not work", why, fix))
    if len(set(s.kinds)) > 1:
        why = f"{', '.join(sorted(set(s.kinds)))}: every step waits for the slowest."
        fix = "Choose equal ones, such as with CUDA_VISIBLE_DEVICES=0."
        found.append(Problem("warning", "the devices are of different kinds", why, fix))
    old = guard.driver_too_old(s.facts)
    if old and s.platform == "gpu":
        found.append(Problem("warning", "old NVIDIA driver", _sentence(old.why), old.fix))
    return found


def _settings(s: Situation) -> list[Problem]:
    found = []
    purpose = guard.cpu_on_purpose(s.facts, s.jax_platforms)
    present = guard.accelerators(s.facts)
    if purpose and present:
        names = " and ".join(a.platform.upper() for a in present)
        what = f"the {names} is left alone: the CPU was asked for"
        fix = "Nothing, if meant; otherwise unset JAX_PLATFORMS and leave out --devices cpu and --simulate."
        found.append(Problem("warning", what, _sentence(purpose + "."), fix))
    elif guard.hidden(s.facts) and any(a.platform == "gpu" for a in present) and s.platform == "cpu":
        why = _sentence(f"{guard.hidden(s.facts)}.")
        found.append(
            Problem("warning", "the GPU is hidden", why, "Nothing, if that is meant; otherwise unset it.")
        )
    tensorflow = [n for n in ("tensorflow", "tensorflow-tpu") if n in s.facts.packages]
    if tensorflow and any(a.platform == "tpu" for a in present):
        severity = "warning" if s.place.name == "kaggle" else "note"
        why = "A TPU serves one process at a time; TensorFlow may take it on import, before JAX."
        remove = f"pip uninstall -y {' '.join(tensorflow)}"
        fix = f"Do not import TensorFlow with JAX, or: {remove} && pip install tensorflow-cpu"
        found.append(Problem(severity, f"{tensorflow[0]} and JAX share a TPU", why, fix))
    if s.float64:
        why = "64-bit arrays halve memory and are slow on accelerators; TPUs emulate them."
        fix = "Unset JAX_ENABLE_X64, or jax.config.update('jax_enable_x64', False)."
        found.append(Problem("warning", "float64 is enabled", why, fix))
    if s.place.hosts > s.processes:
        why = (
            f"The environment declares {s.place.hosts} hosts or tasks, JAX runs {s.processes} process"
            f"{'' if s.processes == 1 else 'es'}: each would train the whole recipe by itself."
        )
        fix = "Start one task, or call jax.distributed.initialize() in every process first."
        found.append(Problem("warning", "the hosts do not work together", why, fix))
    return found


def _host(s: Situation) -> list[Problem]:
    found = []
    devices = len(s.kinds)
    needed = CORES_PER_DEVICE * devices
    if s.platform in ("gpu", "tpu") and s.cores.usable < needed:
        what = f"{s.cores.usable:g} host cores for {devices} device{'s' if devices > 1 else ''}"
        why = f"Feeding images from files wants about {needed} or more; the devices would wait for data."
        fix = "Pack the data set ahead (arrays in memory need no decoding), or choose a host with more cores."
        found.append(Problem("warning", what, why, fix))
    if s.platform == "cpu" and devices > s.cores.usable:
        what = (
            f"{devices} simulated devices on {s.cores.usable:g} host core{'' if s.cores.usable == 1 else 's'}"
        )
        why = "They take turns: results are those of real devices, times are not."
        found.append(Problem("note", what, why, "Nothing for correctness; do not read speeds from it."))
    if s.disk.free_bytes < LOW_DISK_BYTES:
        what = f"{s.disk.free_bytes / GiB:.1f} GiB free on disk"
        why = f"Data sets and checkpoints under {s.disk.path} may not fit."
        found.append(
            Problem("warning", what, why, "Free some space, or run in a directory on a larger disk.")
        )
    if s.memory.available_bytes < LOW_MEMORY_BYTES:
        what = f"{s.memory.available_bytes / GiB:.1f} GiB of host memory available"
        why = "Compiling a large model alone may need more; the system then kills the process."
        fix = "End other processes (in a notebook, other kernels), or choose a host with more memory."
        found.append(Problem("warning", what, why, fix))
    return found


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
