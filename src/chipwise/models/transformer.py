"""A pre-norm transformer, whose equal blocks run in a loop, and the nets GPT-2 and ViT.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), and
Dosovitskiy et al. (2021, arXiv:2010.11929). Sequences are `(batch, length, width)`. Everything is
computed in the dtype of the input and parameters, sums and softmax in float32.

The blocks' parameters are stacked arrays, `(depth, ...)`, and `lax.scan` runs over them, so the
compiler sees one block, not `depth`. GPT-2's gradient for 8 sequences compiled for a TPU v5e in 12
to 14 s on two cores, and in 131 s with the loop unrolled (JAX 0.10.2, libtpu 0.0.42). By that
compiler's estimate the loop runs about a tenth longer.

On GPUs a loop copies the values for the gradient in and out of stacks, so up to `UNROLLED` blocks
are unrolled there. GPT-2's step is planned 21 to 30 % shorter for it and for the loss of
`models.tied` (`benchmarks/gpt2_kernels.md`), at twice the compile time. Unrolled by four, it gains
nothing. In a group of devices GPT-2 XL's gains 7 %, and takes 3 GB more. Convolutional nets are
unrolled here, because a loop over convolutions is slow on the CPU. One over matrix products is not.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .adapted import Adapted, Linear, by_parts, einsum
from .attention import attention, document_numbers, padding, places_in
from .chip_traits import on_gpu, platform
from .conv import conv
from .gelu import gelu
from .kv_cache import KVCache
from .large import fsdp, grouped
from .layer_norm import LayerNorm
from .remat import remat
from .tied import embed

Initializer = Callable
UNROLLED = 24
"""The most blocks that are unrolled on GPUs."""
KEPT = "dots_with_no_batch_dims_saveable"
"""The values that a block keeps for its gradient: the products with its kernels, and the output of
attention. Norms and GELU are computed again, which costs little arithmetic. A loop would otherwise
keep every step of them."""
KEPT_ON_GPUS = "query_proj+key_proj+value_proj+context+attended+mlpwi"
"""What replaces `KEPT` on GPUs: with biases, which the products' kernels add, and with the sum of a
block's input and attention, which several kernels of the gradient read."""
QKV = ("query_proj", "key_proj", "value_proj")
"""The names of queries, keys and values, see `cw.models.remat`."""


def summed(x: jax.Array, y: jax.Array, name: str) -> jax.Array:
    """`x + y`, marked for `KEPT_ON_GPUS`. Elsewhere a program keeps the digest that it had."""
    return checkpoint_name(x + y, name) if on_gpu() else x + y


class Attention(nnx.Module):
    """Self-attention with `heads` heads: `(b, t, width)` -> the same. `causal`: no position sees
    later ones. `keys`: as in `attention`."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool,
        init: Initializer,
        out_init: Initializer,
        keys: int | None = None,
        rngs: nnx.Rngs,
    ):
        self.qkv = Linear(width, 3 * width, kernel_init=init, rngs=rngs)
        self.out = Linear(width, width, kernel_init=out_init, rngs=rngs)
        self.heads = heads
        self.causal = causal
        self.keys = keys

    def __call__(
        self,
        x: jax.Array,
        seen: jax.Array | None = None,
        document: jax.Array | None = None,
        cache: KVCache | None = None,
        first: int | None = None,
    ) -> jax.Array:
        """`seen` and `document` as in `attention`. `cache`: the cache of the positions before.
        `first`: returns only this many positions."""
        b, _, width = x.shape

        def attended(q, k, v):
            if cache is not None:
                return cache.attend(q, k, v)
            return attention(
                q, k, v, causal=self.causal, seen=seen, document=document, keys=self.keys
            )

        if platform() == "tpu":
            return self._by_heads(x, attended, first)
        apart = first is not None or (on_gpu() and cache is None and seen is None)
        heads = self.heads, width // self.heads
        qkv = None if apart else self.qkv(x).reshape(b, -1, 3, *heads)

        def part(i: int) -> jax.Array:
            if qkv is not None:
                return qkv[:, :, i]
            return self._part(x if i or first is None else x[:, :first], i).reshape(b, -1, *heads)

        q, k, v = (checkpoint_name(part(i), name) for i, name in enumerate(QKV))
        y = attended(q, k, v)
        return checkpoint_name(self.out(y.reshape(b, -1, width)), "out_proj")

    def _part(self, x: jax.Array, i: int) -> jax.Array:
        """Queries, keys or values, by a product of their own. cuDNN's kernel takes dense arrays, so
        the parts of a single product would be copied, as they are anyway for a mask. The barrier
        keeps XLA from joining the three products again."""
        own = slice(i * x.shape[-1], (i + 1) * x.shape[-1])
        kernel, bias = (
            part[...].astype(x.dtype)[..., own]  # type: ignore[index]
            for part in (self.qkv.kernel, self.qkv.bias)
        )
        if on_gpu() and isinstance(kernel, Adapted):
            # Its matrix has no gradient, and would get one by a barrier with `x` (JAX 0.10)
            x = lax.optimization_barrier(x)
        elif on_gpu():
            x, kernel = lax.optimization_barrier((x, kernel))
        return x @ kernel + bias[None, None]

    def _by_heads(
        self, x: jax.Array, attended: Callable[..., jax.Array], first: int | None
    ) -> jax.Array:
        """Computes the same by products that take and give arrays of heads. A TPU lays these out in
        tiles of their own, and would have to copy the output of a single product into them. With 16
        heads of 64 on a v4, that takes over a quarter of the layer's time by its compiler."""

        def given(i: int) -> jax.Array:
            return x if i or first is None else x[:, :first]

        width = x.shape[-1]
        parts = (self.qkv.kernel, self.qkv.bias, self.out.kernel, self.out.bias)
        kernel, bias, out, out_bias = (
            part[...].astype(x.dtype)  # type: ignore[index]
            for part in parts
        )
        kernel = kernel.reshape(width, 3, self.heads, -1)
        bias = bias.reshape(3, 1, 1, self.heads, -1)
        q, k, v = (
            checkpoint_name(einsum("btw,whd->bthd", given(i), kernel[:, i]) + bias[i], name)
            for i, name in enumerate(QKV)
        )
        y = attended(q, k, v)
        y = einsum("bthd,hdw->btw", y, out.reshape(self.heads, -1, width)) + out_bias[None, None]
        return checkpoint_name(y, "out_proj")


class PreNormBlock(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))` with a hidden layer of `4 * width`.

    *Arguments:* `tanh`: the tanh approximation of GELU, as in GPT-2, instead of the exact one.
    `init`: the initializer, and `out_init` that of the two layers whose output is added to `x`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool,
        tanh: bool,
        epsilon: float,
        init: Initializer,
        out_init: Initializer,
        keys: int | None = None,
        rngs: nnx.Rngs,
    ):
        self.norm1 = LayerNorm(width, epsilon=epsilon)
        self.attention = Attention(
            width, heads, causal=causal, init=init, out_init=out_init, keys=keys, rngs=rngs
        )
        self.norm2 = LayerNorm(width, epsilon=epsilon)
        self.hidden = Linear(width, 4 * width, kernel_init=init, rngs=rngs)
        self.out = Linear(4 * width, width, kernel_init=out_init, rngs=rngs)
        self.tanh = tanh

    def __call__(
        self,
        x: jax.Array,
        document: jax.Array | None = None,
        cache: KVCache | None = None,
        first: int | None = None,
    ) -> jax.Array:
        y = self.attention(self.norm1(x), document=document, cache=cache, first=first)
        x = summed(x if first is None else x[:, :first], y, "attended")
        hidden = checkpoint_name(self.hidden(self.norm2(x)), "mlpwi")
        return x + checkpoint_name(self.out(gelu(hidden, tanh=self.tanh)), "mlpwo")


class Blocks(nnx.Module):
    """`depth` blocks in sequence: `(b, t, width)` -> the same. Each gets `more` unchanged.

    Parameters are those of one block, each with a leading axis of `depth`. `keep`: a policy of
    `cw.models.remat`. `on_gpus`: another one in place of `KEPT` on GPUs.
    """

    def __init__(
        self,
        depth: int,
        make: Callable[[nnx.Rngs], nnx.Module],
        *,
        keep: str | Sequence[str] = KEPT,
        on_gpus: str | None = None,
        rngs: nnx.Rngs,
    ):
        @nnx.split_rngs(splits=depth)
        @nnx.vmap
        def stacked(rngs):
            return make(rngs)

        self.stack = stacked(rngs)
        self.keep = keep
        self.on_gpus = on_gpus

    def __call__(self, x: jax.Array, *more: jax.Array, first: int | None = None) -> jax.Array:
        """*Arguments:* `first`: the number of positions to return. The last block computes no
        others."""
        graph, layers = nnx.split(self.stack)
        layers = by_parts(self.stack, layers)
        depth = len(jax.tree.leaves(layers)[0])
        unroll = depth <= UNROLLED and on_gpu() and not grouped()

        keep = self.on_gpus if self.on_gpus and self.keep == KEPT and on_gpu() else self.keep

        def block(**options: Any) -> Callable[..., Any]:
            def step(x, layer):
                return fsdp(
                    lambda whole, x, *more: nnx.merge(graph, whole)(x, *more, **options),
                    layer,
                    x,
                    *more,
                ), None

            # The gradient of the last block follows at once, so it computes nothing again
            again = unroll and depth > 1 and not options
            return remat(step, policy=keep, prevent_cse=again)

        if first is None:
            return lax.scan(block(), x, layers, unroll=unroll)[0]
        before, last = (jax.tree.map(itemgetter(at), layers) for at in (slice(-1), -1))
        x, _ = lax.scan(block(), x, before, unroll=unroll)
        return block(first=first)(x, last)[0]

    def decode(self, x: jax.Array, kept: Any, position: jax.Array) -> tuple[jax.Array, Any]:
        """The same for blocks that take a `KVCache`. `kept`: the cache so far, or None. Returns the
        states and the cache now."""
        graph, layers = nnx.split(self.stack)

        def step(carry, at):
            (x, kept), (layer, number) = carry, at
            cache = KVCache(kept, number, position)
            x = nnx.merge(graph, layer)(x, cache=cache)
            return (x, cache.kept), cache.new

        numbers = jnp.arange(len(jax.tree.leaves(layers)[0]))
        (x, kept), new = lax.scan(step, (x, kept), (layers, numbers))
        return x, new if kept is None else kept


def kernels(path: str, leaf) -> bool:
    """Whether a parameter is a matrix, for `decay=`. Its name decides, because stacked biases have
    two axes too."""
    return path.endswith(("kernel", "embedding"))


class GPT2(nnx.Module):
    """Integer tokens `(batch, t)`, `t <= context` -> final states `(batch, t, width)`.

    The logits are `states @ words.T`. `chipwise.models.tied.next_token_loss` takes the table,
    `params["words"]["embedding"]`, and computes them in chunks.

    124,439,808 parameters. Source: Radford et al., "Language Models are Unsupervised Multitask
    Learners" (2019), without dropout, as usual in single-epoch training
    (github.com/karpathy/nanoGPT). Initial values: normal with deviation 0.02, or
    `0.02 / sqrt(2 * depth)` for layers that add to the residual stream. `end`: the token at
    which a document begins, such as the end of the one before. With it, no position sees one of
    another document, and places restart at 0 in each document.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 50_257,
        context: int = 1024,
        depth: int = 12,
        width: int = 768,
        heads: int = 12,
        keep: str = KEPT,
        end: int | None = None,
        rngs: nnx.Rngs,
    ):
        normal = nnx.initializers.normal
        self.end = end
        self.words = Embedding(vocabulary, width, rngs=rngs)
        self.places = Embedding(context, width, rngs=rngs)
        block = partial(PreNormBlock, width, heads, causal=True, tanh=True, epsilon=1e-5)
        out = normal(0.02 * (2 * depth) ** -0.5)
        make = partial(block, init=normal(0.02), out_init=out)
        self.blocks = Blocks(
            depth, lambda rngs: make(rngs=rngs), keep=keep, on_gpus=KEPT_ON_GPUS, rngs=rngs
        )
        self.norm = LayerNorm(width, epsilon=1e-5)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        def begin(tables, tokens, *document):
            places = (
                tables[1][places_in(*document)] if document else tables[1][None, : tokens.shape[1]]
            )
            return embed(tables[0], tokens) + places

        document = () if self.end is None else (document_numbers(tokens, self.end),)
        tables = self.words.embedding[...], self.places.embedding[...]
        x = self.blocks(fsdp(begin, tables, tokens, *document), *document)
        graph, norm = nnx.split(self.norm)
        return fsdp(lambda whole, x: nnx.merge(graph, whole)(x), norm, x)

    def decode(self, tokens: jax.Array, cache: Any, position: jax.Array) -> tuple[jax.Array, Any]:
        """The states of `tokens` `(batch, t)` at `position` `(batch,)` and behind, and the next
        cache."""
        places = position[:, None] + jnp.arange(tokens.shape[1])[None]
        x = embed(self.words.embedding[...], tokens) + self.places.embedding[...][places]
        x, cache = self.blocks.decode(x, cache, position)
        return self.norm(x), cache


class Embedding(nnx.Module):
    """A table of `count` vectors of `width` entries."""

    def __init__(self, count: int, width: int, *, rngs: nnx.Rngs):
        self.embedding = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (count, width)))


class ViT(nnx.Module):
    """`(batch, image, image, 3)` normalised floats -> logits `(batch, classes)`.

    `image` must be a multiple of `patch`, both in pixels.

    The default is ViT-S/16: 22,050,664 parameters at 224×224, 4.6 billion multiply-adds per image
    in the forward pass. Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021,
    arXiv:2010.11929), in the small size of Touvron et al. (2021, arXiv:2012.12877). It has a class
    token, learned positions and no dropout, and is the same net as timm's `vit_small_patch16_224`.
    `tanh`: the tanh approximation of GELU, as in Flax, instead of the exact one.
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
        tanh: bool = False,
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
        self.heads = heads
        block = partial(
            PreNormBlock, width, heads, causal=False, tanh=tanh, epsilon=1e-6, keys=places
        )
        self.blocks = Blocks(
            depth,
            lambda rngs: block(init=init, out_init=init, rngs=rngs),
            on_gpus=KEPT_ON_GPUS,
            rngs=rngs,
        )
        self.norm = LayerNorm(width, epsilon=1e-6)
        # Zeros: the first loss is that of uniform probabilities, log(classes).
        self.classifier = nnx.Linear(width, classes, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.patches(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        token = jnp.broadcast_to(self.token[...], (x.shape[0], 1, x.shape[2]))
        x = jnp.concatenate([token, x], axis=1) + self.places[...]
        x = jnp.pad(x, [(0, 0), (0, padding(x, self.heads)), (0, 0)])
        return self.classifier(self.norm(self.blocks(x, first=1)[:, 0]))
