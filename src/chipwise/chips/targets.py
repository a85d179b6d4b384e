"""Parses target names such as `v3-8`, `a100:8` to a `Target`: chip, counts, topology.

**TPU slices** are named as Google names them: a version, a dash and a number. On v2, v3, v4, v5p
and 7x the number counts TensorCores, two a chip (`v3-8` and `tpu7x-8` are four chips). On v5e and
v6e it counts chips (`v5e-8`, at Google `v5litepod-8`, is eight). The sizes are those that Google
offers, up to 256 chips: of v2 and v3 by https://cloud.google.com/tpu/docs/regions-zones, of v4 and
v5p by the page of each version, of 7x by xpk (https://github.com/AI-Hypercomputer/xpk/pull/586).

**One core**, `v2-1`, `v3-1` or `tpu7x-1`, is a JAX device that cannot be rented alone: half a chip,
for planning one replica. `rented_as` is the target that is paid for.

**GPUs** are counted after a colon: `h100`, `h100:8`. One host has at most `Chip.chips_per_host`
GPUs. Larger targets are whole hosts. A CPU is no target.

**Topologies** were tried with jax 0.10.2 and libtpu 0.0.42. For every target,
`get_topology_desc(platform="tpu", **target.topology_arguments())` lists at least `devices` devices.
The first `devices` of them are the target. It lists more only for one core. A v4 chip is one device
only with `chip_config_name="megacore"`, as on a real host. Otherwise each half is a device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..base import ChipwiseError, DeviceError, Fact, fact, near
from .catalogue import CHIPS, Chip, called, named, rows, spelled

MOST_CHIPS = 256
"""The largest target, in chips."""


@dataclass(frozen=True)
class Target:
    """Where a recipe could run."""

    name: str  # canonical: "v5e-8", "v3-8", "a100-80gb:8", "h100"
    chip: Chip
    chips: int  # chips (GPUs) in it; 1 for half a chip
    devices: int  # JAX devices: cores on v2, v3 and 7x; chips on v4, v5e, v5p and v6e; GPUs
    topology: str | None  # `topology_name` for `jax.experimental.topologies`; None for GPUs
    topology_options: tuple[tuple[str, str | tuple[int, ...]], ...] = ()  # its other arguments
    hosts: int = 1  # machines, each with its own JAX process
    rented_as: str = ""  # the smallest target to rent that contains it, if that is larger
    note: Fact | None = None

    def topology_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `get_topology_desc` besides the platform, as plain JSON values.
        Empty for GPUs."""
        if self.topology is None:
            return {}
        options = {k: v if isinstance(v, str) else list(v) for k, v in self.topology_options}
        return {"topology_name": self.topology, **options}


_SIZES = rows("slices.csv")
SLICES = {
    version: {row["size"]: row[version] for row in _SIZES if row[version]}
    for version in _SIZES[0]
    if version != "size"
}
"""For each TPU version, the numbers its slices are named by, and how the chips are arranged."""

_COUNTS_CHIPS = ("v5e", "v6e")
_CORE_IS_A_DEVICE = ("v2", "v3", "tpu7x")


def parse(text: str) -> Target:
    """The target called `text`. Letter case, spaces and underscores do not matter.

    Raises `DeviceError` for an unknown name, with the nearest, and for a size that does not exist,
    with those that do.
    """
    word = spelled(text)
    name, colon, count = (part.strip("- ") for part in word.partition(":"))
    name = re.sub(r"-core$", "-1", name)
    if not called(name) and not colon and (dashed := re.fullmatch(r"(.+)-(\d+)", name)):
        name, count = dashed.groups()
    chip = named(name)
    if chip is None and (several := [one.names[0] for one in called(name)]):
        wrong = "{target}: that is {names:and}. Type {names:or}."
        raise DeviceError("target-ambiguous", wrong, target=text, names=several)
    if chip is None:
        wrong = "{target}: no such target.{hint:near} Type one such as {examples:or}."
        raise DeviceError(
            "target-unknown", wrong, target=text, hint=near(word, names()), examples=EXAMPLES
        )
    if chip.kind == "TPU":
        return _slice(text, chip, "" if colon else count)
    if chip.kind == "CPU":
        raise DeviceError("target-cpu", target=text)
    return _gpus(text, chip, count or ("" if colon else "1"), bool(count) and not colon)


EXAMPLES = ("v5e-8", "v3-8", "a100:8", "t4")


def names() -> tuple[str, ...]:
    """All canonical names: TPU slices by size, GPUs single and as a whole host."""
    listed: list[str] = []
    for chip in CHIPS:
        short = chip.names[0]
        if chip.kind == "TPU":
            listed += [f"{short}-{size}" for size in SLICES[short]]
        elif chip.kind == "GPU":
            listed += dict.fromkeys((short, parse(f"{short}:{chip.chips_per_host}").name))
    return tuple(listed)


def sizes(chip: Chip, group: int = 1) -> Iterator[Target]:
    """The targets of `chip` that are whole groups of `group` devices, smallest first."""
    short = chip.names[0]
    if chip.kind == "TPU":
        names = [f"{short}-{size}" for size in SLICES[short]]
    else:
        names = [f"{short}:{group * 2**n}" for n in range(MOST_CHIPS.bit_length())]
    for name in names:
        try:
            target = parse(name)
        except ChipwiseError:  # GPUs: parts of a host, or too many
            continue
        if target.devices % group == 0:
            yield target


def _gpus(text: str, chip: Chip, count: str, dashed: bool) -> Target:
    """The target of `count` GPUs: a part of a host, or whole hosts."""
    short = chip.names[0]
    host = chip.chips_per_host
    gpus = int(count) if re.fullmatch(r"[0-9]+", count) else 0
    counts = [*range(1, host), *range(host, MOST_CHIPS + 1, host)]
    if gpus not in counts or dashed:
        below = [n for n in counts if n <= gpus][-1:]
        above = [n for n in counts if n > gpus][:1]
        raise DeviceError(
            "gpu-count",
            "{target}: GPUs are counted after a colon, beyond {most} in whole hosts. Type "
            "{near:or}.",
            target=text,
            most=host,
            near=[f"{short}:{n}" for n in below + above * (gpus not in counts)],
        )
    name = short if gpus == 1 else f"{short}:{gpus}"
    return Target(name, chip, gpus, gpus, None, hosts=max(1, gpus // host))


def _slice(text: str, chip: Chip, size: str) -> Target:
    """The TPU slice that Google names by `size`."""
    short = chip.names[0]
    size = size.lstrip("0")
    core = ["1"] if short in _CORE_IS_A_DEVICE else []
    if size in core:
        return _one_core(short, chip)
    if size not in SLICES[short]:
        raise DeviceError(
            "slice-unknown",
            "{target}: {chip} is counted in {counted}, after a dash. Type {sizes:or}.",
            target=text,
            chip=short,
            counted="chips" if short in _COUNTS_CHIPS else "TensorCores",
            sizes=[f"{short}-{known}" for known in [*core, *SLICES[short]]],
        )
    shape = SLICES[short][size]
    chips = int(size) if short in _COUNTS_CHIPS else int(size) // 2
    host = _host(short, chips)
    options: list[tuple[str, str | tuple[int, ...]]] = []
    if host != (2, 2, 1):  # libtpu's default chips of a host
        options.append(("chips_per_host_bounds", host))
    if short == "v4":
        options.append(("chip_config_name", "megacore"))
    hosts = chips // (host[0] * host[1] * host[2])
    name = f"{short}-{size}"
    devices = chips * chip.jax_devices_per_chip
    return Target(name, chip, chips, devices, f"{short}:{shape}", tuple(options), hosts)


def _host(short: str, chips: int) -> tuple[int, int, int]:
    """The chips of one host, as libtpu arranges them: one, eight on the largest v5e and v6e
    machines, else four."""
    if chips == 1:
        return (1, 1, 1)
    return (2, 4, 1) if short in _COUNTS_CHIPS and chips == 8 else (2, 2, 1)


def _one_core(short: str, chip: Chip) -> Target:
    smallest, shape = next(iter(SLICES[short].items()))
    options = (("chips_per_host_bounds", (1, 1, 1)),) if shape == "1x1x1" else ()
    whole = f"{short}-{smallest}"
    return Target(
        f"{short}-1",
        chip,
        1,
        1,
        f"{short}:{shape}",
        options,
        rented_as=whole,
        note=fact("target-one-core", rented_as=whole),
    )
