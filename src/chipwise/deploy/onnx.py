"""A traced JAX function as an ONNX model, with a batch of any size.

The function is traced with a symbolic batch, and its jaxpr translated. Constant expressions, such as batch
norm folded into a scale and a shift, are evaluated. Calls are inlined and loops of a fixed length unrolled.
Code that depends on the platform uses the default branch. `onnx_ops.py` has the operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from ..data.sources import Spec
from ..errors import RecipeError
from ..recipe.user_code import any_batch

OPSET = 18
_LONGEST_LOOP = 128  # iterations of a loop that are unrolled
_LARGEST_FOLD = 1 << 24  # elements of a computed constant, unless it is not larger than its operands
_INLINED = ("jaxpr", "call_jaxpr", "fun_jaxpr")


class Ref:
    """A value of the graph: `name`, `shape` (ints or expressions of the batch) and `dtype`.

    `lazy`: a broadcast that is not carried out; the tensor has ones where `shape` has larger sizes, and
    elementwise operations broadcast it.
    """

    def __init__(self, name: str, shape: tuple, dtype: Any, lazy: bool = False):
        self.name, self.shape, self.dtype, self.lazy = name, tuple(shape), np.dtype(dtype), lazy


class Graph:
    """The nodes of a model under construction. Operations call `node`, `name` and `dims`."""

    def __init__(self, batch: Any, first_input: str):
        self.batch, self._first = batch, first_input
        self.nodes: list[Any] = []
        self.constants: dict[str, np.ndarray] = {}
        self._known: dict[tuple, str] = {}
        self._alive: list[Any] = []
        self._count, self._size = 0, ""

    def node(self, op: str, *inputs: Any, **attributes: Any) -> str:
        """Adds a node and returns its output's name. Inputs are names, values or NumPy arrays."""
        return self.nodes_of(op, 1, *inputs, **attributes)[0]

    def nodes_of(self, op: str, count: int, *inputs: Any, **attributes: Any) -> list[str]:
        """Like `node`, for several outputs."""
        import onnx

        names = [value if isinstance(value, str) else self.name(value) for value in inputs]
        outs = [self._fresh(op.lower()) for _ in range(count)]
        self.nodes.append(onnx.helper.make_node(op, names, outs, **attributes))
        return outs

    def name(self, value: Any) -> str:
        """The name of a value for elementwise operations, maybe not yet broadcast."""
        if isinstance(value, Ref):
            return value.name
        array = np.asarray(value)
        key = (array.dtype.str, array.shape, array.tobytes()) if array.size < 64 else (id(value),)
        if key not in self._known:
            self._alive.append(value)  # keep it alive, or another array might get its id
            self._known[key] = self._fresh("c")
            self.constants[self._known[key]] = array
        return self._known[key]

    def whole(self, value: Any) -> str:
        """The name of a value in its full shape."""
        if isinstance(value, Ref) and value.lazy:
            return self.node("Expand", value, self.dims(value.shape))
        return self.name(value)

    def dims(self, shape: Sequence[Any]) -> Any:
        """A shape as an int64 vector: a constant, or computed from the batch at run time."""
        if all(isinstance(d, int) for d in shape):
            return np.asarray(shape, np.int64)
        return self.node("Concat", *[self._dim(d) for d in shape], axis=0)

    def _dim(self, dim: Any) -> Any:
        if isinstance(dim, int):
            return np.asarray([dim], np.int64)
        times = dim // self.batch
        rest = dim - times * self.batch if isinstance(times, int) else None
        if not isinstance(times, int) or not isinstance(rest, int):
            raise RecipeError("onnx-dimension", dimension=str(dim))
        if not self._size:
            shape = self.node("Shape", self._first)
            self._size = self.node("Gather", shape, np.asarray([0], np.int64), axis=0)
        out = self._size
        if times != 1:
            out = self.node("Mul", out, np.asarray([times], np.int64))
        return out if rest == 0 else self.node("Add", out, np.asarray([rest], np.int64))

    def _fresh(self, stem: str) -> str:
        self._count += 1
        return f"{stem}_{self._count}"


def to_onnx(function: Callable, inputs: Spec, outputs: Mapping[str, str], about: Mapping[str, str]) -> Any:
    """`function(inputs) -> outputs`, dicts of arrays `(batch, ...)`, as an `onnx.ModelProto`.

    *Arguments:* `inputs`: column to the shape and type of one example; `outputs`: the function's output names
    to the model's; `about`: texts to store as metadata. Raises `RecipeError` for an operation that cannot be
    translated.
    """
    import onnx

    (batch,) = jax.export.symbolic_shape("batch")
    shapes = {n: jax.ShapeDtypeStruct((batch, *s.shape), s.dtype) for n, s in inputs.items()}
    with any_batch("onnx"):
        traced, shape = jax.make_jaxpr(function, return_shape=True)(shapes)
    names = sorted(shapes)
    graph = Graph(batch, names[0])
    given = [Ref(n, shapes[n].shape, shapes[n].dtype) for n in names]
    results = _run(graph, traced.jaxpr, traced.consts, given)
    nodes = graph.nodes
    for value, name in zip(results, [outputs[n] for n in sorted(shape)], strict=True):
        nodes.append(onnx.helper.make_node("Identity", [graph.whole(value)], [name]))

    def info(name: str, s: Any) -> Any:
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(s.dtype))
        return onnx.helper.make_tensor_value_info(name, kind, ["batch", *s.shape[1:]])

    body = onnx.helper.make_graph(
        nodes,
        "chipwise",
        [info(n, shapes[n]) for n in names],
        [info(outputs[n], shape[n]) for n in sorted(shape)],
        [onnx.numpy_helper.from_array(np.asarray(a, order="C"), n) for n, a in graph.constants.items()],
    )
    model = onnx.helper.make_model(body, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=9)
    onnx.helper.set_model_props(model, dict(about))
    return model


def _run(graph: Graph, jaxpr: Any, consts: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """The outputs of `jaxpr`: `Ref`s, or NumPy arrays if they are constant."""
    from .onnx_ops import OPS

    known: dict[Any, Any] = dict(zip(jaxpr.constvars, map(_constant, consts), strict=True))
    known |= dict(zip(jaxpr.invars, given, strict=True))

    def read(atom: Any) -> Any:
        # A literal may be a Python number, which alone would be float64.
        return np.asarray(atom.val, atom.aval.dtype) if hasattr(atom, "val") else known[atom]

    for equation in _needed(jaxpr):
        name, values = equation.primitive.name, [read(v) for v in equation.invars]
        if name == "platform_index":
            results = [np.asarray(equation.params["platforms"].index(None), np.int32)]
        elif name == "scan":
            results = _scan(graph, equation, values)
        elif name == "cond":
            results = _branch(graph, equation, values)
        elif (inner := _inner(equation)) is not None:
            results = _run(graph, inner.jaxpr, inner.consts, values)
        elif _foldable(equation, values):
            folded = equation.primitive.bind(*map(jnp.asarray, values), **equation.params)
            results = [_constant(v) for v in (folded if equation.primitive.multiple_results else [folded])]
        elif name in OPS:
            results = OPS[name](graph, equation, *values)
            results = results if isinstance(results, list) else [results]
            shapes = [v.aval for v in equation.outvars]
            results = [
                Ref(m, a.shape, a.dtype) if isinstance(m, str) else m
                for m, a in zip(results, shapes, strict=True)
            ]
        else:
            raise RecipeError("onnx-operation", operation=name)
        known |= dict(zip(equation.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _needed(jaxpr: Any) -> list[Any]:
    """The equations on which the outputs depend."""
    wanted, kept = {v for v in jaxpr.outvars if not hasattr(v, "val")}, []
    for equation in reversed(jaxpr.eqns):
        if any(v in wanted for v in equation.outvars):
            kept.append(equation)
            wanted |= {v for v in equation.invars if not hasattr(v, "val")}
    return kept[::-1]


def _constant(value: Any) -> np.ndarray:
    if hasattr(value, "dtype") and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise RecipeError("onnx-operation", operation="random")
    return np.asarray(value)


def _inner(equation: Any) -> Any:
    """The closed jaxpr that a call runs; `None` if the equation is not a call."""
    for name in _INLINED:
        jaxpr = equation.params.get(name)
        if jaxpr is not None and equation.primitive.name != "while":
            return jaxpr if hasattr(jaxpr, "jaxpr") else ClosedJaxpr(jaxpr, ())
    return None


def _foldable(equation: Any, values: list[Any]) -> bool:
    shapes = [v.aval.shape for v in equation.outvars]
    if any(isinstance(v, Ref) for v in values) or not all(isinstance(d, int) for s in shapes for d in s):
        return False
    if equation.primitive.name == "dim_as_value":  # the batch, whose size only the run knows
        return False
    size = max(int(np.prod(s)) for s in shapes)
    return size <= max([_LARGEST_FOLD, *[v.size for v in values]])


def _branch(graph: Graph, equation: Any, values: list[Any]) -> list[Any]:
    index, *rest = values
    if isinstance(index, Ref):
        raise RecipeError("onnx-operation", operation="cond")
    branches = equation.params["branches"]
    taken = branches[min(max(int(index), 0), len(branches) - 1)]
    return _run(graph, taken.jaxpr, taken.consts, rest)


def _scan(graph: Graph, equation: Any, values: list[Any]) -> list[Any]:
    p = equation.params
    length, body = p["length"], p["jaxpr"]
    if not isinstance(length, int) or length > _LONGEST_LOOP:
        raise RecipeError("onnx-operation", operation="scan")
    constants, carried = _loop_inputs(p)
    fixed, carry = values[:constants], values[constants : constants + carried]
    over = values[constants + carried :]
    rows: list[list[Any]] = [[] for _ in range(length)]
    for turn in range(length)[:: -1 if p["reverse"] else 1]:
        each = [_row(graph, x, turn) for x in over]
        results = _run(graph, body.jaxpr, body.consts, [*fixed, *carry, *each])
        carry, rows[turn] = results[:carried], results[carried:]
    stacked = []
    for at, var in enumerate(equation.outvars[carried:]):
        axis = np.asarray([0], np.int64)
        parts = [graph.node("Unsqueeze", graph.whole(row[at]), axis) for row in rows]
        stacked.append(Ref(graph.node("Concat", *parts, axis=0), var.aval.shape, var.aval.dtype))
    return [*carry, *stacked]


def _loop_inputs(params: dict[str, Any]) -> tuple[int, int]:
    """The numbers of a loop's constants and of its carried arrays. JAX 0.11 has trees instead of numbers."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = map(list, params["ft_in"].unpack())
    return len(constants), len(carried)


def _row(graph: Graph, value: Any, turn: int) -> Any:
    if not isinstance(value, Ref):
        return value[turn]
    name = graph.node("Gather", graph.whole(value), np.asarray(turn, np.int64), axis=0)
    return Ref(name, value.shape[1:], value.dtype)
