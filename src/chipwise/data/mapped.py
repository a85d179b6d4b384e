"""A change made to each example on the host, for what cannot be traced and run on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ..recipe.task import Source
from .sources import Spec, has, take
from .stages import stage


class Mapped:
    """The examples of `source`, each through `function`: example (a dict of arrays) to another such dict.

    It runs each time an example is read, so what can be done once belongs in a pack and what should differ
    in every epoch in `Task(augment=...)`, on the device. Its time counts as the stage "transform".
    Called by one thread, or by processes when a run is given some (`--workers processes:4`); `function`
    must then be one that pickle can send: defined in a module, not a lambda.
    """

    def __init__(self, source: Source, function: Callable[[Mapping[str, Any]], Mapping[str, Any]]):
        self.source, self.function = source, function
        self.classes = getattr(source, "classes", None)

    @functools.cached_property
    def spec(self) -> Spec:
        """Column to the shape and type of one example, from example 0, read once."""
        columns = take(self, np.zeros(1, np.int32))
        return {name: jax.ShapeDtypeStruct(c.shape[1:], c.dtype) for name, c in columns.items()}

    def __len__(self) -> int:
        return len(self.source)

    def prefetch(self, indices: np.ndarray) -> None:
        """Tells the source below, if it listens, what will be wanted soon."""
        if has(self.source, "prefetch"):
            self.source.prefetch(indices)  # type: ignore[attr-defined]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        example = self.source[index]
        with stage("transform"):
            return self.function(example)
