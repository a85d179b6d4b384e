"""What a module keeps in its plain attributes, and in containers among them, while it is
called: neither parameters nor buffers."""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from ..base import library

_KINDS = (dict, list, set, collections.OrderedDict, collections.defaultdict, collections.deque)


@contextlib.contextmanager
def unchanged(module: Any) -> Iterator[None]:
    """A context after which all parts of `module` have the attributes that they had before."""
    own = set(vars(library("torch", "adapter-library").nn.Module()))
    before = [(part, dict(vars(part))) for part in module.modules()]
    inside: dict[int, tuple[Any, Any]] = {}
    for _, held in before:
        for name, value in held.items():
            if name not in own:
                _remember(value, inside)
    try:
        yield
    finally:
        for part, held in before:
            vars(part).clear()
            vars(part).update(held)
        for container, content in inside.values():
            container.clear()
            fill = container.update if hasattr(container, "update") else container.extend
            fill(content)


def _remember(value: Any, inside: dict[int, tuple[Any, Any]]) -> None:
    """Adds the containers in `value` to `inside`, by identity, each with its own content."""
    if type(value) in _KINDS and id(value) not in inside:
        inside[id(value)] = (value, copy.copy(value))
    elif type(value) is not tuple:
        return
    for x in value.values() if isinstance(value, dict) else value:
        _remember(x, inside)


def kept(module: Any, kinds: Any) -> dict[int, str]:
    """The tensors of these `kinds` in attributes of `module` and its parts: identity to the
    attribute's name."""
    return {
        id(x): f"{place}.{name}".lstrip(".")
        for place, part in module.named_modules()
        for name, value in vars(part).items()
        if name != "_flat_weights"  # of recurrent layers, from their parameters
        for x in _leaves(value)
        if isinstance(x, kinds)
    }


def _leaves(value: Any) -> list[Any]:
    """What the containers in `value` hold, each once, since one may hold itself."""
    seen: set[int] = set()

    def again(x: Any) -> bool:
        known = id(x) in seen
        seen.add(id(x))
        return known

    pytree = library("torch", "adapter-library").utils._pytree
    return pytree.tree_leaves(value, is_leaf=again)
