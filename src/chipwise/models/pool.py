"""Max pools whose gradient compares instead of scattering.

XLA's gradient of a max pool, `select_and_scatter`, is a scalar loop on the CPU. On GPUs it either
adds with atomics, in any order, or sorts all pixels of the batch to avoid that. Here the pixels of
a window are compared as arrays. Values and gradients have the bits of `lax.reduce_window`: among
equal pixels the first in row order gets the whole gradient. TPUs have an instruction for it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from .chip_traits import by_platform


@jax.custom_vjp
def max_pool_2x2(x: jax.Array) -> jax.Array:
    """Largest of each 2x2 window: `(batch, height, width, c)` -> `(batch, height/2, width/2, c)`.

    An odd last row or column is dropped. Reverse-mode gradients only.
    """
    return by_platform(x, cpu=_pool_cpu, default=_pool)


def _pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _scattered(pool):
    """XLA's gradient of `pool`, from its argument, its value and the value's gradient."""
    return lambda x, y, g: jax.vjp(pool, x)[1](g)[0]


def _four(x):
    """The windows' four pixels in row order, each `(batch, height/2, width/2, c)`."""
    b, h, w, c = x.shape
    x = x[:, : h // 2 * 2, : w // 2 * 2].reshape(b, h // 2, 2, w // 2, 2, c)
    return [x[:, :, i, :, j] for i in (0, 1) for j in (0, 1)]


def _pool_cpu(x):
    p = _four(x)
    return jnp.maximum(jnp.maximum(p[0], p[1]), jnp.maximum(p[2], p[3]))


def _gradient(x, y, g):
    free = jnp.ones(y.shape, bool)
    parts = []
    for pixel in _four(x):
        takes = (pixel == y) & free
        parts.append(jnp.where(takes, g, jnp.zeros_like(g)))
        free = free & ~takes
    (b, h, w, c), (_, oh, ow, _) = x.shape, y.shape
    rows = [jnp.stack(parts[i : i + 2], 3).reshape(b, oh, 2 * ow, c) for i in (0, 2)]
    dx = jnp.stack(rows, 2).reshape(b, 2 * oh, 2 * ow, c)
    return lax.pad(dx, jnp.zeros((), g.dtype), [(0, 0, 0), (0, h % 2, 0), (0, w % 2, 0), (0, 0, 0)])


def _forward(x):
    y = max_pool_2x2(x)
    return y, (x, y)


def _backward(residuals, g):
    x, y = residuals
    dx = by_platform(x, y, g, tpu=_scattered(_pool), default=_gradient)
    return (dx,)


max_pool_2x2.defvjp(_forward, _backward)


@jax.custom_vjp
def max_pool_3x3(x: jax.Array) -> jax.Array:
    """Largest of each 3x3 window, every second pixel: `(batch, h, w, c)` -> `(batch, (h+1)/2,
    (w+1)/2, c)`.

    Padding is lower than every value. Reverse-mode gradients only.
    """
    return _pool_3x3(x)


_AROUND = ((0, 0), (1, 1), (1, 1), (0, 0))


def _pool_3x3(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), _AROUND)


def _gradient_3x3(x, y, g):
    _, (_, oh, ow, _) = x.shape, y.shape
    padded = jnp.pad(x, _AROUND, constant_values=-jnp.inf)

    def pixel(i, j):  # pixel 3 i + j of every window
        return padded[:, i : i + 2 * oh - 1 : 2, j : j + 2 * ow - 1 : 2]

    places = [(i, j) for i in range(3) for j in range(3)]
    first = jnp.full(y.shape, -1, jnp.int8)  # stays so if all are NaN
    for i, j in reversed(places):
        first = jnp.where(pixel(i, j) == y, jnp.int8(3 * i + j), first)
    zero = jnp.zeros((), g.dtype)
    dx = jnp.zeros(padded.shape, g.dtype)
    for i, j in reversed(places):  # so that a pixel's windows are added in order
        part = jnp.where(first == 3 * i + j, g, jnp.zeros_like(g))
        behind = [padded.shape[1] - i - 2 * oh + 1, padded.shape[2] - j - 2 * ow + 1]
        dx = dx + lax.pad(part, zero, [(0, 0, 0), (i, behind[0], 1), (j, behind[1], 1), (0, 0, 0)])
    return dx[:, 1:-1, 1:-1]


def _forward_3x3(x):
    y = _pool_3x3(x)
    return y, (x, y)


def _backward_3x3(residuals, g):
    return (by_platform(*residuals, g, tpu=_scattered(_pool_3x3), default=_gradient_3x3),)


max_pool_3x3.defvjp(_forward_3x3, _backward_3x3)
