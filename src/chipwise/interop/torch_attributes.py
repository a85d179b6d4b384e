"""What a module keeps in its plain attributes, and in lists and dicts among them, while it is
called: neither parameters nor buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..base import library


@contextlib.contextmanager
def unchanged(module: Any) -> Iterator[None]:
    """A context after which all parts of `module` have the attributes that they had before."""
    own = set(vars(library("torch", "adapter-library").nn.Module()))
    before = [(part, dict(vars(part))) for part in module.modules()]
    inside = [
        (value, _copied(value))
        for _, held in before
        for name, value in held.items()
        if type(value) in (dict, list) and name not in own
    ]
    try:
        yield
    finally:
        for part, held in before:
            vars(part).clear()
            vars(part).update(held)
        for container, content in inside:
            container.clear()
            container.update(content) if isinstance(container, dict) else container.extend(content)


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {name: _copied(x) for name, x in value.items()}
    return [_copied(x) for x in value] if type(value) is list else value


def kept(module: Any, kinds: Any) -> dict[int, str]:
    """The tensors of these `kinds` in attributes of `module` and its parts: identity to the
    attribute's name."""
    leaves = library("torch", "adapter-library").utils._pytree.tree_leaves
    return {
        id(x): f"{place}.{name}".lstrip(".")
        for place, part in module.named_modules()
        for name, value in vars(part).items()
        if name != "_flat_weights"  # of recurrent layers, from their parameters
        for x in leaves(value)
        if isinstance(x, kinds)
    }
