"""The pre-norm transformer that ViT and GPT-2 share: a stack of equal blocks, run as one loop.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019); Dosovitskiy et
al. (2021, arXiv:2010.11929). Sequences are `(batch, length, width)`; everything is computed in the
dtype of the input and parameters, sums and softmax in float32.

The blocks' parameters lie in stacked arrays, `(depth, ...)`, and `lax.scan` runs over them: the
compiler sees one block, not `depth`. GPT-2's gradient for 8 sequences compiled for a TPU v5e in 12 to 14 s on
two cores, in 131 s with the loop unrolled (JAX 0.10.2, libtpu 0.0.42); by that compiler's own estimate
the loop runs about a tenth longer. Convolutional nets are unrolled here, because a loop over
convolutions is slow on the CPU; matrix products are not.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from . import wide

Initializer = Callable
# What a block keeps for its gradient: the products with its kernels. Norms, GELU and the t × t weights of
# attention are computed again, which costs little arithmetic; a loop would otherwise keep every step of them.
_KEPT = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


class LayerNorm(nnx.Module):
    """Each vector of `width` entries to mean 0 and deviation 1, times a scale, plus a shift.

    Statistics in float32, the result in the input's dtype; the variance from centred values, since
    a difference of means of squares loses the digits that a large mean shares.
    """

    def __init__(self, width: int, *, epsilon: float):
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """`(..., width)` -> the same shape and dtype."""
        dtype, shape = wide(x.dtype), (1,) * (x.ndim - 1) + (-1,)
        y = x.astype(dtype)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        scale, bias = (p[...].astype(dtype).reshape(shape) for p in (self.scale, self.bias))
        return (y * scale + bias).astype(x.dtype)


class Attention(nnx.Module):
    """Self-attention with `heads` heads: `(b, t, width)` -> the same. `causal`: none looks ahead."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool,
        init: Initializer,
        out_init: Initializer,
        rngs: nnx.Rngs,
    ):
        self.qkv = nnx.Linear(width, 3 * width, kernel_init=init, rngs=rngs)
        self.out = nnx.Linear(width, width, kernel_init=out_init, rngs=rngs)
        self.heads, self.causal = heads, causal

    def __call__(self, x: jax.Array) -> jax.Array:
        b, t, width = x.shape
        qkv = self.qkv(x).reshape(b, t, 3, self.heads, width // self.heads)
        y = attend(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], causal=self.causal)
        return self.out(y.reshape(b, t, width))


def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
    """`softmax(q k^T / sqrt(d)) v` in each head: three arrays `(b, t, heads, d)` -> one.

    The products are in the inputs' dtype and the softmax in float32, as under PyTorch's autocast. Not
    `jax.nn.dot_product_attention`: its gradient multiplies float32 by bfloat16, which strict dtype
    promotion refuses, and which on GPUs leaves the tensor cores.
    """
    scores = jnp.einsum("btnd,bsnd->bnts", q, k)
    scores = scores.astype(wide(q.dtype)) * q.shape[-1] ** -0.5
    if causal:
        t = q.shape[1]
        scores = jnp.where(jnp.tri(t, dtype=bool)[None, None], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores).astype(v.dtype), v)


class Block(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))` with a hidden layer of `4 * width`.

    *Arguments:* `tanh`: GELU by its tanh formula, as GPT-2, instead of the exact one; `init`, and
    `out_init` for the two layers whose output is added to `x`.
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
        rngs: nnx.Rngs,
    ):
        self.norm1 = LayerNorm(width, epsilon=epsilon)
        self.attention = Attention(width, heads, causal=causal, init=init, out_init=out_init, rngs=rngs)
        self.norm2 = LayerNorm(width, epsilon=epsilon)
        self.hidden = nnx.Linear(width, 4 * width, kernel_init=init, rngs=rngs)
        self.out = nnx.Linear(4 * width, width, kernel_init=out_init, rngs=rngs)
        self.tanh = tanh

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.out(jax.nn.gelu(self.hidden(self.norm2(x)), approximate=self.tanh))


class Blocks(nnx.Module):
    """`depth` blocks, one after another: `(b, t, width)` -> the same.

    Parameters are those of a `Block`, each with a leading axis of `depth`.
    """

    def __init__(self, depth: int, make: Callable[[nnx.Rngs], Block], *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=depth)
        @nnx.vmap
        def stacked(rngs):
            return make(rngs)

        self.stack = stacked(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        graph, layers = nnx.split(self.stack)

        # prevent_cse: needed outside loops only
        @partial(jax.checkpoint, policy=_KEPT, prevent_cse=False)
        def step(x, layer):
            return nnx.merge(graph, layer)(x), None

        return lax.scan(step, x, layers)[0]


def kernels(path: str, leaf) -> bool:
    """Whether a parameter is a matrix, for `decay=`: stacked biases have two axes as well."""
    return path.endswith(("kernel", "embedding"))
