"""ImageNet-1k with the vision transformer ViT-S/16 (22,050,664 parameters), 90 epochs.

    chipwise train vit-s16 --data DIR
    chipwise train vit-s16 --synthetic                # random images: speed without a data set
    chipwise plan vit-s16 --on v3-8,h100              # no data needed

DIR is a packed folder of 256×256 images. The recipe is that of Beyer et al., "Better plain ViT
baselines for ImageNet-1k" (2022, arXiv:2205.01580). The images are random crops scaled to 224×224,
mirrored, with two layers of RandAugment at magnitude 10 and mixup of 0.2 with one weight for a
batch (here for a replica's). The loss is softmax cross-entropy, and the batch is 1024. The
optimizer is Adam with a decoupled decay of 1e-4 a step at the peak (0.1 times a rate of 1e-3, as
AdamW counts), warm-up of 10,000 steps, half a cosine, clipping at a norm of 1, no dropout.

Expected top-1 accuracy: about 76.5 %, which the source reaches in 90 epochs with averaged tokens
and fixed positions (6 to 7 h on a TPU v3-8, google-research/big_vision, configs/vit_s16_i1k.py, and
80 % in 300 epochs). This recipe has a class token and learned positions, as timm's weights do. Its
accuracy has not been measured. In training, accuracy counts the class with the larger mixup weight.
"""

from __future__ import annotations

from ..augment import centre, compose, flip, mixup as mixing, rand_augment, resized_crop
from ..base import invalid
from ..data.datasets import imagenet
from ..interop.nnx import functional
from ..models.transformer import ViT, kernels
from ..recipe.optimizers import adamw
from ..recipe.recipe import Recipe, Validated
from ..recipe.schedules import cosine, warmup
from .classification import by_channel, classification


def recipe(
    data: str | None = None,
    image: int = 224,
    patch: int = 16,
    depth: int = 12,
    width: int = 384,
    heads: int = 6,
    magnitude: int = 10,
    mixup: float = 0.2,
) -> Recipe:
    """*Arguments:*

    - `image` and `patch`: the pixels on a side of the net's input and of a patch.
    - `depth`: the blocks.
    - `width`: the entries of a token.
    - `heads`: the heads of attention, a divisor of `width`.
    - `magnitude`: the magnitude of RandAugment, 0 for none.
    - `mixup`: the alpha of mixup, 0 for none.
    """
    if image % patch or width % heads:
        expected = "a patch that divides the image and heads that divide the width"
        raise invalid(
            "vit-sizes", "image, patch, width, heads", (image, patch, width, heads), expected
        )
    images = imagenet(data, image)
    normalise = by_channel([127.5], [127.5])  # to -1 to 1, as in the source

    def net(rngs):
        return ViT(
            image=image,
            patch=patch,
            depth=depth,
            width=width,
            heads=heads,
            classes=images.classes,
            rngs=rngs,
        )

    changes = (rand_augment(2, magnitude, space="original"),) if magnitude else ()
    same = (image, patch, depth, width, heads) == (224, 16, 12, 384, 6)
    return Recipe(
        name="vit-s16" if same else "vit",
        task=classification(
            functional(net),
            images,
            lambda stored: normalise(centre(stored, image)),
            augment=compose(resized_crop(image), flip(), *changes),
            mix=mixing(images.classes, mixup, each=False) if mixup else None,
        ),
        batch=1024,
        replicas=8,
        duration="90ep",
        optimizer=adamw(
            lr=warmup(cosine(1e-3), "10000st"), weight_decay=0.1, decay=kernels, clip=1.0
        ),
        precision="bf16",
        validated=Validated(source="76.5 % after 90 epochs, Beyer et al. 2022, arXiv:2205.01580"),
    )
