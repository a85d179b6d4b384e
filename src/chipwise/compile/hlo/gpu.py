"""Reads the kernels of a program from XLA's GPU compiler, with their bytes and FLOPs.

The compiler states no times. `compile.time_gpu` computes them from these figures. The entry
computation is scheduled, and each of its operations is one kernel: a fusion, or a call of a
library.

- **Products** are calls of cuBLAS and cuDNN, which state shapes, dimension numbers and precision,
  or a `dot` inside a fusion that Triton compiles. A convolution counts as a matrix product: `(batch
  x pixels, window x inputs) @ (window x inputs, outputs)` in the forward pass.
- **Memory**: the bytes that a kernel reads and writes. For slices and in-place updates only the
  part counts. The workspace of a library is left out.
- **Loops** run their kernels once per iteration. XLA states the trip count if it knows it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .operations import (
    QUIET_CALLS,
    convolution_flops,
    convolution_sizes,
    convolution_window,
    dot_sizes,
    elements,
    kind_of,
    moved,
    needed,
    parts,
)
from .proto import NAMES, Instruction, parse
from .reader import ProgramCost, Reader, described

VERSION = 11
"""The version of this module's `read`, raised whenever `read` would return a different result for
the same program. A change of `operations` raises `tpu.VERSION` too."""

CUBLAS = "__cublas$"
CONVOLUTION = "__cudnn$conv"
ATTENTION = "__cudnn$fmha"
_SORT = "__cub$DeviceRadixSort"
WORK = NAMES["work"]
"""The arithmetic of an elementwise operation for each element. Operations that are not listed have
1."""

_PASSES_OF_SORT = 8  # of a radix sort over 32-bit keys, each reading and writing everything


def read(program: bytes) -> ProgramCost:
    """Returns the kernels and the cost of a compiled program, given as the bytes that
    `proto.program_bytes` takes from the executable.

    Raises `ValueError` if the bytes are not a program.
    """
    reader = _GpuReader()
    reading = ProgramCost()
    reading.add(reader.computation(parse(program).entry))
    return reader.finished(reading)


class _GpuReader(Reader):
    def weight(self, branch: ProgramCost) -> tuple[float, ...]:
        return branch.product_flops, branch.bytes

    def known_call(self, op: Instruction) -> bool:
        return op.target in QUIET_CALLS or _library(op) is not None or op.target.startswith(_SORT)

    def kernel(self, op: Instruction, sums: ProgramCost) -> None:
        if op.opcode.endswith("-start"):
            return  # copies that overlap with computation
        fused = list(parts(op))
        product = next(
            (p for p in fused if p.opcode in ("dot", "convolution") or _library(p)), None
        )
        kind = kind_of(op)
        kernel = described(op, kind, bytes=_bytes(op), work=_work(op))
        if product is not None:
            kernel = _product(product, kernel)
        sums.product_flops += kernel.flops
        sums.bytes += kernel.bytes
        sums.kernels.append(kernel)


def _library(op: Instruction) -> str | None:
    """The kind of kernel if `op` is a custom call of one of NVIDIA's libraries, else `None`."""
    if op.opcode != "custom-call":
        return None
    kinds = {CUBLAS: "matmul", CONVOLUTION: "convolution", ATTENTION: "attention"}
    return next((kind for start, kind in kinds.items() if op.target.startswith(start)), None)


def _bytes(op: Instruction) -> float:
    if op.opcode != "custom-call":
        return moved(op)
    arrays = [*op.operand_shapes, *op.shapes]
    last = op.shapes[-1]
    if (
        op.target.startswith("__cu")
        and len(op.shapes) > 1
        and last.bits == 8
        and len(last.dims) == 1
    ):
        arrays.pop()  # a library's workspace
    passes = _PASSES_OF_SORT if op.target.startswith(_SORT) else 1
    return float(passes * sum(shape.nbytes for shape in arrays))


def _work(op: Instruction) -> float:
    """The elementwise arithmetic of `op`."""
    if op.opcode != "fusion":
        return _own_work(op, elements(op))
    return sum(_own_work(part, count) for fused in op.called for part, count in needed(fused))


def _own_work(op: Instruction, count: int) -> float:
    if op.opcode in ("reduce", "reduce-window"):
        return float(sum(s.elements for s in op.operand_shapes))
    if op.opcode in ("custom-call", "dot", "convolution"):
        return 0.0
    return float(WORK.get(op.opcode, 1) * count)


def _product(op: Instruction, kernel):
    """`kernel` with the sizes of its product."""
    library = _library(op)
    operand = op.operand_shapes[0]
    if library == "attention":
        return _attention(op, replace(kernel, kind="attention", dtype=operand.dtype))
    if library == "convolution" or op.opcode == "convolution":
        flops = convolution_flops(op)
        sizes = convolution_sizes(op, flops)
        kernel = replace(kernel, window=convolution_window(op))
        kind = "convolution"
    else:
        sizes = dot_sizes(op)
        flops = 2.0 * math.prod(sizes)
        kind = "matmul"
    return replace(
        kernel, kind=kind, flops=flops, shape=sizes, dtype=_multiplied(op, operand.dtype)
    )


def _multiplied(op: Instruction, dtype: str) -> str:
    """The dtype that a product multiplies in: TF32 for float32 operands, if the chip has it, unless
    `PrecisionConfig` requests the highest precision."""
    if dtype != "f32":
        return dtype
    stated = op.config.get("gemm_backend_config", {}).get("precision_config", {})
    asked = stated.get("operand_precision", [])
    highest = "HIGHEST" in asked or 2 in op.proto.precision_config.operand_precision
    return "f32" if highest else "tf32"


def _attention(op: Instruction, kernel):
    """`kernel` with the FLOPs and sizes of attention's products. There are two products in the
    forward pass and five in the backward pass. With a causal mask half of each counts."""
    config = op.config.get("cudnn_fmha_backend_config", {})
    sizes = [int(n) for n in config.get("intermediate_tensor_shape", {}).get("dimensions", ())]
    if len(sizes) != 4:
        return kernel
    batch, heads, queries, keys = sizes
    depth = op.operand_shapes[0].dims[-1]
    products = 5 if "Backward" in op.target else 2
    share = 0.5 if "CAUSAL" in config.get("mask_type", "") else 1.0
    return replace(
        kernel,
        flops=share * products * 2.0 * batch * heads * queries * keys * depth,
        shape=(queries, keys, depth, batch * heads),
    )
