"""The layers that the built-in models share, as Flax NNX modules.

Images are `(batch, height, width, channels)`. Every layer computes in the dtype of its input and
parameters (cast both to bfloat16 for mixed precision); batch-norm statistics are float32 always.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from . import wide
from .conv import conv

#: PyTorch's default for convolutions and dense layers: uniform within ±1/sqrt(fan_in).
pytorch_uniform = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
#: Keras's default: uniform within ±sqrt(6 / (fan_in + fan_out)).
glorot_uniform = nnx.initializers.glorot_uniform()


class BatchNorm(nnx.Module):
    """Batch normalisation over all axes but the last, of `channels` entries.

    In training mode (`model.train()`) it uses and updates the statistics of the batch it is given, in
    evaluation mode (`model.eval()`) the running ones: `running = momentum * running + (1 - momentum) *
    batch`, the TensorFlow sense of momentum.

    Not `nnx.BatchNorm`, which returns float32 for bfloat16 input because its statistics are float32.
    Here they are float32 and the result has the input's dtype. The scale and shift are folded into one
    multiply-add per element, of which the gradient too is one pass.
    """

    def __init__(self, channels: int, *, momentum: float = 0.99, epsilon: float = 1e-3):
        self.scale = nnx.Param(jnp.ones((channels,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((channels,), jnp.float32))
        self.mean = nnx.BatchStat(jnp.zeros((channels,), jnp.float32))
        self.var = nnx.BatchStat(jnp.ones((channels,), jnp.float32))
        self.momentum, self.epsilon = momentum, epsilon
        self.use_running_average = False

    def set_view(self, use_running_average: bool | None = None):
        """Lets `nnx.view`, `train()` and `eval()` switch the mode."""
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def __call__(self, x: jax.Array) -> jax.Array:
        """`(..., channels)` -> the same shape and dtype."""
        dtype = wide(x.dtype)
        if self.use_running_average:
            mean, var = self.mean[...].astype(dtype), self.var[...].astype(dtype)
        else:
            mean, var = _moments(x.astype(dtype))
            self.mean[...] = _blend(self.momentum, self.mean[...], mean)
            self.var[...] = _blend(self.momentum, self.var[...], var)
        scale = self.scale[...].astype(dtype) * lax.rsqrt(var + self.epsilon)
        shift = self.bias[...].astype(dtype) - mean * scale
        shape = (1,) * (x.ndim - 1) + (-1,)
        return (x.astype(dtype) * scale.reshape(shape) + shift.reshape(shape)).astype(x.dtype)


def _moments(x):
    """Mean and (biased) variance of each channel, both sums taken in one pass over `x`."""
    axes = tuple(range(x.ndim - 1))
    mean, square = jnp.mean(x, axes), jnp.mean(x * x, axes)
    return mean, jnp.maximum(square - mean * mean, 0)


def _blend(keep, running, batch):
    return lax.stop_gradient(keep * running + (1 - keep) * batch.astype(running.dtype))


class ConvBN(nnx.Module):
    """Convolution without bias, batch norm, ReLU: `(b, h, w, c_in)` -> `(b, h/stride, w/stride, c_out)`.

    `padding` is "SAME" in TensorFlow's sense: for a stride of 2 the extra zero goes behind.
    """

    def __init__(
        self,
        c_in: int,
        c_out: int,
        *,
        kernel: int = 3,
        stride: int = 1,
        kernel_init: Callable = glorot_uniform,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        rngs: nnx.Rngs,
    ):
        self.conv = conv_layer(c_in, c_out, kernel=kernel, stride=stride, kernel_init=kernel_init, rngs=rngs)
        self.norm = BatchNorm(c_out, momentum=momentum, epsilon=epsilon)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.norm(self.conv(x)))


class DenseBN(nnx.Module):
    """Dense layer without bias, batch norm, ReLU, dropout: `(b, c_in)` -> `(b, c_out)`."""

    def __init__(
        self,
        c_in: int,
        c_out: int,
        *,
        dropout: float = 0.0,
        kernel_init: Callable = glorot_uniform,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        rngs: nnx.Rngs,
    ):
        self.dense = nnx.Linear(c_in, c_out, use_bias=False, kernel_init=kernel_init, rngs=rngs)
        self.norm = BatchNorm(c_out, momentum=momentum, epsilon=epsilon)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(nnx.relu(self.norm(self.dense(x))))


class Classifier(nnx.Module):
    """Dense layer without bias, times a constant `weight`: `(b, c_in)` -> logits `(b, classes)`."""

    def __init__(
        self,
        c_in: int,
        classes: int,
        *,
        weight: float = 1.0,
        kernel_init: Callable = glorot_uniform,
        rngs: nnx.Rngs,
    ):
        self.dense = nnx.Linear(c_in, classes, use_bias=False, kernel_init=kernel_init, rngs=rngs)
        self.weight = weight

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x) * self.weight


def conv_layer(
    c_in: int, c_out: int, *, kernel: int = 3, stride: int = 1, kernel_init: Callable, rngs: nnx.Rngs
) -> nnx.Conv:
    """A square convolution without bias, through `chipwise.models.conv`."""
    return nnx.Conv(
        c_in,
        c_out,
        (kernel, kernel),
        strides=stride,
        padding="SAME",
        use_bias=False,
        kernel_init=kernel_init,
        conv_general_dilated=conv,
        rngs=rngs,
    )


# XLA's CPU back end runs `select_and_scatter`, the gradient of a max pool, as a scalar loop. There the
# four pixels of a window are compared as four arrays instead; values and gradients are bitwise those of
# `lax.reduce_window`: among equal pixels the first in row order takes the whole gradient.
@jax.custom_vjp
def max_pool_2x2(x: jax.Array) -> jax.Array:
    """Largest of each 2x2 window: `(batch, height, width, c)` -> `(batch, height/2, width/2, c)`.

    An odd last row or column is dropped. Reverse-mode gradients only.
    """
    return lax.platform_dependent(x, cpu=_pool_cpu, default=_pool)


def _pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _four(x):
    """The windows' four pixels in row order, each `(batch, height/2, width/2, c)`."""
    b, h, w, c = x.shape
    x = x[:, : h // 2 * 2, : w // 2 * 2].reshape(b, h // 2, 2, w // 2, 2, c)
    return [x[:, :, i, :, j] for i in (0, 1) for j in (0, 1)]


def _pool_cpu(x):
    p = _four(x)
    return jnp.maximum(jnp.maximum(p[0], p[1]), jnp.maximum(p[2], p[3]))


def _gradient_cpu(x, y, g):
    free, parts = jnp.ones(y.shape, bool), []
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
    dx = lax.platform_dependent(
        x, y, g, cpu=_gradient_cpu, default=lambda x, y, g: jax.vjp(_pool, x)[1](g)[0]
    )
    return (dx,)


max_pool_2x2.defvjp(_forward, _backward)
