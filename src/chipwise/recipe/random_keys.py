"""Typed random keys (`jax.random.key`) in trees. The functions of a task and of an optimizer see
keys. All other code sees their words, which are ordinary arrays and can be summed, sent, saved and
hashed as such."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax

Tree = Any


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class KeyData:
    """Takes the place of an array of keys. *Fields:* `words`: `(..., n)` uint32, its only child,
    whose path ends with the generator. `generator`: the kind of keys that they become, such as
    `"threefry2x32"`."""

    words: Any
    generator: Hashable

    def tree_flatten_with_keys(self) -> tuple[Any, Hashable]:
        return ((jax.tree_util.DictKey(str(self.generator)), self.words),), self.generator

    @classmethod
    def tree_unflatten(cls, generator: Hashable, children: Any) -> KeyData:
        (words,) = children
        return cls(words, generator)


def is_key(leaf: Any) -> bool:
    """Whether `leaf` is an array of typed keys."""
    return jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)


def as_data(tree: Tree) -> Tree:
    """`tree` with a `KeyData` in the place of each typed key. Traced or not."""

    def one(leaf: Any) -> Any:
        return (
            KeyData(jax.random.key_data(leaf), jax.random.key_impl(leaf)) if is_key(leaf) else leaf
        )

    return jax.tree.map(one, tree)


def as_keys(tree: Tree) -> Tree:
    """The inverse of `as_data`. Works on traced trees. On arrays, it makes keys on the default
    device."""

    def one(leaf: Any) -> Any:
        if _is_data(leaf):
            return jax.random.wrap_key_data(leaf.words, impl=leaf.generator)
        return leaf

    return jax.tree.map(one, tree, is_leaf=_is_data)


def has_keys(tree: Tree) -> bool:
    """Whether a tree of `as_data` has keys."""
    return any(map(_is_data, jax.tree.leaves(tree, is_leaf=_is_data)))


def _is_data(leaf: Any) -> bool:
    return isinstance(leaf, KeyData)
