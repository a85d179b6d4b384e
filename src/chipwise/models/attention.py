"""`cw.models.attention`: a chip's own fused kernel if there is one, and a blocked implementation
otherwise.

Plain attention stores a number for every pair of positions. None of these implementations does.

| chip | implementation | for |
|---|---|---|
| NVIDIA GPUs from Ampere (sm_80) on | cuDNN's | bf16, f16; heads of 8 to 128, in eights |
| TPU v4 and later | splash attention, a kernel of JAX | bf16; more than 256 positions |
| all others, and float32 | blocks in a loop, `attention_blocks` | everything |

Every backward pass adds in a fixed order. cuDNN's does so with `xla_gpu_deterministic_ops`, which
exact training sets.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from ..base import RecipeError, invalid
from ..base.annotations import as_annotated
from . import wide
from .attention_blocks import blocks
from .attention_fused import cudnn, splash
from .attention_mask import SAVED, Mask
from .chip_traits import ChipTraits, traits
from .large import fsdp

_LOST = 256.0  # squared and divided by the root of a head of 512, still vanishes in a softmax


@as_annotated
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    window: int | None = None,
    seen: jax.Array | None = None,
    document: jax.Array | None = None,
    keys: int | None = None,
) -> jax.Array:
    """`softmax(query key^T / sqrt(d)) value` in each head, without storing all of its weights.

    *Arguments:*

    - `query` `(batch, t, heads, d)`, `key` and `value` `(batch, s, kv_heads, d)`, of one dtype.
      `kv_heads` divides `heads`, and each group of heads shares one of them (Ainslie et al., 2023,
      arXiv:2305.13245).
    - `causal`: no position sees later ones. Needs `t` equal to `s`.
    - `window`: a position sees those less than `window` away, itself included. Needs `t` equal to
      `s`.
    - `seen` `(batch, s)` bool: False for keys to ignore, such as padding. With None, no key is
      ignored.
    - `document` `(batch, t)` integers: a position sees only those with its own number. Others
      change neither its output nor its gradient by one bit.
    - `keys`: the number of keys that are seen. Those behind it are padding. With None, all are
      seen. Not with `causal`, `window` or `document`.

    *Returns* `(batch, t, heads, d)` in the inputs' dtype. Sums and the softmax are float32.

    Raises `RecipeError` for shapes that do not fit.
    """
    _check(query, key, value, causal, window)
    if keys is not None:
        others = causal or window is not None or document is not None
        if others or not 1 <= keys <= key.shape[1]:
            expected = f"from 1 to {key.shape[1]}, without causal, window or document"
            raise invalid("attention-keys", "keys", keys, expected)
    if document is not None:
        if (
            document.dtype.kind not in "iu"
            or not document.shape == query.shape[:2] == key.shape[:2]
        ):
            given = f"{document.dtype}{list(document.shape)}"
            expected = f"integers {query.shape[:2]}"
            raise invalid(
                "attention-document", "document", given, f"{expected}, one for each query and key"
            )
        document = document.astype(jnp.int32)
    if seen is not None:
        padded = _with_seen(query, key, value, seen)
        found = attention(*padded, causal=causal, window=window, document=document, keys=keys)
        return found[..., : query.shape[-1]]
    if window is not None and window >= query.shape[1]:
        window = None
    mask = Mask(causal, window)
    form = form_for(traits(), query, key, mask, document is not None)
    if form != "cudnn":
        key, value = key[:, :keys], value[:, :keys]
    if form == "blocks":
        return blocks(query, key, value, mask, document)
    kernel = splash if form == "splash" else partial(cudnn, keys=keys)
    # In a group each device calls the kernel with its rows, since compilers do not partition
    # kernels.
    more = () if document is None else (document,)
    return fsdp(
        lambda _, q, k, v, *more: kernel(q, k, v, mask, *more), (), query, key, value, *more
    )


def document_numbers(tokens: jax.Array, end: int) -> jax.Array:
    """The document of each of `tokens` `(batch, t)`, int32, for `attention(document=)`. The token
    `end` follows a document, or is the first of each. It counts as the first of the next document,
    whose beginning is predicted from it."""
    return jnp.cumsum(tokens == end, axis=1, dtype=jnp.int32)


def places_in(document: jax.Array) -> jax.Array:
    """The position of each token in its document, from 0: `(batch, t)` int32."""
    at = jnp.arange(document.shape[1], dtype=jnp.int32)[None]
    first = jnp.pad(document[:, 1:] != document[:, :-1], [(0, 0), (1, 0)])
    return at - jax.lax.cummax(jnp.where(first, at, 0), axis=1)


def _with_seen(query, key, value, seen) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The three arrays with eight more entries per head, which replace a mask that kernels lack.
    The product of an unseen key with any query is lower by 65,536, so its weight is 0."""
    if seen.shape != key.shape[:2]:
        raise invalid(
            "attention-seen", "the shape of seen", seen.shape, f"{key.shape[:2]}, one for each key"
        )
    d = query.shape[-1]
    more = [(0, 0)] * 3 + [(0, 8)]
    scale = math.sqrt((d + 8) / d)  # since kernels divide by the root of the wider head
    query = (query.astype(wide(query.dtype)) * scale).astype(query.dtype)
    query = jnp.pad(query, more).at[..., d].set(jnp.asarray(_LOST, query.dtype))
    gone = jnp.where(seen, 0, -_LOST).astype(key.dtype)
    return query, jnp.pad(key, more).at[..., d].set(gone[:, :, None]), jnp.pad(value, more)


def form_for(chip: ChipTraits, query, key, mask: Mask, documents: bool = False) -> str:
    """ "cudnn", "splash" or "blocks": the implementation on `chip` for the arguments of
    `attention`."""
    d = query.shape[-1]
    half = query.dtype.itemsize == 2
    gpu = chip.platform == "cuda" and chip.fuses and half and (mask.causal or mask.window is None)
    # cuDNN reads which pairs are of one document, an array of t * t for each head.
    if gpu and d % 8 == 0 and d <= 128 and not (documents and query.shape[1] > 2048):
        return "cudnn"
    tpu = chip.platform == "tpu" and chip.fuses and query.dtype == jnp.bfloat16
    # The weights of a single block fit in on-chip memory, where XLA's products are as fast.
    if tpu and (d <= 128 or d % 128 == 0) and max(query.shape[1], key.shape[1]) > 256:
        return "splash"
    return "blocks"


def padding(x: jax.Array, heads: int) -> int:
    """How many positions to append to `x` `(batch, t, width)`, once, because attention would append
    them in each layer. To `attention` they are not `keys`."""
    one = jax.ShapeDtypeStruct((*x.shape[:2], heads, x.shape[-1] // heads), x.dtype)
    return x.shape[1] % 2 if form_for(traits(), one, one, Mask()) == "cudnn" else 0


def saveable(prim, *_, **params) -> bool:
    """A `jax.checkpoint` policy that saves the outputs of fused forward passes, so that they do not
    run twice."""
    return prim.name.startswith("dot_product_attention_fwd") or (
        prim.name == "name" and params["name"] == SAVED
    )


def flops(rows: int, t: int, s: int, d: int, share: float, products: int) -> float:
    """The FLOPs of a fused kernel, for plans, since compilers state none.

    *Arguments:* `rows`: batch times heads. `t`, `s`, `d` as in `attention`. `share`: the share of
    the `t * s` pairs that it computes, see `visited`. `products`: 2 in the forward pass and 5 in
    the backward pass (the weights again and one for each gradient), or more if several kernels
    recompute the weights.
    """
    return 2.0 * rows * t * s * d * share * products


def _check(query, key, value, causal: bool, window: int | None) -> None:
    shapes = [list(x.shape) for x in (query, key, value)]
    fits = (
        all(len(shape) == 4 for shape in shapes)
        and shapes[1] == shapes[2]
        and query.shape[0] == key.shape[0]
        and query.shape[3] == key.shape[3]
        and 0 < key.shape[2] <= query.shape[2]
        and query.shape[2] % key.shape[2] == 0
    )
    if not fits:
        expected = "(b, t, heads, d) and twice (b, s, kv_heads, d), kv_heads a divisor of heads"
        raise invalid("attention-shapes", "query, key and value", shapes, expected)
    dtypes = [str(x.dtype) for x in (query, key, value)]
    if len(set(dtypes)) > 1 or not jnp.issubdtype(query.dtype, jnp.floating):
        expected = "one floating dtype: cast with .astype"
        raise invalid("attention-dtypes", "the dtypes of query, key and value", dtypes, expected)
    if window is not None and (window < 1):
        raise invalid(
            "attention-window", "window", window, "a whole number of positions, at least 1"
        )
    if (causal or window is not None) and shapes[0][1] != shapes[1][1]:
        sentence = "{queries} queries and {keys} keys: causal and window expect as many."
        raise RecipeError("attention-lengths", sentence, queries=shapes[0][1], keys=shapes[1][1])
