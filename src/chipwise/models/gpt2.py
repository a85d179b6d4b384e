"""GPT-2 small: 124,439,808 parameters, the table of words used at both ends.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), without its
dropout, which single-epoch training leaves out (as in github.com/karpathy/nanoGPT). Initial values:
normal of 0.02, of `0.02 / sqrt(2 * depth)` for the layers that add to the residual stream.
"""

from functools import partial

import jax
from flax import nnx

from .tied import embed
from .transformer import Block, Blocks, LayerNorm


class GPT2(nnx.Module):
    """Tokens `(batch, t)`, whole numbers, `t <= context` -> final states `(batch, t, width)`.

    The logits are `states @ words.T`; `chipwise.models.tied.next_token_loss` takes the table,
    `params["words"]["embedding"]`, and never has them all at once.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 50_257,
        context: int = 1024,
        depth: int = 12,
        width: int = 768,
        heads: int = 12,
        rngs: nnx.Rngs,
    ):
        normal = nnx.initializers.normal
        self.words = Table(vocabulary, width, rngs=rngs)
        self.places = Table(context, width, rngs=rngs)
        block = partial(Block, width, heads, causal=True, tanh=True, epsilon=1e-5)
        out = normal(0.02 * (2 * depth) ** -0.5)
        self.blocks = Blocks(depth, lambda rngs: block(init=normal(0.02), out_init=out, rngs=rngs), rngs=rngs)
        self.norm = LayerNorm(width, epsilon=1e-5)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = embed(self.words.embedding[...], tokens)
        x = x + self.places.embedding[...][None, : tokens.shape[1]]
        return self.norm(self.blocks(x))


class Table(nnx.Module):
    """A vector of `width` entries for each of `count` things."""

    def __init__(self, count: int, width: int, *, rngs: nnx.Rngs):
        self.embedding = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (count, width)))
