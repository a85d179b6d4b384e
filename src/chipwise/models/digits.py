"""A small net for the 8x8 digits that come with scikit-learn: 9,048 parameters, seconds to train.

For first runs, tests and demonstrations: it has every part that makes training on several devices
delicate (batch norm, dropout, a convolution) and no download.
"""

import jax
from flax import nnx

from chipwise.models.layers import Classifier, ConvBN, DenseBN


class DigitsNet(nnx.Module):
    """`(batch, 8, 8, 1)` floats, usually pixels / 16 -> logits `(batch, 10)`."""

    def __init__(self, *, width: int = 8, dropout: float = 0.2, momentum: float = 0.9, rngs: nnx.Rngs):
        self.conv = ConvBN(1, width, kernel=3, stride=2, momentum=momentum, rngs=rngs)
        self.dense = DenseBN(16 * width, 8 * width, dropout=dropout, momentum=momentum, rngs=rngs)
        self.classifier = Classifier(8 * width, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.conv(x)
        return self.classifier(self.dense(x.reshape(x.shape[0], -1)))
