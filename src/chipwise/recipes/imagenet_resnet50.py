"""ImageNet-1k with ResNet-50 v1.5 (25,557,032 parameters), 90 epochs.

    chipwise train imagenet-resnet50 --data DIR
    chipwise train imagenet-resnet50 --synthetic      # random images: speed without a data set
    chipwise plan imagenet-resnet50 --on v3-8,h100    # no data needed

DIR is a packed folder of 256×256 images. Random crops of 8 to 100 % of the area are scaled to
224×224 and mirrored on the device. Evaluation uses the centre. Batch 1024 over 8 replicas:
batch-norm statistics over 128 images. Rate, warm-up, momentum and decay are as in Goyal et al.
(2017, arXiv:1706.02677), with decay only on kernels, half a cosine instead of three steps, and
label smoothing 0.1 (He et al., 2018, arXiv:1812.01187).

Expected top-1 accuracy: 76.3 to 76.7 %. Flax's example reached this in 100 epochs with the same
rate, warm-up and cosine, without smoothing (google/flax, examples/imagenet: 76.37 % in 4.4 h on a
TPU v3-8, 76.27 % in 4.3 h on 8 V100 in mixed precision, evaluation included). Goyal et al. report
76.3 % after 90 epochs of the stepped schedule. Both crop the original photographs. Crops of stored
256×256 images show a little less of them, and the effect has not been measured here.
"""

from __future__ import annotations

from ..augment import centre, imagenet as crop_and_flip
from ..base import invalid
from ..data.datasets import imagenet
from ..interop.nnx import functional
from ..models.resnet50 import ResNet50
from ..recipe.optimizers import sgd
from ..recipe.recipe import Recipe, Validated
from ..recipe.schedules import cosine, warmup
from .classification import by_channel, classification


def recipe(
    data: str | None = None,
    image: int = 224,
    width: int = 64,
    blocks: tuple = (3, 4, 6, 3),
    smoothing: float = 0.1,
) -> Recipe:
    """*Arguments:*

    - `image`: the pixels on a side of the net's input.
    - `width`: the channels of the first layer.
    - `blocks`: the bottlenecks in each stage, `3,4,23,3` for ResNet-101.
    - `smoothing`: label smoothing.
    """
    if not isinstance(blocks, tuple) or not all(isinstance(n, int) and n > 0 for n in blocks):
        raise invalid(
            "blocks-not-whole", "blocks", blocks, "whole numbers above 0, such as 3,4,6,3"
        )
    images = imagenet(data, image)
    normalise = by_channel(images.mean, images.std)
    net = functional(
        lambda rngs: ResNet50(blocks=blocks, width=width, classes=images.classes, rngs=rngs)
    )
    same = (image, width, blocks) == (224, 64, (3, 4, 6, 3))
    return Recipe(
        name="imagenet-resnet50" if same else "imagenet-resnet",
        task=classification(
            net,
            images,
            lambda stored: normalise(centre(stored, image)),
            augment=crop_and_flip(image),
            smoothing=smoothing,
        ),
        batch=1024,
        replicas=8,
        duration="90ep",
        optimizer=sgd(
            lr=warmup(cosine(0.4), "5ep"),
            momentum=0.9,
            nesterov=True,
            weight_decay=1e-4,
            decay="kernels",
        ),
        precision="bf16",
        validated=Validated(source="76.3 % after 90 epochs, Goyal et al. 2017, arXiv:1706.02677"),
    )
