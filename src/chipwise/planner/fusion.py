"""What XLA's GPU compiler makes of a flat list of operations: kernels, and what each reads and writes.

Nothing is compiled; the rules are those of its passes, simplified:

- Elementwise operations, conversions, broadcasts, slices, padding, concatenation and reshapes are computed
  inside the kernels that read them (instruction and priority fusion). A value that several kernels read is
  written once when that moves fewer bytes than computing it in each.
- A reduction begins a kernel, with its elementwise producers fused in; a reduction along the last axis
  that only one kernel reads is computed in that kernel (the softmax and normalisation rewriter).
- Kernels of one shape that read the same array and do not need each other become one (multi-output
  fusion), and a reduction of an array joins the kernel that writes it. Small independent kernels are
  launched together (horizontal fusion).
- Products, convolutions, pooling, gathers, scatters and sorts read and write memory; nothing is fused
  into them. Reshapes and transposes of what they read or write are layouts and cost nothing.

Source: the passes under xla/service/gpu/transforms of https://github.com/openxla/xla.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .flatten import Graph, Node

# fmt: off
SAME = frozenset((
    "reshape", "squeeze", "expand_dims", "transpose", "copy", "copy_p", "stop_gradient", "pvary",
    "optimization_barrier", "sharding_constraint", "name", "device_put", "random_wrap", "random_unwrap",
    "reduce_precision",
))
REDUCTIONS = frozenset((
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor",
    "reduce", "argmax", "argmin",
))
POOLS = frozenset((
    "reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter_add",
    "select_and_scatter", "select_and_gather_add", "cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp",
))
SLICES = frozenset(("slice", "dynamic_slice"))
PRODUCTS = frozenset(("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"))
OTHERS = frozenset((
    "scan", "while", "fft", "cholesky", "qr", "eigh", "svd", "lu", "triangular_solve", "custom_call",
    "pallas_call",
))
# fmt: on

#: Arithmetic of an elementwise operation per element; 1 where not listed.
COST = {
    "random_bits": 60, "threefry2x32": 60, "random_fold_in": 60, "random_split": 60, "erf_inv": 30,
    "erf": 20, "tanh": 15, "logistic": 10, "exp": 8, "exp2": 8, "log": 8, "log1p": 10, "expm1": 10, "pow": 20,
    "sin": 20, "cos": 20, "div": 4, "sqrt": 4, "rsqrt": 4, "rem": 8,
    "broadcast_in_dim": 0, "convert_element_type": 0, "slice": 0, "iota": 0, "squeeze": 0,
}  # fmt: skip

_SMALL_BYTES = 256 * 1024  # computed again rather than written, whatever the count
_SMALL_ELEMENTS = 128 * 2048  # launched together
_TOGETHER = 64
_MOST_INPUTS = 96
_FLOPS_PER_BYTE = 10.0  # what arithmetic costs against memory traffic, outside matrix units


def kind_of(node: Node) -> str:
    name = node.primitive
    if name in PRODUCTS:
        return "product"
    if name in REDUCTIONS:
        return "reduce"
    if name in POOLS:
        return "pool"
    if name == "gather" or name.startswith("scatter") or name == "sort":
        return name.split("-")[0].split("_")[0]
    if name == "top_k" or name == "approx_top_k":
        return "sort"
    if name in OTHERS or node.inner is not None or node.has_effects:
        return "other"
    inner = any(hasattr(v, "jaxpr") or hasattr(v, "eqns") for v in node.params.values())
    return "other" if inner else "elementwise"


@dataclass
class Kernel:
    """One launch. `reads` and `writes`: bytes by value; `work`: elementwise arithmetic; `elements`: size of
    the space it runs over; `at`: place in the program."""

    kind: str
    node: Node
    at: int
    elements: int
    reads: dict[int, float] = field(default_factory=dict)
    writes: dict[int, float] = field(default_factory=dict)
    work: float = 0.0
    level: int = 0

    @property
    def bytes_read(self) -> float:
        return sum(self.reads.values())

    @property
    def bytes_written(self) -> float:
        return sum(self.writes.values())


_Memo = dict[int, tuple[dict[int, float], float]]
"""Of a value: what a kernel reads to compute it, bytes by value in memory, and the arithmetic of that."""


class Fusion:
    """The kernels of one graph, in order, and `stand_for`: which value a layout-only change is of."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.stand_for = list(range(len(graph.values)))
        self.maker: dict[int, int] = {}
        self.kinds = [kind_of(node) for node in graph.nodes]
        for i, node in enumerate(graph.nodes):
            if node.primitive in SAME and len(node.inputs) >= len(node.outputs):
                for taken, output in zip(node.inputs, node.outputs, strict=False):
                    self.stand_for[output] = self.stand_for[taken]
                self.kinds[i] = "same"
            else:
                for output in node.outputs:
                    self.maker[output] = i
        self.outputs = {self.stand_for[v] for v in graph.outputs}
        self.users: dict[int, list[int]] = {}
        for i, node in enumerate(graph.nodes):
            if self.kinds[i] != "same":
                for v in set(self._taken(node)):
                    self.users.setdefault(v, []).append(i)
        self.in_memory = self._must_be_in_memory()
        self._decide()
        self.kernels = self._together(self._with_reductions(self._siblings(self._kernels())))

    # ---- which values are written to memory

    def _taken(self, node: Node) -> list[int]:
        return [self.stand_for[v] for v in node.inputs]

    def _is_row(self, i: int) -> bool:
        """A reduction along the last axes of rows that fit a kernel's registers."""
        node = self.graph.nodes[i]
        if self.kinds[i] != "reduce" or "axes" not in node.params or len(node.outputs) != 1:
            return False
        shape = self.graph.values[node.inputs[0]].shape
        axes = sorted(node.params["axes"])
        last = list(range(len(shape) - len(axes), len(shape)))
        rows = math.prod(shape[a] for a in axes)
        return axes == last and 0 < rows <= 65_536 and len(axes) < len(shape)

    def _is_wider(self, i: int) -> bool:
        """An operation that only makes its one input larger: better kept as it was."""
        node, values = self.graph.nodes[i], self.graph.values
        if node.primitive not in ("convert_element_type", "broadcast_in_dim") or not node.inputs:
            return False
        return values[node.inputs[0]].nbytes <= values[node.outputs[0]].nbytes

    def _must_be_in_memory(self) -> set[int]:
        values = {self.stand_for[v] for v in self.graph.inputs} | self.graph.constants | self.outputs
        for i, node in enumerate(self.graph.nodes):
            kind = self.kinds[i]
            if kind in ("same", "elementwise"):
                continue
            if not self._is_row(i):
                values.update(node.outputs)
            if kind == "gather":  # its indices may be computed inside
                values.add(self._taken(node)[0])
            elif kind != "reduce":
                values.update(self._taken(node))
        return values

    def _sources(self, in_memory: set[int], v: int, memo: _Memo):
        """What a kernel reads to compute `v` (bytes by value in memory), and its arithmetic per element."""
        if v in memo:
            return memo[v]
        values = self.graph.values
        if v in in_memory or v not in self.maker:
            source = ({v: values[v].nbytes}, 0.0)
        else:
            source = self._reads_of(in_memory, self.maker[v], memo)
        memo[v] = source
        return source

    def _reads_of(self, in_memory: set[int], i: int, memo: _Memo) -> tuple[dict[int, float], float]:
        node, values = self.graph.nodes[i], self.graph.values
        size = max(sum(values[o].size for o in node.outputs), 1)
        if self.kinds[i] == "reduce":
            size = max(size, max((values[t].size for t in node.inputs), default=1))
        reads: dict[int, float] = {}
        work = float(COST.get(node.primitive, 1)) * size
        for j, taken in enumerate(self._taken(node)):
            if node.primitive == "dynamic_update_slice" and j == 0:
                continue  # in place
            inner, cost = self._sources(in_memory, taken, memo)
            # A slice needs only its part of what it cuts.
            part = min(1.0, size / max(values[taken].size, 1)) if node.primitive in SLICES else 1.0
            for source, nbytes in inner.items():
                reads[source] = max(reads.get(source, 0.0), nbytes * part)
            work += cost * part
        return reads, work

    def _decide(self) -> None:
        """Adds to `in_memory` the values that it is cheaper to write once than to compute in each reader."""
        forced = set(self.in_memory)
        memo: _Memo = {}
        for v in sorted(self.maker):
            self._sources(forced, v, memo)
        roots: dict[int, set[int]] = {}  # value -> kernels that compute it inside, by node
        for i in range(len(self.graph.nodes) - 1, -1, -1):
            if self.kinds[i] == "same":
                continue
            for v in self.graph.nodes[i].outputs:
                readers: set[int] = set()
                for user in self.users.get(v, ()):
                    outputs = self.graph.nodes[user].outputs
                    if any(o in self.in_memory for o in outputs) or not outputs:
                        readers.add(user)
                    else:
                        for o in outputs:
                            readers |= roots.get(o, set())
                roots[v] = readers
                if v in self.in_memory:
                    continue
                reads, work = memo[v]
                again, size = len(readers) - 1, self.graph.values[v].nbytes
                source = sum(reads.values())
                inlined = again * (source + work / _FLOPS_PER_BYTE)
                if self.kinds[i] == "reduce":
                    write = again > 0
                elif self._is_wider(i):
                    write = False  # rather its input
                elif source + work / _FLOPS_PER_BYTE <= _SMALL_BYTES:
                    write = False
                else:
                    write = inlined > (again + 2) * size and again > 0
                if write or len(reads) > _MOST_INPUTS:
                    self.in_memory.add(v)

    # ---- kernels

    def _kernels(self) -> list[Kernel]:
        values, kernels = self.graph.values, []
        memo: _Memo = {}
        level: dict[int, int] = {}
        for i, node in enumerate(self.graph.nodes):
            kind = self.kinds[i]
            if kind == "same" or not (any(o in self.in_memory for o in node.outputs) or node.has_effects):
                continue
            if kind in ("elementwise", "reduce"):
                reads, work = self._reads_of(self.in_memory, i, memo)
                elements = max((values[v].size for v in (*node.outputs, *node.inputs)), default=1)
                if kind == "elementwise":
                    elements = max((values[v].size for v in node.outputs), default=1)
            else:
                reads, work, elements = self._opaque(node, kind, memo)
            writes = {o: values[o].nbytes for o in node.outputs}
            if node.primitive == "dynamic_update_slice" or kind == "scatter":
                update = values[node.inputs[1 if kind != "scatter" else -1]].nbytes
                writes = {node.outputs[0]: update}
            kernel = Kernel(kind, node, i, elements, reads, writes, work)
            kernel.level = 1 + max((level.get(v, 0) for v in reads), default=0)
            for o in node.outputs:
                level[o] = kernel.level
            kernels.append(kernel)
        return kernels

    def _opaque(self, node: Node, kind: str, memo: _Memo) -> tuple[dict[int, float], float, int]:
        values, taken = self.graph.values, self._taken(node)
        reads = {v: values[v].nbytes for v in taken}
        out = sum(values[o].nbytes for o in node.outputs)
        elements = max((values[v].size for v in (*node.outputs, *node.inputs)), default=1)
        if kind == "gather":
            reads = {taken[0]: min(values[taken[0]].nbytes, out)}
            for v in taken[1:]:
                for source, nbytes in self._sources(self.in_memory, v, memo)[0].items():
                    reads.setdefault(source, nbytes)
        elif kind == "scatter":  # what it changes is read as well
            update = values[taken[-1]].nbytes
            reads = {v: values[v].nbytes for v in taken[1:]} | {
                taken[0]: min(update, values[taken[0]].nbytes)
            }
        return reads, float(elements), elements

    def _siblings(self, kernels: list[Kernel]) -> list[Kernel]:
        hosts: dict[tuple, Kernel] = {}
        kept = []
        for kernel in kernels:
            if kernel.kind in ("elementwise", "reduce") and kernel.reads:
                big = max(kernel.reads, key=lambda v: (kernel.reads[v], v))
                key = (kernel.level, kernel.elements, big)
                if key in hosts:
                    _merge(hosts[key], kernel)
                    continue
                hosts[key] = kernel
            kept.append(kernel)
        return kept

    def _with_reductions(self, kernels: list[Kernel]) -> list[Kernel]:
        """Lets a reduction join the elementwise kernel that writes what it reduces."""
        writer = {v: k for k in kernels for v in k.writes}
        kept = []
        for kernel in kernels:
            big = max(kernel.reads, key=lambda v: kernel.reads[v]) if kernel.reads else None
            host = writer.get(big) if big is not None else None
            if (
                kernel.kind == "reduce"
                and big is not None
                and host is not None
                and host.kind in ("elementwise", "reduce")
                and host.elements == kernel.elements == self.graph.values[big].size
                and all(v in host.writes or (v in writer and writer[v].level < host.level) or v not in writer
                        for v in kernel.reads)
            ):  # fmt: skip
                kernel.reads = {v: b for v, b in kernel.reads.items() if v not in host.writes}
                _merge(host, kernel)
                writer.update(dict.fromkeys(kernel.writes, host))
                continue
            kept.append(kernel)
        return kept

    def _together(self, kernels: list[Kernel]) -> list[Kernel]:
        hosts: dict[int, tuple[Kernel, int]] = {}
        kept = []
        for kernel in kernels:
            if kernel.kind in ("elementwise", "reduce") and kernel.elements <= _SMALL_ELEMENTS:
                host, count = hosts.get(kernel.level, (None, 0))
                if host is not None and count < _TOGETHER:
                    _merge(host, kernel)
                    hosts[kernel.level] = host, count + 1
                    continue
                hosts[kernel.level] = kernel, 1
            kept.append(kernel)
        return kept

    # ---- memory

    def peak_bytes(self, inner: dict[int, float]) -> float:
        """Most bytes alive at once besides arguments and outputs. *Arguments:* `inner`: what the bodies of
        loops need, by kernel's `at`."""
        values, order = self.graph.values, self._order()
        ends = {v: t for t, k in enumerate(order) for v in (*k.reads, *k.writes)}
        kept = {self.stand_for[v] for v in self.graph.inputs} | self.graph.constants | self.outputs
        dying: dict[int, list[int]] = {}
        for v, t in ends.items():
            if v not in kept:
                dying.setdefault(t, []).append(v)
        live = peak = 0.0
        for t, kernel in enumerate(order):
            written = [v for v in kernel.writes if v not in kept]
            free = [v for v in dying.get(t, ()) if v not in kernel.writes]
            reused = 0.0
            if kernel.kind == "elementwise":  # may overwrite what it reads last
                sizes = [values[v].nbytes for v in free]
                for v in written:
                    if values[v].nbytes in sizes:
                        sizes.remove(values[v].nbytes)
                        reused += values[v].nbytes
            live += sum(values[v].nbytes for v in written)
            peak = max(peak, live - reused + inner.get(kernel.at, 0.0))
            live -= sum(values[v].nbytes for v in dying.get(t, ()))
        return peak

    def _order(self) -> list[Kernel]:
        """The program's order, but what a merged kernel reads comes before it."""
        writer = {v: k for k in self.kernels for v in k.writes}
        done: set[int] = set()
        order: list[Kernel] = []
        for first in self.kernels:
            stack = [first]
            while stack:
                kernel = stack[-1]
                if id(kernel) in done:
                    stack.pop()
                    continue
                before = [writer[v] for v in kernel.reads if v in writer]
                waiting = [k for k in before if id(k) not in done and k is not kernel and k not in stack]
                if waiting:
                    stack += waiting
                else:
                    done.add(id(kernel))
                    order.append(stack.pop())
        return order


def _merge(host: Kernel, guest: Kernel) -> None:
    for v, nbytes in guest.reads.items():
        host.reads[v] = max(host.reads.get(v, 0.0), nbytes)
    host.writes.update(guest.writes)
    host.work += guest.work
    if guest.kind == "reduce":
        host.kind = "reduce"
