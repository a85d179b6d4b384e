"""DavidNet, the ResNet-9 that trains to 94 % on CIFAR-10 in 24 epochs: 6,573,120 parameters.

Source: David C. Page, github.com/davidcpage/cifar10-fast, `dawn.py` (2018), as rebuilt for TPUs in
Fenwicks' second tutorial: 379 million multiply-adds per image in the forward pass.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from .conv_layers import Classifier, ConvBN, pytorch_uniform
from .pool import max_pool_2x2


class DavidBlock(nnx.Module):
    """ConvBN and a 2x2 max pool, then, if `residual`, two more ConvBN with a shortcut.

    `(b, h, w, c_in)` -> `(b, h/2, w/2, c_out)`.
    """

    def __init__(
        self, c_in: int, c_out: int, *, residual: bool, momentum: float = 0.9, rngs: nnx.Rngs
    ):
        conv_bn = partial(
            ConvBN, kernel_init=pytorch_uniform, momentum=momentum, epsilon=1e-5, rngs=rngs
        )
        self.conv = conv_bn(c_in, c_out)
        self.residual = nnx.List([conv_bn(c_out, c_out) for _ in range(2)] if residual else [])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = y = max_pool_2x2(self.conv(x))
        for layer in self.residual:
            y = layer(y)
        return x + y if self.residual else x


class DavidNet(nnx.Module):
    """`(batch, 32, 32, 3)` normalised floats -> logits `(batch, classes)`.

    `width` is the channels of the first layer, 64 in the original. The others have 2, 4 and 8 times
    as many. 16 gives a net of 1/16 the size and arithmetic for a CPU.
    """

    def __init__(
        self, *, width: int = 64, classes: int = 10, momentum: float = 0.9, rngs: nnx.Rngs
    ):
        self.prep = ConvBN(
            3, width, kernel_init=pytorch_uniform, momentum=momentum, epsilon=1e-5, rngs=rngs
        )
        self.block1 = DavidBlock(width, 2 * width, residual=True, momentum=momentum, rngs=rngs)
        self.block2 = DavidBlock(2 * width, 4 * width, residual=False, momentum=momentum, rngs=rngs)
        self.block3 = DavidBlock(4 * width, 8 * width, residual=True, momentum=momentum, rngs=rngs)
        self.classifier = Classifier(
            8 * width, classes, weight=0.125, kernel_init=pytorch_uniform, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.block3(self.block2(self.block1(self.prep(x))))
        return self.classifier(jnp.max(x, axis=(1, 2)))
