"""The decoder that MaxText trained in 2023, as a recipe whose replica a group of chips computes.

    chipwise plan benchmarks/plan_accuracy/recipes/maxtext.py:decoder --set shards=256 --on v5e-256

Source: google/maxtext@76bd53b0f, `MaxText/layers/models.py` and `MaxText/configs/base.yml`: blocks whose
attention and layers read one norm, rotary positions, heads of 256 entries, ReLU, no biases, and one table for
words and logits. Sizes are in the scripts of its folder `configs`, multiplied by the power of 2 of each size
in `pyconfig.get_individual_scales`.
"""

from functools import partial

import jax
from flax import nnx

import chipwise as cw
from chipwise.models.attention import attention
from chipwise.models.llama import RMSNorm, by_heads, joined, rotated
from chipwise.models.tied import embed
from chipwise.models.transformer import Blocks, Embedding, kernels
from chipwise.recipes.tokens import language

HEAD = 256


def decoder(
    depth=32, width=5120, heads=32, hidden=32_768, context=2048, plain=False, remat="nothing_saveable"
):
    """*Arguments:* `heads`, of 256 entries whatever the `width`; `plain`: attention holds its weights, as
    before fused kernels; `remat`: what a block saves for its gradient, a policy of `cw.models.remat`."""
    net = partial(Decoder, depth, width, heads, hidden, plain, remat)
    return cw.Recipe(
        name="maxtext", task=language(net, "words", None, context, Decoder.VOCABULARY, (10_000_000, 1024)),
        batch=256, replicas=1, shards=8, duration="10000st", precision="bf16",
        optimizer=cw.adamw(lr=cw.schedules.cosine(3e-4), b2=0.95, weight_decay=0.1, decay=kernels, clip=1.0),
    )  # fmt: skip


class ParallelBlock(nnx.Module):
    """`x + attention(norm(x)) + down(relu(up(norm(x))))`."""

    def __init__(self, width, heads, hidden, plain, rngs):
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        inner = heads * HEAD
        self.norm = RMSNorm(width, epsilon=1e-6)
        self.q, self.k, self.v = (linear(width, inner) for _ in range(3))
        self.out, self.up, self.down = linear(inner, width), linear(width, hidden), linear(hidden, width)
        self.heads, self.plain = heads, plain

    def __call__(self, x):
        y = self.norm(x)
        q, k, v = (by_heads(y, layer.kernel[...], self.heads) for layer in (self.q, self.k, self.v))
        q, k = rotated(q, 10_000.0), rotated(k, 10_000.0)
        plain = partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
        attended = plain(q, k, v) if self.plain else attention(q, k, v, causal=True)
        return x + joined(attended, self.out.kernel[...]) + self.down(jax.nn.relu(self.up(y)))


class Decoder(nnx.Module):
    """Tokens `(batch, t)` -> final states `(batch, t, width)`."""

    VOCABULARY = 32_768

    def __init__(self, depth, width, heads, hidden, plain, remat, rngs):
        self.words = Embedding(self.VOCABULARY, width, rngs=rngs)
        block = partial(ParallelBlock, width, heads, hidden, plain)
        self.blocks = Blocks(depth, block, keep=remat, rngs=rngs)
        self.norm = RMSNorm(width, epsilon=1e-6)

    def __call__(self, tokens):
        x = self.blocks(cw.models.fsdp(embed, self.words.embedding[...], tokens))
        graph, norm = nnx.split(self.norm)
        return cw.models.fsdp(lambda whole, x: nnx.merge(graph, whole)(x), norm, x)
