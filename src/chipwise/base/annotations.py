"""Hold what a user gives a public function or dataclass against its annotation.

    @as_annotated
    def fit(recipe: Recipe, run: str | Path | None = None, *, fresh: bool = False): ...

`fit(recipe, fresh="no")` raises the `RecipeError` "wrong-kind" before anything happens. A flag is
True or False, a number is one of Python, NumPy, JAX or PyTorch and never a flag, a text is no list
of texts, a list may be a tuple and the reverse, and a path is a text or a `Path`. What says no more
than `Any`, a tree of arrays or a protocol does is left to the function. `Annotated[str, Duration,
"a duration"]` takes both types, and says the last words when it gets neither.

typeguard and beartype decide otherwise on flags, NumPy's numbers and texts, and importing them
takes 10 and 50 ms. So this is written here.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import operator
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .elsewhere import refuse
from .errors import invalid
from .figures import listed

Called = TypeVar("Called", bound=Callable)


def as_annotated(called: Called) -> Called:
    """`called`, a function or a class, which refuses arguments that its annotations exclude."""
    if isinstance(called, type):
        # The class itself stays what it is, so that it can be compared, pickled and subclassed.
        called.__init__ = as_annotated(called.__init__)  # type: ignore[misc]
        return called
    signature = inspect.signature(called)
    name_of = called.__qualname__.removesuffix(".__init__")

    @functools.cache  # annotations may name what its module imports later
    def hints() -> dict[str, Any]:
        return typing.get_type_hints(called, include_extras=True)

    def held(name: str, value: Any, hint: Any) -> Any:
        if not _fits(value, hint):
            raise invalid("wrong-kind", name, value, _words(hint), of=name_of)
        if Path in typing.get_args(hint) or os.PathLike in typing.get_args(hint):
            _check_path(name, value)
        return _plain(value, hint)

    @functools.wraps(called)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind_partial(*args, **kwargs)
        except TypeError:  # an argument that there is not: Python says which
            known = signature.parameters
            refuse(name_of, (name for name in kwargs if name not in known), known)
            return called(*args, **kwargs)
        for name, value in bound.arguments.items():
            hint, kind = hints().get(name, Any), signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                bound.arguments[name] = tuple(held(name, one, hint) for one in value)
            elif kind is inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = {own: held(own, one, hint) for own, one in value.items()}
            else:
                bound.arguments[name] = held(name, value, hint)
        return called(*bound.args, **bound.kwargs)

    return typing.cast(Called, call)


_LISTS = (list, tuple, Sequence, Iterable)
_WORDS: dict[Any, str] = {
    Any: "anything",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "None",
    Path: "a path",
    os.PathLike: "a path",
    Callable: "a function",
    **dict.fromkeys(_LISTS, "a list"),
    **dict.fromkeys((Mapping, dict), "a dict"),
}
"""The kinds of values in words. Others are called by the name of their class."""


def _fits(value: Any, hint: Any) -> bool:
    kind, inside = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inside)
    if kind is typing.Annotated:
        return any(_fits(value, one) for one in inside if not isinstance(one, str))
    if kind in (bool, int, float):
        return _is_number(value, kind)
    if kind is Callable:
        return callable(value)
    if kind in _LISTS:
        return _is_listed(value, kind, inside)
    if kind in (Mapping, dict):
        items = value.items() if isinstance(value, Mapping) else []
        pairs = all(all(map(_fits, pair, inside)) for pair in items)
        return isinstance(value, Mapping) and pairs
    free = ("typing", "jax", "jaxlib", "numpy")  # Any, and arrays
    if not isinstance(kind, type) or kind.__module__.partition(".")[0] in free:
        return True
    if getattr(kind, "_is_protocol", False):
        return callable(value) or "__call__" not in vars(kind)
    return isinstance(value, os.PathLike if issubclass(kind, os.PathLike) else kind)


def _is_number(value: Any, kind: type) -> bool:
    """Whether a value is a number of this kind, also one of a library or an array `()`."""
    plain = getattr(value, "dtype", type(value))
    if hasattr(value, "dtype") and not hasattr(plain, "kind"):  # of PyTorch or TensorFlow
        try:
            alone = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
            return alone and _is_number(value.item(), kind)
        except (RuntimeError, TypeError):  # on PyTorch's device "meta", or a traced key of JAX
            return False
    if kind is bool or plain in (bool, "bool"):
        return kind is bool and plain in (bool, "bool") and getattr(value, "shape", ()) == ()
    if kind is int:
        try:
            return operator.index(value) is not None
        except TypeError:
            return False
    if isinstance(value, int):  # one of 400 digits is no float
        return abs(value) <= sys.float_info.max
    array = getattr(value, "shape", None) == () and plain.kind in "fiuV"  # V: bfloat16
    return array or isinstance(value, numbers.Real)


def _plain(value: Any, hint: Any) -> Any:
    """A library's number as one of Python, where one is expected, unless it is traced."""
    kinds = [one for one in (hint, *typing.get_args(hint)) if one in (bool, int, float)]
    if not hasattr(value, "dtype") or not any(_is_number(value, kind) for kind in kinds):
        return value
    try:
        return value.item()
    except TypeError:  # traced
        return value


def _check_path(name: str, value: Any) -> None:
    """Raises `RecipeError` for a path that no file can have. An address is left alone."""
    if not isinstance(value, str | os.PathLike) or "://" in str(value):
        return
    path, expected = Path(os.fsdecode(value)), "a path without NUL and lone surrogates"
    try:
        possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        possible = False
    if possible and hasattr(os, "pathconf"):  # Windows says no limit: its own error has to
        most, apple = os.pathconf("/", "PC_NAME_MAX"), sys.platform == "darwin"
        sizes = [len(part if apple else os.fsencode(part)) for part in path.parts]
        possible = max(sizes, default=0) <= most
        expected = f"a path of names of at most {most} {'characters' if apple else 'bytes'}"
    if not possible:
        raise invalid("path-impossible", name, value, expected)


def _is_listed(value: Any, kind: Any, inside: tuple[Any, ...]) -> bool:
    """Whether a value is a list, a tuple or an array of such items, whichever of them `kind` is."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return False
    if not hasattr(value, "__getitem__") and kind is not Iterable:
        return False
    if not isinstance(value, Collection):  # looking at the items of an iterator would take them
        return kind is Iterable or hasattr(value, "__len__")
    if kind is tuple and inside and inside[-1] is not Ellipsis:
        items = list(value)
        return len(items) == len(inside) and all(map(_fits, items, inside))
    return all(_fits(one, inside[0]) for one in value) if inside else True


def _words(hint: Any) -> str:
    """What is expected, in words, such as "a text, a Path or None"."""
    kind, inside = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        named = [["True", "False"] if one is bool else [_words(one)] for one in inside]
        return listed([word for words in named for word in words], "or")
    if kind is typing.Annotated:
        return inside[-1]
    if kind in _LISTS and inside:
        return f"{_WORDS[kind]} ({', '.join(map(_words, inside))})"
    if kind in (Mapping, dict) and inside:
        return f"{_WORDS[kind]} ({': '.join(map(_words, inside))})"
    name = getattr(kind, "__name__", str(kind))
    return _WORDS.get(kind, "..." if kind is Ellipsis else f"a{'n' * (name[0] in 'AEIOU')} {name}")
