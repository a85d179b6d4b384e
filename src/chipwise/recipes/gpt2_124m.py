"""GPT-2 small (124,439,808 parameters) on 10 billion tokens of text.

    chipwise train gpt2-124m --data DIR
    chipwise train gpt2-124m --synthetic              # random tokens: speed without a data set
    chipwise plan gpt2-124m --on v5e-8,a100:8         # no data needed

DIR is a packed folder with one column, `token`: sequences of 1,025 uint16. Each of the first 1,024
tokens predicts the next one, except where a column `mask` has a 0. The net is that of Radford et
al. (2019). The training is that of llm.c's reproduction: batch 512 sequences (524,288 tokens),
19,560 steps, AdamW with b2 0.95 and a decay of 0.1 on matrices, warm-up of 700 steps to 6e-4, half
a cosine to 0, clipping at a norm of 1.

There are 64 replicas of 8 sequences. A device computes one replica at a time, and 8 sequences fit
every chip of 16 GB. Up to 64 devices share the replicas. The metric `loss` is in nats per token,
and `perplexity` is its `exp`.

Expected loss on held-out text of the same kind: 3.28 on FineWeb. llm.c's trainer reached 3.2847
after 10 billion tokens, according to github.com/KellerJordan/modded-nanogpt, in 90 minutes on 8
A100 and 45 on 8 H100. The loss depends on the text: 1 % less loss is about 3 % less perplexity. Not
measured here.
"""

from __future__ import annotations

from ..base import invalid
from ..models.transformer import GPT2, KEPT, kernels
from ..recipe import schedules
from ..recipe.optimizers import adamw
from ..recipe.recipe import Recipe, Validated
from .tokens import language, start_of

_BATCH = 512
_STEPS = 19_560
_EVAL = 10_240  # sequences, 10.5 million tokens


def recipe(
    data: str | None = None,
    context: int = 1024,
    vocabulary: int = 50_257,
    depth: int = 12,
    width: int = 768,
    heads: int = 12,
    remat: str = KEPT,
    documents: bool = False,
    warmup: str = "700st",
) -> Recipe:
    """*Arguments:*

    - `context`: the predicted tokens of a sequence.
    - `vocabulary`: the size of the vocabulary.
    - `depth`: the blocks.
    - `width`: the entries of a token's state.
    - `heads`: the heads of attention, a divisor of `width`.
    - `remat`: what a block saves for its gradient, a policy of `cw.models.remat` such as
      `context+mlpwi`.
    - `documents`: no token sees one of another document, see `tokens.start_of`.
    - `warmup`: the warm-up of the rate, such as `5%` for a short run.
    """
    if width % heads or not 1 <= vocabulary <= 65_536:
        expected = "heads that divide the width, and at most 65,536 kinds of tokens"
        raise invalid(
            "gpt2-sizes", "width, heads, vocabulary", (width, heads, vocabulary), expected
        )
    sizes = {
        "vocabulary": vocabulary,
        "context": context,
        "depth": depth,
        "width": width,
        "heads": heads,
    }

    end = start_of(data, vocabulary) if documents else None

    def net(rngs):
        return GPT2(**sizes, keep=remat, end=end, rngs=rngs)

    same = (context, vocabulary, depth, width, heads) == (1024, 50_257, 12, 768, 12)
    rate = schedules.warmup(schedules.cosine(6e-4), warmup)
    return Recipe(
        name="gpt2-124m" if same else "gpt2",
        task=language(net, "words", data, context, vocabulary, (_BATCH * _STEPS, _EVAL)),
        batch=_BATCH,
        replicas=64,
        duration=f"{_STEPS}st",
        optimizer=adamw(lr=rate, b2=0.95, weight_decay=0.1, decay=kernels, clip=1.0),
        precision="bf16",
        validated=Validated(source="a loss of 3.28 on FineWeb, llm.c"),
    )
