"""GPT-2 XL (1,557,611,200 parameters), each replica computed by a group of 4 devices.

    chipwise train gpt2-xl --data DIR --simulate 4
    chipwise plan gpt2-xl --on v5e-8,a100:8,h100:8     # no data needed
    chipwise plan gpt2-xl --set shards=1 --on h100:8   # one device per replica

DIR is as for `gpt2-124m`. Net and settings are those of `gpt2-124m`, except the size of Radford et al.
(2019), 48 blocks of width 1,600, and batch (1,048,576 tokens), rate (2e-4) and its end at a tenth, which
are those of GPT-3's model of 1.3 billion (Brown et al. 2020, arXiv:2005.14165, table 2.1). It trains on
31 billion tokens, 20 for each parameter (Hoffmann et al. 2022, arXiv:2203.15556).

A parameter with its optimizer state, gradient and sum takes 20 bytes, 31 GB in all; with `shards=4` a
device has 8 GB of that. 32 replicas of 32 sequences: 8 for each device of a group, one after another on
up to 32 groups. Blocks save only their input (`remat`). Not measured here.
"""

from __future__ import annotations

import dataclasses

from ..models.transformer import kernels
from ..recipe.optimizers import adamw
from ..recipe.recipe import Recipe
from ..recipe.schedules import cosine, warmup
from . import gpt2_124m


def recipe(
    data: str | None = None, context: int = 1024, vocabulary: int = 50_257, depth: int = 48,
    width: int = 1600, heads: int = 25, remat: str = "nothing_saveable",
) -> Recipe:  # fmt: skip
    """*Arguments:* as in `gpt2-124m`."""
    small = gpt2_124m.recipe(data, context, vocabulary, depth, width, heads, remat)
    same = (context, vocabulary, depth, width, heads) == (1024, 50_257, 48, 1600, 25)
    rate = warmup(cosine(2e-4, end=2e-5), "2%")
    return dataclasses.replace(
        small,
        name="gpt2-xl" if same else "gpt2",
        batch=1024,
        replicas=32,
        shards=4,
        duration="29700st",
        optimizer=adamw(lr=rate, b2=0.95, weight_decay=0.1, decay=kernels, clip=1.0),
        validated=None,
    )
