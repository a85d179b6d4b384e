"""Reads cycles, bytes and traffic of a program from the HLO module that the TPU compiler returns.

A computation's operations run one after another. The compiler states the cost of each in
`backend_config.window_config.estimated_cycles`. Programs of libtpu 0.0.42 for v2 to TPU7x show:

- **Unit**: cycles of the TensorCore's clock, of one JAX device. A v4 or v5p chip is one device (two
  cores in megacore), and its cycles are the chip's: a product of 4096 x 4096 bfloat16 matrices
  comes to 88 % and 96 % of the *chip's* peak. On v2, v3 and 7x a device is half a chip, and so is a
  cycle count.
- **Waiting for memory is included**, as a rule of thumb. Work is cut into windows
  (`iteration_bounds`), and the cycles match a transfer plus a fixed start of some 3,000 cycles for
  each window. x + 1 over 256 MB of float32 reaches 71 to 94 % of the memory bandwidth, depending on
  the chip. Over bfloat16 it reaches about half of that. The sum of 256 MB, whose windows are small,
  reaches 17 to 42 %. A chip prefetches the next window, so the last figures may be too slow. The
  bandwidth alone would be too fast.
- **Cycles are missing** for gathers, sorts, custom calls and work of a 7x's SparseCore (there they
  are `2**63 - 1`). Only their bytes are known. So an operation's time is the longer of
  `cycles / clock` and `bytes / bandwidth`. Bytes are padded, and count for the memory that they are
  in: memory space 1 of a layout is on the chip (VMEM), 0 is HBM.
- `copy-start` and `slice-start` fetch from HBM while other operations compute. They have no cycles.
  Their bytes count in `ProgramCost.bytes`: a program takes at least the time of all its bytes at
  full bandwidth.
- **Loops** have the cost of one iteration. The trip count follows from the condition's comparison,
  the counter's initial value and its increment.
- A matrix product is a `convolution` too, without spatial dimensions, or with batch dimensions in
  their place (a window of 8 x 12, stride 7 x 11, base dilation 8 x 12).

Collectives have no cycles. `wire_bytes` counts the bytes that a device sends in a ring. Each
collective is a kernel with its number of bytes and the names of the kernels that run beside it
(`reader`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

from .kernel import Kernel
from .operations import convolution_flops, estimated_cycles, kind_of, moved, parts, tiled, turned
from .proto import Instruction, parse
from .reader import ProgramCost, Reader, described
from .splash import Splash

VERSION = 11
"""The version of `read`, raised whenever `read` would return a different result for the same
program."""

_NOTICEABLE = 0.1  # share of the products' work that is padding


def read(
    program: bytes, clock_GHz: float = 1.0, memory_GBps: float = math.inf, chip: str | None = None
) -> ProgramCost:
    """Returns the cost of a compiled program, given as the bytes that `proto.program_bytes` takes
    from the executable.

    *Arguments:* `clock_GHz` is the clock of the device's core. `memory_GBps` is the HBM bandwidth
    of one *device* (half the chip's on v2, v3 and 7x), in 1e9 bytes/s. `chip` is its name in the
    catalogue, for `splash`.

    Raises `ValueError` if the bytes are not a program.
    """
    entry = parse(program).entry
    reader = _TpuReader(clock_GHz, memory_GBps, chip)
    reading = ProgramCost()
    reading.add(reader.computation(entry))
    waiting = reading.bytes / memory_GBps / 1e9 - reading.seconds
    if waiting > 0:
        reading.seconds += waiting
        reading.kernels.append(Kernel("prefetch", "copy", seconds=waiting, bound="memory"))
    flops = reading.product_flops
    padded = reading.padded_flops
    if flops and (share := 1 - flops / padded) >= _NOTICEABLE:
        reader.note(
            "program-padding",
            share=share,
            shape=max(reader.losses, key=lambda name: reader.losses[name]),
        )
    return reader.finished(reading)


class _TpuReader(Reader):
    def __init__(self, clock_GHz: float, memory_GBps: float, chip: str | None):
        super().__init__()
        self.clock = clock_GHz
        self.bandwidth = memory_GBps
        self.chip = chip
        self.losses: dict[str, float] = defaultdict(float)

    def kernel(self, op: Instruction, sums: ProgramCost) -> None:
        for part in parts(op):
            self.product(part, sums)
        kind = kind_of(op)
        bytes_moved = moved(op)
        sums.bytes += bytes_moved
        if op.opcode.endswith("-start"):
            return  # overlapped with other operations; collectives have wire bytes
        cycles = estimated_cycles(op)
        if cycles is None and (splash := Splash.of(op)):
            kind = "attention"
            cycles = splash.cycles(self.chip) if self.chip else None
            sums.product_flops = sums.padded_flops = splash.flops
        computing = (cycles or 0.0) / self.clock
        moving = bytes_moved / self.bandwidth
        time = max(computing, moving) / 1e9
        if time:
            sums.seconds += time
            product = kind in ("matmul", "convolution", "attention") and computing >= moving
            bound = "compute" if product or turned(op) else "memory"
            if kind == "elementwise" and turned(op):
                kind = "copy"  # since the transposition takes the time
            kernel = described(op, kind, seconds=time, bound=bound)
            sums.kernels.append(replace(kernel, bytes=bytes_moved, flops=sums.product_flops))

    def product(self, op: Instruction, sums: ProgramCost) -> None:
        if op.opcode.removesuffix("-start") == "convolution":
            flops = convolution_flops(op)
            ratio = min(
                (s.elements / s.padded_elements for s in tiled(op) if s.elements), default=1.0
            )
            sums.product_flops += flops
            sums.padded_flops += flops / ratio
            self.losses[str(op.shapes[0])] += flops / ratio - flops
