"""Llama 3 8B (8,030,261,248 parameters), each replica computed by a group of 8 devices.

    chipwise train llama-8b --data DIR
    chipwise plan llama-8b --on h100:8,v5p-16,tpu7x-8
    chipwise plan llama-8b --set shards=16 --on v6e-16     # a group of 16 devices
    chipwise train llama-8b --synthetic --set depth=2 ...  # any size: the settings are below

DIR is a packed folder with one column, `token`: sequences of 8,193 uint32. Each of the first 8,192
tokens predicts the next one, except where a column `mask` has a 0. Weights are random, or those of
another run (`--from`), or published ones. `--from hf://meta-llama/Llama-3.2-1B` or
`hf://Qwen/Qwen3-0.6B` sets the sizes too.

The net, the rate of 3e-4, its end at a tenth and the batch of 4 million tokens are those of Dubey
et al. (2024, arXiv:2407.21783, table 3 and section 3.4.1). AdamW's b2 of 0.95, its decay of 0.1 on
matrices and the clipping at a norm of 1 are those of Llama 2 (Touvron et al. 2023,
arXiv:2307.09288). It trains on 160 billion tokens, 20 for each parameter (Hoffmann et al. 2022,
arXiv:2203.15556). Llama 3 used 15 trillion.

A parameter with its optimizer state, gradient and sum takes 20 bytes, 161 GB in all, on `shards`
devices. There are 32 replicas of 16 sequences. Blocks save only their input (`remat`). Not measured
here.
"""

from __future__ import annotations

import inspect
from typing import Any

from ..base import invalid
from ..models.llama import Llama
from ..models.transformer import kernels
from ..recipe.optimizers import adamw
from ..recipe.recipe import Recipe
from ..recipe.schedules import cosine, warmup
from .tokens import language, start_of

_BATCH = 512
_STEPS = 38_300
_EVAL = 1024  # sequences, 8.4 million tokens


def recipe(
    data: str | None = None,
    context: int = 8192,
    vocabulary: int = 128_256,
    depth: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    hidden: int = 14_336,
    rope_theta: float = 500_000.0,
    rope_factor: float = 1.0,
    epsilon: float = 1e-5,
    head_dim: int = 0,
    qk_norm: bool = False,
    tied: bool = False,
    remat: str = "nothing_saveable",
    documents: bool = False,
) -> Recipe:
    """*Arguments:*

    - `context`: the predicted tokens of a sequence.
    - `vocabulary`: the size of the vocabulary.
    - `depth`: the blocks.
    - `width`: the entries of a token's state.
    - `heads`: the heads of queries.
    - `kv_heads`: the heads of keys and values, a divisor of `heads`.
    - `hidden`: the entries of the gated layer.
    - `rope_theta` and `rope_factor`: settings of the rotary positions (the factor is 8 in Llama
      3.1, 32 in 3.2).
    - `epsilon`: the epsilon of the norms.
    - `head_dim`: the entries of a head, 0 for `width / heads`.
    - `qk_norm`: queries and keys are normalised, as in Qwen 3.
    - `tied`: one table for words and logits.
    - `remat`: what a block saves for its gradient, a policy of `cw.models.remat` such as
      `query_proj+context`.
    - `documents`: no token sees one of another document, see `tokens.start_of`.
    """
    even = (head_dim or width // heads) % 2 == 0 and (head_dim > 0 or width % heads == 0)
    if vocabulary < 1 or heads % kv_heads or not even:
        given = (width, heads, kv_heads, vocabulary)
        expected = "kv_heads that divide the heads, which divide the width into even numbers"
        raise invalid("llama-sizes", "width, heads, kv_heads, vocabulary", given, expected)
    sizes: dict[str, Any] = dict(
        vocabulary=vocabulary,
        depth=depth,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        hidden=hidden,
        rope_theta=rope_theta,
        rope_factor=rope_factor,
        epsilon=epsilon,
        head_dim=head_dim,
        qk_norm=qk_norm,
        tied=tied,
    )
    end = start_of(data, vocabulary) if documents else None

    def net(rngs):
        return Llama(**sizes, keep=remat, end=end, rngs=rngs)

    usual = inspect.signature(recipe).parameters
    same = all(
        value == usual[name].default for name, value in {"context": context, **sizes}.items()
    )
    rate = warmup(cosine(3e-4, end=3e-5), "2%")
    return Recipe(
        name="llama-8b" if same else "llama",
        task=language(
            net, "words" if tied else "head", data, context, vocabulary, (_BATCH * _STEPS, _EVAL)
        ),
        batch=_BATCH,
        replicas=32,
        shards=8,
        duration=f"{_STEPS}st",
        optimizer=adamw(lr=rate, b2=0.95, weight_decay=0.1, decay=kernels, clip=1.0),
        precision="bf16",
    )
