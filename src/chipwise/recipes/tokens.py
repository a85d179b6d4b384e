"""The task of the language models: predict the next token of packed text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from ..base import DataError
from ..data.pack.tokenise import tokenizer_of
from ..data.packed import PackedFolder
from ..data.synthetic import Absent
from ..interop.nnx import decoder, functional
from ..models.tied import tied_loss
from ..recipe.metrics import perplexity
from ..recipe.source import Source
from ..recipe.task import Sum, Task

_NARROW = 65_536


def language(
    net: Callable[[nnx.Rngs], nnx.Module],
    table: str,
    data: str | Path | None,
    context: int,
    vocabulary: int,
    sequences: tuple[int, int],
) -> Task:
    """The task of a net that maps `(batch, context)` tokens to `(batch, context, width)` states.
    The logits are the products of the states with the rows of `params[table]["embedding"]`. The
    data is that of `tokens`. If it has a column `mask`, the loss is the mean over the tokens of the
    whole step whose mask is not 0.

    `predict` gives the logits of the token that follows the last one, from the last `context`
    tokens.
    """
    init, apply = functional(net)
    states_of = decoder(net)

    def loss(params, state, batch, key, train):
        text = batch["token"].astype(jnp.int32)
        states, state = apply(params, state, text[:, :-1], key, train)
        counted = batch["mask"][:, 1:] if "mask" in batch else None
        total = tied_loss(params[table]["embedding"], states, text[:, 1:], counted)
        size = text[:, 1:].size if counted is None else jnp.sum(counted != 0, dtype=jnp.int32)
        mean = Sum(total, jnp.float32(size))
        return {"loss": mean, "perplexity": perplexity(mean)}, state

    def predict(params, state, inputs):
        text = inputs["token"].astype(jnp.int32)[:, -context:]
        last = apply(params, state, text, None, False)[0][:, -1]
        return (last @ params[table]["embedding"].T).astype(jnp.float32)

    def decode(params, state, text, cache, position):
        states, cache = states_of(params, state, text, cache, position)
        words = params[table]["embedding"]
        last = (((2,), (1,)), ((), ()))
        return lax.dot_general(states, words, last, preferred_element_type=jnp.float32), cache

    train, held_out = tokens(data, context, vocabulary, sequences)
    return Task(
        init=init,
        loss=loss,
        train=train,
        eval=held_out,
        predict=predict,
        decode=decode,
        context=context,
        returns="logits",
    )


def tokens(
    data: str | Path | None, context: int, vocabulary: int, sequences: tuple[int, int]
) -> tuple[Source, Source]:
    """Training and evaluation sequences, with a column `token` of shape `(context + 1,)`. Each
    token is below `vocabulary`. The dtype is uint16, or uint32 for a vocabulary above 65,536.

    *Arguments:* `data`: a packed folder. `sequences`: the numbers of training and evaluation
    sequences without a folder. Raises `DataError` for a folder with other columns.
    """
    dtype = np.dtype(np.uint16 if vocabulary <= _NARROW else np.uint32)
    spec = {"token": jax.ShapeDtypeStruct((context + 1,), dtype)}
    if data is None:
        train, held_out = (
            Absent(n, spec, "Text in tokens", {"token": vocabulary}) for n in sequences
        )
        return train, held_out
    return tuple(packed(data, spec["token"], vocabulary))  # type: ignore[return-value]


def start_of(data: str | Path | None, vocabulary: int) -> int:
    """The token at which each document of a packed folder begins: the first that the tokenizer puts
    before one, else the end of the one before. Without a folder it is the last token of the
    vocabulary, as in GPT-2. Raises `DataError` for a folder that does not name this token, because
    its tokens were cut elsewhere."""
    if data is None:
        return vocabulary - 1
    source = PackedFolder(data, "train")
    cut = tokenizer_of(source, source.document_ends)
    if cut is None or cut.end is None:
        raise DataError("tokens-without-end", path=str(data))
    return (*cut.begin, cut.end)[0]


def packed(
    data: str | Path, token: jax.ShapeDtypeStruct, vocabulary: int, *, labelled: bool = False
) -> list[PackedFolder]:
    """The training and evaluation parts of a packed folder with a column `token` below
    `vocabulary`, and with a column `label` if `labelled`. Raises `DataError` for any other
    folder."""
    sources = [PackedFolder(data, split) for split in ("train", "eval")]
    for source in sources:
        column = source.spec.get("token")
        below = source.below.get("token")
        narrow = (
            labelled
            and column is not None
            and column.dtype.kind in "iu"
            and column.shape == token.shape
        )
        if (
            not (narrow or column == token)
            or (below or 2**32) > vocabulary
            or (labelled and source.classes is None)
        ):
            columns = [f"{name} {c.dtype}{list(c.shape)}" for name, c in source.spec.items()]
            expected = f"token {token.dtype}{list(token.shape)}{' and label' if labelled else ''}"
            size = (
                f"length={(column or token).size}"
                if labelled
                else f"context={(column or token).size - 1}"
            )
            size += f" --set vocabulary={below}" * (below is not None)
            raise DataError(
                "tokens-differ",
                path=str(source.path),
                columns=columns,
                below=below,
                expected=expected,
                vocabulary=vocabulary,
                size=size,
            )
    return sources
