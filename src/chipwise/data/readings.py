"""How a task's data and weights were read, for the first lines of a run and its recipe.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..base import Fact, fact
from .class_names import names_in
from .draws import Wrapped
from .packed import PackedFolder


def packs_read(sources: Iterable[Any]) -> list[Fact]:
    """What packed folders among `sources`, or below their wrappers, say of how they were read, each
    once."""
    texts: dict[str, None] = {}
    for source in sources:
        if (pack := _pack(source)) is not None:
            texts |= dict.fromkeys(pack.readings)
    return [fact("pack-read", sentence=text) for text in texts]


def packs(task: Any) -> dict[str, Any]:
    """The descriptions of a task's packs, "train" and "eval"."""
    both = {"train": _pack(task.train), "eval": _pack(task.eval)}
    return {split: pack.description for split, pack in both.items() if pack is not None}


def _pack(source: Any) -> PackedFolder | None:
    """The packed folder that a source reads."""
    while isinstance(source, Wrapped):
        source = source.source
    return source if isinstance(source, PackedFolder) else None


def readings(task: Any) -> list[Fact]:
    """How the packs and the weights of a task were read."""
    return [*packs_read((task.train, task.eval)), *task.weights_read]


def classes_of(task: Any) -> list[Fact]:
    """The number of a task's classes and their first names, if they have names."""
    names = names_in(task)
    return [fact("classes-known", count=len(names), names=names)] if names else []
