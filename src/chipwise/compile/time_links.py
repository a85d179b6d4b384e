"""Computes the seconds of a sum over devices from the catalogue's links and their topology.
Compilers state no time for it.

The exact sum exchanges chunks, all to all, adds them and gathers the result (`step.reduce`). The
time depends on the topology:

- **TPU slices** are meshes of two or three axes, some with wrap-around links. Gathering uses all
  links of a chip at once. In a mesh it is limited by a corner, which has one link per axis. The
  exchange has to cross the middle of the slice, which is much slower in a large one.
- **GPU hosts** communicate through a network card for each GPU. In the exchange every GPU sends its
  data through its card. In gathering, a host's cards receive each value once.
"""

from __future__ import annotations

import re

from ..base import DeviceError
from ..chips.catalogue import Chip
from ..chips.targets import Target

LINK_EFFICIENCY = {"NVLink": 0.78, "PCIe": 0.65, "ICI": 0.8}
"""The share of the one-way bandwidth that a sum of large arrays reaches. Eight H200, whose NVLink
switches add, reach 0.82 of 450 GB/s with 64 MiB (nccl-tests in
https://github.com/stas00/ml-engineering/blob/master/network/benchmarks/README.md). A plain ring
reaches a little less. The shares of PCIe and ICI are assumed. None was measured here."""

HOP_SECONDS = {"NVLink": 3e-6, "PCIe": 8e-6, "ICI": 1e-6}
"""The assumed latency between neighbours in the ring."""

NETWORK_GBps = {"NVLink2": 6.25, "NVLink3": 25.0, "NVLink4": 50.0, "NVLink5": 50.0}
"""The one-way bandwidth between hosts for each GPU, by the links inside a host. NVIDIA's own hosts
have four cards of 100 Gbit/s (DGX-1), eight of 200 (DGX A100) or eight of 400 (DGX H100, B200), by
their data sheets. Cloud hosts may have a quarter."""

ONE_CARD_GBps = 12.5
"""The bandwidth of a host without such cards. It is 100 Gbit/s, shared by all of its GPUs."""

NETWORK_HOP_SECONDS = 15e-6


def all_reduce_seconds(
    bytes_per_device: float, devices: int, chip: Chip, near: int | None = None
) -> float:
    """The seconds to sum arrays of `bytes_per_device`, one on each of `devices` JAX devices, in a
    ring.

    Each device sends and receives 2(D-1)/D of the array over half of the catalogue's two-way
    bandwidth. With several hosts there is a ring through each network card, as in NCCL. The rings
    are as fast as the slower of the links and all cards of a host together. `near` is the number of
    the devices on one host, each with its share of the host's network. By default it is all of a
    host.

    Raises `DeviceError` if the chip's interconnect is not in the catalogue.
    """
    if devices <= 1:
        return 0.0
    near = chip.chips_per_host if near is None else near
    kind, one_way = _links(chip)
    seconds = 2 * (devices - 1) * HOP_SECONDS[kind]
    if chip.kind == "GPU" and devices > near:
        one_way = min(one_way, near * _card(chip, kind, chip.chips_per_host))
        seconds += 2 * (devices // near - 1) * NETWORK_HOP_SECONDS
    return seconds + 2 * (devices - 1) / devices * bytes_per_device / one_way


def _links(chip: Chip) -> tuple[str, float]:
    """The kind of links inside a host or a slice, and the bytes a second that a device sends over
    them. Raises `DeviceError` if the catalogue does not have them, or of another kind."""
    kind = next((kind for kind in LINK_EFFICIENCY if chip.interconnect_kind.startswith(kind)), None)
    if kind is None or chip.interconnect_GBps_both_ways is None:
        raise DeviceError("chip-without-interconnect", chip=chip.name)
    one_way = chip.interconnect_GBps_both_ways / 2 / chip.jax_devices_per_chip
    return kind, one_way * LINK_EFFICIENCY[kind] * 1e9


def _card(chip: Chip, kind: str, gpus: int) -> float:
    """The bytes a second that each of a host's `gpus` sends over the network."""
    card = NETWORK_GBps.get(chip.interconnect_kind.split(" ")[0], ONE_CARD_GBps / gpus)
    return card * LINK_EFFICIENCY[kind] * 1e9


# ---- several hosts

_FULL = 16  # length of an axis that is a ring on v5e and v6e, and on v2 only in its whole pod
_CUBE = 4  # v4, v5p and 7x have rings if all axes are multiples of it


def sum_seconds(
    bytes_per_device: float,
    target: Target,
    devices: int,
    exact: bool = True,
    shards: int = 1,
    vectors: int = 1,
) -> float:
    """The seconds to sum an array of `bytes_per_device` over `devices` of `target`, with the result
    on each.

    *Arguments:* `shards` is the size of the groups, in devices. The first devices of all groups sum
    one array, the second devices another, and so on, all at once. `vectors` is the number of arrays
    that each device exchanges. One sum of them all is gathered.

    Within a host, or without `exact`, the time follows from `all_reduce_seconds`: half of it for
    each array that is exchanged, and half for gathering. Raises `DeviceError` if the chip's
    interconnect is not in the catalogue.
    """
    near = max(1, max(target.chip.chips_per_host, _domain(target)) // shards)
    within = all_reduce_seconds(bytes_per_device, devices, target.chip, near)
    each = max(1, max(target.devices // target.hosts, _domain(target)) // shards)
    if not exact or devices <= each:
        return within * (1 + vectors) / 2
    sent = bytes_per_device * (devices - 1) / devices
    if target.chip.kind == "TPU":
        crossing, gathering = _on_slice(target)
        return HOP_SECONDS["ICI"] * 2 * (devices - 1) + sent * (vectors * crossing + gathering)
    return _over_network(target, devices, bytes_per_device, shards, vectors)


def axes(target: Target) -> list[tuple[int, bool]]:
    """The axes of a TPU slice longer than one chip, and whether each is a ring.

    https://cloud.google.com/tpu/docs/system-architecture-tpu-vm states the rings. v4 and later 3D
    slices from 4x4x4 on are tori. v5e and v6e have rings along whole axes of 16. The whole v2 pod
    is a torus. The v3 pod is larger than any target.
    """
    assert target.topology is not None
    version, _, shape = target.topology.partition(":")
    sizes = [int(size) for size in shape.split("x")]
    if len(sizes) == 3:
        closed = [all(size % _CUBE == 0 for size in sizes)] * 3
    else:
        closed = [size == _FULL and (version != "v2" or min(sizes) == _FULL) for size in sizes]
        closed = [False, False] if version == "v3" else closed
    return [(size, ring) for size, ring in zip(sizes, closed, strict=True) if size > 1]


def _domain(target: Target) -> int:
    """The number of GPUs of several hosts joined by NVLink, as in a GB200's rack. It is 0 if NVLink
    ends in the host."""
    match = re.search(r"(\d+)-GPU domain", target.chip.interconnect_kind)
    return int(match[1]) if match else 0


def _on_slice(target: Target) -> tuple[float, float]:
    """The seconds to exchange and to gather each byte of a device.

    Half of the data of half of the chips crosses the middle of an axis each way, over one link for
    each row of chips, or two in a ring. All axes work at once, so the longest decides.
    """
    rings = axes(target)
    ports = 6 if target.topology is not None and target.topology.count("x") == 2 else 4
    link = _links(target.chip)[1] / ports
    crossing = max(size / (4 * (2 if ring else 1)) for size, ring in rings)
    gathering = 1 / sum(2 if ring else 1 for _, ring in rings)
    return crossing / link, gathering / link


def _over_network(target: Target, devices: int, sent: float, shards: int, vectors: int) -> float:
    """The seconds to exchange and then gather over several hosts. Each takes the longer of the
    times of the cards and of the links inside a host."""
    chip = target.chip
    here = target.devices // target.hosts
    each, (kind, inside) = max(1, here // shards), _links(chip)
    card = _card(chip, kind, here)
    hosts = -(-devices // each)
    away = (devices - each) / devices
    exchange = max(sent * away / card, sent * (each - 1) / devices / inside)
    gather = max(sent * away / each / card, sent * (devices - 1) / devices / inside)
    hops = 2 * (each - 1) * HOP_SECONDS[kind] + 2 * (hosts - 1) * NETWORK_HOP_SECONDS
    return vectors * exchange + gather + hops
