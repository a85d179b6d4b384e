"""ResNet-50 v1.5: 25,557,032 parameters, 4.1 billion multiply-adds per image in the forward pass.

Source: He et al., "Deep Residual Learning" (2016, arXiv:1512.03385), with the stride on the 3x3
convolution of a bottleneck instead of its first 1x1, as in torchvision, MLPerf and Goyal et al.
(2017, arXiv:1706.02677). Initial values are those of Goyal et al.: a zero scale in the last batch
norm of each bottleneck, so that each block starts as its shortcut, and 0.01 for the classifier.
Padding is symmetric, as in PyTorch, so that its weights give the same outputs.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from .conv_layers import BatchNorm, conv_layer, global_mean
from .pool import max_pool_3x3


class Bottleneck(nnx.Module):
    """1x1 to `middle` channels, 3x3 with the stride, 1x1 to `4 * middle`, with a shortcut.

    The shortcut is a 1x1 convolution if the shape changes. `(b, h, w, c_in)` -> `(b,
    ceil(h/stride), ceil(w/stride), 4 * middle)`.
    """

    def __init__(self, c_in: int, middle: int, *, stride: int, rngs: nnx.Rngs):
        c_out = 4 * middle
        self.conv1 = _conv(c_in, middle, 1, 1, rngs)
        self.norm1 = _norm(middle)
        self.conv2 = _conv(middle, middle, 3, stride, rngs)
        self.norm2 = _norm(middle)
        self.conv3 = _conv(middle, c_out, 1, 1, rngs)
        self.norm3 = _norm(c_out)
        self.norm3.scale[...] = jnp.zeros_like(self.norm3.scale[...])
        self.project = stride != 1 or c_in != c_out
        if self.project:
            self.conv0 = _conv(c_in, c_out, 1, stride, rngs)
            self.norm0 = _norm(c_out)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = nnx.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return nnx.relu(y + (self.norm0(self.conv0(x)) if self.project else x))


class ResNet50(nnx.Module):
    """`(batch, height, width, 3)` normalised floats -> logits `(batch, classes)`.

    `width` is the channels of the first layer, 64 in the original. `blocks` are the bottlenecks of
    each stage (3, 4, 23, 3 is ResNet-101).
    """

    def __init__(
        self,
        *,
        blocks: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
        classes: int = 1000,
        rngs: nnx.Rngs,
    ):
        self.stem = _conv(3, width, 7, 2, rngs)
        self.norm = _norm(width)
        bottlenecks = []
        channels = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                bottlenecks.append(Bottleneck(channels, width << stage, stride=stride, rngs=rngs))
                channels = 4 * (width << stage)
        self.blocks = nnx.List(bottlenecks)
        normal = nnx.initializers.normal(0.01)
        self.classifier = nnx.Linear(channels, classes, kernel_init=normal, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(x)))
        x = max_pool_3x3(x)
        for block in self.blocks:
            x = block(x)
        return self.classifier(global_mean(x))


def _conv(c_in: int, c_out: int, kernel: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    pads = ((kernel // 2, kernel // 2),) * 2
    return conv_layer(c_in, c_out, kernel=kernel, stride=stride, padding=pads, rngs=rngs)


def _norm(channels: int) -> BatchNorm:
    return BatchNorm(channels, momentum=0.9, epsilon=1e-5)
