"""The devices on which a program runs: by default all, with an error if JAX misses an accelerator.

machine = detect()                 # all devices, or an error: no silent fallback to the CPU
machine = detect(4)                # the first four
machine = detect(platform="cpu")   # the CPU, even if there is a GPU
simulate(8)                        # the CPU as eight devices. Call it before JAX starts
"""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..base import DeviceError, near
from ..base.annotations import as_annotated
from ..chips import Chip, find
from . import guard
from .fingerprint import this_machine
from .host_facts import HostFacts, gather
from .hosts import hosts
from .jax_settings import setting, started
from .plugins import hidden
from .portable_cpu import active

PLATFORMS = ("cpu", "gpu", "tpu")
FRACTIONS = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
"""The old and the new name of the variable for the share of a GPU's memory that JAX takes when it
starts, by default `JAX_SHARE` (https://docs.jax.dev/en/latest/gpu_memory_allocation.html). JAX
refuses both together."""

JAX_SHARE = 0.75
GPU_SHARE = 0.9
"""The share that `detect` sets unless the user has: training has the GPU to itself, and the rest
suffices for the context, the code of libraries and the buffers of collectives."""


@dataclass(frozen=True)
class Machine:
    """The devices to use, in JAX's order: the first ones of each host."""

    platform: str  # "cpu", "gpu" or "tpu"
    kind: str  # JAX's `device_kind`, such as "TPU v5 lite"
    devices: tuple[jax.Device, ...]
    available: int  # number of all devices of the platform
    simulated: bool  # whether they are parts of a host's CPU

    @property
    def listed(self) -> Chip | None:
        """Its chip in the catalogue."""
        return find(self.kind, memory_of(self.devices[0]))

    @property
    def portable(self) -> bool:
        """Whether programs are compiled for x86-64 CPUs in general: see `portable_cpu`."""
        return active(self.devices[0])

    @property
    def chip(self) -> str:
        """The kind of chip, within which bits are equal: JAX calls every processor "cpu"."""
        if self.platform != "cpu":
            return self.kind
        return this_machine().cpu + ", portable" * self.portable


def detect(count: int | None = None, platform: str | None = None, group: int = 1) -> Machine:
    """The machine: all devices of the best platform that JAX finds.

    *Arguments:*

    - `count`: use only the first `count` devices.
    - `platform`: `"cpu"`, `"gpu"` or `"tpu"`. By default the best one. `"cpu"` ignores
      accelerators: if JAX has not started yet, it starts without them, for the rest of this
      process.
    - `group`: see `shared`.

    Raises `DeviceError` when there are fewer than `count` devices, when JAX cannot use the host's
    accelerator, or when JAX runs several processes that did not join with `hosts`. The message says
    why and what to type. `JAX_PLATFORMS=cpu`, `simulate` and an empty `CUDA_VISIBLE_DEVICES` count
    as a request for the CPU.
    """
    if platform is not None and platform not in PLATFORMS:
        raise DeviceError(
            "platform-unknown", platform=platform, choices=PLATFORMS, hint=near(platform, PLATFORMS)
        )
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise DeviceError("device-count-not-whole", count=count)
    devices = _devices(platform)
    if devices[0].platform == "cpu" and platform is None:
        facts = gather()
        if left := guard.unused(facts, setting("jax_platforms")):
            raise guard.refusal(facts, left, jax_errors([a.platform for a in left]))
    return _take(devices, count, group)


def jax_errors(platforms: list[str]) -> dict[str, str]:
    """JAX's error message for each platform that does not work."""
    errors = {}
    for platform in platforms:
        try:
            # "cuda", since for the alias "gpu" JAX gives no reason
            jax.devices("cuda" if platform == "gpu" else platform)
        except RuntimeError as error:
            errors[platform] = str(error)
    return errors


def _devices(platform: str | None) -> list[jax.Device]:
    if platform == "cpu" and not started():
        # An unused accelerator stays free: a TPU serves one process, and JAX reserves a GPU's
        # memory.
        jax.config.update("jax_platforms", "cpu")
    take_memory()
    hosts()
    try:
        with hidden():  # this starts JAX
            return jax.devices(platform) if platform else jax.devices()
    except RuntimeError as error:
        raise no_devices(gather(), platform, setting("jax_platforms"), str(error)) from error


def take_memory() -> None:
    """Lets JAX take `GPU_SHARE` of a GPU's memory when it starts, unless it has started or the user
    has set a share: `memory_of` counts on the share with which it started."""
    if not started() and not any(map(os.environ.get, FRACTIONS)):
        os.environ[FRACTIONS[0]] = str(GPU_SHARE)


def memory_stats(device: jax.Device) -> dict[str, Any]:
    """What JAX says of a device's memory. Empty if nothing, as of another host's device."""
    try:
        return device.memory_stats() or {}
    except Exception:  # some backends lack it
        return {}


def memory_of(device: jax.Device) -> float | None:
    """All bytes of a GPU's memory, by how many of them JAX may take. `None` if unknown."""
    share = next(filter(None, map(os.environ.get, FRACTIONS)), JAX_SHARE)
    limit = memory_stats(device).get("bytes_limit") if device.platform == "gpu" else None
    return limit and limit / float(share)


def no_devices(
    facts: HostFacts, platform: str | None, jax_platforms: str | None, jax_error: str
) -> DeviceError:
    """The error to raise if JAX raised one instead of returning devices of `platform` (any if
    `None`)."""
    purpose = guard.cpu_on_purpose(facts, jax_platforms)
    hidden = guard.hidden(facts)
    present = guard.accelerators(facts)
    matching = [a for a in present if platform in (None, a.platform)]
    if platform in ("gpu", "tpu"):
        if purpose:
            return DeviceError("platform-kept-out", platform=platform, setting=purpose)
        if platform == "gpu" and hidden:
            return DeviceError("platform-hidden", platform=platform, setting=hidden)
        if not matching:
            names = [a.platform.upper() for a in present]
            return DeviceError("platform-absent", platform=platform, accelerators=names)
    if matching:
        return guard.refusal(facts, matching, {a.platform: jax_error for a in matching})
    return DeviceError("jax-does-not-start", said=" ".join(jax_error.split())[:600])


def _take(devices: list[jax.Device], count: int | None, group: int = 1) -> Machine:
    kind = devices[0].device_kind
    here = hosts()
    if jax.process_count() != here.count:
        raise DeviceError("joined-by-others", processes=jax.process_count())
    if count is not None and count > len(devices):
        raise DeviceError("devices-missing", count=count, here=len(devices), kind=kind)
    return Machine(
        platform=devices[0].platform,
        kind=kind,
        devices=shared(devices, len(devices) if count is None else count, here.count, group),
        available=len(devices),
        simulated=devices[0].platform == "cpu" and len(devices) > here.count,
    )


def shared(
    devices: Sequence[jax.Device], count: int, hosts: int, group: int = 1
) -> tuple[jax.Device, ...]:
    """`count` of the devices of all hosts, in order: the first ones of each host, in numbers as
    equal as the hosts allow.

    *Arguments:* `group`: the number of devices in a group. Each host gets whole groups if that
    leaves every host a device.

    Raises `DeviceError` if a host would have no device.
    """
    if count < hosts:
        raise DeviceError("devices-below-hosts", count=count, hosts=hosts, host=count)
    if hosts == 1:  # in JAX's order: its devices may have any
        return tuple(devices[:count])
    seen: collections.Counter[int] = collections.Counter()
    order = []
    for place, device in enumerate(devices):
        order.append((seen[device.process_index] // group, place))
        seen[device.process_index] += 1
    chosen = tuple(devices[place] for place in sorted(place for _, place in sorted(order)[:count]))
    whole = len({device.process_index for device in chosen}) == hosts
    return chosen if whole or group == 1 else shared(devices, count, hosts)


@as_annotated
def simulate(n: int) -> None:
    """Makes JAX start with `n` CPU devices and without accelerators, for the rest of this process.

    Call it before the first JAX operation, with which JAX fixes its devices. Overrides the number
    in `XLA_FLAGS`. Calling it again with the same `n` does nothing.

    Raises `DeviceError` if `n` is not from 1 to 65,536, or if JAX has already started with other
    devices.
    """
    if not 1 <= n <= 1 << 16:
        raise DeviceError("device-count-not-whole", count=n)
    if not started():
        # Not with XLA_FLAGS, which XLA may have read already, and which may have the user's flags.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", n)
        return
    here = jax.devices()
    if here[0].platform == "cpu" and len(here) == n:
        return
    raise DeviceError("simulate-too-late", count=n, here=len(here), kind=here[0].device_kind)
