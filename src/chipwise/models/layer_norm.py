"""Layer norm, and its gradient for GPUs."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from . import wide
from .chip_traits import on_gpu


class LayerNorm(nnx.Module):
    """Normalises each vector of `width` entries to mean 0 and deviation 1, times a scale, plus a
    shift.

    Statistics are float32, the result has the input's dtype. The variance is computed from centred
    values, since a difference of means of squares loses digits if the mean is large.
    """

    def __init__(self, width: int, *, epsilon: float):
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """`(..., width)` -> the same shape and dtype."""
        norm = by_rows_and_columns if on_gpu() else _norm
        return norm(x, self.scale[...], self.bias[...], self.epsilon)


def _norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    dtype = wide(x.dtype)
    shape = (1,) * (x.ndim - 1) + (-1,)
    y = x.astype(dtype)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + epsilon)
    scale, bias = (p.astype(dtype).reshape(shape) for p in (scale, bias))
    return (y * scale + bias).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def by_rows_and_columns(
    x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float
) -> jax.Array:
    """`_norm`, with a gradient of three kernels on GPUs: the moments of each row, the sums of each
    column, and the gradient of `x`. XLA's own writes a float32 array of the size of `x`, whose
    columns it then adds."""
    return _norm(x, scale, bias, epsilon)


def _forward(x, scale, bias, epsilon):
    return _norm(x, scale, bias, epsilon), (x, scale, bias)


def _backward(epsilon, kept, slope):
    x, scale, bias = kept
    dtype = wide(x.dtype)
    last = x.ndim - 1
    mean, squares = _moments(x.astype(dtype))
    # Behind a barrier, so that no kernel computes the moments again
    mean, rate = lax.optimization_barrier((mean, lax.rsqrt(squares / x.shape[-1] + epsilon)))
    y = (x.astype(dtype) - mean[..., None]) * rate[..., None]
    slope = slope.astype(dtype)
    d_scale, d_bias = (jnp.sum(part, axis=range(last)) for part in (slope * y, slope))
    slope = slope * scale.astype(dtype).reshape((1,) * last + (-1,))
    along = jnp.mean(slope * y, axis=-1, keepdims=True)
    d_x = (slope - jnp.mean(slope, axis=-1, keepdims=True) - y * along) * rate[..., None]
    return d_x.astype(x.dtype), d_scale.astype(scale.dtype), d_bias.astype(bias.dtype)


by_rows_and_columns.defvjp(_forward, _backward)


def _moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean of each row, and the sum of the squares of the differences from it, in one pass that
    joins the moments of parts (Chan, Golub & LeVeque, 1983). Nothing cancels if the mean is
    large."""

    def join(left, right):
        (mean, squares, n), (other, more, k) = left, right
        share = k / jnp.maximum(n + k, 1)
        far = other - mean
        return mean + far * share, squares + more + far * far * n * share, n + k

    zero = jnp.zeros((), x.dtype)
    operands = x, jnp.zeros_like(x), jnp.ones_like(x)
    mean, squares, _ = lax.reduce(operands, (zero, zero, zero), join, (x.ndim - 1,))
    return mean, squares
