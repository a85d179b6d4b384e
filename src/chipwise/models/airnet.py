"""The net of airbench94, which trains to 94 % on CIFAR-10 with the fewest operations known.

Source: Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (2024, arXiv:2404.00498),
github.com/KellerJordan/cifar10-airbench, `airbench94.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from .conv import conv
from .conv_layers import BatchNorm, Classifier, conv_layer, pytorch_uniform
from .pool import max_pool_2x2
from .starts import dirac


class AirGroup(nnx.Module):
    """Two 3×3 convolutions, each with batch norm and GELU, and a 2×2 max pool after the first.

    `(b, h, w, c_in)` -> `(b, h/2, w/2, c_out)`.
    """

    def __init__(self, c_in: int, c_out: int, *, momentum: float, rngs: nnx.Rngs):
        layer = partial(conv_layer, kernel=3, kernel_init=dirac(pytorch_uniform), rngs=rngs)
        norm = partial(BatchNorm, momentum=momentum, epsilon=1e-12, scaled=False)
        self.conv1, self.conv2 = layer(c_in, c_out), layer(c_out, c_out)
        self.norm1, self.norm2 = norm(c_out), norm(c_out)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.gelu(self.norm1(max_pool_2x2(self.conv1(x))), approximate=False)
        return nnx.gelu(self.norm2(self.conv2(x)), approximate=False)


class AirNet(nnx.Module):
    """`(batch, 32, 32, 3)` normalised floats -> logits `(batch, classes)`.

    Replace `whiten/kernel` by `starts.whitening` of the data, and freeze it. `momentum`: of batch norm's
    running statistics; `width`: channels of the first group; the others have 4 times as many.
    """

    def __init__(self, *, width: int = 64, classes: int = 10, momentum: float = 0.6, rngs: nnx.Rngs):
        self.whiten = nnx.Conv(3, 24, (2, 2), padding="VALID", conv_general_dilated=conv, rngs=rngs)
        group = partial(AirGroup, momentum=momentum, rngs=rngs)
        self.group1 = group(24, width)
        self.group2 = group(width, 4 * width)
        self.group3 = group(4 * width, 4 * width)
        self.classifier = Classifier(4 * width, classes, weight=1 / 9, kernel_init=pytorch_uniform, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.gelu(self.whiten(x), approximate=False)
        x = self.group3(self.group2(self.group1(x)))
        return self.classifier(jnp.max(x, axis=(1, 2)))
