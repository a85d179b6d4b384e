"""A change made to each example on the host, for what cannot be traced and run on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..task import Source
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

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        example = self.source[index]
        with stage("transform"):
            return self.function(example)
