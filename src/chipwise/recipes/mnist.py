"""MNIST with the small convolutional net of the Fenwicks tutorial (250,698 parameters).

    chipwise train mnist --data DIR

Pixels / 255, no augmentation, Adam with a rate of 1e-4 + 0.01 exp(-step / 2000). Expected test
accuracy after 24 epochs: 99.3 to 99.5 %, depending on the seed (`benchmarks/mnist_seeds.md`). The
archived Fenwicks runs reached 99.30 to 99.47 % on a TPU v2-8 and 99.23 to 99.45 % on a T4. Takes
minutes on two CPU cores.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from ..data.datasets import mnist
from ..interop.nnx import functional
from ..models.small import MnistNet
from ..recipe.optimizers import adam
from ..recipe.recipe import Recipe, Validated
from ..recipe.schedules import exponential
from .classification import classification


def recipe(data: str | None = None, bn_momentum: float = 0.99) -> Recipe:
    """*Arguments:* `bn_momentum`: the momentum of batch norm's running statistics, per step."""
    return Recipe(
        name="mnist",
        task=classification(
            functional(lambda rngs: MnistNet(momentum=bn_momentum, rngs=rngs)), mnist(data), _unit
        ),
        batch=256,
        replicas=8,
        duration="24ep",
        optimizer=adam(lr=exponential(0.01, 1 / math.e, decay="2000st", floor=1e-4)),
        validated=Validated(source="99.35 to 99.37 % over 5 seeds, benchmarks/mnist_seeds.md"),
    )


def _unit(images):
    return images.astype(jnp.float32)[..., None] / jnp.float32(255)
