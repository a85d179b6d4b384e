"""The task of the language models: predict the next token of packed text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..data.packed import PackedFolder
from ..data.synthetic import Absent
from ..errors import DataError
from ..interop.nnx import functional
from ..models.tied import tied_loss
from ..recipe.metrics import perplexity
from ..recipe.source import Source
from ..recipe.task import Sum, Task

_NARROW = 65_536
_UNKNOWN = 2**32


def language(
    net: Callable[[nnx.Rngs], nnx.Module],
    table: str,
    data: str | Path | None,
    context: int,
    vocabulary: int,
    sequences: tuple[int, int],
) -> Task:
    """The task of a net from `(batch, context)` tokens to `(batch, context, width)` states; the logits are
    their products with the rows of `params[table]["embedding"]`. Data as in `tokens`."""
    init, apply = functional(net)

    def loss(params, state, batch, key, train):
        text = batch["token"].astype(jnp.int32)
        states, state = apply(params, state, text[:, :-1], key, train)
        total = tied_loss(params[table]["embedding"], states, text[:, 1:])
        mean = Sum(total, jnp.float32(text[:, 1:].size))
        return {"loss": mean, "perplexity": perplexity(mean)}, state

    def predict(params, state, inputs):
        text = inputs["token"].astype(jnp.int32)[:, :context]
        last = apply(params, state, text, None, False)[0][:, -1]
        return (last @ params[table]["embedding"].T).astype(jnp.float32)

    train, held_out = tokens(data, context, vocabulary, sequences)
    return Task(init=init, loss=loss, train=train, eval=held_out, predict=predict)


def tokens(
    data: str | Path | None, context: int, vocabulary: int, sequences: tuple[int, int]
) -> tuple[Source, Source]:
    """Training and evaluation sequences: column `token` `(context + 1,)`, each below `vocabulary`; uint16, or
    uint32 for a larger vocabulary.

    *Arguments:* `data`: a packed folder; `sequences`: their numbers without one. Raises `DataError` for a
    folder with other columns.
    """
    dtype = np.dtype(np.uint16 if vocabulary <= _NARROW else np.uint32)
    spec = {"token": jax.ShapeDtypeStruct((context + 1,), dtype)}
    if data is None:
        train, held_out = (Absent(n, spec, "Text in tokens", {"token": vocabulary}) for n in sequences)
        return train, held_out
    packed = PackedFolder(data, "train"), PackedFolder(data, "eval")
    for source in packed:
        if source.spec.get("token") != spec["token"] or source.below.get("token", _UNKNOWN) > vocabulary:
            columns = [f"{name} {c.dtype}{list(c.shape)}" for name, c in source.spec.items()]
            raise DataError(
                "tokens-differ",
                "{path} has {columns:and}, tokens below {below}: expected {expected} below "
                "{vocabulary}. Set context= and vocabulary= to match, or pack it anew.",
                path=str(source.path),
                columns=columns,
                below=source.below.get("token"),
                expected=f"token {dtype}[{context + 1}]",
                vocabulary=vocabulary,
            )
    return packed
