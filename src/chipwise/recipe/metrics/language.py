"""Of language models: perplexity."""

from __future__ import annotations

import numpy as np

from ..task import Sum


def perplexity(loss: Sum) -> Sum:
    """`exp` of the mean loss, 1 at best, the number of words for a guess among all (Jelinek et al., 1977).

    *Arguments:* `loss`, in nats: a total `()` over tokens and their number. Not the mean of the batches'
    perplexities, which is larger.
    """
    return Sum(loss.total, loss.count, _exponential)


def _exponential(total, count):
    return np.exp(total / count)
