"""CIFAR-10 with David Page's nine-layer residual net (6,573,120 parameters).

    chipwise train cifar10-davidnet --data DIR
    chipwise train cifar10-davidnet --data DIR --set width=16 --set precision=f32    # on a laptop

Reflect-pad 4 and crop, flip and 8×8 cutout run on the device. Expected test accuracy after 24
epochs: 94 %. The median of 50 runs of the original is 94.08 %, and 35 of them reached at least
94 %. A run took 79 s on a V100 (https://github.com/davidcpage/cifar10-fast). The archived Fenwicks
notebooks, with another weight decay, took 64 s on a TPU v2-8 and 550 s on a T4. Weight decay is the
original's 5e-4. Fenwicks' 1.25e-4 acted eight times on a TPU because each of 8 cores added it
before the sum. All of these are of the lossless files. Of a JPEG copy (quality 75, halved chroma),
91.05 % were reached on an H100 (`benchmarks/gpu.md`). The original was not run on that copy.
"""

from __future__ import annotations

from ..augment import cifar
from ..data.datasets import cifar10
from ..interop.nnx import functional
from ..models.davidnet import DavidNet
from ..recipe.optimizers import sgd
from ..recipe.recipe import Recipe, Validated
from ..recipe.schedules import one_cycle
from .classification import by_channel, classification


def recipe(
    data: str | None = None, width: int = 64, smoothing: float = 0.0, bn_momentum: float = 0.9
) -> Recipe:
    """*Arguments:* `width`: the channels of the first layer (16 is a quarter of the net).
    `smoothing`: label smoothing. `bn_momentum`: the momentum of batch norm's running statistics,
    per step."""
    images = cifar10(data)
    return Recipe(
        name="cifar10-davidnet" if width == 64 else f"cifar10-davidnet-{width}",
        task=classification(
            functional(lambda rngs: DavidNet(width=width, momentum=bn_momentum, rngs=rngs)),
            images,
            by_channel(images.mean, images.std),
            augment=cifar(images.mean),
            smoothing=smoothing,
        ),
        batch=512,
        replicas=8,
        duration="24ep",
        optimizer=sgd(
            lr=one_cycle(0.4, warmup="5ep"), momentum=0.9, nesterov=True, weight_decay=5e-4
        ),
        precision="bf16",
        validated=Validated(
            source="94 % at 0.019 to 0.039, 92 % at 0.005 and too little at 0.155 in archived runs",
            forgetting=(0.019, 0.04),
        ),
    )
