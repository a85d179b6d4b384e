"""Matrix products and convolutions as what the chip multiplies: `groups` products of (m × k) by (k × n)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .flatten import Graph, Node


@dataclass(frozen=True)
class Product:
    """`groups` products `(m, k) @ (k, n)`. `channels` are the two dimensions that must be multiples of a few
    elements for matrix units; `window` the pixels that one output reads, 1 for a matrix product."""

    kind: str
    m: int
    n: int
    k: int
    groups: int
    channels: tuple[int, int]
    window: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.groups * self.m * self.n * self.k


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
    few = min(channels) < 8 if params["batch_group_count"] > 1 or params["feature_group_count"] > 1 else False
    kind = "depthwise" if groups > 1 and few else "convolution"
    return Product(kind, m, n, k, groups, channels, pixels if gradient else window)
