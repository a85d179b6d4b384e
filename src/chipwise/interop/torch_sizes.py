"""Batches of any size, as an export has them, for PyTorch.

PyTorch asks a tensor for its sizes in Python and in C++, and computes with them. It gets a
`torch.SymInt` that holds JAX's own expression of the batch's size. What has to be known, as in
`len(x)`, raises JAX's error for it.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ..base import library
from ..recipe.user_code import is_framework

_COMPUTED: dict[str, Callable] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "mod", "floordiv", "neg")
} | {
    "int_floordiv": operator.floordiv,
    "pow_by_natural": operator.pow,
    "sym_max": jax.core.max_dim,
    "sym_min": jax.core.min_dim,
}
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
_JOINED = {"sym_and": all, "sym_or": any}
_UNDECIDED = {
    "guard_size_oblivious": False,
    "guard_or_false": False,
    "statically_known_true": False,
    "guard_or_true": True,
    "expect_true": True,
}
"""How PyTorch asks for what may not be known, and the answer then."""
_LAYOUT = {
    "is_contiguous": True,
    "is_non_overlapping_and_dense": True,
    "is_channels_last_contiguous_2d": False,
    "is_channels_last_contiguous_3d": False,
    "is_channels_last_strides_2d": False,
    "is_channels_last_strides_3d": False,
}
_FALSE = ("is_float", "is_nested_int", "has_hint")


class _Node:
    """What is behind a `torch.SymInt` or `torch.SymBool`. PyTorch looks methods up by name."""

    def __init__(self, known: Callable[[], Any], whole: bool = False):
        self.known, self.whole = known, whole

    def __getattr__(self, name: str) -> Any:
        if name in _COMPUTED:
            return lambda *others: _whole(_COMPUTED[name](self.known(), *_known(others)))
        if name in _COMPARED:
            loose = not _asked_by_a_line()
            return lambda other: _Node(lambda: _compared(name, self.known(), other.known(), loose))
        if name in _JOINED:
            return lambda other: _Node(lambda: _JOINED[name](_known((self, other))))
        if name in _UNDECIDED:
            return lambda *_: _or_else(self.known, _UNDECIDED[name])
        if name in _LAYOUT:
            return lambda *_: _Node(lambda: _LAYOUT[name])
        if name in _FALSE:
            return lambda: False
        raise AttributeError(name)

    def is_int(self) -> bool:
        return self.whole

    def is_bool(self) -> bool:
        return not self.whole

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return self.whole and isinstance(self.known(), int)

    def maybe_as_int(self) -> int | None:
        return self.known() if self.is_constant() else None

    def wrap_int(self, value: int) -> _Node:
        return _whole(value)

    def wrap_bool(self, value: bool) -> _Node:
        return _Node(lambda: value)

    def clone(self) -> _Node:
        return self

    def sym_not(self) -> _Node:
        return _Node(lambda: not self.known())

    def int_(self, *_: Any) -> int:
        return int(self.known())

    def bool_(self, *_: Any) -> bool:
        return bool(self.known())

    def str(self) -> str:
        return f"{self.known()}"

    guard_int, guard_bool, _graph_repr = int_, bool_, str


def _whole(value: Any) -> _Node:
    return _Node(lambda: value, True)


def _known(nodes: Any) -> Iterator[Any]:
    return (node.known() for node in nodes)


def _compared(name: str, one: Any, other: Any, loose: bool) -> bool:
    """JAX calls sizes that may be equal unequal, but refuses to order them. `loose`: a size that
    may be 1 is not, as PyTorch asks for, since a file is also tried with one example."""
    if name not in ("eq", "ne") or (loose and 1 in (one, other)):
        return getattr(operator, name)(one, other)
    return (one < other or one > other) == (name == "ne")


def _asked_by_a_line() -> bool:
    """Whether Python code outside of PyTorch compares a size."""
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__") != "torch.fx.experimental.sym_node":
        return False  # PyTorch's C++
    return frame.f_back is not None and not is_framework(frame.f_back.f_code.co_filename)


def _or_else(known: Callable[[], bool], undecided: bool) -> bool:
    try:
        return known()
    except jax.errors.InconclusiveDimensionOperation:
        return undecided


def as_torch(shape: tuple[Any, ...]) -> Any:
    """The sizes of a JAX array as PyTorch's."""
    torch = library("torch", "adapter-library")
    return torch.Size([n if isinstance(n, int) else torch.SymInt(_whole(n)) for n in shape])


def as_jax(given: Any) -> Any:
    """A size, or sizes, of PyTorch as JAX's."""
    if isinstance(given, tuple):
        return tuple(map(as_jax, given))
    return given if isinstance(given, int) else given.node.known()


def among(torch: Any, given: Any) -> bool:
    """Whether a size that is not known is among these arguments."""
    flat = torch.utils._pytree.tree_leaves(given)
    parts = (x if isinstance(x, torch.Size) else (x,) for x in flat)
    return any(isinstance(x, torch.SymInt) for part in parts for x in part)


def attributes(torch: Any) -> dict[str, Any]:
    """What torchax' classes of tensors get so that PyTorch knows their sizes."""
    from torchax.ops import mappings

    def new(cls: Any, source: Any, view_info: Any = None, env: Any = None, *_: Any) -> Any:
        view = isinstance(source, torch.Tensor)
        shape = view_info.calculate_output_shape(source.jax()) if view else source.shape
        kind = source.dtype if view else mappings.j2t_dtype(source.dtype)
        make = torch.Tensor._make_wrapper_subclass
        return make(cls, as_torch(shape), dtype=kind, device="meta")

    return {"__new__": staticmethod(new), "shape": property(lambda x: as_torch(x.jax().shape))}
