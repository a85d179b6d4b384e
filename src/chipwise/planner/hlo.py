"""Reads cycles, bytes and traffic of a program from the HLO module that the TPU compiler returns.

A computation's operations run one after another. The compiler states the cost of each in
`backend_config.window_config.estimated_cycles`. Observed in programs of libtpu 0.0.42 for v2 to TPU7x:

- **Unit**: cycles of the TensorCore's clock, of one JAX device. A v4 or v5p chip is one device (two cores
  in megacore), and its cycles are the chip's: a product of 4096 x 4096 bfloat16 matrices comes to 88 % and
  96 % of the *chip's* peak. On v2, v3 and 7x a device, and so a cycle count, is half a chip.
- **Waiting for memory is included**, as a rule of thumb: work is cut into windows (`iteration_bounds`), and
  the cycles match a transfer plus a fixed start of some 3,000 cycles for each. x + 1 over 256 MB of float32
  reaches 71 to 94 % of the memory bandwidth, depending on the chip; over bfloat16 about half of that; the sum
  of 256 MB, whose windows are small, 17 to 42 %. A chip prefetches the next window, so the last figures may
  be too slow; `bytes_by_kind` has their bytes. The bandwidth alone would be too fast.
- **Cycles are missing** for gathers, sorts, custom calls and work of a 7x's SparseCore (there `2**63 - 1`);
  only their bytes are known. So an operation's time is the longer of `cycles / clock` and `bytes /
  bandwidth`. Bytes are padded, and count for the memory they are in: memory space 1 of a layout is on the
  chip (VMEM), 0 is HBM.
- `copy-start` and `slice-start` fetch from HBM while other operations compute. They have no cycles. Their
  bytes count in `bytes_accessed`, and a program takes at least the time of all its bytes at full bandwidth.
- **Loops** have the cost of one iteration: the trip count follows from the condition's comparison, the
  counter's initial value and its increment.
- A matrix product is a `convolution` too: without spatial dimensions, or with batch dimensions in their
  place (a window of 8 x 12, stride 7 x 11, base dilation 8 x 12).

Collectives have no cycles: `wire_bytes` is what a device sends, in a ring, and each is a kernel of so many
bytes with the names of the kernels that run beside it (`hlo_async`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from ..words.facts import Fact, fact
from .hlo_async import Flight, awaited, moved_on, started
from .hlo_bytes import moved
from .hlo_operations import (
    COLLECTIVES,
    FREE,
    QUIET_CALLS,
    convolution_flops,
    estimated_cycles,
    kind_of,
    parts,
    tiled,
    trips,
    turned,
)
from .hlo_proto import Computation, Instruction, parse
from .kernels import Kernel
from .splash import Splash

VERSION = 10
"""Of what `read` makes of a program: raised whenever it would make something else of the same one."""

_NOTICEABLE = 0.1  # share of the products' work that is padding


@dataclass
class Reading:
    """The cost of one execution of a program, or of a part, on a device. Loops are multiplied out.

    Bytes are HBM traffic; `wire_bytes` goes to other devices. `product_flops` are 2 for each multiply and add
    of matrix products and convolutions, `padded_flops` the same with their padding. Seconds are on the given
    clock, and leave `wire_bytes` out.
    """

    cycles_by_kind: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    bytes_by_kind: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    seconds_by_kind: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    wire_bytes: float = 0.0
    product_flops: float = 0.0
    padded_flops: float = 0.0
    kernels: list[Kernel] = field(default_factory=list)
    notes: list[Fact] = field(default_factory=list)

    def add(self, other: Reading, times: float = 1.0) -> None:
        for mine, theirs in (
            (self.cycles_by_kind, other.cycles_by_kind),
            (self.bytes_by_kind, other.bytes_by_kind),
            (self.seconds_by_kind, other.seconds_by_kind),
        ):
            for kind, value in theirs.items():
                mine[kind] += times * value
        self.wire_bytes += times * other.wire_bytes
        self.product_flops += times * other.product_flops
        self.padded_flops += times * other.padded_flops
        self.kernels += other.kernels if times == 1 else [k.times(times) for k in other.kernels]

    @property
    def cycles(self) -> float | None:
        """The compiler's cycles; `None` if it states none."""
        return sum(self.cycles_by_kind.values()) if self.cycles_by_kind else None

    @property
    def bytes_accessed(self) -> float:
        return sum(self.bytes_by_kind.values())

    @property
    def seconds(self) -> float:
        return sum(self.seconds_by_kind.values())


def read(
    program: bytes, clock_GHz: float = 1.0, memory_GBps: float = math.inf, chip: str | None = None
) -> Reading:
    """The cost of a compiled program, given as `hlo_proto.program_bytes` takes it from the executable.

    *Arguments:* `clock_GHz` of the device's core, and `memory_GBps`, the HBM bandwidth of one *device* (half
    the chip's on v2, v3 and 7x), 1e9 bytes/s; `chip`, its name in the catalogue, for `splash`.

    Raises `ValueError` if the bytes are not a program.
    """
    entry, reader = parse(program).entry, _TpuReader(clock_GHz, memory_GBps, chip)
    reading = Reading()
    reading.add(reader.computation(entry))
    waiting = reading.bytes_accessed / memory_GBps / 1e9 - reading.seconds
    if waiting > 0:
        reading.seconds_by_kind["copy"] += waiting
        reading.kernels.append(Kernel("prefetch", "copy", seconds=waiting, bound="memory"))
    flops, padded = reading.product_flops, reading.padded_flops
    if flops and (share := 1 - flops / padded) >= _NOTICEABLE:
        shape = max(reader.losses, key=lambda name: reader.losses[name])
        reader.note("program-padding", share=share, shape=shape)
    reading.notes = reader.notes
    return reading


class Reader:
    """Adds up the costs of a compiled program's operations; a subclass defines the cost of one."""

    def __init__(self) -> None:
        self.notes: list[Fact] = []  # each once
        self.costs: dict[int, Reading] = {}

    def note(self, code: str, **numbers: object) -> None:
        if (note := fact(code, **numbers)) not in self.notes:
            self.notes.append(note)

    def computation(self, inside: Computation) -> Reading:
        if inside.id not in self.costs:
            sums = Reading()
            flying: dict[Flight | None, tuple[list[Kernel], list[str]]] = {}
            for op in inside.instructions.values():
                cost = self.operation(op, bool(flying) and moved_on(op) in flying)
                landed, names = flying.pop(awaited(op), ([], [])) if flying else ([], [])
                sums.kernels += [replace(kernel, beside=tuple(names)) for kernel in landed]
                sent = [kernel for kernel in cost.kernels if kernel.kind == "collective"]
                others = [kernel for kernel in cost.kernels if kernel.kind != "collective"]
                for _, names in flying.values():
                    names += [kernel.name for kernel in others]
                if sent and (flight := started(op)) is not None:
                    flying[flight], cost.kernels = (sent, []), others
                sums.add(cost)
            sums.kernels += [kernel for sent, _ in flying.values() for kernel in sent]
            self.costs[inside.id] = sums
        return self.costs[inside.id]

    def operation(self, op: Instruction, moves_on: bool = False) -> Reading:
        """The cost of `op`; `moves_on`: of a collective that is in it too, the start counted."""
        sums, code = Reading(), op.opcode
        if code in FREE or code.endswith(("-done", "-update")):
            return sums
        if code == "while":
            return self.loop(op)
        if code == "conditional":
            return max(map(self.computation, op.called), key=self.weight)
        if code.removesuffix("-start") in ("call", "async"):
            for inside in op.called:
                sums.add(self.computation(inside))
            return sums
        self.look(op)
        fused = list(parts(op))
        for part in () if moves_on else fused:
            self.collective(part, sums)
        if not sums.kernels or any(part.opcode in ("convolution", "dot") for part in fused):
            self.kernel(op, sums)
        return sums

    def weight(self, branch: Reading) -> tuple[float, ...]:
        """The weight that selects the costliest branch of a conditional."""
        return branch.seconds, branch.bytes_accessed, branch.product_flops

    def kernel(self, op: Instruction, sums: Reading) -> None:
        """Adds the cost of `op`."""
        raise NotImplementedError

    def loop(self, op: Instruction) -> Reading:
        body, condition = op.called
        runs = trips(op)
        if runs is None:
            self.note("program-loop-on-data", source=op.source or op.name)
            runs = 1
        sums = Reading()
        sums.add(self.computation(body), runs)
        sums.add(self.computation(condition), runs + 1)
        return sums

    def look(self, op: Instruction) -> None:
        """Records operations whose time is unknown."""
        for part in parts(op):
            code, source = part.opcode, part.source or part.name
            if code in ("send", "recv") and part.host_transfer:
                self.note("program-host-transfer", source=source)
            elif code in ("infeed", "outfeed"):
                self.note("program-host-queue", opcode=code, source=source)
            elif code == "custom-call" and not self.known_call(part):
                self.note("program-custom-call", target=part.target)
            elif code == "sort":
                self.note("program-sort", shape=str(part.shapes[0]))
            for shape in part.shapes:
                if shape.dynamic:
                    self.note("program-dynamic-shape", shape=str(shape))

    def known_call(self, op: Instruction) -> bool:
        """Whether the time of a custom call is known."""
        stated = op.target in QUIET_CALLS or estimated_cycles(op) is not None
        return stated or Splash.of(op) is not None

    def collective(self, op: Instruction, sums: Reading) -> None:
        code = op.opcode.removesuffix("-start")
        if code in COLLECTIVES:
            devices = op.group_size
            whole = sum(s.nbytes for s in op.operand_shapes) or sum(s.nbytes for s in op.shapes)
            if code == "all-gather":
                whole *= devices
            sent = COLLECTIVES[code](devices) * whole
            sums.wire_bytes += sent
            named = described(op, "collective", bytes=sent, bound="interconnect")
            sums.kernels.append(replace(named, name=code))


class _TpuReader(Reader):
    def __init__(self, clock_GHz: float, memory_GBps: float, chip: str | None):
        super().__init__()
        self.clock, self.bandwidth, self.chip = clock_GHz, memory_GBps, chip
        self.losses: dict[str, float] = defaultdict(float)

    def kernel(self, op: Instruction, sums: Reading) -> None:
        for part in parts(op):
            self.product(part, sums)
        kind, bytes_moved = kind_of(op), moved(op)
        sums.bytes_by_kind[kind] += bytes_moved
        if op.opcode.endswith("-start"):
            return  # overlapped with other operations; collectives have wire bytes
        cycles = estimated_cycles(op)
        if cycles is None and (splash := Splash.of(op)):
            kind, cycles = "attention", splash.cycles(self.chip) if self.chip else None
            sums.product_flops = sums.padded_flops = splash.flops
        if cycles is not None:
            sums.cycles_by_kind[kind] += cycles
        computing, moving = (cycles or 0.0) / self.clock, bytes_moved / self.bandwidth
        time = max(computing, moving) / 1e9
        if time:
            sums.seconds_by_kind[kind] += time
            product = kind in ("matmul", "convolution", "attention") and computing >= moving
            bound = "compute" if product or turned(op) else "memory"
            as_kind = (
                "copy" if kind == "elementwise" and turned(op) else kind
            )  # the transposition takes the time
            kernel = described(op, as_kind, seconds=time, bound=bound)
            sums.kernels.append(replace(kernel, bytes=bytes_moved, flops=sums.product_flops))

    def product(self, op: Instruction, sums: Reading) -> None:
        if op.opcode.removesuffix("-start") == "convolution":
            flops = convolution_flops(op)
            ratio = min((s.elements / s.padded_elements for s in tiled(op) if s.elements), default=1.0)
            sums.product_flops += flops
            sums.padded_flops += flops / ratio
            self.losses[str(op.shapes[0])] += flops / ratio - flops


def described(op: Instruction, kind: str, **more: Any) -> Kernel:
    """A kernel with its source in the program, and the type of its largest array."""
    largest = max((*op.shapes, *op.operand_shapes), key=lambda s: s.nbytes, default=None)
    dtype = "" if largest is None else largest.dtype
    return Kernel(op.name, kind, dtype=dtype, source=op.source, line=op.line, **more)
