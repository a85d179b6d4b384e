"""Two small convolutional nets with batch norm: for the 8x8 digits, and for MNIST."""

from functools import partial

import jax
from flax import nnx

from .conv_layers import Classifier, ConvBN, DenseBN


class DigitsNet(nnx.Module):
    """`(batch, 8, 8, 1)` floats, usually pixels / 16 -> logits `(batch, 10)`: 9,048 parameters.

    For first runs, tests and demonstrations on the built-in digits: it has the parts that make
    training on several devices difficult (batch norm, dropout, a convolution), and needs no
    download.
    """

    def __init__(
        self, *, width: int = 8, dropout: float = 0.2, momentum: float = 0.9, rngs: nnx.Rngs
    ):
        self.conv = ConvBN(1, width, kernel=3, stride=2, momentum=momentum, rngs=rngs)
        self.dense = DenseBN(16 * width, 8 * width, dropout=dropout, momentum=momentum, rngs=rngs)
        self.classifier = Classifier(8 * width, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.conv(x)
        return self.classifier(self.dense(x.reshape(x.shape[0], -1)))


class MnistNet(nnx.Module):
    """`(batch, 28, 28, 1)` floats, usually pixels / 255 -> logits `(batch, 10)`: 250,698
    parameters.

    The net of Fenwicks' first tutorial (github.com/fenwickslab/fenwicks), about 99.4 % after 24
    epochs: ConvBN 6 (3x3), ConvBN 12 (6x6, stride 2), ConvBN 24 (6x6, stride 2), dense 200 with
    batch norm and dropout 0.5, classifier of 10. It has Glorot initialisation, and batch norm with
    momentum 0.99 and epsilon 1e-3.
    """

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
