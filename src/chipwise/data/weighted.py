"""Examples that come more often than others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..base import DataError
from ..base.annotations import as_annotated
from ..base.figures import one_line
from . import order
from .cached import constant
from .compared import Compared, compared, sha_of_all
from .draws import Drawn, Wrapped
from .sources import Columns, has


@as_annotated
class Weighted(Wrapped):
    """Training data in which example `i` comes in proportion to `weights[i]`.

        count = np.bincount(labels)
        train = cw.data.Weighted(source, 1 / count[labels])   # every class equally often

    An epoch has `len(source)` examples. Example `i` comes `len(source) * weights[i] / sum(weights)`
    times in it, rounded up or down. Which ones are rounded up, and their order, is a function of
    the recipe's seed and the epoch. So a run is exact on any devices, and resumes after a stop.
    With equal weights an epoch is that of `source` itself. Examples that come twice in an epoch are
    augmented with different keys. An evaluation takes every example once.

    *Arguments:* `weights`: `(n,)`, at least 0, not all of them 0.

    Raises `DataError` for other weights.
    """

    def __init__(self, source: Any, weights: Any):
        super().__init__(source)
        try:
            self.weights = np.asarray(weights, np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            reason = one_line(error)
            raise DataError("column-not-array", column="weights", reason=reason) from error
        n = len(source)
        w = self.weights
        if w.shape != (n,) or not np.isfinite(w).all() or w.min() < 0 or not w.sum() > 0:
            low, high = (float(w.min()), float(w.max())) if w.size else (0.0, 0.0)
            raise DataError("weights-wrong", shape=list(w.shape), low=low, high=high, n=n)

    def compared(self) -> Compared:
        """Compares the source and the weights."""
        inner = compared(self.source)
        return replace(
            inner, parts={**inner.parts, "weights": sha_of_all([self.weights.tobytes()])}
        )


class _Resampled(Drawn):
    """The epochs of a weighted source."""

    def __init__(self, source: Any, seed: int, weights: np.ndarray):
        super().__init__(source, seed)
        self.weights = weights
        self._epochs: dict[int, np.ndarray] = {}

    def indices(self, positions: np.ndarray) -> np.ndarray:
        epochs, places = np.divmod(np.asarray(positions), len(self))
        rows = np.empty(len(places), np.int64)
        for epoch in np.unique(epochs).tolist():
            known = self._epochs.get(epoch)
            if known is None:
                known = order.weighted(self.seed, epoch, self.weights)
                self._epochs = {epoch: known}  # replaced, not changed: several threads read
            rows[epochs == epoch] = known[places[epochs == epoch]]
        return rows


class _Filled(_Resampled):
    """The epochs of a weighted source whose examples are constant and which several threads may
    read."""

    def fill(self, positions: np.ndarray, out: Columns) -> None:
        self.source.fill(self.indices(positions), out)

    def prefetch(self, positions: np.ndarray) -> None:
        if has(self.source, "prefetch"):
            self.source.prefetch(self.indices(positions))


def by_epoch(source: Any, seed: int) -> Any:
    """`source` itself if its examples are constant, else a `Drawn`, which is read by position.
    Raises `DataError` for weights inside another source, which would not count."""
    inner = source
    while isinstance(inner, Wrapped) and not isinstance(inner, Weighted):
        inner = inner.source
    if isinstance(inner, Weighted) and inner is not source:
        outer = type(source).__name__
        wrong = "{outer}(cw.data.Weighted(...)): type cw.data.Weighted({outer}(...), weights)."
        raise DataError("weights-inside", wrong, outer=outer)
    if isinstance(source, Weighted):
        kind = _Filled if has(source.source, "fill") else _Resampled
        return kind(source.source, seed, source.weights)
    return source if constant(source) else Drawn(source, seed)
