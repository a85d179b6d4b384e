"""What a module keeps in its plain attributes, and in containers among them, while it is
called: neither parameters nor buffers."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import operator
from collections.abc import Iterator
from typing import Any

from ..base import library

_SEQUENCES = (list, collections.deque)
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict)
_KINDS = (*_SEQUENCES, *_MAPPINGS, set)
_PARTS = {"_parameters", "_buffers", "_modules"}
"""Where PyTorch keeps what a module is made of, which a call may replace."""


@contextlib.contextmanager
def unchanged(module: Any) -> Iterator[None]:
    """A context after which all parts of `module` have the attributes, weights and layers that they
    had before."""
    before = [(part, dict(vars(part))) for part in module.modules()]
    inside: dict[int, tuple[Any, Any]] = {}
    for _, held in before:
        for name, value in held.items():
            if name not in _own() - _PARTS:
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


@contextlib.contextmanager
def aliased(module: Any, held: Any) -> Iterator[None]:
    """A context in which the attributes of `module` and its parts, and containers among them, have
    the tensors `held` by name where they had its parameters and buffers. Others stay."""
    every = (*module.named_parameters(), *module.named_buffers())
    own = {name: tensor for name, tensor in every if name in held}
    _put(module, {id(tensor): held[name] for name, tensor in own.items()})
    try:
        yield
    finally:
        _put(module, {id(held[name]): tensor for name, tensor in own.items()})


def _put(module: Any, new: dict[int, Any]) -> None:
    seen: set[int] = set()

    def put(value: Any) -> Any:
        if type(value) is tuple:
            parts = tuple(map(put, value))
            return value if all(map(operator.is_, parts, value)) else parts
        if type(value) in (*_SEQUENCES, *_MAPPINGS) and id(value) not in seen:
            seen.add(id(value))
            places = value.items() if isinstance(value, dict) else enumerate(value)
            for place, x in list(places):
                value[place] = put(x)
        return new.get(id(value), value)

    for part in module.modules():
        attributes = vars(part)
        for name in attributes.keys() - _own() - {"_flat_weights"}:
            attributes[name] = put(attributes[name])


@functools.cache
def _own() -> frozenset[str]:
    """The attributes that every module has."""
    return frozenset(vars(library("torch", "adapter-library").nn.Module()))


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
