"""Examples of other people's data sets as columns: dicts or (image, label), of whatever holds numbers.

Torch tensors and PIL pictures are told by what they can do, so neither library is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import DataError

_PAIR = ("image", "label")


def as_columns(example: Any, index: int) -> dict[str, Any]:
    """Example `index` of a map data set, such as PyTorch's, as column to something NumPy takes as an array.

    A dict keeps its names; a pair becomes `image` and `label`, and a tuple of one becomes `image`. Torch
    tensors, on any device, and PIL pictures become arrays: a picture `(h, w)` or `(h, w, channels)`, one with
    a palette its colours (3 channels, 4 with transparency), bfloat16 float32. The rest stays as it is.

    Raises `DataError` for an example of another kind, and for a picture that cannot be decoded.
    """
    if isinstance(example, (tuple, list)) and 1 <= len(example) <= len(_PAIR):
        example = dict(zip(_PAIR, example, strict=False))
    if not isinstance(example, Mapping) or not example:
        size = f" of {len(example)}" if isinstance(example, (tuple, list, Mapping)) else ""
        raise DataError(
            f"Example {index} is a {type(example).__name__}{size}, expected a dict of arrays such as "
            '{"image": ..., "label": ...}, or a pair (image, label).'
        )
    columns = {}
    for name, value in example.items():
        try:
            columns[str(name)] = _array(value)
        except (OSError, RuntimeError, TypeError, ValueError) as error:  # whatever Pillow and torch raise
            reason = " ".join(str(error).split())
            raise DataError(f"Example {index} has a '{name}' that cannot be read: {reason}.") from error
    return columns


def _array(value: Any) -> Any:
    if hasattr(value, "detach") and hasattr(value, "numpy"):  # torch
        value = value.detach().cpu()
        # NumPy has no bfloat16
        return (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy(force=True)
    if hasattr(value, "getbands") and hasattr(value, "convert"):  # PIL
        if value.mode in ("P", "PA"):  # its numbers are places in a list of colours
            transparent = value.mode == "PA" or "transparency" in value.info
            value = value.convert("RGBA" if transparent else "RGB")
        return np.asarray(value)
    return value
