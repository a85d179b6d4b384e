"""Decides which data sets give the same examples in every epoch, so that they may be read once."""

from __future__ import annotations

from typing import Any

from .class_names import Renamed
from .draws import Drawn, Wrapped
from .padded import Padded
from .sources import has

# Their own code draws nothing
_OF_TORCH = ("TensorDataset", "Subset", "ConcatDataset", "StackDataset")


class Cached(Wrapped):
    """Declares that `source` gives the same examples in every epoch, so that they may stay on the
    devices.

        train = cw.data.Cached(MyDataset("photos"))

    Needed only for a data set with code of its own in `[i]`, such as a PyTorch `Dataset`. Such code
    may draw at random, so it is otherwise called in every epoch.
    """

    def __init__(self, source: Any):
        super().__init__(source)
        if hasattr(source, "__getitems__"):
            self.__getitems__ = source.__getitems__


def constant(source: Any) -> bool:
    """Whether `source` is known to give the same examples in every epoch.

    This is known of chipwise's own sources and others with `spec` and `fill` or `take`, of lists,
    `Cached`, Hugging Face data sets without a transform, and PyTorch's data sets of tensors.
    """
    kind = type(source)
    if kind in (Padded, Renamed):
        return constant(source.source)
    if kind in (list, tuple, Cached) or has(source, "fill") or has(source, "take"):
        return True
    if kind.__module__.startswith("datasets.") and hasattr(source, "format"):
        return source.format["type"] != "custom"
    if kind.__module__ == "torch.utils.data.dataset" and kind.__name__ in _OF_TORCH:
        inner = getattr(source, "datasets", [getattr(source, "dataset", [])])
        return all(map(constant, inner.values() if isinstance(inner, dict) else inner))
    return False


def steady(source: Any) -> Any:
    """`source`, read with the draws of its first epoch for seed 0: for evaluation and predictions,
    which see the same examples each time."""
    return source if constant(source) else Drawn(source, 0)
