"""Which devices a program runs on: all that JAX finds, unless it found suspiciously little.

machine = detect()                 # every device; an error rather than a silent fall to the CPU
machine = detect(4)                # the first four
machine = detect(platform="cpu")   # the CPU, though a GPU may be there
simulate(8)                        # the CPU divided into eight devices, before JAX starts
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..errors import DeviceError, near
from . import guard
from .facts import HostFacts, gather
from .hosts import hosts

PLATFORMS = ("cpu", "gpu", "tpu")
FRACTIONS = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
"""The variables, an old and a new name of one, that say how much of a GPU's free memory JAX takes as it
starts: a share, by default 0.75 (https://docs.jax.dev/en/latest/gpu_memory_allocation.html). JAX refuses to
be given both."""

GPU_SHARE = 0.9
"""What `detect` sets there, unless the user has: who trains has the GPU to itself, and the rest suffices for
the context, the libraries' code and the buffers of collectives."""


@dataclass(frozen=True)
class Machine:
    """The devices to use, in JAX's order, and where they came from.

    `available` counts all devices of the platform, of which `devices` are the first (of each host, where
    there are several). `simulated` says that they are parts of a host's CPU.
    """

    platform: str  # "cpu", "gpu" or "tpu"
    kind: str  # JAX's `device_kind`, such as "TPU v5 lite"
    devices: tuple[jax.Device, ...]
    available: int
    simulated: bool


def detect(count: int | None = None, platform: str | None = None) -> Machine:
    """The machine: all devices of the best platform that JAX finds.

    *Arguments:*
    - `count`: use the first `count` devices only.
    - `platform`: `"cpu"`, `"gpu"` or `"tpu"`; by default the best that is there. `"cpu"` ignores
      accelerators: when JAX has not started yet, it starts without one, for the life of this process.

    Raises `DeviceError` when fewer devices are there than asked for, when the host has an accelerator that
    JAX cannot use, or when JAX runs several processes; the message says why and what to type.
    `JAX_PLATFORMS=cpu`, `simulate` and an empty `CUDA_VISIBLE_DEVICES` count as a request for the CPU.
    """
    if platform is not None and platform not in PLATFORMS:
        raise DeviceError(
            "platform-unknown", platform=platform, choices=PLATFORMS, hint=near(platform, PLATFORMS)
        )
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise DeviceError("device-count-not-whole", count=count)
    devices = _devices(platform)
    if devices[0].platform == "cpu" and platform is None:
        refuse_fallback(gather(), setting("jax_platforms"), jax_errors)
    return _take(devices, count)


def refuse_fallback(facts: HostFacts, jax_platforms: str | None, ask) -> None:
    """Raises `DeviceError` when JAX found only CPUs on a host whose accelerator nobody switched off.

    `ask` maps a list of platforms to what JAX says about each: called only when there is something to
    explain, because asking starts backends.
    """
    left = guard.unused(facts, jax_platforms)
    if left:
        raise guard.refusal(facts, left, ask([a.platform for a in left]))


def jax_errors(platforms: list[str]) -> dict[str, str]:
    """What JAX says when asked for each platform; platforms that work are left out."""
    errors = {}
    for platform in platforms:
        try:
            # "cuda", since for the alias "gpu" JAX only says that there is none
            jax.devices("cuda" if platform == "gpu" else platform)
        except RuntimeError as error:
            errors[platform] = str(error)
    return errors


def _devices(platform: str | None) -> list[jax.Device]:
    if platform == "cpu" and not started():
        # A TPU serves one process, and a GPU's memory is reserved on start: do not take what is not used.
        jax.config.update("jax_platforms", "cpu")
    take_memory()
    hosts()
    try:
        return jax.devices(platform) if platform else jax.devices()
    except RuntimeError as error:
        raise no_devices(gather(), platform, setting("jax_platforms"), str(error)) from error


def take_memory() -> None:
    """Lets JAX take `GPU_SHARE` of a GPU as it starts, unless the user has said how much."""
    if not any(map(os.environ.get, FRACTIONS)):
        os.environ[FRACTIONS[0]] = str(GPU_SHARE)


def no_devices(
    facts: HostFacts, platform: str | None, jax_platforms: str | None, jax_error: str
) -> DeviceError:
    """What to raise when JAX gave an error instead of devices of `platform` (`None`: of any)."""
    purpose, hidden = guard.cpu_on_purpose(facts, jax_platforms), guard.hidden(facts)
    present = guard.accelerators(facts)
    asked = [a for a in present if platform in (None, a.platform)]
    if platform in ("gpu", "tpu"):
        if purpose:
            return DeviceError("platform-kept-out", platform=platform, setting=purpose)
        if platform == "gpu" and hidden:
            return DeviceError("platform-hidden", platform=platform, setting=hidden)
        if not asked:
            shown = [a.platform.upper() for a in present]
            return DeviceError("platform-absent", platform=platform, accelerators=shown)
    if asked:
        return guard.refusal(facts, asked, {a.platform: jax_error for a in asked})
    return DeviceError("jax-does-not-start", said=" ".join(jax_error.split())[:600])


def _take(devices: list[jax.Device], count: int | None) -> Machine:
    kind, here = devices[0].device_kind, hosts()
    if jax.process_count() != here.count:
        raise DeviceError("joined-by-others", processes=jax.process_count())
    if count is not None and count > len(devices):
        raise DeviceError("devices-missing", count=count, here=len(devices), kind=kind)
    return Machine(
        platform=devices[0].platform,
        kind=kind,
        devices=shared(devices, len(devices) if count is None else count, here.count),
        available=len(devices),
        simulated=devices[0].platform == "cpu" and len(devices) > here.count,
    )


def shared(devices: Sequence[jax.Device], count: int, hosts: int) -> tuple[jax.Device, ...]:
    """`count` of the devices of all hosts, in their order: the first ones of each host, equally many.

    Raises `DeviceError` where a host would have none, or fewer than the others.
    """
    if hosts == 1 or count == len(devices):
        taken = list(devices[:count])
    else:
        seen: dict[int, int] = {}
        taken = []
        for device in devices:
            seen[device.process_index] = seen.get(device.process_index, 0) + 1
            if seen[device.process_index] <= count // hosts:
                taken.append(device)
    each = [sum(d.process_index == host for d in taken) for host in range(hosts)]
    if hosts > 1 and (len(taken) != count or len(set(each)) > 1):
        host = min(range(hosts), key=each.__getitem__)
        raise DeviceError("devices-uneven-hosts", count=count, hosts=hosts, host=host, here=each[host])
    return tuple(taken)


def simulate(n: int) -> None:
    """Makes JAX start with `n` CPU devices and leave any accelerator alone, in this process, for good.

    Call it before the first JAX operation: JAX fixes its devices when it first needs them. An `XLA_FLAGS`
    that asks for another number gives way. Calling it again with the same `n` does nothing.

    Raises `DeviceError` when `n` is not a whole number of at least 1, or when JAX has already started
    with other devices.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise DeviceError("device-count-not-whole", count=n)
    if not started():
        # Not through XLA_FLAGS: XLA reads that variable once, which may be over, and it may hold the
        # user's own flags. JAX's setting overrides it.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", n)
        return
    here = jax.devices()
    if here[0].platform == "cpu" and len(here) == n:
        return
    raise DeviceError("simulate-too-late", count=n, here=len(here), kind=here[0].device_kind)


def started() -> bool:
    """Whether JAX has fixed its devices, found out without starting it.

    JAX has no public question for this, but it refuses to change `jax_num_cpu_devices` once started.
    """
    before = setting("jax_num_cpu_devices")
    try:
        jax.config.update("jax_num_cpu_devices", before + 2)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", before)
    return False


def setting(name: str) -> Any:
    """A setting of JAX such as `"jax_platforms"`. JAX makes the attributes as it runs, unseen by types."""
    return getattr(jax.config, name)
