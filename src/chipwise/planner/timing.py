"""Computes the time of a run from the time of a step, with assumptions about everything else."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ..chips.catalogue import Chip
from ..chips.targets import Target
from ..engine.blueprint import Memory
from ..errors import DeviceError
from ..hlo.kernel import Kernel
from ..recipe.recipe import Recipe
from ..words.facts import Fact
from .plans import Range
from .programs import StepPrograms, Traceable

CALL_SECONDS, ARGUMENT_SECONDS = 5e-6, 0.3e-6
"""Of the host's time to start a program on a device, and for each array it is given: measured with
`benchmarks/dispatch.py`."""

ALLOWANCE = 3.0
"""Up and down, of seconds that are an allowance and not measured."""

START_SECONDS = {
    kind: Range.around(seconds, ALLOWANCE) for kind, seconds in {"TPU": 10.0, "GPU": 5.0, "CPU": 2.0}.items()
}
"""Before the first compilation: imports, devices, data. The TPU's value is what the archived notebooks of
2019 show for a restart; the others are allowances. How far they go nobody measured."""

COMPILE_SECONDS = {"TPU": (2.0, 0.006), "GPU": (3.0, 0.002)}
"""For a step, and for each operation of its programs, on one core: allowances, read off a few compilations
here (processor seconds: digits 1, MNIST's 18 on a TPU v5e; ResNet-50 some 20 to 30 on an A100)."""

OTHER_HOST = 2.0
"""Up and down, of compilation seconds that were measured, but on this host and not on the target's."""


@dataclass(frozen=True)
class StepTime:
    """A step on one target, from its compiler or measured here; per device. `seconds` is `None` if there is a
    `problem`, or if it does not fit."""

    method: str
    flops: float
    wire_bytes: float
    memory: Memory | None
    dtypes: frozenset[str]  # dtypes that a replica computes in
    xla_seconds: float | None = field(default=None, kw_only=True)
    notes: tuple[Fact, ...]
    warnings: tuple[Fact, ...] = ()
    problem: Fact | None = None
    compile_seconds: Range | None = None  # measured, if the target is this host
    seconds: Range | None = None
    parts: dict[str, float] = field(default_factory=dict)
    bound: str | None = None
    kernels: tuple[Kernel, ...] = ()  # of a whole step

    def timed(
        self, parts: dict[str, float], factors: tuple[float, float], dispatch: float, busiest: str
    ) -> StepTime:
        """The step with the seconds of its `parts` on the device, with `factors` down and up, and of the
        host's `dispatch`.

        *Arguments:* `busiest`: the bound of the replica's program.
        """
        device = sum(parts.values())
        bound = "memory" if parts["update"] > parts["replica"] else busiest
        if parts["reduce"] > max(parts["replica"], parts["update"]):
            bound = "interconnect"
        return replace(
            self,
            seconds=at_least(Range(device, device * factors[0], device * factors[1]), dispatch),
            parts={**parts, "dispatch": dispatch},
            bound="launch" if dispatch > device else bound,
        )


DISPATCH_FACTOR = 2.0
"""Up and down, of what the host's side takes: measured on one machine, and hosts differ."""


def at_least(device: Range, host: float) -> Range:
    """The time of a step: `device`, but at least the `host` seconds, with their interval."""
    return Range(
        max(device.value, host),
        max(device.low, host / DISPATCH_FACTOR),
        max(device.high, host * DISPATCH_FACTOR) if host > device.low else device.high,
    )


def compilation(kind: str, operations: int, devices: int, cores: int | None, passes: int = 1) -> Range:
    """Assumed seconds to compile programs of so many operations on the host of a TPU or GPU.

    *Arguments:* `devices`: of the host; programs are compiled for each, in parallel on `cores`, by default
    enough of them; `passes`: of a product on a TPU, which may take that much longer.
    """
    base, each = COMPILE_SECONDS[kind]
    turns = 1 if cores is None else max(1, -(-devices // cores))
    known = Range.around(base + each * operations * turns, ALLOWANCE)
    return replace(known, high=passes * known.high)


def dispatch_seconds(programs: StepPrograms, hosts: int) -> float:
    """The host's time to start a step: each local device's replicas and update, and the reduction."""
    local = -(-programs.layout.devices // max(hosts, 1))

    def call(program: Traceable) -> float:
        return CALL_SECONDS + ARGUMENT_SECONDS * program.arguments

    reduce = CALL_SECONDS + ARGUMENT_SECONDS * local * programs.local_vectors
    _, *others = programs.programs
    return local * (programs.calls * call(programs.replica) + sum(map(call, others))) + reduce


# ---- sums over devices, for which compilers state no time

LINK_EFFICIENCY = {"NVLink": 0.78, "PCIe": 0.65, "ICI": 0.8}
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


def all_reduce_seconds(bytes_per_device: float, devices: int, chip: Chip, near: int | None = None) -> float:
    """Seconds to sum an array of `bytes_per_device`, one on each of `devices` JAX devices, in a ring.

    Each device sends and receives 2(D-1)/D of the array over half of the catalogue's two-way bandwidth. With
    several hosts there is a ring through each network card, as in NCCL: they are as fast as the slower of the
    links and all cards of a host together. `near`: how many of the devices are on one host, each with its
    share of the host's network, by default all of a host.

    Raises `DeviceError` if the chip's interconnect is not in the catalogue.
    """
    if devices <= 1:
        return 0.0
    near = chip.chips_per_host if near is None else near
    if chip.interconnect_GBps_both_ways is None:
        raise DeviceError("chip-without-interconnect", chip=chip.name)
    words = chip.interconnect_kind
    kind = "ICI" if chip.kind == "TPU" else "NVLink" if words.startswith("NVLink") else "PCIe"
    one_way = chip.interconnect_GBps_both_ways / 2 / chip.jax_devices_per_chip * LINK_EFFICIENCY[kind]
    hops = 2 * (devices - 1)
    seconds = hops * HOP_SECONDS[kind]
    if chip.kind == "GPU" and devices > near:
        card = NETWORK_GBps.get(words.split(" ")[0], ONE_CARD_GBps / chip.chips_per_host)
        one_way = min(one_way, card * near * LINK_EFFICIENCY[kind])
        seconds += 2 * (devices // near - 1) * NETWORK_HOP_SECONDS
    return seconds + 2 * (devices - 1) / devices * bytes_per_device / (one_way * 1e9)


# ---- the whole run


def evaluations(recipe: Recipe, every: str | None) -> int:
    """The number of evaluations of a run: after each of the durations `every`, and at the end.

    Raises `RecipeError` for a duration that cannot be understood."""
    total = recipe.clock.total or 0
    if recipe.task.eval is None:
        return 0
    if every is None or total == 0:
        return 1
    return min(total, math.ceil(total / recipe.clock.marks(every).length))


@dataclass(frozen=True)
class RunTime:
    """Seconds of a run: its `parts`, their `total`, and `overhead`, the time before the first step."""

    parts: dict[str, float]
    total: Range
    overhead: Range

    @property
    def ranked_by(self) -> str:
        """ "step" if the overhead, which is only assumed, may be longer than all steps; otherwise "run"."""
        return "run" if self.parts["train"] + self.parts["evaluate"] > self.overhead.high else "step"


def run_time(recipe: Recipe, target: Target, step: Range, compilation: Range, evaluations: int) -> RunTime:
    """The time of a run of `recipe` with so many `evaluations` whose steps take `step`.

    Evaluating an example takes a third of its training time: a forward pass without the backward pass, which
    costs twice as much.
    """
    train = step.times(recipe.clock.total or 0)
    held = len(recipe.task.eval) if recipe.task.eval is not None else 0
    evaluate = step.times(evaluations * held / recipe.batch / 3)
    start = START_SECONDS[target.chip.kind]
    overhead = start.plus(compilation)
    parts = {"start": start, "compile": compilation, "train": train, "evaluate": evaluate}
    return RunTime({k: v.value for k, v in parts.items()}, overhead.plus(train).plus(evaluate), overhead)
