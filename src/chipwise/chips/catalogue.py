"""Reads `chips.csv`, and finds the chip of a device or a name, with its figures.

**Scope.** Every figure is per chip, or per GPU (a K80 board is two GPUs). A JAX device is a whole
chip except on TPU v2, v3 and 7x, where it is half a chip. `jax_devices_per_chip` says so, and
`peak_flops_per_device` divides by it.

**Units** are in the column names. TFLOP/s are 1e12. GB and GB/s are 1e9 *bytes*. Interconnect is
the total of both directions. Peaks are dense: the headline figures of newer GPUs, twice as large,
are for 2:4 sparse weights.

**Where sources disagree**, the vendor's current documentation wins over tables in other programs.
The column `notes` has the figures of those tables. `verified` says how a row was checked, `source`
where it was read.

- GeForce cards have the tensor-core figure with float32 accumulation, which training uses.
- No peak is published for float32 on TPUs, so there is none here.
- TPU clocks agree with the peak: cores x matrix units x products a cycle x 2 x clock. TPU v6e and
  7x then need four units of 256 x 256 a core, where Google's page of v6e counts two. Their compiler
  agrees: libtpu 0.0.42 states 1.42 and 1.24 times the cycles of four for a product of side 8192.
  Two would take more.
- `cuda_MiB` is less than `memory_GB` where error correction takes some of it (K80, T4, A10, A10G,
  A40, L40S).

An empty cell is unknown. A new GPU needs a new row. A TPU also needs its slices in `slices.csv`. A
new kind of figure needs a new column and a field of the same name.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files

from ..base import RecipeError


@dataclass(frozen=True)
class Chip:
    """One row of `chips.csv`. `None` is unknown or not applicable. Units are in the names."""

    name: str
    names: tuple[str, ...]  # names to type, the shortest first
    vendor: str
    kind: str  # GPU, TPU or CPU
    year: int | None
    scope: str  # the unit of a row: chip, GPU or host
    bf16_dense_tflops: float | None
    fp16_dense_tflops: float | None
    fp32_tflops: float | None  # without tensor cores
    tf32_dense_tflops: float | None
    int8_dense_tops: float | None
    memory_GB: float | None
    cuda_MiB: float | None  # what CUDA reports of it
    memory_GBps: float | None
    jax_devices_per_chip: int
    chips_per_host: int  # at most, in one machine that clouds offer
    tensorcores: int | None  # of a TPU chip: 1, or 2
    streaming_multiprocessors: int | None  # of a GPU
    # TPU: the clock of a TensorCore that its compiler's cycles count. GPU: the boost clock
    clock_GHz: float | None
    compute_capability: str  # of an NVIDIA GPU, "8.0"
    l2_MiB: float | None  # of a GPU
    interconnect_GBps_both_ways: float | None
    interconnect_kind: str
    device_kinds: tuple[str, ...]  # JAX's `Device.device_kind`
    verified: str
    notes: str
    source: str


def cell(type_name: str, text: str):
    """A CSV file's cell as a value of a field's type. A semicolon separates the parts of a tuple.
    An empty number is `None`."""
    if type_name.startswith("tuple"):
        return tuple(map(float if "float" in type_name else str, filter(None, text.split(";"))))
    if type_name == "str":
        return text
    if not text:
        return None
    return int(text) if type_name.startswith("int") else float(text)


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file of this folder, by column."""
    return list(csv.DictReader(files(__package__).joinpath(name).read_text("utf-8").splitlines()))


def _read() -> tuple[Chip, ...]:
    types = {f.name: str(f.type) for f in fields(Chip)}
    return tuple(
        Chip(**{name: cell(types[name], value) for name, value in row.items()})
        for row in rows("chips.csv")
    )


CHIPS: tuple[Chip, ...] = _read()
"""Every chip of the catalogue, in the file's order."""

# Words that name the same silicon's memory and may follow a known kind without changing a figure.
_HARMLESS = re.compile(r"\d+gb|hbm\w*|gddr\w*", re.IGNORECASE)


def _normal(device_kind: str) -> str:
    """Lower case, single spaces, without the brand: drivers before 450 wrote `A100-...` and `Tesla
    T4`, later ones `NVIDIA A100-...`."""
    words = device_kind.lower().split()
    while len(words) > 1 and words[0] in ("nvidia", "tesla"):
        words = words[1:]
    return " ".join(words)


# Of the memory that a row states, what CUDA may report: error correction takes up to a tenth. The
# 10 GB of one card are five sixths of the 12 GB of its namesake.
REPORTED = 0.84, 1.05
# A chip without namesakes is not lost to a wrong share: if JAX started with 0.75 of the memory and
# the environment says 0.9 since, or the other way round, 0.75 to 1.2 of it seem to be there.
# Another size is at most two thirds or at least four thirds.
_REPORTED_OF_ONE = 0.72, 1.25


def _of_kind(device_kind: str, memory_bytes: float | None = None) -> tuple[Chip, ...]:
    """The chips of a device name, without those that have another memory. Several if the driver
    gives cards that differ in memory one name."""
    name = _normal(device_kind)
    known = {_normal(kind) for chip in CHIPS for kind in chip.device_kinds}
    for kind in sorted(known - {name}, key=len, reverse=True) if name not in known else ():
        words = name.removeprefix(kind + " ").split()
        if name.startswith(kind + " ") and all(map(_HARMLESS.fullmatch, words)):
            size = next((int(word[:-2]) * 2.0**30 for word in words if word.endswith("gb")), None)
            return _of_kind(kind, memory_bytes or size)
    found = [chip for chip in CHIPS if name in map(_normal, chip.device_kinds)]
    low, high = REPORTED if len(found) > 1 else _REPORTED_OF_ONE
    size = (memory_bytes or 0) / 2**30
    return tuple(
        c for c in found if not (size and c.memory_GB) or low <= size / c.memory_GB <= high
    )


@cache
def find(device_kind: str, memory_bytes: float | None = None) -> Chip | None:
    """The chip of JAX's `Device.device_kind`, or `None` if the catalogue does not have it.

    1. Exactly one of a row's `device_kinds`, leaving aside letter case and a leading `NVIDIA` or
       `Tesla`.
    2. Otherwise the longest such kind that the name begins with, if only memory words follow:
       `NVIDIA H200 141GB HBM3e` is an `NVIDIA H200`.

    Nothing looser: `A10` begins `A100`, `L4` begins `L40S`, `TPU v5` begins `TPU v5 lite`, a `4090
    Laptop GPU` is another chip and a `MIG 1g.5gb` is a seventh of one. Unknown is better than
    wrong.

    *Arguments:* `memory_bytes`: all memory of a GPU. Drivers give an RTX 3080 of 10 GB and one of
    12 GB the same name, so both are unknown without it. So is a card whose memory is far from that
    of every row.
    """
    found = _of_kind(device_kind, memory_bytes)
    return found[0] if len(found) == 1 else None


def spelled(text: str) -> str:
    """`text` in the spelling of `Chip.names`: lower case, dashes for spaces and underscores,
    without the maker's name: `Tesla T4` is `t4`, `TPU_v3` is `v3`."""
    word = re.sub(r"[\s_-]+", "-", text.strip().lower()).strip("-")
    word = re.sub(r"^(?:(?:nvidia|google|cloud|tesla|geforce)-)+", "", word)
    return re.sub(r"^tpu-?(?=v\d|7x)", "tpu" if re.match(r"tpu-?7x", word) else "", word)


def called(text: str) -> tuple[Chip, ...]:
    """The chips called `text`: one of their `names`, their `name`, or a `device_kind`. Several are
    cards that differ in memory and are sold under one name."""
    word = spelled(text).replace("-", "")  # h100sxm is h100-sxm
    exact = (
        chip
        for chip in CHIPS
        if word in (name.replace("-", "") for name in (*chip.names, spelled(chip.name)))
    )
    return tuple(exact) or _of_kind(text)


@cache
def named(text: str) -> Chip | None:
    """The chip called `text`, or `None` if there is none, or more than one.

    Here an `a100` is the 40 GB SXM one and a `v100` the 16 GB SXM one: what clouds mean by the bare
    name. An `rtx-3080` is none of its two: type `rtx-3080-10gb`.
    """
    found = called(text)
    return found[0] if len(found) == 1 else None


NAMES = tuple(name for chip in CHIPS for name in chip.names if named(name) is chip)
"""Every name that means one chip."""


def peak_flops_per_device(chip: Chip, precision: str) -> float | None:
    """Dense peak of one JAX device in FLOP/s for a recipe's precision, or `None` when unknown.

    - `"bf16"`, `"f16"`: the matrix peak in that type. GPUs before Ampere have none in bfloat16,
      TPUs none in float16.
    - `"tf32"`: the TF32 peak. GPUs without TF32 compute the products in float32, so it is their
      float32 peak. Unknown on TPUs.
    - `"f32"`: the GPU's float32 peak without tensor cores, which full float32 products use. Unknown
      on TPUs, where they run as several bfloat16 passes and no peak is published, and on CPUs.

    Raises `RecipeError` for any other precision.
    """
    peaks = {
        "bf16": chip.bf16_dense_tflops,
        "f16": chip.fp16_dense_tflops,
        "tf32": chip.tf32_dense_tflops or chip.fp32_tflops,
        "f32": chip.fp32_tflops,
    }
    if precision not in peaks:
        text = "precision={precision}: type {choices:or}."
        raise RecipeError("chip-precision-unknown", text, precision=precision, choices=tuple(peaks))
    tflops = peaks[precision]
    return None if tflops is None else tflops * 1e12 / chip.jax_devices_per_chip
