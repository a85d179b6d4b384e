"""Layers of the built-in models, as Flax NNX modules.

Images are `(batch, height, width, channels)`. Every layer computes in the dtype of its input and
parameters (cast both to bfloat16 for mixed precision). Batch-norm statistics are always float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ..base.annotations import as_annotated
from . import wide
from .conv import conv

#: PyTorch's default for convolutions and dense layers: uniform within ±1/sqrt(fan_in).
pytorch_uniform = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
#: Keras's default: uniform within ±sqrt(6 / (fan_in + fan_out)).
glorot_uniform = nnx.initializers.glorot_uniform()
#: Normal with variance 2 / (kernel area x output channels), not truncated.
he_normal = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


class BatchNorm(nnx.Module):
    """Batch normalisation over all axes but the last, which has `channels` entries.

    In training mode (`model.train()`) it normalises with the statistics of the batch and updates
    the running ones. In evaluation mode (`model.eval()`) it uses the running ones. The update is
    `running = momentum * running + (1 - momentum) * batch`, TensorFlow's definition of momentum.
    Without `scaled` it has only a shift.

    Not `nnx.BatchNorm`, which returns float32 for bfloat16 input because its statistics are
    float32. Here the result has the input's dtype. Scale and shift are folded into one multiply-add
    per element, whose gradient is also one pass.
    """

    def __init__(
        self, channels: int, *, momentum: float = 0.99, epsilon: float = 1e-3, scaled: bool = True
    ):
        self.scale: Any = nnx.Param(jnp.ones((channels,), jnp.float32)) if scaled else None
        self.bias = nnx.Param(jnp.zeros((channels,), jnp.float32))
        self.mean = nnx.BatchStat(jnp.zeros((channels,), jnp.float32))
        self.var = nnx.BatchStat(jnp.ones((channels,), jnp.float32))
        self.momentum = momentum
        self.epsilon = epsilon
        self.use_running_average = False

    def set_view(self, use_running_average: bool | None = None):
        """Lets `nnx.view`, `train()` and `eval()` switch the mode."""
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def __call__(self, x: jax.Array) -> jax.Array:
        """`(..., channels)` -> the same shape and dtype."""
        dtype = wide(x.dtype)
        if self.use_running_average:
            mean = self.mean[...].astype(dtype)
            var = self.var[...].astype(dtype)
        else:
            mean, var = _moments(x.astype(dtype))
            # Not `self.mean[...] = `, which compares shardings: for that of a traced array JAX
            # writes an error message, searching all operations so far: half of the time of tracing
            # a ResNet-50.
            self.mean.set_value(_blend(self.momentum, self.mean[...], mean))
            self.var.set_value(_blend(self.momentum, self.var[...], var))
        scale = lax.rsqrt(var + self.epsilon)
        if self.scale is not None:
            scale = self.scale[...].astype(dtype) * scale
        shift = self.bias[...].astype(dtype) - mean * scale
        shape = (1,) * (x.ndim - 1) + (-1,)
        return (x.astype(dtype) * scale.reshape(shape) + shift.reshape(shape)).astype(x.dtype)


def _moments(x):
    """Mean and (biased) variance of each channel, in one pass over `x`."""
    axes = tuple(range(x.ndim - 1))
    mean = jnp.mean(x, axes)
    square = jnp.mean(x * x, axes)
    return mean, jnp.maximum(square - mean * mean, 0)


def _blend(keep, running, batch):
    return lax.stop_gradient(keep * running + (1 - keep) * batch.astype(running.dtype))


class ConvBN(nnx.Module):
    """Convolution without bias, batch norm, ReLU: `(b, h, w, c_in)` -> `(b, h/stride, w/stride,
    c_out)`.

    `padding` "SAME" is TensorFlow's: for a stride of 2 the extra zero is at the end.
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
        self.conv = conv_layer(
            c_in, c_out, kernel=kernel, stride=stride, kernel_init=kernel_init, rngs=rngs
        )
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


@as_annotated
def conv_layer(
    c_in: int,
    c_out: int,
    *,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    padding: Any = "SAME",
    kernel_init: Callable = he_normal,
    rngs: nnx.Rngs,
) -> nnx.Conv:
    """A square convolution without bias, through `chipwise.models.conv`."""
    size = (kernel, kernel)
    return nnx.Conv(
        c_in,
        c_out,
        size,
        strides=stride,
        padding=padding,
        kernel_init=kernel_init,
        use_bias=False,
        conv_general_dilated=conv,
        feature_group_count=groups,
        rngs=rngs,
    )


@as_annotated
def global_mean(x: jax.Array) -> jax.Array:
    """The mean of each channel, `(b, h, w, c)` -> `(b, c)`, in float32: 49 terms of bfloat16 would
    lose three bits."""
    return jnp.mean(x.astype(wide(x.dtype)), axis=(1, 2)).astype(x.dtype)
