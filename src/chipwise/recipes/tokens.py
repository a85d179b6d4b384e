"""Packed tokens for the language models."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from ..data.packed import PackedFolder
from ..data.synthetic import Absent
from ..errors import DataError
from ..recipe.source import Source

_NARROW = 65_536
_UNKNOWN = 2**32


def tokens(
    data: str | Path | None, context: int, vocabulary: int, sequences: tuple[int, int]
) -> tuple[Source, Source]:
    """Training and evaluation sequences: column `token` `(context + 1,)`, each below `vocabulary`; uint16, or
    uint32 where there are more kinds.

    *Arguments:* `data`: a packed folder; `sequences`: how many of each there are without one.
    Raises `DataError` for a folder of other columns.
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
                path=str(source.path),
                columns=columns,
                below=source.below.get("token"),
                expected=f"token {dtype}[{context + 1}]",
                vocabulary=vocabulary,
            )
    return packed
