"""CIFAR-10 with the pre-activation ResNet-32 of tensorflow/models research/resnet (464,154 parameters).

    chipwise train cifar10-resnet32 --data DIR

The schedule, by step, is that of the April 2018 comparison "TensorFlow Performance by GPU and TPU":
0.1, from step 40,000 0.01, from 60,000 0.001, from 80,000 0.0001; batch 128, momentum 0.9, L2 decay
2e-4 on kernels. Expected test accuracy: 92.5 % at about 80,000 steps (the README of research/resnet).
One replica, as there: batch-norm statistics over 128 examples, and one device is enough for it;
`--set replicas=8` spreads it over eight.
"""

from __future__ import annotations

from ..data.augment import reflect_crop
from ..data.datasets import cifar10
from ..interop.nnx import functional
from ..models.resnet32 import ResNet32
from ..recipe.optimizers import sgd
from ..recipe.recipe import Recipe, Validated
from ..recipe.schedules import piecewise
from .classification import by_image, classification


def recipe(data: str | None = None) -> Recipe:
    return Recipe(
        name="cifar10-resnet32",
        task=classification(
            functional(lambda rngs: ResNet32(rngs=rngs)),
            cifar10(data),
            by_image,
            augment=reflect_crop(pad=2, flip=0.5),
        ),
        batch=128,
        replicas=1,
        duration="90000st",
        optimizer=sgd(
            lr=piecewise({"0st": 0.1, "40000st": 0.01, "60000st": 0.001, "80000st": 0.0001}),
            momentum=0.9,
            weight_decay=2e-4,
            decay="kernels",
        ),
        validated=Validated(source="92.5 % at 80,000 steps, README of tensorflow/models research/resnet"),
    )
