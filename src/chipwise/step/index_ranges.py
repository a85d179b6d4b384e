"""The columns of a batch that a traced loss uses as indices, with the sizes of the axes, and the
loss with other values where an index is outside.

An index reads from an array, or is compared with all numbers below a limit, as in `one_hot`. Not
seen are an index in a loop (`scan`, `while_loop`) or in a branch (`cond`), one that was clipped or
computed by more than a shift, one that an array is written at, and a comparison with numbers that
were made before the trace.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .program_flops import called_by

Ranges = dict[str, tuple[int, int]]
"""Column to the least and the largest value with which all its indices are inside."""

_COLUMNS, _MODEL, _OUTSIDE = 1, 2, 4
"""What a value is made of: columns, the model, what an index outside reads. 0: constants."""
_WHOLE = ("cond", "while", "scan", "shard_map", "pallas_call")
_SHAPES = ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose")
_PARTS = ("dynamic_slice", "gather", "pad", "rev", "slice")


class _Origin(NamedTuple):
    """A column, shifted, from which a value is. Without a column, the value counts to `shift`."""

    column: str | None
    shift: int
    axis: int = 0
    """The place among the indices of several axes."""


class _Value(NamedTuple):
    array: Any = None  # missing if it depends on columns and the model, or nothing is computed
    made_of: int = 0
    origins: frozenset[_Origin] = frozenset()


_Visit = Callable[[JaxprEqn, list[_Value]], list[_Value]]


def index_ranges(traced: ClosedJaxpr, names: Sequence[str]) -> Ranges:
    """The ranges of the columns that are indices. `names` are those of the last arguments."""
    ranges: Ranges = {}

    def visit(operation: JaxprEqn, read: list[_Value]) -> list[_Value]:
        at, lasts = _index(operation, read)
        for name, shift, axis in read[at].origins if lasts else ():
            if name is not None:
                least, most = ranges.get(name, (-shift, max(lasts) - shift))
                last = lasts[axis] if axis < len(lasts) else min(lasts)
                ranges[name] = max(least, -shift), min(most, last - shift)
        return [_Value(origins=_origins(operation, read)) for _ in operation.outvars]

    others = [_Value()] * (len(traced.jaxpr.invars) - len(names))
    columns = [_Value(origins=frozenset({_Origin(name, 0)})) for name in names]
    _walk(traced.jaxpr, traced.consts, others + columns, visit)
    return ranges


def with_outside(
    traced: ClosedJaxpr,
    columns: Sequence[Any],
    seeds: tuple[Any, Any, Any],
    tried: int,
    output: int = 0,
) -> jax.Array:
    """The output of `traced` for `columns` where the column at the place `tried` is an index
    outside. If two seeds give the same output, it does not depend on what they draw. Traceable.

    The model is not computed. Its values are drawn, in the same shapes.

    *Arguments:* `seeds`: of what an index outside reads, of the result of a comparison with one (0:
    it is equal to no number, as computed), and of what the model makes of columns.
    """
    number = itertools.count()

    def drawn(like: Any, seed: Any = 2) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), next(number))
        if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
            return jax.random.split(key, like.shape)
        if not jnp.issubdtype(like.dtype, jnp.floating):
            return jnp.full(like.shape, seed).astype(like.dtype)
        # Between 0 and 1, where most functions are finite
        values = jax.random.uniform(key, like.shape, jnp.float32, 0.1, 0.9)
        return values.astype(like.dtype)

    def visit(operation: JaxprEqn, read: list[_Value]) -> list[_Value]:
        made_of = 0
        for value in read:
            made_of |= value.made_of
        origins, variables = _origins(operation, read), operation.outvars
        at, lasts = _index(operation, read)
        index = read[at] if lasts and read[at].made_of == _COLUMNS else None
        if index is not None and all(o.column != str(tried) for o in index.origins):
            index = None
        if made_of != _COLUMNS | _MODEL:
            given = [
                drawn(variable.aval, seeds[2]) if value.array is None else value.array
                for value, variable in zip(read, operation.invars, strict=True)
            ]
            results = operation.primitive.bind(*given, **operation.params)
            results = results if operation.primitive.multiple_results else [results]
        elif index is None:
            return [_Value(None, made_of, origins) for _ in variables]
        else:
            results = [drawn(variable.aval, seeds[2]) for variable in variables]
        if index is not None:
            outside = _outside(operation, index.array, lasts, results[0].shape)
            other = drawn(results[0], seeds[operation.primitive.name == "eq"])
            results = [jnp.where(outside, other, results[0])]
            made_of |= _OUTSIDE
        return [_Value(result, made_of, origins) for result in results]

    others = [variable.aval for variable in traced.jaxpr.invars[: -len(columns)]]
    given = [_Value(drawn(aval), _MODEL) for aval in others]
    given += [
        _Value(column, _COLUMNS, frozenset({_Origin(str(i), 0)}))
        for i, column in enumerate(columns)
    ]
    made = _walk(traced.jaxpr, traced.consts, given, visit)[output].array
    return jnp.zeros(()) if made is None else made  # no index has to do with it


def _walk(jaxpr: Jaxpr, consts: Sequence[Any], given: list[_Value], visit: _Visit) -> list[_Value]:
    """Calls `visit` with each operation and its arguments, also in called functions."""
    variables = [*jaxpr.constvars, *jaxpr.invars]
    known = dict(zip(variables, [*map(_Value, consts), *given], strict=True))

    def of(atom: Any) -> _Value:
        return _Value(atom.val) if isinstance(atom, Literal) else known[atom]

    for operation in jaxpr.eqns:
        read, name = [of(atom) for atom in operation.invars], operation.primitive.name
        called = () if name in _WHOLE else tuple(called_by(operation))
        if name == "select_n" and _wraps(read):
            results = [read[1]]
        elif called:
            body = called[0][0]
            closed = (p for p in operation.params.values() if getattr(p, "jaxpr", None) is body)
            results = _walk(body, getattr(next(closed, None), "consts", ()), read, visit)
        else:
            results = visit(operation, read)
        known |= zip(operation.outvars, results, strict=True)
    return [of(atom) for atom in jaxpr.outvars]


def _wraps(cases: list[_Value]) -> bool:
    """Whether a `select_n` adds the axis' size to indices below 0, as JAX does before it reads."""
    _, index, wrapped = [
        {(o.column, o.axis): o.shift for o in case.origins if o.column is not None}
        for case in (cases if len(cases) == 3 else [_Value()] * 3)
    ]
    return bool(index) and index.keys() == wrapped.keys() and index != wrapped


def _origins(operation: JaxprEqn, read: list[_Value]) -> frozenset[_Origin]:
    """The columns whose values, shifted, are those of the operation's result."""
    name, params = operation.primitive.name, operation.params
    atoms: list[Any] = operation.invars
    if name == "iota":
        return frozenset({_Origin(None, params["shape"][params["dimension"]])})
    if name in _SHAPES:
        return read[0].origins
    if name in ("add", "sub"):
        value, by = read[0], atoms[1]
        if name == "add" and isinstance(atoms[0], Literal):
            value, by = read[1], atoms[0]
        if not isinstance(by, Literal) or np.asarray(by.val).dtype.kind not in "iu":
            return frozenset()
        step = int(by.val) if name == "add" else -int(by.val)
        return frozenset(o._replace(shift=o.shift + step) for o in _of_columns(value))
    if name == "concatenate":
        shapes = [atom.aval.shape for atom in atoms]
        apart = params["dimension"] == len(shapes[0]) - 1 and all(s[-1] == 1 for s in shapes)
        return frozenset(
            origin._replace(axis=i) if apart else origin
            for i, value in enumerate(read)
            for origin in _of_columns(value)
        )
    cases = read[1:] if name == "select_n" else read[:1] if name in _PARTS else []
    return frozenset(origin for value in cases for origin in _of_columns(value))


def _of_columns(value: _Value) -> list[_Origin]:
    return [origin for origin in value.origins if origin.column is not None]


def _index(operation: JaxprEqn, read: list[_Value]) -> tuple[int, list[int]]:
    """The place of the argument that is an index from columns, and the last number inside for each
    of its axes. No axes without such an argument."""
    name, lasts, at = operation.primitive.name, list[int](), 0
    if name == "gather":
        table: Any = operation.invars[0].aval
        params = operation.params
        axes, at = params["dimension_numbers"].start_index_map, 1
        if not _any_index(operation):
            lasts = [table.shape[axis] - params["slice_sizes"][axis] for axis in axes]
    elif name == "eq":
        counts = [[o.shift - 1 for o in value.origins if o.column is None] for value in read]
        at = 1 if counts[0] else 0
        lasts = counts[1 - at]
    return at, lasts if lasts and _of_columns(read[at]) else []


def _any_index(gather: JaxprEqn) -> bool:
    """Whether a `gather` says what an index outside reads: the last element, or a given value.

    A `fill_value` that JAX sets is none: NaN, or an end of the integers. `row[label]` in a `vmap`
    has the mode that clips too, but keeps the axes of a slice.
    """
    mode, fill, numbers = (gather.params[n] for n in ("mode", "fill_value", "dimension_numbers"))
    if mode == jax.lax.GatherScatterMode.CLIP:
        sizes = [gather.params["slice_sizes"][axis] for axis in numbers.start_index_map]
        return bool(numbers.collapsed_slice_dims) or 1 not in sizes
    if mode != jax.lax.GatherScatterMode.FILL_OR_DROP or fill is None:
        return False
    dtype = gather.outvars[0].aval.dtype  # type: ignore[attr-defined]
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return fill != (limits.min or limits.max)
    return jnp.issubdtype(dtype, jnp.floating) and not math.isnan(fill)


def _outside(operation: JaxprEqn, index: Any, lasts: list[int], shape: Any) -> jax.Array:
    """Where a result of `shape` is of an index outside."""
    index = index.astype(jnp.promote_types(index.dtype, jnp.int32))
    most = jnp.broadcast_to(jnp.asarray(lasts, index.dtype), index.shape)
    outside = (index < 0) | (index > most)
    if operation.primitive.name == "gather":
        numbers = operation.params["dimension_numbers"]
        outside = jnp.expand_dims(outside.any(-1), tuple(map(int, numbers.offset_dims)))
    return jnp.broadcast_to(outside, shape)
