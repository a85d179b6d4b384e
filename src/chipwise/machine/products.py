"""Products in one form, and convolutions as products.

XLA's CPU back end passes a transposed factor on to its library for products, whose kernels then add
in an order that depends on the processor. If the factors are transposed first, behind a barrier
that keeps the compiler from undoing it, the order was the same on all x86-64 processors compared
(`benchmarks/portable.md`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from ..base import DeviceError

REFUSED = """
cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd
triangular_solve tridiagonal tridiagonal_solve ragged_dot_general symmetric_product fft
""".split()  # noqa: SIM905
"""JAX's operations that LAPACK or another library computes on a CPU, which chooses its kernels by
the processor, and products that have no other form."""


def apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with every product and convolution of it in the form that x86-64
    processors compute alike. Raises `DeviceError`, when it is traced, for `REFUSED` operations, and
    for float16, whose conversions differ without the processor's own."""

    @functools.wraps(function)
    def rewritten(*arguments: Any) -> Any:
        traced, returned = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = core.jaxpr_as_fun(_rewritten(traced))(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(returned), results)

    return rewritten


def _rewritten(value: Any) -> Any:
    """Rewrites the equations of a parameter of an equation, if it has any."""
    if isinstance(value, core.ClosedJaxpr):
        return value.replace(jaxpr=_rewritten(value.jaxpr))
    if isinstance(value, core.Jaxpr):
        return value.replace(eqns=[_equation(one) for one in value.eqns])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_rewritten, value))
    if type(value) in (tuple, list):
        return type(value)(map(_rewritten, value))
    return value


def _equation(one: Any) -> Any:
    name = one.primitive.name
    if name in REFUSED:
        raise DeviceError("portable-operation", operation=name)
    if any(getattr(each.aval, "dtype", None) == jnp.float16 for each in one.outvars):
        raise DeviceError("portable-float16", operation=name)
    empty = any(0 in each.aval.shape for each in (*one.invars, *one.outvars))
    if name not in _IN_ONE_FORM or empty:
        inner = {key: _rewritten(value) for key, value in one.params.items()}
        return one.replace(params=inner)
    function = functools.partial(_IN_ONE_FORM[name], **one.params)
    given = [jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype) for each in one.invars]
    (call,) = jax.make_jaxpr(jax.jit(function))(*given).eqns
    return call.replace(invars=one.invars, outvars=one.outvars)


def _product(left: Array, right: Array, *, dimension_numbers: Any, **how: Any) -> Array:
    """`lax.dot_general` with dimensions in the order batch, free, contracted on the left, and
    batch, contracted, free on the right, unless the right has the left's order."""
    (left_sum, right_sum), (left_batch, right_batch) = dimension_numbers
    left_free = _others(left.ndim, left_batch, left_sum)
    right_free = _others(right.ndim, right_batch, right_sum)
    batch, summed = len(left_batch), len(left_sum)
    left = _transposed(left, [*left_batch, *left_free, *left_sum])
    after = range(left.ndim - summed, left.ndim)
    alike = [*right_batch, *right_free, *right_sum]
    if alike == sorted(alike):
        right, contracted = _transposed(right, alike), range(right.ndim - summed, right.ndim)
    else:
        right = _transposed(right, [*right_batch, *right_sum, *right_free])
        contracted = range(batch, batch + summed)
    numbers = ((tuple(after), tuple(contracted)), (tuple(range(batch)), tuple(range(batch))))
    kept = {key: how[key] for key in ("precision", "preferred_element_type")}
    return lax.dot_general(left, right, numbers, **kept)


def _convolution(left: Array, right: Array, *, dimension_numbers: Any, **how: Any) -> Array:
    """`lax.conv_general_dilated` as a product of patches. XLA leaves some convolutions to Eigen,
    which cuts their sums by the sizes of the processor's caches."""
    images, kernels, result = dimension_numbers
    n = left.ndim
    left = lax.transpose(left, [images[0], *images[2:], images[1]])
    right = lax.transpose(right, [*kernels[2:], kernels[1], kernels[0]])
    patches = _patches(left, right.shape[:-2], how)
    batches, groups = how["batch_group_count"], how["feature_group_count"]
    count, window = batches * groups, patches.shape[-2]
    inputs, outputs = right.shape[-2:]
    rows = (patches.shape[0] // batches, *patches.shape[1 : n - 1])
    # The axes are: group of the batch, rows, positions in the window, group of channels, channels
    patches = patches.reshape(batches, *rows, window, groups, inputs)
    patches = jnp.moveaxis(patches, n + 1, 1).reshape(count, -1, window * inputs)
    kernel = right.reshape(window * inputs, count, outputs // count)
    out = _product(
        patches,
        kernel,
        dimension_numbers=(((2,), (0,)), ((0,), (1,))),
        precision=how["precision"],
        preferred_element_type=how["preferred_element_type"],
    )
    out = jnp.moveaxis(out.reshape(count, *rows, outputs // count), 0, -2)
    order = [result[0], *result[2:], result[1]]
    out = out.reshape(*rows, outputs)
    return lax.transpose(out, [order.index(axis) for axis in range(n)])


def _patches(images: Array, window: Sequence[int], how: dict[str, Any]) -> Array:
    """Returns what each output of a convolution sees of `images` `(N, ..., C)`, as
    `(N, ..., positions in the window, C)`."""
    edges = [
        (*pads, step - 1) for pads, step in zip(how["padding"], how["lhs_dilation"], strict=True)
    ]
    padded = lax.pad(images, jnp.zeros((), images.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
    steps, apart = how["window_strides"], how["rhs_dilation"]
    outputs = [
        (size - (width - 1) * gap - 1) // step + 1
        for size, width, gap, step in zip(padded.shape[1:-1], window, apart, steps, strict=True)
    ]
    # The fewer slices: one for each position in the window, or one for each output
    by_window = math.prod(window) <= math.prod(outputs)
    each, taken = (window, outputs) if by_window else (outputs, window)
    start_by, take_by = (apart, steps) if by_window else (steps, apart)
    slices = []
    for position in itertools.product(*map(range, each)):
        first = [at * by for at, by in zip(position, start_by, strict=True)]
        end = [at + (n - 1) * by + 1 for at, n, by in zip(first, taken, take_by, strict=True)]
        start, limit = (0, *first, 0), (len(images), *end, images.shape[-1])
        slices.append(lax.slice(padded, start, limit, (1, *take_by, 1)))
    if by_window:
        return jnp.stack(slices, -2)
    rows = [one.reshape(len(images), -1, images.shape[-1]) for one in slices]
    return jnp.stack(rows, 1).reshape(len(images), *outputs, -1, images.shape[-1])


_IN_ONE_FORM: dict[str, Callable[..., Array]] = {
    "dot_general": _product,
    "conv_general_dilated": _convolution,
}


def _transposed(array: Array, order: Sequence[int]) -> Array:
    # The barrier stands also where nothing is transposed here: the caller may have done it
    return lax.optimization_barrier(lax.transpose(array, order))


def _others(ndim: int, *those: Sequence[int]) -> list[int]:
    taken = {axis for axes in those for axis in axes}
    return [axis for axis in range(ndim) if axis not in taken]
