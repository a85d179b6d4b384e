"""Operations of a compiled program: their kind and products, and the trip counts of loops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .proto import NAMES, Computation, Instruction, Shape

KINDS = (
    "matmul",
    "convolution",
    "attention",
    "elementwise",
    "reduce",
    "copy",
    "collective",
    "other",
)

_SENTINEL = 2**62
FREE, _MOVES, _OTHERS, QUIET_CALLS, SLICES, UPDATES, _FETCHES = (
    frozenset(NAMES[kind])
    for kind in ("free", "moves", "others", "quiet_calls", "slices", "updates", "fetches")
)
COLLECTIVES = {  # share of the array that a device sends, in a ring of d
    "all-reduce": lambda d: 2 * (d - 1) / d,
    "all-gather": lambda d: (d - 1) / d,
    "reduce-scatter": lambda d: (d - 1) / d,
    "all-to-all": lambda d: (d - 1) / d,
    "ragged-all-to-all": lambda d: (d - 1) / d,
    "collective-permute": lambda d: 1.0,
    "collective-broadcast": lambda d: 1.0,
}
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


# ---- kinds of operations


def estimated_cycles(op: Instruction) -> float | None:
    """The compiler's cycles, or `None` if it states none or the largest number."""
    cycles = float(op.config.get("window_config", {}).get("estimated_cycles", -1))
    return cycles if 0 <= cycles < _SENTINEL else None


def parts(op: Instruction) -> Iterator[Instruction]:
    """Yields the operation itself, or the operations fused into it, at any depth."""
    if op.opcode.removesuffix("-start") != "fusion":
        yield op
        return
    for inside in op.called:
        for part in inside.instructions.values():
            yield from parts(part)


def kind_of(op: Instruction) -> str:
    """One of `KINDS` other than "collective". A fusion that contains a collective has the kind of
    its other operations."""
    if op.opcode in _FETCHES:
        return "copy"
    fused = list(parts(op))
    codes = {p.opcode.removesuffix("-start") for p in fused} - COLLECTIVES.keys()
    products = [p for p in fused if p.opcode in ("convolution", "dot")]
    if products:
        return "matmul" if all(_is_matmul(p) for p in products) else "convolution"
    if codes & _OTHERS or any(
        p.opcode == "custom-call" and p.target not in QUIET_CALLS for p in fused
    ):
        return "other"
    if codes & {"reduce", "reduce-window", "select-and-scatter"}:
        return "reduce"
    working = codes - FREE - {"broadcast", "iota", "custom-call", "fusion"}
    return "copy" if working <= _MOVES else "elementwise"  # also where nothing works, as in a fill


def turned(op: Instruction) -> bool:
    """Whether `op` changes the fastest dimension. A TPU transposes such arrays in a separate unit,
    at some 50 elements per cycle of a core, which is slower than memory for small elements."""
    for part in parts(op):
        if part.opcode not in ("copy", "transpose") or not part.operand_shapes:
            continue
        (before, *_), (after, *_) = part.operand_shapes, part.shapes
        came_from = tuple(part.proto.dimensions) or tuple(range(len(after.dims)))
        first, second = (next((i for i in s.order if s.dims[i] > 1), None) for s in (before, after))
        if second is not None and came_from[second] != first:
            return True
    return False


# ---- products


def tiled(op: Instruction) -> list[Shape]:
    """The two largest tiled arrays among a product's result and operands. The third one is the
    weights or their gradient."""
    tiled = [s for s in (*op.shapes, *op.operand_shapes) if s.tile]
    return sorted(tiled, key=lambda s: s.elements)[-2:]


@dataclass(frozen=True)
class _Window:
    """A convolution's window along one spatial dimension."""

    size: int  # of the input
    taps: int
    out: int
    stride: int
    pad: int  # padding before the input
    spread: int  # dilation of the input
    apart: int  # dilation of the window

    @property
    def holds_a_batch(self) -> bool:
        """Whether each position has one element, so that the dimension is a batch dimension."""
        return self.taps == self.spread and self.stride == max(self.taps - 1, 1)

    @property
    def meetings(self) -> int:
        """The number of the `out * taps` pairs that have an element of the input."""
        at = (
            np.arange(self.out)[:, None] * self.stride
            + np.arange(self.taps)[None] * self.apart
            - self.pad
        )
        inside = (at >= 0) & (at <= (self.size - 1) * self.spread) & (at % self.spread == 0)
        return int(inside.sum())


@dataclass(frozen=True)
class _Arrays:
    """The dimensions of a convolution's arrays in their forward roles. The library's calls for
    gradients have the same dimension numbers, with exchanged arrays."""

    inputs: tuple[int, ...]
    kernel: tuple[int, ...]
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, op: Instruction) -> _Arrays:
        first = op.operand_shapes[0].dims
        second = op.operand_shapes[1].dims
        result = op.shapes[0].dims
        if "BackwardInput" in op.target:
            return cls(result, second, first)
        return (
            cls(first, result, second)
            if "BackwardFilter" in op.target
            else cls(first, second, result)
        )


def _windows(op: Instruction) -> list[_Window]:
    """The windows of a convolution's spatial dimensions (`ConvolutionDimensionNumbers`,
    `WindowDimension`)."""
    labels = op.proto.convolution_dimension_numbers
    dims = op.proto.window.dimensions
    at = _Arrays.of(op)
    lhs = at.inputs
    rhs = at.kernel
    out = at.outputs
    return [
        _Window(
            lhs[a],
            rhs[b],
            out[c],
            w.stride or 1,
            w.padding_low,
            w.base_dilation or 1,
            w.window_dilation or 1,
        )
        for a, b, c, w in zip(
            labels.input_spatial_dimensions,
            labels.kernel_spatial_dimensions,
            labels.output_spatial_dimensions,
            dims,
            strict=True,
        )
    ]


def _is_matmul(op: Instruction) -> bool:
    """Whether a product has no sliding window. JAX's name for it decides, if it was kept."""
    name = op.source.rsplit("/", 1)[-1]
    if op.opcode == "dot" or "dot_general" in name:
        return True
    if "conv_general_dilated" in name:
        return False
    windows = _windows(op)
    return all(w.holds_a_batch for w in windows) and (
        not windows or any(w.spread > 1 for w in windows)
    )


def convolution_flops(op: Instruction) -> float:
    """The FLOPs, 2 for each multiply-add. Window positions in the padding or between dilated
    elements do not count."""
    labels = op.proto.convolution_dimension_numbers
    at = _Arrays.of(op)
    products = float(
        at.outputs[labels.output_batch_dimension] * at.outputs[labels.output_feature_dimension]
    )
    products *= at.kernel[labels.kernel_input_feature_dimension]
    return 2 * products * math.prod(w.meetings for w in _windows(op))


def convolution_sizes(op: Instruction, flops: float) -> tuple[int, int, int, int]:
    """`(m, n, k, groups)` of the matrix products of a convolution of `flops`. `k` follows from
    `flops`.

    The result has the size `(m, n)`: pixels of the batch by outputs in the forward pass, pixels by
    inputs for the input gradient, and inputs times window by outputs for the kernel gradient, which
    is summed over pixels."""
    labels = op.proto.convolution_dimension_numbers
    at = _Arrays.of(op)
    groups = max(op.proto.feature_group_count, 1)
    features = at.outputs[labels.output_feature_dimension] // groups
    inputs = at.kernel[labels.kernel_input_feature_dimension]
    if "BackwardFilter" in op.target:
        m = inputs * math.prod(at.kernel[i] for i in labels.kernel_spatial_dimensions)
        n = features
    else:
        backwards = "BackwardInput" in op.target
        image = at.outputs
        batch = labels.output_batch_dimension
        spatial = labels.output_spatial_dimensions
        if backwards:
            image = at.inputs
            batch = labels.input_batch_dimension
            spatial = labels.input_spatial_dimensions
        m = image[batch] * math.prod(image[i] for i in spatial)
        n = inputs if backwards else features
    return m, n, max(1, round(flops / 2 / groups / max(m * n, 1))), groups


def convolution_window(op: Instruction) -> tuple[int, ...]:
    """Taps along each spatial dimension, then strides: `(3, 3, 1, 1)`."""
    windows = _windows(op)
    return (*(w.taps for w in windows), *(w.stride for w in windows))


def dot_sizes(op: Instruction) -> tuple[int, int, int, int]:
    """`(m, n, k, groups)` of a matrix product: a `dot`, or a call of cuBLAS."""
    left = op.operand_shapes[0].dims
    right = op.operand_shapes[1].dims
    names = ("lhs_contracting_dimensions", "rhs_contracting_dimensions", "lhs_batch_dimensions")
    if op.opcode == "dot":
        summed, others, batch = (getattr(op.proto.dot_dimension_numbers, name) for name in names)
    else:
        stated = op.config.get("gemm_backend_config", {}).get("dot_dimension_numbers", {})
        summed, others, batch = ([int(i) for i in stated.get(name, ())] for name in names)
    k = math.prod(left[i] for i in summed)
    groups = math.prod(left[i] for i in batch)
    m = math.prod(left) // max(k * groups, 1)
    n = math.prod(right) // max(math.prod(right[i] for i in others) * groups, 1)
    return m, n, k, groups


# ---- how often a loop runs


def trips(loop: Instruction) -> int | None:
    """The trip count of `loop`, as the compiler states it, or from the condition's comparison, the
    counter's initial value and its step. `None` if the count depends on data.

    JAX's `scan` and `fori_loop` become `while (i < n) { ...; i += 1 }` with the counter in a tuple.
    In compiled programs the comparison and the increment may be in fusions, values may be copied,
    and constants may be carried in the tuple. All of these are handled.
    """
    stated = loop.config.get("known_trip_count")
    if stated:
        return int(stated["n"])
    body, condition = loop.called
    start = loop.operands[0]
    test = _operands(original(condition.root), "compare")
    if test is None:
        return None
    comparison, (left, right) = test

    def first(index: int) -> int | None:
        return _constant(_element(start, index))

    mirrored = _MIRRORED.get(comparison.direction)
    for counter, other, compare in ((left, right, comparison.direction), (right, left, mirrored)):
        index = original(counter).index
        step = None if index is None else _step(body, index)
        if index is None or not step:
            continue
        limit = _constant(other)
        held = original(other).index
        if limit is None and held is not None and _step(body, held) == 0:
            limit = first(held)
        begin = first(index)
        if limit is None or begin is None or compare not in _MIRRORED:
            return None
        end = limit + {"LE": 1, "GE": -1}.get(compare, 0)
        return max(0, math.ceil((end - begin) / step))
    return None


def original(op: Instruction) -> Instruction:
    """`op`, or the operation that it copies."""
    while op.opcode in ("copy", "bitcast"):
        op = op.operands[0]
    return op


def _element(op: Instruction, index: int) -> Instruction | None:
    """Element `index` of a tuple, or `None` if `op` is not a `tuple` operation with that
    element."""
    return op.operands[index] if op.opcode == "tuple" and index < len(op.operands) else None


def _constant(op: Instruction | None) -> int | None:
    return None if op is None else original(op).value


def _operands(op: Instruction, *opcodes: str) -> tuple[Instruction, list[Instruction]] | None:
    """The instruction of one of `opcodes`, with its operands as seen from outside. The instruction
    is `op` itself, or the root of the fusion `op`. `None` if it has another opcode."""
    if op.opcode in opcodes:
        return op, op.operands
    if op.opcode != "fusion":
        return None
    root = original(op.called[0].root)
    if root.opcode not in opcodes:
        return None
    sides = [original(side) for side in root.operands]
    return root, [s if s.parameter is None else op.operands[s.parameter] for s in sides]


def _step(body: Computation, index: int) -> int | None:
    """The increment of element `index` of the body's tuple: 0 if it is unchanged, `None` if it is
    unknown."""
    after = _element(body.root, index)
    if after is None:
        return None
    after = original(after)
    if after.opcode == "get-tuple-element":
        return 0 if after.index == index else None
    sums = _operands(after, "add", "subtract")
    if sums is None:
        return None
    root, (left, right) = sums
    pairs = [(left, right)] if root.opcode == "subtract" else [(left, right), (right, left)]
    for counter, other in pairs:
        if original(counter).index == index:
            value = _constant(other)
            held = original(other).index
            if value is None and held is not None and _step(body, held) == 0:
                value = 1  # a constant in the tuple: JAX's loops count by ones
            return -value if root.opcode == "subtract" and value is not None else value
    return None


# ---- bytes that an operation reads from memory and writes to it


def moved(op: Instruction) -> float:
    """The HBM bytes that one execution of `op` reads and writes, with the padding of shapes."""
    code = op.opcode.removesuffix("-start")
    # For example a buffer for the outputs of a loop
    if code == "custom-call" and op.target in QUIET_CALLS:
        return 0.0
    if code in COLLECTIVES:
        return float(sum(s.hbm_bytes for s in op.operand_shapes) * 2)
    if op.opcode == "copy-start":
        return float(sum(s.hbm_bytes for s in op.shapes[:2]))
    if op.opcode in ("slice-start", "dynamic-slice-start"):
        arrays = [s for s in op.shapes if s.dims]
        small = min((s.padded_bytes for s in arrays), default=0)
        return float(small * sum(1 for s in arrays[-2:] if s.memory == 0))
    if code == "dynamic-update-slice":
        return float(2 * op.operand_shapes[1].hbm_bytes)
    if code == "scatter":
        return float(3 * op.operand_shapes[-1].hbm_bytes)
    if code in SLICES:
        return float(sum(s.hbm_bytes for s in op.shapes) * 2)
    if code != "fusion":
        return float(sum(s.hbm_bytes for s in (*op.operand_shapes, *op.shapes)))
    fused = op.called[0]
    return _written(op, fused) + _taken(op, fused)


def _taken(op: Instruction, fused: Computation) -> float:
    """The bytes that the fusion `op` reads. For an array that it slices, only the slice counts."""
    return sum(
        shape.hbm_bytes * min(count, shape.elements) / max(shape.elements, 1)
        for part, count in needed(fused)
        if part.inside is fused and part.parameter is not None
        for shape in op.operands[part.parameter].shapes
    )


def needed(fused: Computation, results: int | None = None) -> Iterator[tuple[Instruction, int]]:
    """Yields the operations of a fusion, at any depth, each with the number of its elements that
    the fusion computes. For a parameter it is the number of elements that the fusion reads.

    *Arguments:* `results` is the number of elements of the fusion's result. `None` means all.
    """
    counts = dict.fromkeys((op.id for op in fused.instructions.values()), 0)
    counts[fused.root.id] = elements(fused.root) if results is None else results
    for op in reversed(fused.instructions.values()):
        whole = elements(op)
        some = min(counts[op.id], whole)
        if op.opcode == "fusion":
            inside = op.called[0]
            for part, count in needed(inside, some):
                if part.inside is inside and part.parameter is not None:
                    counts[op.operands[part.parameter].id] += count
                else:
                    yield part, count
            continue
        yield op, some
        for place, operand in enumerate(op.operands if some else ()):
            size = elements(operand)
            if place == 0 and op.opcode in UPDATES and original(operand).opcode == "parameter":
                continue  # written in place
            sliced = place == 0 and op.opcode in SLICES
            counts[operand.id] += some if sliced or size == whole else size


def elements(op: Instruction) -> int:
    """The number of elements of the largest array in the result of `op`."""
    return max((shape.elements for shape in op.shapes), default=0)


def _written(op: Instruction, fused: Computation) -> float:
    """The bytes that the fusion `op` writes. For in-place updates only the updated part counts."""
    outputs = fused.root.operands if fused.root.opcode == "tuple" else [fused.root]
    total = 0.0
    for output, shape in zip(outputs, op.shapes, strict=False):
        if shape.memory != 0:
            continue
        maker = original(output)
        if maker.opcode == "fusion":
            maker = original(maker.called[0].root)
        if maker.opcode == "dynamic-update-slice":
            total += min(shape.padded_bytes, maker.operand_shapes[1].padded_bytes)
        elif maker.opcode == "scatter":
            total += min(shape.padded_bytes, 2 * maker.operand_shapes[-1].padded_bytes)
        else:
            total += shape.padded_bytes
    return total
