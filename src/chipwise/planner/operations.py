"""A traced program as operations that a chip's time can be computed from: products, and passes over memory.

`trace` needs no device and compiles nothing: the program is flattened (`flatten`), fused as XLA's GPU
compiler would (`fusion`), and each kernel counted. A fused kernel reads its outside inputs once and
writes its outside outputs once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..words.facts import Fact
from .flatten import Graph, Node, flatten
from .fusion import Fusion, Kernel


@dataclass(frozen=True)
class Product:
    """`groups` products `(m, k) @ (k, n)`. `channels` are the two dimensions that must be multiples of a few
    elements for matrix units."""

    kind: str  # "matmul", "convolution" or "depthwise"
    m: int
    n: int
    k: int
    groups: int
    channels: tuple[int, int]

    @property
    def flops(self) -> float:
        """Two for each multiply-add."""
        return 2.0 * self.groups * self.m * self.n * self.k


@dataclass(frozen=True)
class Operation:
    """One kernel, `count` times.

    `kind`: that of its product, or "elementwise", "reduce", "pool", "gather", "scatter", "sort", "other".
    `dtype` is that of the multiplied operands, or of the largest array. `work`: arithmetic beside a product.
    `score_bytes`: the part of the bytes that is attention weights, which a fused attention kernel keeps to
    itself; `masked`: a mask is laid over them, and such a kernel computes only the half that counts.
    Everything but `count` is of one execution.
    """

    kind: str
    bytes_read: float
    bytes_written: float
    dtype: str
    product: Product | None = None
    count: float = 1.0
    work: float = 0.0
    score_bytes: float = 0.0
    masked: bool = False

    @property
    def flops(self) -> float:
        """Of its product."""
        return self.product.flops if self.product is not None else 0.0


@dataclass(frozen=True)
class Traced:
    """The operations of one execution of a program on one device, and its memory in bytes.

    `peak_temp_bytes` is the most that is alive at once besides arguments and outputs, in the order of the
    program. `notes` says what could not be counted: host callbacks, loops of unknown length, dynamic shapes.
    """

    operations: tuple[Operation, ...]
    peak_temp_bytes: float = 0.0
    notes: tuple[Fact, ...] = ()
    dtypes: frozenset[str] = frozenset()  # of every array, named as NumPy does

    @property
    def flops(self) -> float:
        """Of products."""
        return sum(op.flops * op.count for op in self.operations)


def trace(function: Callable[..., Any], *specs: Any, platform: str = "cuda") -> Traced:
    """The operations of `function(*specs)`.

    *Arguments:* `specs`: trees of arrays or `ShapeDtypeStruct`s, as for `jax.jit(function).lower(*specs)`;
    `platform`: whose forms of platform-dependent code to take: "cuda", "cpu", "tpu".

    Raises what `function` raises while it is traced.
    """
    graph = flatten(function, specs, platform)
    operations, temp = _operations(graph)
    return Traced(tuple(operations), temp, tuple(graph.notes), frozenset(_dtypes(graph)))


def _dtypes(graph: Graph) -> set[str]:
    inner = [_dtypes(node.inner) for node in graph.nodes if node.inner is not None]
    return {value.dtype for value in graph.values}.union(*inner)


def _operations(graph: Graph) -> tuple[list[Operation], float]:
    fusion = Fusion(graph)
    scores, masked = _scores(graph, fusion)
    operations: list[Operation] = []
    inside: dict[int, float] = {}
    for kernel in fusion.kernels:
        if kernel.node.inner is not None:
            body, temp = _operations(kernel.node.inner)
            inside[kernel.at] = temp
            trips = kernel.node.trips
            operations += [dataclasses.replace(op, count=op.count * trips) for op in body]
        else:
            operations.append(_operation(graph, kernel, scores, masked))
    return operations, fusion.peak_bytes(inside)


def _operation(graph: Graph, kernel: Kernel, scores: set[int], masked: bool) -> Operation:
    product = product_of(graph, kernel.node) if kernel.kind == "product" else None
    score = sum(b for v, b in (*kernel.reads.items(), *kernel.writes.items()) if v in scores)
    arrays = kernel.node.inputs[:2] if product is not None else (*kernel.reads, *kernel.writes)
    size = (
        (lambda v: _bits(graph.values[v].dtype)) if product is not None else lambda v: graph.values[v].nbytes
    )
    largest = max(arrays, key=size, default=None)
    return Operation(
        kind=kernel.kind if product is None else product.kind,
        bytes_read=kernel.bytes_read,
        bytes_written=kernel.bytes_written,
        dtype=graph.values[largest].dtype if largest is not None else "float32",
        product=product,
        work=kernel.work if product is None else 0.0,
        score_bytes=score,
        masked=masked and score > 0,
    )


def _bits(dtype: str) -> int:
    return {"bfloat16": 16, "float16": 16, "float64": 64, "int8": 8, "uint8": 8}.get(dtype, 32)


def _scores(graph: Graph, fusion: Fusion) -> tuple[set[int], bool]:
    """Values that are attention weights or come elementwise from them, and whether one is masked.

    They begin as `(..., t, s)` made by a product with batch dimensions whose summed axis, the head's, is
    shorter than both.
    """
    scores: set[int] = set()
    masked = False
    for i, node in enumerate(graph.nodes):
        if node.primitive == "dot_general":
            product, out = product_of(graph, node), node.outputs[0]
            assert product is not None
            ranks = len(graph.values[out].shape)
            if product.groups > 1 and ranks > 3 and product.k < min(product.m, product.n):
                scores.add(out)
        elif fusion.kinds[i] in ("elementwise", "same"):
            sizes = [graph.values[v].size for v in node.inputs if v in scores]
            if sizes:
                scores |= {o for o in node.outputs if graph.values[o].size == max(sizes)}
                masked = masked or node.primitive == "select_n"
    return {fusion.stand_for[v] for v in scores}, masked


# ---- products and convolutions as what the chip multiplies


def product_of(graph: Graph, node: Node) -> Product | None:
    """The product that `node` is, or `None`."""
    if node.primitive in ("dot_general", "ragged_dot", "ragged_dot_general"):
        return _dot(graph, node)
    return _convolution(graph, node) if node.primitive == "conv_general_dilated" else None


def _dot(graph: Graph, node: Node) -> Product:
    left, right = (graph.values[v].shape for v in node.inputs[:2])
    if node.primitive != "dot_general":  # rows of `left` each meet one of the groups of `right`
        m, k, n = math.prod(left[:-1]), left[-1], right[-1]
        return Product("matmul", m, n, k, 1, (k, n))
    (ca, cb), (ba, _) = node.params["dimension_numbers"]
    k, groups = math.prod(left[i] for i in ca), math.prod(left[i] for i in ba)
    m = math.prod(left) // max(k * groups, 1)
    n = math.prod(right) // max(math.prod(right[i] for i in cb) * groups, 1)
    return Product("matmul", m, n, k, groups, (k, n))


def _convolution(graph: Graph, node: Node) -> Product:
    """Padding counts as multiplied, as in every published figure; the zeros between the pixels of a dilated
    input do not: they stand in the gradient of a strided convolution, which no library computes that way.
    """
    numbers, params = node.params["dimension_numbers"], node.params
    left, right = (graph.values[v].shape for v in node.inputs[:2])
    out = graph.values[node.outputs[0]].shape
    pairs = 1  # of output pixels and window pixels that meet
    for i, axis in enumerate(numbers.out_spec[2:]):
        hole = params["lhs_dilation"][i]
        offsets = range(right[numbers.rhs_spec[2 + i]])
        stride, dilation = params["window_strides"][i], params["rhs_dilation"][i]
        low = params["padding"][i][0]
        if hole == 1:
            pairs *= out[axis] * len(offsets)
        else:
            places = (o * stride + t * dilation - low for o in range(out[axis]) for t in offsets)
            pairs *= sum(place % hole == 0 for place in places)
    pixels = math.prod(out[a] for a in numbers.out_spec[2:])
    window = math.prod(right[a] for a in numbers.rhs_spec[2:])
    batch, features = out[numbers.out_spec[0]], out[numbers.out_spec[1]]
    inner = right[numbers.rhs_spec[1]]  # per group
    groups = params["feature_group_count"] * params["batch_group_count"]
    m, n = batch * pixels, features // groups
    k = max(1, round(inner * pairs / max(pixels, 1)))
    # In a kernel's gradient the "window" is the output image and the output image the kernel's window.
    gradient = window > pixels and left[numbers.lhs_spec[1]] == inner * params["feature_group_count"]
    channels = (batch, n) if gradient else (inner, n)
    kind = "depthwise" if groups > 1 and min(channels) < 8 else "convolution"
    return Product(kind, m, n, k, groups, channels)
