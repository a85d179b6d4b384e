"""ViT-S/16, the vision transformer the size of ResNet-50: 22,050,664 parameters at 224×224.

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021, arXiv:2010.11929), in the small
size of Touvron et al. (2021, arXiv:2012.12877): a class token, learned positions, no dropout; the same
net as timm's `vit_small_patch16_224`. 4.6 billion multiply-adds an image forwards.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from .conv import conv
from .transformer import Block, Blocks, LayerNorm


class ViT(nnx.Module):
    """`(batch, image, image, 3)` normalised floats -> logits `(batch, classes)`.

    `image` must be a multiple of `patch`, both in pixels.
    """

    def __init__(
        self,
        *,
        image: int = 224,
        patch: int = 16,
        depth: int = 12,
        width: int = 384,
        heads: int = 6,
        classes: int = 1000,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.truncated_normal(0.02)
        self.patches = nnx.Conv(
            3,
            width,
            (patch, patch),
            strides=patch,
            padding="VALID",
            kernel_init=nnx.initializers.lecun_normal(),
            conv_general_dilated=conv,
            rngs=rngs,
        )
        self.token = nnx.Param(jnp.zeros((1, 1, width), jnp.float32))
        places = (image // patch) ** 2 + 1
        self.places = nnx.Param(init(rngs.params(), (1, places, width)))
        block = partial(Block, width, heads, causal=False, tanh=False, epsilon=1e-6)
        self.blocks = Blocks(depth, lambda rngs: block(init=init, out_init=init, rngs=rngs), rngs=rngs)
        self.norm = LayerNorm(width, epsilon=1e-6)
        # Zeros: the first loss is that of even odds, log(classes), whatever the rest does.
        self.classifier = nnx.Linear(width, classes, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.patches(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        token = jnp.broadcast_to(self.token[...], (x.shape[0], 1, x.shape[2]))
        x = jnp.concatenate([token, x], axis=1) + self.places[...]
        return self.classifier(self.norm(self.blocks(x)[:, 0]))
