"""Adds up the costs of a compiled program's operations, and finds the kernels that run during a
collective.

A compiler's latency-hiding scheduler separates a collective's start from its end. The operations
that it puts between them run meanwhile, so the schedule shows what a collective overlaps with. This
was observed in programs of XLA's GPU compiler in jaxlib 0.10.2 and of libtpu 0.0.42:

- **GPUs** have `all-gather-start` and `all-gather-done`. Other collectives are in a computation
  that `async-start` calls. If the compiler has nothing to put between start and end, `is_sync` is
  true.
- **TPUs** have a fusion with the custom call `AsyncCollectiveStart`, a product's fusion that moves
  the collective on, and a fusion with `AsyncCollectiveDone`. Each of the three repeats the
  collective, under the same channel. The collective counts at the start.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ...base import Fact, fact
from .kernel import Kernel
from .operations import COLLECTIVES, FREE, QUIET_CALLS, estimated_cycles, parts, trips
from .proto import Computation, Instruction
from .splash import Splash

LARGE_SORT = 1 << 20
"""The bytes from which on sorting takes noticeably longer than reading and writing them."""

_NOTICEABLE = 0.05  # of the products


@dataclass
class ProgramCost:
    """The cost of one execution of a program, or of a part, on a device. Loops are multiplied
    out."""

    seconds: float = 0.0
    """Seconds on the given clock, without `wire_bytes`. They are 0 if the compiler states no
    time."""
    bytes: float = 0.0
    """HBM traffic."""
    wire_bytes: float = 0.0
    """Bytes sent to other devices."""
    product_flops: float = 0.0
    """FLOPs of matrix products and convolutions, 2 for each multiply-add."""
    padded_flops: float = 0.0
    """`product_flops` with the padding of the arrays."""
    kernels: list[Kernel] = field(default_factory=list)
    notes: list[Fact] = field(default_factory=list)

    def add(self, other: ProgramCost, times: float = 1.0) -> None:
        for name in ("seconds", "bytes", "wire_bytes", "product_flops", "padded_flops"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        self.kernels += other.kernels if times == 1 else [k.times(times) for k in other.kernels]


class Reader:
    """Adds up the costs of a compiled program's operations. A subclass defines the cost of one."""

    def __init__(self) -> None:
        self.notes: list[Fact] = []  # each once
        self.costs: dict[int, ProgramCost] = {}

    def finished(self, program: ProgramCost) -> ProgramCost:
        """Returns the whole program's cost with all notes. If memory is short, XLA's own
        rematerialisation computes results again, in kernels with ".remat" in their names. A note
        reports their share of the products' FLOPs."""
        again = sum(k.count * k.flops for k in program.kernels if ".remat" in k.name)
        if again > _NOTICEABLE * program.product_flops:
            self.note("program-remat", share=again / program.product_flops)
        program.notes = self.notes
        return program

    def note(self, code: str, **numbers: object) -> None:
        if (note := fact(code, **numbers)) not in self.notes:
            self.notes.append(note)

    def computation(self, inside: Computation) -> ProgramCost:
        if inside.id not in self.costs:
            sums = ProgramCost()
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
                    flying[flight] = (sent, [])
                    cost.kernels = others
                sums.add(cost)
            sums.kernels += [kernel for sent, _ in flying.values() for kernel in sent]
            self.costs[inside.id] = sums
        return self.costs[inside.id]

    def operation(self, op: Instruction, moves_on: bool = False) -> ProgramCost:
        """The cost of `op`. With `moves_on`, `op` contains a collective that already counted at its
        start, so it does not count again."""
        sums = ProgramCost()
        code = op.opcode
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

    def weight(self, branch: ProgramCost) -> tuple[float, ...]:
        """The weight that selects the costliest branch of a conditional."""
        return branch.seconds, branch.bytes, branch.product_flops

    def kernel(self, op: Instruction, sums: ProgramCost) -> None:
        """Adds the cost of `op` to `sums`."""
        raise NotImplementedError

    def loop(self, op: Instruction) -> ProgramCost:
        body, condition = op.called
        runs = trips(op)
        if runs is None:
            self.note("program-loop-on-data", source=op.source or op.name)
            runs = 1
        sums = ProgramCost()
        sums.add(self.computation(body), runs)
        sums.add(self.computation(condition), runs + 1)
        return sums

    def look(self, op: Instruction) -> None:
        """Adds notes for operations whose time is unknown."""
        for part in parts(op):
            code = part.opcode
            source = part.source or part.name
            if code in ("send", "recv") and part.proto.is_host_transfer:
                self.note("program-host-transfer", source=source)
            elif code in ("infeed", "outfeed"):
                self.note("program-host-queue", opcode=code, source=source)
            elif code == "custom-call" and not self.known_call(part):
                self.note("program-custom-call", target=part.target)
            elif code == "sort" and sum(shape.nbytes for shape in part.shapes) >= LARGE_SORT:
                self.note("program-sort", shape=str(part.shapes[0]))
            for shape in part.shapes:
                if shape.dynamic:
                    self.note("program-dynamic-shape", shape=str(shape))

    def known_call(self, op: Instruction) -> bool:
        """Whether the time of a custom call is known."""
        stated = op.target in QUIET_CALLS or estimated_cycles(op) is not None
        return stated or Splash.of(op) is not None

    def collective(self, op: Instruction, sums: ProgramCost) -> None:
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


def described(op: Instruction, kind: str, **more: Any) -> Kernel:
    """A kernel with its source in the program, and the type of its largest array."""
    largest = max((*op.shapes, *op.operand_shapes), key=lambda s: s.nbytes, default=None)
    dtype = "" if largest is None else largest.dtype
    return Kernel(op.name, kind, dtype=dtype, source=op.source, line=op.line, **more)


# ---- collectives on their way

Flight = tuple[str, int]
"""The identity of a collective on its way: the instruction that starts it, or its channel."""

_START = "AsyncCollectiveStart"
_DONE = "AsyncCollectiveDone"


def started(op: Instruction) -> Flight | None:
    """The collective that `op` starts without waiting for it, or `None`."""
    if op.opcode.endswith("-start"):
        waits = op.config.get("collective_backend_config", {}).get("is_sync", False)
        return None if waits else ("instruction", op.id)
    return _in_fusion(op, _START)


def awaited(op: Instruction) -> Flight | None:
    """The collective that `op` waits for, or `None`."""
    if op.opcode.endswith("-done"):
        start = op.operands[0]
        while start.opcode.endswith("-update"):
            start = start.operands[0]
        return "instruction", start.id
    return _in_fusion(op, _DONE)


def moved_on(op: Instruction) -> Flight | None:
    """The collective that the fusion `op` may move on, or `None`."""
    channel = _channel(op) if op.opcode == "fusion" else 0
    return ("channel", channel) if channel else None


def _in_fusion(op: Instruction, target: str) -> Flight | None:
    marked = op.opcode == "fusion" and any(part.target == target for part in parts(op))
    return ("channel", _channel(op)) if marked else None


def _channel(op: Instruction) -> int:
    return next((part.channel for part in parts(op) if part.opcode in COLLECTIVES), 0)
