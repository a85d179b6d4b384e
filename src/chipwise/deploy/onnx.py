"""A JAX function as an ONNX model, with a batch of any size or of one: `jax2onnx` translates it.

The function is traced here, and jax2onnx traces its operations again, one by one. Otherwise it
would replace functions of `jax.numpy` in a user's code by some that need a batch of a known size.
Operations that jax2onnx 0.17.1 writes so that ONNX Runtime cannot run them are replaced by others.
Code that depends on the platform uses the default branch.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..base import RecipeError, library
from ..base.figures import one_line
from ..data.sources import Spec
from ..recipe.source import rows_of
from ..recipe.user_code import any_batch

_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_NO_CALLS = ("while", "scan", "reduce")
_LONGEST_UNROLLED = 128  # turns of a loop


@contextlib.contextmanager
def _own_functions() -> Iterator[None]:
    """A context after which JAX's functions are its own again: jax2onnx puts others in the place of
    some, such as `jnp.cumsum`, from its import on, for everybody in the process."""
    before = [(module, dict(vars(module))) for module in (jnp, lax, jax.nn)]
    try:
        yield
    finally:
        for module, functions in before:
            vars(module).update(functions)


def to_onnx(
    function: Callable,
    inputs: Spec,
    outputs: Mapping[str, str],
    about: Mapping[str, str],
    batch: int | None = None,
) -> Any:
    """Translates `function(inputs) -> outputs`, dicts of arrays `(batch, ...)`, to an
    `onnx.ModelProto`.

    *Arguments:* `inputs`: column to the shape and type of one example. `outputs`: the function's
    output names to the model's. `about`: texts to store as metadata. `batch`: see `Request`. Raises
    `RecipeError` for a function that cannot be translated.
    """
    with _own_functions():
        jax2onnx = library("jax2onnx", "export-library", extra="onnx")
    import onnx

    with any_batch("onnx", batch) as size:
        shapes = rows_of(dict(sorted(inputs.items())), size)
        traced = jax.make_jaxpr(function)(shapes)

    def again(*columns: jax.Array) -> tuple:
        return tuple(_run(traced.jaxpr, traced.consts, columns))

    named = {"input_names": list(shapes), "output_names": [outputs[n] for n in sorted(outputs)]}
    try:
        # It warns of its own deprecated calls, and its operations promote ranks and dtypes.
        with (
            warnings.catch_warnings(action="ignore"),
            jax.numpy_rank_promotion("allow"),
            jax.numpy_dtype_promotion("standard"),
            _own_functions(),
        ):
            model = jax2onnx.to_onnx(again, list(shapes.values()), model_name="chipwise", **named)
    except Exception as error:  # each operation raises what it likes
        raise RecipeError("onnx-operation", reason=one_line(error, 160)) from error
    onnx.helper.set_model_props(model, dict(about))
    return model


def _run(jaxpr: Any, consts: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """The outputs of `jaxpr`, by operations that jax2onnx translates."""
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    known |= dict(zip(jaxpr.invars, given, strict=True))

    def read(atom: Any) -> Any:
        # A literal may be a Python number, which alone would be float64.
        return np.asarray(atom.val, atom.aval.dtype) if hasattr(atom, "val") else known[atom]

    for equation in jaxpr.eqns:
        results = _result(equation, [read(v) for v in equation.invars])
        known |= dict(zip(equation.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _result(equation: Any, values: list[Any]) -> Sequence[Any]:
    name = equation.primitive.name
    params = equation.params
    if name == "platform_index":
        return [np.int32(params["platforms"].index(None))]
    if name == "cond" and not isinstance(values[0], jax.core.Tracer):
        branches = params["branches"]
        taken = branches[min(max(int(values[0]), 0), len(branches) - 1)]
        return _run(taken.jaxpr, taken.consts, values[1:])
    if name == "scan":
        return _scan(params, values)
    if name == "pad" and all(
        low >= 0 <= high and not inside for low, high, inside in params["padding_config"]
    ):
        return [_padded(values[0], values[1], [pair[:2] for pair in params["padding_config"]])]
    if name == "reduce_window_max" and (pooled := _max_pool(params, *values)) is not None:
        return [pooled]
    inner = next((params[n] for n in _CALLS if n in params and name not in _NO_CALLS), None)
    if inner is not None:
        return _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), values)
    made = equation.primitive.bind(*map(jnp.asarray, values), **params)
    return made if equation.primitive.multiple_results else [made]


def _scan(params: Mapping[str, Any], values: list[Any]) -> list[Any]:
    """The loop, unrolled if it is short: in jax2onnx's own, arrays of BERT's get a batch of another
    size."""
    body, (constants, carried) = params["jaxpr"], _loop_inputs(params)
    fixed = values[:constants]
    carry = values[constants : constants + carried]
    over = [jnp.asarray(v) for v in values[constants + carried :]]
    length = params["length"]
    turns = range(params["length"])

    def step(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        made = _run(body.jaxpr, body.consts, [*fixed, *carry, *row])
        return made[:carried], made[carried:]

    if length > _LONGEST_UNROLLED:
        carry = [jnp.asarray(v) for v in carry]
        last, stacked = lax.scan(step, carry, over, length, params["reverse"])
        return [*last, *stacked]
    rows: list[list[Any]] = [[] for _ in turns]
    for turn in reversed(turns) if params["reverse"] else turns:
        carry, rows[turn] = step(carry, [x[turn] for x in over])
    return [*carry, *(jnp.stack(each) for each in zip(*rows, strict=True))]


def _loop_inputs(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of a loop's constants and of its carried arrays. JAX 0.11 has trees instead of
    numbers."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = map(list, params["ft_in"].unpack())
    return len(constants), len(carried)


def _padded(x: jax.Array, value: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """`lax.pad`, which jax2onnx translates only for a batch of a known size."""
    for axis, (low, high) in enumerate(pairs):
        shapes = [(*x.shape[:axis], n, *x.shape[axis + 1 :]) for n in (low, high)]
        below, above = (lax.broadcast(jnp.asarray(value, x.dtype), shape) for shape in shapes)
        x = lax.concatenate([*([below] if low else []), x, *([above] if high else [])], axis)
    return x


def _max_pool(params: Mapping[str, Any], x: jax.Array) -> jax.Array | None:
    """A max pool over the axes between examples and channels, or behind both: jax2onnx pools over
    all axes of an array, which ONNX Runtime refuses for more than three. Its pool of Flax knows no
    explicit padding."""
    from flax import nnx

    window = params["window_dimensions"]
    rank = x.ndim
    if {*params["base_dilation"], *params["window_dilation"]} != {1} or rank < 3 or window[0] != 1:
        return None
    order = [0, *range(2, rank), 1] if window[1] == 1 != window[-1] else list(range(rank))
    if window[order[-1]] != 1:
        return None
    x = _padded(
        x.transpose(order), jnp.asarray(-jnp.inf, x.dtype), [params["padding"][i] for i in order]
    )
    size, strides = (
        [params[f"window_{n}"][i] for i in order[1:-1]] for n in ("dimensions", "strides")
    )
    y = nnx.max_pool(x, window_shape=tuple(size), strides=tuple(strides), padding="VALID")
    return y.transpose([order.index(i) for i in range(rank)])
