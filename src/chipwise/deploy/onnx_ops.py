"""Translates JAX operations to ONNX: each function takes the graph, the equation and its operands, and
returns names.

Operations that are not in `OPS`, or that ONNX cannot express, are refused by name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import RecipeError
from .onnx import Graph, Ref

_NAMES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def _ints(values: Any) -> np.ndarray:
    return np.asarray(values, np.int64)


def _refuse(equation: Any) -> RecipeError:
    return RecipeError("onnx-operation", operation=equation.primitive.name)


def _each(op: Callable) -> Callable:
    """An elementwise operation; the result stays unbroadcast if all operands are."""

    def run(graph: Graph, equation: Any, *values: Any) -> Any:
        refs = [v for v in values if isinstance(v, Ref)]
        lazy = all(v.lazy for v in refs) and all(np.ndim(v) == 0 for v in values if not isinstance(v, Ref))
        aval = equation.outvars[0].aval
        return Ref(op(graph, equation, *values), aval.shape, aval.dtype, lazy=lazy and bool(refs))

    return run


def _logic(name: str) -> Callable:
    def run(graph: Graph, equation: Any, *values: Any) -> str:
        boolean = equation.invars[0].aval.dtype == np.bool_
        return graph.node(name if boolean else f"Bitwise{name}", *values)

    return _each(run)


def _kind(dtype: Any) -> int:
    import onnx

    return onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def _one_like(equation: Any) -> np.ndarray:
    return np.asarray(1, equation.invars[0].aval.dtype)


def _select(graph: Graph, equation: Any, which: Any, *cases: Any) -> str:
    if len(cases) != 2 or equation.invars[0].aval.dtype != np.bool_:
        raise _refuse(equation)
    return graph.node("Where", which, cases[1], cases[0])


def _reshape(graph: Graph, equation: Any, x: Any) -> str:
    shape = equation.outvars[0].aval.shape
    if sum(not isinstance(d, int) for d in shape) == 1 and 0 not in shape:
        return graph.node("Reshape", graph.whole(x), _ints([d if isinstance(d, int) else -1 for d in shape]))
    return graph.node("Reshape", graph.whole(x), graph.dims(shape))


def _broadcast(graph: Graph, equation: Any, x: Any) -> Ref:
    """A lazy broadcast: a reshape with ones. Operations that need the full shape call `Graph.whole`."""
    aval, places = equation.outvars[0].aval, equation.params["broadcast_dimensions"]
    old = equation.invars[0].aval.shape
    if isinstance(x, Ref) and x.lazy:  # its tensor may have ones where the shape has more
        name = graph.whole(x)
    else:
        name = graph.name(x)
    ones = [1] * len(aval.shape)
    for place, dim in zip(places, old, strict=True):
        ones[place] = dim
    if tuple(ones) != tuple(old):
        added = [i for i in range(len(ones)) if i not in places]
        name = graph.node("Unsqueeze", name, _ints(added))
    return Ref(name, aval.shape, aval.dtype, lazy=tuple(ones) != tuple(aval.shape))


def _stack(graph: Graph, equation: Any, *values: Any) -> str:
    axis = equation.params.get("axis", equation.params.get("dimension", 0))
    names = [graph.node("Unsqueeze", graph.whole(v), _ints([axis])) for v in values]
    return graph.node("Concat", *names, axis=axis)


def _slice(graph: Graph, equation: Any, x: Any) -> str:
    p, shape = equation.params, equation.invars[0].aval.shape
    axes = [i for i, d in enumerate(shape) if (p["start_indices"][i], p["limit_indices"][i]) != (0, d)]
    strides = p["strides"] or (1,) * len(shape)
    axes = sorted({*axes, *(i for i, s in enumerate(strides) if s != 1)})
    ends = [p["limit_indices"][i] for i in axes]
    if not all(isinstance(e, int) for e in ends):
        raise _refuse(equation)
    starts = [p["start_indices"][i] for i in axes]
    steps = [strides[i] for i in axes]
    return graph.node("Slice", graph.whole(x), _ints(starts), _ints(ends), _ints(axes), _ints(steps))


def _dynamic_slice(graph: Graph, equation: Any, x: Any, *starts: Any) -> str:
    shape, sizes = equation.invars[0].aval.shape, equation.params["slice_sizes"]
    axes = [i for i, d in enumerate(shape) if sizes[i] != d]
    if any(isinstance(starts[i], Ref) or not isinstance(shape[i], int) for i in axes):
        raise _refuse(equation)
    first = [min(max(int(starts[i]), 0), shape[i] - sizes[i]) for i in axes]
    last = [f + sizes[i] for f, i in zip(first, axes, strict=True)]
    return graph.node("Slice", graph.whole(x), _ints(first), _ints(last), _ints(axes))


def _scatter(graph: Graph, equation: Any, x: Any, index: Any, update: Any) -> str:
    """Writes one window, as `x.at[..., 3].set(y)` does. Several windows are refused."""
    order, shape = equation.params["dimension_numbers"], equation.invars[0].aval.shape
    if isinstance(index, Ref) or index.ndim != 1:
        raise _refuse(equation)
    gone = order.inserted_window_dims
    sizes = list(equation.invars[2].aval.shape)
    for axis in gone:
        sizes.insert(axis, 1)
    starts = [0] * len(shape)
    for axis, start in zip(order.scatter_dims_to_operand_dims, index, strict=True):
        starts[axis] = int(start)
    outside = [i for i, d in enumerate(sizes) if d != shape[i] and not 0 <= starts[i] <= shape[i] - d]
    if outside:  # JAX drops such a window, or moves it, depending on the mode
        raise _refuse(equation)
    name = graph.whole(update)
    return _replace(
        graph, equation, x, graph.node("Unsqueeze", name, _ints(gone)) if gone else name, sizes, starts
    )


def _replace(graph: Graph, equation: Any, x: Any, window: str, sizes: Any, starts: Any) -> str:
    """`x` with `window`, of shape `sizes`, at `starts`. Positions must be known, as they are in an unrolled
    loop, since ONNX cuts at constants. Along each axis the window is put between what precedes and follows
    it."""
    shape = equation.invars[0].aval.shape
    axes = [i for i, d in enumerate(shape) if sizes[i] != d]
    if any(isinstance(starts[i], Ref) or not isinstance(shape[i], int) for i in axes):
        raise _refuse(equation)
    first = {i: min(max(int(starts[i]), 0), shape[i] - sizes[i]) for i in axes}
    for done, axis in enumerate(reversed(axes)):
        outer = axes[: len(axes) - 1 - done]  # along which the window is not yet complete
        low, high = [first[i] for i in outer], [first[i] + sizes[i] for i in outer]

        def rest(begin: int, end: int, outer=outer, low=low, high=high, axis=axis) -> list[str]:
            if begin == end:
                return []
            cut = (_ints([*low, begin]), _ints([*high, end]), _ints([*outer, axis]))
            return [graph.node("Slice", graph.whole(x), *cut)]

        end = first[axis] + sizes[axis]
        window = graph.node("Concat", *rest(0, first[axis]), window, *rest(end, shape[axis]), axis=axis)
    return window


def _split(graph: Graph, equation: Any, x: Any) -> list[str]:
    sizes, axis = equation.params["sizes"], equation.params["axis"]
    return graph.nodes_of("Split", len(sizes), graph.whole(x), _ints(sizes), axis=axis)


def _reverse(graph: Graph, equation: Any, x: Any) -> str:
    axes = list(equation.params["dimensions"])
    least = np.iinfo(np.int64).min
    return graph.node(
        "Slice", graph.whole(x), _ints([-1] * len(axes)), _ints([least] * len(axes)), _ints(axes),
        _ints([-1] * len(axes)),
    )  # fmt: skip


def _pad(graph: Graph, equation: Any, x: Any, value: Any) -> str:
    config = equation.params["padding_config"]
    if any(low < 0 or high < 0 or inside for low, high, inside in config):
        raise _refuse(equation)
    pads = _ints([low for low, _, _ in config] + [high for _, high, _ in config])
    return graph.node("Pad", graph.whole(x), pads, value)


def _reduce(name: str) -> Callable:
    def run(graph: Graph, equation: Any, x: Any) -> str:
        value = graph.whole(x)
        boolean = equation.invars[0].aval.dtype == np.bool_
        if boolean:
            value = graph.node("Cast", value, to=_kind(np.int32))
        out = graph.node(name, value, _ints(equation.params["axes"]), keepdims=0)
        return graph.node("Cast", out, to=_kind(np.bool_)) if boolean else out

    return run


def _arg(name: str) -> Callable:
    def run(graph: Graph, equation: Any, x: Any) -> str:
        (axis,) = equation.params["axes"]
        out = graph.node(name, graph.whole(x), axis=axis, keepdims=0)
        return graph.node("Cast", out, to=_kind(equation.params["index_dtype"]))

    return run


def _cumsum(graph: Graph, equation: Any, x: Any) -> str:
    p = equation.params
    return graph.node("CumSum", graph.whole(x), np.asarray(p["axis"], np.int64), reverse=int(p["reverse"]))


def _dot(graph: Graph, equation: Any, left: Any, right: Any) -> str:
    """MatMul if the contracted axes are in its places, else Einsum."""
    (lc, rc), (lb, rb) = equation.params["dimension_numbers"]
    a, b = equation.invars[0].aval, equation.invars[1].aval
    n, m = len(a.shape), len(b.shape)
    out = equation.outvars[0].aval
    if a.dtype != b.dtype or out.dtype != a.dtype:
        raise _refuse(equation)
    if not lb and len(lc) == 1 and m == 2 and lc[0] == n - 1:
        kernel = graph.whole(right)
        if rc[0] == 1:
            kernel = (
                graph.name(right.T)
                if not isinstance(right, Ref)
                else graph.node("Transpose", right, perm=[1, 0])
            )
        return graph.node("MatMul", graph.whole(left), kernel)
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    one, two = [""] * n, [""] * m
    for i, j in zip((*lb, *lc), (*rb, *rc), strict=True):
        one[i] = two[j] = next(letters)
    one = [c or next(letters) for c in one]
    two = [c or next(letters) for c in two]
    output = [one[i] for i in lb]
    output += [c for i, c in enumerate(one) if i not in (*lb, *lc)]
    output += [c for j, c in enumerate(two) if j not in (*rb, *rc)]
    text = f"{''.join(one)},{''.join(two)}->{''.join(output)}"
    return graph.node("Einsum", graph.whole(left), graph.whole(right), equation=text)


def _convolution(graph: Graph, equation: Any, x: Any, kernel: Any) -> str:
    p, order = equation.params, equation.params["dimension_numbers"]
    if any(d != 1 for d in p["lhs_dilation"]) or p["batch_group_count"] != 1:
        raise _refuse(equation)
    if isinstance(kernel, Ref):
        weights = graph.node("Transpose", graph.whole(kernel), perm=list(order.rhs_spec))
    else:
        weights = graph.name(np.ascontiguousarray(kernel.transpose(order.rhs_spec)))
    image = graph.node("Transpose", graph.whole(x), perm=list(order.lhs_spec))
    pads = [low for low, _ in p["padding"]] + [high for _, high in p["padding"]]
    if min(pads, default=0) < 0:
        raise _refuse(equation)
    out = graph.node(
        "Conv", image, weights, strides=list(p["window_strides"]), dilations=list(p["rhs_dilation"]),
        group=p["feature_group_count"], pads=pads,
    )  # fmt: skip
    return graph.node("Transpose", out, perm=np.argsort(order.out_spec).tolist())


def _pool(kind: str) -> Callable:
    """Pooling over all axes but two: batch and channels are the axes with a window of one."""

    def run(graph: Graph, equation: Any, x: Any) -> str:
        p = equation.params
        window, strides, padding = p["window_dimensions"], p["window_strides"], p["padding"]
        still = [i for i, w in enumerate(window) if (w, strides[i], tuple(padding[i])) == (1, 1, (0, 0))]
        if len(still) < 2 or any(d != 1 for d in p["base_dilation"]):
            raise _refuse(equation)
        outer = [still[0], still[-1]]
        inner = [i for i in range(len(window)) if i not in outer]
        order = [*outer, *inner]
        attributes: dict[str, Any] = {
            "kernel_shape": [window[i] for i in inner],
            "strides": [strides[i] for i in inner],
            "pads": [padding[i][0] for i in inner] + [padding[i][1] for i in inner],
        }
        image = graph.node("Transpose", graph.whole(x), perm=order)
        if kind == "max":
            out = graph.node(
                "MaxPool", image, dilations=[p["window_dilation"][i] for i in inner], **attributes
            )
        elif any(d != 1 for d in p["window_dilation"]):
            raise _refuse(equation)
        else:
            size = np.asarray(np.prod(attributes["kernel_shape"]), equation.invars[0].aval.dtype)
            mean = graph.node("AveragePool", image, count_include_pad=1, **attributes)
            out = graph.node("Mul", mean, size)
        return graph.node("Transpose", out, perm=np.argsort(order).tolist())

    return run


def _gather(graph: Graph, equation: Any, x: Any, indices: Any) -> str:
    """A gather of a window at a constant position, or of whole slices along one axis (a table look-up)."""
    p, shape = equation.params, equation.invars[0].aval.shape
    order, sizes = p["dimension_numbers"], p["slice_sizes"]
    axes = order.start_index_map
    if not isinstance(indices, Ref) and indices.ndim == 1:
        first = [min(max(int(i), 0), shape[a] - sizes[a]) for a, i in zip(axes, indices, strict=True)]
        last = [f + sizes[a] for a, f in zip(axes, first, strict=True)]
        out = graph.node("Slice", graph.whole(x), _ints(first), _ints(last), _ints(axes))
        gone = order.collapsed_slice_dims
        return graph.node("Squeeze", out, _ints(gone)) if gone else out
    if len(axes) != 1 or order.operand_batching_dims or order.collapsed_slice_dims != axes:
        raise _refuse(equation)
    (axis,) = axes
    if sizes[axis] != 1 or any(
        s != d for i, (s, d) in enumerate(zip(sizes, shape, strict=True)) if i != axis
    ):
        raise _refuse(equation)
    rank = len(equation.invars[1].aval.shape) - 1  # without the last axis of the indices, which has length 1
    # ONNX puts the axes of the indices at the gathered axis; JAX puts the others at offset_dims
    made = [*range(axis), *([None] * rank), *range(axis + 1, len(shape))]
    offset = iter(order.offset_dims)
    places = {i: next(offset) for i in range(len(shape)) if i != axis}
    if [places[i] for i in made if i is not None] != [at for at, i in enumerate(made) if i is not None]:
        raise _refuse(equation)
    if isinstance(indices, Ref):
        at = graph.node("Squeeze", graph.whole(indices), _ints([rank]))
        at = graph.node("Cast", at, to=_kind(np.int64))
    else:
        at = graph.name(indices[..., 0].astype(np.int64))
    return graph.node("Gather", graph.whole(x), at, axis=axis)


def _size(graph: Graph, equation: Any, *values: Any) -> str:
    size = graph.dims([equation.params["dim"]])
    return graph.node(
        "Cast", graph.node("Squeeze", size, _ints([0])), to=_kind(equation.outvars[0].aval.dtype)
    )


OPS: dict[str, Callable] = {
    **{name: _each(lambda g, e, *x, op=op: g.node(op, *x)) for name, op in _NAMES["elementwise"].items()},
    **{name: _logic(op) for name, op in _NAMES["logic"].items()},
    **{name: _reduce(op) for name, op in _NAMES["reduce"].items()},
    **{name: lambda graph, equation, x: x for name in _NAMES["same"]},
    "argmax": _arg("ArgMax"),
    "argmin": _arg("ArgMin"),
    "broadcast_in_dim": _broadcast,
    "clamp": _each(lambda g, e, low, x, high: g.node("Min", g.node("Max", x, low), high)),
    "concatenate": lambda g, e, *x: g.node("Concat", *map(g.whole, x), axis=e.params["dimension"]),
    "conv_general_dilated": _convolution,
    "convert_element_type": _each(lambda g, e, x: g.node("Cast", x, to=_kind(e.params["new_dtype"]))),
    "cumsum": _cumsum,
    "dim_as_value": _size,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": lambda g, e, x, update, *starts: _replace(
        g, e, x, g.whole(update), e.invars[1].aval.shape, starts
    ),
    "erfc": _each(lambda g, e, x: g.node("Sub", _one_like(e), g.node("Erf", x))),
    "expm1": _each(lambda g, e, x: g.node("Sub", g.node("Exp", x), _one_like(e))),
    "gather": _gather,
    "integer_pow": _each(lambda g, e, x: g.node("Pow", x, np.asarray(e.params["y"], e.invars[0].aval.dtype))),
    "is_finite": _each(lambda g, e, x: g.node("Not", g.node("Or", g.node("IsNaN", x), g.node("IsInf", x)))),
    "log1p": _each(lambda g, e, x: g.node("Log", g.node("Add", x, _one_like(e)))),
    "ne": _each(lambda g, e, *x: g.node("Not", g.node("Equal", *x))),
    "pad": _pad,
    "reduce_window_max": _pool("max"),
    "reduce_window_sum": _pool("sum"),
    "rem": _each(lambda g, e, *x: g.node("Mod", *x, fmod=1)),
    "reshape": _reshape,
    "expand_dims": _reshape,
    "squeeze": _reshape,
    "rev": _reverse,
    "rsqrt": _each(lambda g, e, x: g.node("Reciprocal", g.node("Sqrt", x))),
    "scatter": _scatter,
    "select_n": _each(_select),
    "slice": _slice,
    "split": _split,
    "square": _each(lambda g, e, x: g.node("Mul", x, x)),
    "stack": _stack,
    "transpose": lambda g, e, x: g.node("Transpose", g.whole(x), perm=list(e.params["permutation"])),
}
"""JAX's name of an operation to what writes it."""
