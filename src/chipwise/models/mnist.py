"""The MNIST net of Fenwicks' first tutorial: 250,698 parameters, about 99.4 % after 24 epochs.

ConvBN 6 (3x3), ConvBN 12 (6x6, stride 2), ConvBN 24 (6x6, stride 2), dense 200 with batch norm and
dropout 0.5, classifier of 10; Glorot initialisation, batch norm with momentum 0.99 and epsilon 1e-3.
Source: github.com/fenwickslab/fenwicks, tutorial 1.
"""

from functools import partial

import jax
from flax import nnx

from chipwise.models.layers import Classifier, ConvBN, DenseBN


class MnistNet(nnx.Module):
    """`(batch, 28, 28, 1)` floats, usually pixels / 255 -> logits `(batch, 10)`."""

    def __init__(self, *, momentum: float = 0.99, rngs: nnx.Rngs):
        conv_bn = partial(ConvBN, momentum=momentum, rngs=rngs)
        self.conv1 = conv_bn(1, 6, kernel=3)
        self.conv2 = conv_bn(6, 12, kernel=6, stride=2)
        self.conv3 = conv_bn(12, 24, kernel=6, stride=2)
        self.dense = DenseBN(7 * 7 * 24, 200, dropout=0.5, momentum=momentum, rngs=rngs)
        self.classifier = Classifier(200, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.conv3(self.conv2(self.conv1(x)))
        return self.classifier(self.dense(x.reshape(x.shape[0], -1)))
