"""Reads the TPU compiler's own account of a program: optimized HLO text in, cycles, bytes and traffic out.

The text is scheduled: a computation's operations run one after another in the order they stand. What each
costs the compiler wrote beside it, in `backend_config.window_config.estimated_cycles`. Studied in what
libtpu 0.0.42 makes for v2 to TPU7x:

- **Unit**: cycles of the TensorCore's clock, of one JAX device. A v4 or v5p chip is one device (two cores
  in megacore), and its cycles are the chip's: a product of 4096 x 4096 bfloat16 matrices comes to 88 % and
  96 % of the *chip's* peak. On v2, v3 and 7x a device, and so a cycle count, is half a chip.
- **Waiting for memory is included**, by a rule of thumb: work is cut into windows (`iteration_bounds`), and
  the cycles fit a transfer and a fixed start of some 3,000 cycles for each. x + 1 over 256 MB of float32
  comes to 71 to 94 % of the memory bandwidth, by chip; over bfloat16 to about half of that; the sum of
  256 MB, whose windows are small, to 17 to 42 %. A chip fetches the next window while it works on one, so
  these last may be too slow; `bytes_by_kind` tells what they move. The bandwidth alone would be too fast.
- **It is missing** for gathers, sorts, custom calls and what the SparseCore of a 7x does (there
  `2**63 - 1`). What is known of these is what they move. So an operation's time is taken as the longer of
  `cycles / clock` and `bytes / bandwidth`, bytes counted in the memory they are in, with its padding:
  `S(1)` in a layout is on the chip (VMEM), no mark is HBM.
- `copy-start` and `slice-start` fetch from HBM while other operations compute. They have no cycles. Their
  bytes count in `bytes_accessed`, and a program takes no less than all its bytes at the full bandwidth.
- **Loops** state their body once, and not how often it runs: the trip count is read off the condition's
  comparison, the counter's first value and its increment.
- A matrix product is a `convolution` too: without spatial dimensions in `dim_labels`, or with batch
  dimensions in their place (`size=8x12 stride=7x11 lhs_dilate=8x12`).

Collectives have no cycles: `wire_bytes` is what a device sends, in a ring.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from . import hlo_loops, hlo_text
from .hlo_loops import original
from .hlo_text import Computation, Instruction, Module, Shape

VERSION = 2
"""Of what `read` makes of a text: raised whenever it would make something else of the same one."""

KINDS = ("matmul", "convolution", "elementwise", "reduce", "copy", "collective", "other")

_SENTINEL = 2**62
_NOTICEABLE = 0.1  # of the products' work, lost to padding
_FREE = frozenset(
    [
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "add-dependency",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "domain",
        "get-dimension-size",
        "send-done",
        "recv-done",
    ]
)
_MOVES = frozenset(
    [
        "copy",
        "transpose",
        "reshape",
        "bitcast",
        "bitcast-convert",
        "slice",
        "dynamic-slice",
        "dynamic-update-slice",
        "pad",
        "concatenate",
        "reverse",
    ]
)
_OTHERS = frozenset(
    [
        "sort",
        "scatter",
        "gather",
        "rng",
        "rng-bit-generator",
        "fft",
        "cholesky",
        "triangular-solve",
        "send",
        "recv",
        "infeed",
        "outfeed",
    ]
)
_SLICES = frozenset(("slice", "dynamic-slice", "gather"))
_COLLECTIVES = {  # bytes a device sends in a ring of d, of the whole
    "all-reduce": lambda d: 2 * (d - 1) / d,
    "all-gather": lambda d: (d - 1) / d,
    "reduce-scatter": lambda d: (d - 1) / d,
    "all-to-all": lambda d: (d - 1) / d,
    "ragged-all-to-all": lambda d: (d - 1) / d,
    "collective-permute": lambda d: 1.0,
    "collective-broadcast": lambda d: 1.0,
}
_QUIET_CALLS = frozenset(
    [
        "AssumeGatherIndicesInBound",
        "AllocateBuffer",
        "PrepareAsyncCallStart",
        "PrepareAsyncCallDone",
        "Sharding",
        "SPMDFullToShardShape",
        "SPMDShardToFullShape",
        "ConcatBitcast",
        "GatherScatterIndicesBitpacked",
    ]
)


@dataclass
class Reading:
    """What one execution of a program costs a device. Loops are multiplied out.

    `cycles` is `None` where the compiler named none. `bytes_accessed` is HBM traffic, `wire_bytes` what goes
    to other devices, `product_flops` 2 for each multiply and add of matrix products and convolutions.
    `once_flops` are the same without the loops' trips. `seconds` is `None` without a clock, and leaves
    `wire_bytes` out.
    """

    cycles: float | None = None
    cycles_by_kind: dict[str, float] = field(default_factory=dict)
    bytes_accessed: float = 0.0
    bytes_by_kind: dict[str, float] = field(default_factory=dict)
    wire_bytes: float = 0.0
    product_flops: float = 0.0
    once_flops: float = 0.0
    seconds: float | None = None
    seconds_by_kind: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class _Sums:
    """Running totals of a computation: `seconds` are on the given clock, or cycles without one."""

    cycles: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    nbytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    wire: float = 0.0
    flops: float = 0.0
    once: float = 0.0
    padded: float = 0.0  # flops of the products with their padding

    def add(self, other: _Sums, times: float = 1.0) -> None:
        for mine, theirs in (
            (self.cycles, other.cycles),
            (self.nbytes, other.nbytes),
            (self.seconds, other.seconds),
        ):
            for kind, value in theirs.items():
                mine[kind] += times * value
        self.wire += times * other.wire
        self.flops += times * other.flops
        self.padded += times * other.padded
        self.once += other.once

    @property
    def time(self) -> float:
        return sum(self.seconds.values())


def read(text: str, clock_GHz: float | None = None, memory_GBps: float | None = None) -> Reading:
    """The cost of the program in `text`, as `compiled.as_text()` gives it.

    *Arguments:* `clock_GHz` of the device's core, and `memory_GBps`, the HBM bandwidth of one *device* (half
    the chip's on v2, v3 and 7x), 1e9 bytes/s; without a clock there are no `seconds`.

    Raises `ValueError` if the text has no entry computation.
    """
    reader = _Reader(hlo_text.parse(text), clock_GHz, memory_GBps)
    sums = reader.computation(reader.module.entry)
    result = Reading(
        cycles=float(sum(sums.cycles.values())) if sums.cycles else None,
        cycles_by_kind=dict(sums.cycles),
        bytes_accessed=float(sum(sums.nbytes.values())),
        bytes_by_kind=dict(sums.nbytes),
        wire_bytes=sums.wire,
        product_flops=sums.flops,
        once_flops=sums.once,
    )
    if clock_GHz is not None:
        result.seconds, result.seconds_by_kind = sums.time, dict(sums.seconds)
        if memory_GBps is not None and result.bytes_accessed / memory_GBps / 1e9 > sums.time:
            waiting = result.bytes_accessed / memory_GBps / 1e9 - sums.time
            result.seconds = sums.time + waiting
            result.seconds_by_kind["copy"] = result.seconds_by_kind.get("copy", 0.0) + waiting
    if sums.flops and 1 - sums.flops / sums.padded >= _NOTICEABLE:
        share = 1 - sums.flops / sums.padded
        shape = max(reader.losses, key=lambda name: reader.losses[name])
        reader.note(
            f"{share:.0%} of the products' work is padding to tiles of 8 x 128, most of it in {shape}"
        )
    result.notes = list(reader.notes)
    return result


class _Reader:
    def __init__(self, module: Module, clock_GHz: float | None, memory_GBps: float | None):
        self.module, self.clock, self.bandwidth = module, clock_GHz, memory_GBps
        self.notes: dict[str, None] = {}  # in order, each once
        self.losses: dict[str, float] = defaultdict(float)
        self.kinds: dict[str, str] = {}
        self.costs: dict[str, _Sums] = {}

    def note(self, text: str) -> None:
        self.notes[text] = None

    def computation(self, name: str) -> _Sums:
        if name not in self.costs:
            sums = _Sums()
            inside = self.module.computations[name]
            for op in inside.instructions.values():
                sums.add(self.operation(op, inside))
            self.costs[name] = sums
        return self.costs[name]

    def operation(self, op: Instruction, inside: Computation) -> _Sums:
        sums, code = _Sums(), op.opcode
        if code in _FREE or code.endswith(("-done", "-update")):
            return sums
        if code == "while":
            return self.loop(op, inside)
        if code == "conditional":
            branches = [self.computation(name) for name in op.called("branch_computations")] or [
                self.computation(name)
                for key in ("true_computation", "false_computation")
                for name in op.called(key)
            ]
            if branches:
                sums.add(max(branches, key=lambda b: (b.time, sum(b.nbytes.values()))))
            return sums
        started = code.removesuffix("-start")
        if started in ("call", "async"):
            for name in op.called("to_apply") + op.called("calls"):
                sums.add(self.computation(name))
            return sums
        self.look(op)
        for part in self.parts(op):
            self.product_or_collective(part, sums)
        kind = self.kind(op)
        moved = self.moved(op, inside)
        sums.nbytes[kind] += moved
        if code.endswith("-start"):
            return sums  # beside other operations; collectives have their wire bytes
        cycles = op.estimated_cycles
        if cycles is not None and cycles < _SENTINEL:
            sums.cycles[kind] += cycles
        else:
            cycles = 0.0
        clock, bandwidth = self.clock or 1.0, self.bandwidth or math.inf
        time = max(cycles / clock, moved / bandwidth) / 1e9
        if time:
            sums.seconds[kind] += time
        return sums

    def loop(self, op: Instruction, inside: Computation) -> _Sums:
        (body,), (condition,) = op.called("body"), op.called("condition")
        trips = hlo_loops.trips(self.module, op, inside)
        if trips is None:
            self.note(f"a loop whose trip count depends on data ({op.source or op.name}): counted once")
            trips = 1
        sums = _Sums()
        sums.add(self.computation(body), trips)
        sums.add(self.computation(condition), trips + 1)
        return sums

    # ---- what an operation is

    def parts(self, op: Instruction) -> Iterator[Instruction]:
        """The operation, or those fused into it, of any depth."""
        if op.opcode.removesuffix("-start") != "fusion":
            yield op
            return
        for name in op.called("calls"):
            for part in self.module.computations[name].instructions.values():
                yield from self.parts(part)

    def kind(self, op: Instruction) -> str:
        if op.opcode in ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start"):
            return "copy"
        parts = list(self.parts(op))
        codes = {p.opcode.removesuffix("-start") for p in parts}
        if codes & _COLLECTIVES.keys():
            return "collective"
        products = [p for p in parts if p.opcode in ("convolution", "dot")]
        if products:
            return "matmul" if all(_is_matmul(p) for p in products) else "convolution"
        if codes & _OTHERS or any(p.opcode == "custom-call" and p.target not in _QUIET_CALLS for p in parts):
            return "other"
        if codes & {"reduce", "reduce-window", "select-and-scatter"}:
            return "reduce"
        working = codes - _FREE - {"broadcast", "iota", "custom-call", "fusion"}
        return "copy" if working and working <= _MOVES else "elementwise"

    def look(self, op: Instruction) -> None:
        """Notes what costs time that nobody counted."""
        for part in self.parts(op):
            code = part.opcode
            if code in ("send", "recv") and "is_host_transfer=true" in part.attributes:
                self.note(f"talks to the host in the middle of the program ({part.source or part.name})")
            elif code in ("infeed", "outfeed"):
                self.note(f"{code} ({part.source or part.name}): waits for the host")
            elif code == "custom-call" and part.target not in _QUIET_CALLS:
                if part.estimated_cycles is None:
                    self.note(
                        f"custom call {part.target}: its time is unknown, counted by the bytes it moves"
                    )
            elif code == "sort":
                self.note(f"a sort of {part.shapes[0]}: its time is unknown, counted by the bytes it moves")
            if "<=" in part.type and any(s.dynamic for s in part.shapes):
                self.note(f"a dynamic shape, {part.type.split('{')[0]}: counted at its largest")

    # ---- products and collectives

    def product_or_collective(self, op: Instruction, sums: _Sums) -> None:
        code = op.opcode.removesuffix("-start")
        if code == "convolution":
            flops = _convolution_flops(op)
            ratio = min((s.elements / s.padded_elements for s in self.tiled(op) if s.elements), default=1.0)
            sums.flops += flops
            sums.once += flops
            sums.padded += flops / ratio
            self.losses[str(op.shapes[0])] += flops / ratio - flops
        elif code in _COLLECTIVES:
            devices = _group_size(op, self.module)
            whole = sum(s.nbytes for s in op.operand_shapes) or sum(s.nbytes for s in op.shapes)
            if code == "all-gather":
                whole *= devices
            sums.wire += _COLLECTIVES[code](devices) * whole

    def tiled(self, op: Instruction) -> list[Shape]:
        """The two largest of a product's result and operands: the third is weights, or their gradient."""
        found = [s for s in (*op.shapes, *op.operand_shapes) if s.tile]
        return sorted(found, key=lambda s: s.elements)[-2:]

    # ---- bytes

    def moved(self, op: Instruction, inside: Computation) -> float:
        """Bytes read from and written to HBM."""
        code = op.opcode.removesuffix("-start")
        if code in _COLLECTIVES:
            return float(sum(s.hbm_bytes for s in op.operand_shapes) * 2)
        if op.opcode == "copy-start":
            return float(sum(s.hbm_bytes for s in op.shapes[:2]))
        if op.opcode in ("slice-start", "dynamic-slice-start"):
            moved = [s for s in op.shapes if not s.scalar]
            small = min((s.padded_bytes for s in moved), default=0)
            return float(small * sum(1 for s in moved[-2:] if s.memory == 0))
        if code == "dynamic-update-slice":
            return float(2 * op.operand_shapes[1].hbm_bytes)
        if code == "scatter":
            return float(3 * op.operand_shapes[-1].hbm_bytes)
        if code in _SLICES:
            return float(sum(s.hbm_bytes for s in op.shapes) * 2)
        if code != "fusion":
            return float(sum(s.hbm_bytes for s in (*op.operand_shapes, *op.shapes)))
        fused = self.module.computations[op.called("calls")[0]]
        total = float(self.written(op, fused))
        for number, shape in enumerate(op.operand_shapes):
            if shape.memory == 0:
                total += min(shape.padded_bytes, self.taken(fused, number))
        return total

    def taken(self, fused: Computation, number: int) -> float:
        """Bytes of parameter `number` that the fusion reads: a slice of it, all of it, or nothing if it only
        writes into it. Infinite where it hands it on as it is."""
        names = [op.name for op in fused.instructions.values() if op.parameter == number]
        total = 0.0
        while names:
            name = names.pop()
            if name == fused.root_name:
                return math.inf
            for user in fused.users(name):
                at = [i for i, operand in enumerate(user.operands) if operand == name]
                if user.opcode in ("bitcast", "copy", "get-tuple-element"):
                    names.append(user.name)
                elif user.opcode in _SLICES and at == [0]:
                    total += sum(s.padded_bytes for s in user.shapes)
                elif user.opcode in ("dynamic-update-slice", "scatter") and at == [0]:
                    continue
                elif user.opcode == "fusion":
                    inner = self.module.computations[user.called("calls")[0]]
                    within = sum(self.taken(inner, i) for i in at)
                    if math.isinf(within):
                        names.append(user.name)
                    else:
                        total += within
                else:
                    return math.inf
        return total

    def written(self, op: Instruction, fused: Computation) -> float:
        root = fused.root
        outputs = [fused.instructions[n] for n in root.operands] if root.opcode == "tuple" else [root]
        total = 0.0
        for output, shape in zip(outputs, op.shapes, strict=False):
            found = original(output, fused)
            if shape.memory != 0:
                continue
            if found is not None and found.opcode == "fusion":
                inner = self.module.computations[found.called("calls")[0]]
                found = original(inner.root, inner)
            if found is not None and found.opcode == "dynamic-update-slice":
                total += min(shape.padded_bytes, found.operand_shapes[1].padded_bytes)
            elif found is not None and found.opcode == "scatter":
                total += min(shape.padded_bytes, 2 * found.operand_shapes[-1].padded_bytes)
            else:
                total += shape.padded_bytes
        return total


def _window(op: Instruction) -> dict[str, str]:
    found = re.search(r"window=\{([^}]*)\}", op.attributes)
    return dict(part.split("=", 1) for part in found[1].split()) if found else {}


def _is_matmul(op: Instruction) -> bool:
    """Whether a product has no window to slide. JAX's own name for it decides, where it was kept."""
    if op.opcode == "dot":
        return True
    made = re.search(r'op_name="([^"]*)"', op.attributes)
    last = made[1].rsplit("/", 1)[-1] if made else ""
    if "dot_general" in last:
        return True
    if "conv_general_dilated" in last:
        return False
    labels = re.search(r"dim_labels=(\w+)_", op.attributes)
    if labels is None or not any(c.isdigit() for c in labels[1]):
        return True
    window = _window(op)
    if "size" not in window:
        return False
    sizes, strides, dilations = (
        [int(n) for n in window.get(key, "").split("x") if n] for key in ("size", "stride", "lhs_dilate")
    )
    return bool(dilations) and all(
        size == dilation and stride == max(size - 1, 1)
        for size, stride, dilation in zip(sizes, strides, dilations, strict=False)
    )


def _convolution_flops(op: Instruction) -> float:
    """2 for each multiply and add; window positions outside the input, or between its spread elements, are
    not work."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.attributes)
    if labels is None or len(op.operand_shapes) < 2:
        return 0.0
    left, right, out = (labels[i] for i in (1, 2, 3))
    lhs, rhs, result = op.operand_shapes[0].dims, op.operand_shapes[1].dims, op.shapes[0].dims
    products = float(result[out.index("b")] * result[out.index("f")] * rhs[right.index("i")])
    window = _window(op)

    def per_dimension(key: str, default: str) -> list[str]:
        spatial = sum(c.isdigit() for c in out)
        return window[key].split("x") if key in window else [default] * spatial

    if any(c.isdigit() for c in out):
        pads, strides = per_dimension("pad", "0_0"), per_dimension("stride", "1")
        spread, apart = per_dimension("lhs_dilate", "1"), per_dimension("rhs_dilate", "1")
        for i in range(sum(c.isdigit() for c in out)):
            products *= _positions(
                lhs[left.index(str(i))],
                rhs[right.index(str(i))],
                result[out.index(str(i))],
                int(strides[i]),
                int(pads[i].split("_")[0]),
                int(spread[i]),
                int(apart[i]),
            )
    return 2 * products


def _positions(size: int, window: int, out: int, stride: int, pad: int, spread: int, apart: int) -> int:
    """How many of the `out * window` pairs along a dimension meet an element of the input."""
    at = np.arange(out)[:, None] * stride + np.arange(window)[None] * apart - pad
    return int(((at >= 0) & (at <= (size - 1) * spread) & (at % spread == 0)).sum())


def _group_size(op: Instruction, module: Module) -> int:
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", op.attributes)
    if listed:
        return len(listed[1].split(","))
    tiled = re.search(r"replica_groups=\[\d+,(\d+)\]", op.attributes)
    return int(tiled[1]) if tiled else module.devices
