"""A traced function as one flat list of primitive operations: calls inlined, dead code gone, loops kept.

Everything is read from the jaxpr by structure, not by the names of the primitives that hold others: a
primitive whose one inner jaxpr takes what it takes and returns what it returns is a call (`jit`,
`checkpoint`, `custom_jvp`, `custom_vjp` and their successors). Nothing is compiled and no device is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from ..words.facts import Fact, fact
from .plans import unique

#: The names under which a lowering rule for an NVIDIA GPU may stand.
_SAME = {"cuda": ("cuda", "gpu"), "rocm": ("rocm", "gpu"), "gpu": ("gpu", "cuda")}


@dataclass(frozen=True)
class Value:
    """An array: its shape, its element type, its bytes."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: float

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass
class Node:
    """One primitive operation on values named by number. A loop has its body in `inner`, which runs `trips`
    times; the body's inputs and outputs are in the order of the node's (slices where it scans)."""

    primitive: str
    params: dict[str, Any]
    inputs: list[int]
    outputs: list[int]
    inner: Graph | None = None
    trips: float = 1.0
    has_effects: bool = False


@dataclass
class Graph:
    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    constants: set[int] = field(default_factory=set)
    notes: list[Fact] = field(default_factory=list)

    def add(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1


def flatten(function: Callable[..., Any], specs: Sequence[Any], platform: str) -> Graph:
    """The graph of `function(*specs)`, arrays or `ShapeDtypeStruct`s in any tree, lowered for `platform`."""
    closed = jax.make_jaxpr(function)(*specs)
    graph = Graph()
    graph.inputs = [graph.add(_value(v.aval, graph)) for v in closed.jaxpr.invars]
    graph.outputs = _inline(graph, closed.jaxpr, closed.consts, graph.inputs, platform)
    _prune(graph)
    graph.notes = list(unique(graph.notes))
    return graph


def _value(aval: Any, graph: Graph) -> Value:
    shape = []
    for n in getattr(aval, "shape", ()):
        try:
            shape.append(int(n))
        except Exception:  # a symbolic dimension; each version of JAX has its own error for it
            graph.notes.append(fact("trace-dynamic-shape", shape=str(aval)))
            shape.append(1)
    dtype = getattr(aval, "dtype", None)
    item = getattr(dtype, "itemsize", 0) if dtype is not None else 0
    return Value(tuple(shape), str(dtype), float(math.prod(shape) * item))


def _inline(
    graph: Graph, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[int], platform: str
) -> list[int]:
    """Adds the equations of `jaxpr` to `graph`; returns the numbers of its outputs."""
    env: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var in jaxpr.constvars:
        env[var] = graph.add(_value(var.aval, graph))
        graph.constants.add(env[var])
    known: dict[Any, int] = {}  # branch numbers that the platform decides

    def read(atom: Any) -> int:
        if hasattr(atom, "val"):  # a literal, part of the code
            return graph.add(Value((), str(getattr(atom.aval, "dtype", "")), 0.0))
        return env[atom]

    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        taken = [read(a) for a in eqn.invars]
        inner = _inner(params)
        if name == "platform_index":
            known[eqn.outvars[0]] = _branch(params["platforms"], platform)
        if name == "cond":
            which = _decided(eqn, known, platform)
            if which is None:
                which = max(
                    range(len(params["branches"])), key=lambda i: _weight(params["branches"][i].jaxpr)
                )
                graph.notes.append(fact("trace-branch-on-data"))
            branch = params["branches"][which]
            outputs = _inline(graph, branch.jaxpr, branch.consts, taken[1:], platform)
        elif name == "scan":
            outputs = _loop(graph, eqn, taken, params["jaxpr"], float(params["length"]), platform)
        elif name == "while":
            graph.notes.append(fact("trace-loop-on-data"))
            taken = taken[params["cond_nconsts"] :]
            outputs = _loop(graph, eqn, taken, params["body_jaxpr"], 1.0, platform)
        elif len(inner) == 1 and _is_call(inner[0], eqn):
            outputs = _inline(graph, inner[0].jaxpr, inner[0].consts, taken, platform)
        else:
            outputs = [graph.add(_value(v.aval, graph)) for v in eqn.outvars]
            effects = bool(eqn.effects)
            if "callback" in name or name in ("infeed", "outfeed", "debug_print"):
                graph.notes.append(fact("trace-host-callback", primitive=name))
                effects = True
            elif inner and not name.startswith(("scatter", "reduce", "select_and", "sort", "custom_lin")):
                graph.notes.append(fact("trace-kernel", primitive=name))
            graph.nodes.append(Node(name, params, taken, outputs, has_effects=effects))
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _inner(params: dict[str, Any]) -> list[Any]:
    """The closed jaxprs among an equation's parameters."""
    closed = []
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, "jaxpr") and hasattr(one, "consts"):
                closed.append(one)
            elif hasattr(one, "eqns") and hasattr(one, "invars"):
                closed.append(SimpleNamespace(jaxpr=one, consts=()))
    return closed


def _is_call(inner: Any, eqn: Any) -> bool:
    def shapes(atoms):
        return [getattr(a.aval, "shape", None) for a in atoms]

    return shapes(inner.jaxpr.invars) == shapes(eqn.invars) and shapes(inner.jaxpr.outvars) == shapes(
        eqn.outvars
    )


def _branch(platforms: Sequence[Any], platform: str) -> int:
    """Which entry of `platforms`, tuples of names or `None` for the rest, `platform` takes."""
    accepted = _SAME.get(platform, (platform,))
    for i, names in enumerate(platforms):
        if names is not None and any(name in names for name in accepted):
            return i
    return next((i for i, names in enumerate(platforms) if names is None), len(platforms) - 1)


def _decided(eqn: Any, known: dict[Any, int], platform: str) -> int | None:
    platforms = eqn.params.get("branches_platforms")
    if platforms is not None:
        return _branch(platforms, platform)
    index = eqn.invars[0]
    if hasattr(index, "val"):
        return int(np.clip(int(index.val), 0, len(eqn.params["branches"]) - 1))
    return known.get(index)


def _weight(jaxpr: Any) -> float:
    """A branch's rough cost: elements it makes, products a thousandfold."""
    total = 0.0
    for eqn in jaxpr.eqns:
        heavy = 1000.0 if eqn.primitive.name in ("dot_general", "conv_general_dilated") else 1.0
        total += heavy * sum(float(np.prod(getattr(v.aval, "shape", ()) or (1,))) for v in eqn.outvars)
        total += sum(_weight(inner.jaxpr) for inner in _inner(eqn.params))
    return total


def _loop(graph: Graph, eqn: Any, taken: list[int], closed: Any, trips: float, platform: str) -> list[int]:
    body = Graph()
    body.inputs = [body.add(_value(v.aval, body)) for v in closed.jaxpr.invars]
    body.outputs = _inline(body, closed.jaxpr, closed.consts, body.inputs, platform)
    graph.notes += body.notes
    outputs = [graph.add(_value(v.aval, graph)) for v in eqn.outvars]
    graph.nodes.append(Node(eqn.primitive.name, eqn.params, taken, outputs, body, trips))
    return outputs


def _read(graph: Graph, outputs: Sequence[int]) -> set[int]:
    """Every value that is read on the way to `outputs`."""
    read = set(outputs)
    for node in reversed(graph.nodes):
        if node.has_effects or any(v in read for v in node.outputs):
            read.update(node.inputs)
    return read


def _prune(graph: Graph) -> None:
    """Drops what no output needs, also inside loops."""
    read, kept = set(graph.outputs), []
    for node in reversed(graph.nodes):
        if node.has_effects or any(v in read for v in node.outputs):
            if node.inner is not None:
                _prune_loop(node, node.inner, read)
            read.update(node.inputs)
            kept.append(node)
    graph.nodes = kept[::-1]


def _prune_loop(node: Node, body: Graph, needed: set[int]) -> None:
    if node.primitive == "scan":
        consts, carries = node.params["num_consts"], node.params["num_carry"]
        keep = [v in needed for v in node.outputs]
    else:  # the condition may read any carry
        consts, carries = node.params["body_nconsts"], len(node.outputs)
        keep = [True] * carries
    while True:  # a carry that a kept output reads is itself kept
        outputs = [v for v, k in zip(body.outputs, keep, strict=True) if k]
        read = _read(body, outputs)
        more = [k or (i < carries and body.inputs[consts + i] in read) for i, k in enumerate(keep)]
        if more == keep:
            break
        keep = more
    body.outputs = outputs
    _prune(body)
    read = {v for n in body.nodes for v in n.inputs} | set(body.outputs)
    node.outputs = [v for v, k in zip(node.outputs, keep, strict=True) if k]
    taken = [(o, i) for o, i in zip(node.inputs, body.inputs, strict=True) if i in read]
    node.inputs, body.inputs = [o for o, _ in taken], [i for _, i in taken]
