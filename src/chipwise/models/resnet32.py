"""The pre-activation ResNet-32 for CIFAR-10 of TensorFlow's research models: 464,154 parameters.

Source: github.com/tensorflow/models, `research/resnet/resnet_model.py` (removed 2019), with He et al.,
"Identity Mappings in Deep Residual Networks" (2016, arXiv:1603.05027). Three stages of five units,
16, 32 and 64 channels, leaky ReLU of 0.1, batch norm with momentum 0.9 and epsilon 1e-3; shortcuts
have no parameters: 2x2 average pool, channels padded with zeros on both sides. 69 million multiply-adds per
image in the forward pass.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from .conv_layers import BatchNorm, conv_layer, global_mean


class Unit(nnx.Module):
    """Two 3x3 convolutions, each after batch norm and leaky ReLU, with a shortcut.

    `first`: the activation comes before the shortcut, as in the first unit of the first stage. `(b, h, w,
    c_in)` -> `(b, h/stride, w/stride, c_out)`.
    """

    def __init__(self, c_in: int, c_out: int, *, stride: int = 1, first: bool = False, rngs: nnx.Rngs):
        self.norm1 = BatchNorm(c_in, momentum=0.9, epsilon=1e-3)
        self.conv1 = conv_layer(c_in, c_out, stride=stride, rngs=rngs)
        self.norm2 = BatchNorm(c_out, momentum=0.9, epsilon=1e-3)
        self.conv2 = conv_layer(c_out, c_out, rngs=rngs)
        self.widen, self.stride, self.first = c_out - c_in, stride, first

    def __call__(self, x: jax.Array) -> jax.Array:
        active = _activate(self.norm1(x))
        y = self.conv2(_activate(self.norm2(self.conv1(active))))
        return y + self._shortcut(active if self.first else x)

    def _shortcut(self, x):
        if self.stride == 2:
            b, h, w, c = x.shape
            # The mean as a sum over a reshaped array: exact in gradient and fast on every chip.
            x = x.reshape(b, h // 2, 2, w // 2, 2, c)
            x = (x[:, :, 0, :, 0] + x[:, :, 0, :, 1] + x[:, :, 1, :, 0] + x[:, :, 1, :, 1]) * 0.25
        side = self.widen // 2
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (side, self.widen - side))) if self.widen else x


class ResNet32(nnx.Module):
    """`(batch, 32, 32, 3)` standardised floats -> logits `(batch, classes)`."""

    def __init__(self, *, units: int = 5, classes: int = 10, rngs: nnx.Rngs):
        self.stem = conv_layer(3, 16, rngs=rngs)
        self.units = nnx.List(
            [
                Unit(
                    c_in if unit == 0 else c_out,
                    c_out,
                    stride=2 if unit == 0 and stage > 0 else 1,
                    first=stage == unit == 0,
                    rngs=rngs,
                )
                for stage, (c_in, c_out) in enumerate([(16, 16), (16, 32), (32, 64)])
                for unit in range(units)
            ]
        )
        self.norm = BatchNorm(64, momentum=0.9, epsilon=1e-3)
        uniform = nnx.initializers.variance_scaling(1.0, "fan_in", "uniform")
        self.classifier = nnx.Linear(64, classes, kernel_init=uniform, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for unit in self.units:
            x = unit(x)
        x = _activate(self.norm(x))
        return self.classifier(global_mean(x))


def _activate(x):
    return jax.nn.leaky_relu(x, 0.1)
