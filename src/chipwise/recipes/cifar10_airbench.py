"""CIFAR-10 to 94 % with the fewest operations: airbench94 (1,971,640 parameters, 0.36 PFLOP per run).

    chipwise train cifar10-airbench --data DIR
    chipwise train cifar10-airbench --data DIR --set precision=f32                  # on a laptop
    chipwise plan cifar10-airbench --on t4,a100,v5e-1,v5e-8                           # no data needed

Source: Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (2024, arXiv:2404.00498). It has a frozen
first layer that whitens 2×2 patches, computed from the training data; convolutions that start as the
identity; alternating flips; 64 times the rate for the biases of batch norm; lookahead over a growing time;
label smoothing 0.2; six views of an image in evaluation.

The source sums its loss, so it divides its rate and multiplies its decay by the batch. On the mean gradient,
with kilostep = 1024 * (1 + 1 / (1 - 0.85)): rate 11.5 * 1024 / kilostep = 1.5, decay per step 0.0153 * 1024 /
kilostep = 0.002, which is 1.5 * 0.00133. The biases' decay is the same, at 64 times the rate.

Expected test accuracy: 94.01 %, the mean of 1,000 runs of the original (9.9 epochs, 3.8 s on an A100,
github.com/KellerJordan/cifar10-airbench). It computes batch norm's statistics over all 1,024 images of a
step, in float16; here each of 8 replicas has its own, over 128 images. A whole run has not been measured
here.
"""

from __future__ import annotations

from ..data.augment import alternating_flip, compose, reflect_crop
from ..data.datasets import cifar10
from ..interop.nnx import functional
from ..models.airnet import AirNet
from ..models.starts import whitening
from ..recipe.optimizers import sgd
from ..recipe.recipe import Recipe, Validated
from ..recipe.schedules import one_cycle, piecewise, polynomial
from ..recipe.wrappers import grouped, lookahead
from .classification import by_channel, classification, mirror_and_shifts

_BATCH, _MOMENTUM = 1024, 0.85
_KILOSTEP = 1024 * (1 + 1 / (1 - _MOMENTUM))
_RATE = round(11.5 * _BATCH / _KILOSTEP, 6)
_DECAY = round(0.0153 * 1024 / _KILOSTEP / _RATE, 6)


def recipe(
    data: str | None = None,
    width: int = 64,
    smoothing: float = 0.2,
    bn_momentum: float = 0.6,
    views: bool = True,
) -> Recipe:
    """*Arguments:* `width`: channels of the first group; `smoothing`: label smoothing; `bn_momentum`: of
    batch norm's running statistics, per step; `views`: whether evaluation averages six views of an image."""
    images = cifar10(data)
    inner = sgd(
        lr=one_cycle(_RATE, warmup="23%", start=round(0.2 * _RATE, 6), end=round(0.07 * _RATE, 6)),
        momentum=_MOMENTUM,
        nesterov=True,
        weight_decay=_DECAY,
    )
    groups = {
        "*/norm?/bias": {"lr": 64.0, "weight_decay": 1 / 64},
        "whiten/bias": {"lr": piecewise({"0st": 1.0, "3ep": 0.0})},
    }
    return Recipe(
        name="cifar10-airbench" if width == 64 else f"cifar10-airbench-{width}",
        task=classification(
            functional(lambda rngs: AirNet(width=width, momentum=bn_momentum, rngs=rngs)),
            images,
            by_channel(images.mean, images.std),
            augment=compose(alternating_flip(), reflect_crop(2)),
            smoothing=smoothing,
            views=mirror_and_shifts(1) if views else None,
            from_data=lambda source: {"whiten/kernel": whitening(source, images.mean, images.std)},
        ),
        batch=_BATCH,
        replicas=8,
        duration="9.9ep",
        optimizer=lookahead(
            grouped(inner, groups), every=5, pull=polynomial(1.0, round(1 - 0.95**5, 6), 3.0)
        ),
        precision="bf16",
        frozen=("whiten/kernel",),
        validated=Validated(source="94.01 %, mean of 1,000 runs, Jordan 2024, arXiv:2404.00498"),
    )
