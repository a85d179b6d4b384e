"""How long a sum over devices takes, where no compiler says."""

from __future__ import annotations

from ..chips.catalogue import Chip
from ..errors import DeviceError

EFFICIENCY = {"NVLink": 0.78, "PCIe": 0.65, "ICI": 0.8}
"""Of the one-way bandwidth that a sum of large arrays reaches. NVLink: eight H200, whose switches add, reach
0.82 of 450 GB/s with 64 MiB and more with larger arrays (nccl-tests in
https://github.com/stas00/ml-engineering/blob/master/network/benchmarks/README.md); a little less for a plain
ring. PCIe and ICI: allowances. None was measured here."""

HOP_SECONDS = {"NVLink": 3e-6, "PCIe": 8e-6, "ICI": 1e-6}
"""Between neighbours in the ring."""

NETWORK_GBps = {"NVLink2": 6.25, "NVLink3": 25.0, "NVLink4": 50.0, "NVLink5": 50.0}
"""One way for each GPU between hosts, by the links inside them: what NVIDIA's own hosts have, four cards of
100 Gbit/s (DGX-1), eight of 200 (DGX A100), eight of 400 (DGX H100, B200); their datasheets were not read
again. Cloud hosts may have a quarter."""

ONE_CARD_GBps = 12.5
"""Of a host without such cards: 100 Gbit/s for all of its GPUs."""

NETWORK_HOP_SECONDS = 15e-6


def all_reduce_seconds(bytes_per_device: float, devices: int, chip: Chip) -> float:
    """Seconds to sum an array of `bytes_per_device`, one on each of `devices` JAX devices, in a ring.

    Each device sends and receives 2(D-1)/D of the array over half of the catalogue's two-way bandwidth.
    Beyond one host the ring is as fast as the slower of the links and the network between hosts.

    Raises `DeviceError` when the chip's interconnect is not in the catalogue.
    """
    if devices <= 1:
        return 0.0
    if chip.interconnect_GBps_both_ways is None:
        raise DeviceError(f"{chip.name}: its interconnect is not in the catalogue. Plan for one device.")
    words = chip.interconnect_kind
    kind = "ICI" if chip.kind == "TPU" else "NVLink" if words.startswith("NVLink") else "PCIe"
    one_way = chip.interconnect_GBps_both_ways / 2 / chip.jax_devices_per_chip * EFFICIENCY[kind]
    hops = 2 * (devices - 1)
    seconds = hops * HOP_SECONDS[kind]
    if chip.kind == "GPU" and devices > chip.chips_per_host:
        network = NETWORK_GBps.get(words.split(" ")[0], ONE_CARD_GBps / chip.chips_per_host)
        one_way = min(one_way, network * EFFICIENCY[kind])
        seconds += 2 * (devices // chip.chips_per_host - 1) * NETWORK_HOP_SECONDS
    return seconds + 2 * (devices - 1) / devices * bytes_per_device / (one_way * 1e9)
