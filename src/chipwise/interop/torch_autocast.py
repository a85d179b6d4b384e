"""Casts what `torch.autocast("cpu")` casts. PyTorch does so below what a trace sees, and for its
own device alone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from ..base import RecipeError
from ..recipe.user_code import this_line

_BIASED = ("linear", "conv")
"""How the names of products with a bias begin, their third argument."""
_REFUSED = ("corrcoef", "gru", "linalg_pinv", "lstm", "rnn_relu", "rnn_tanh")
"""What PyTorch rounds in places of its own."""
_COMPOSED = ("einsum", "linalg_matrix_power", "pad")
"""What torchax has whole, and PyTorch makes of operations that it may cast."""
_NORMS = ("batch_norm", "group_norm", "instance_norm", "layer_norm", "norm_legit", "rms_norm")
"""How the names end of what returns the type of its first argument."""


@functools.cache
def _dtypes(torch: Any) -> dict[str, Any]:
    """The name of an operation to the type that it computes in, or None for that of the context."""
    from torchax.amp import CastPolicy, autocast_policy

    kinds = {CastPolicy.LOWER_PRECISION_FP: None, CastPolicy.FP32: torch.float32}
    named = {
        operation.overloadpacket.__name__: kinds[policy]
        for operation, policy in autocast_policy.items()
        if policy in kinds  # others take the widest type, as they do by themselves
    }
    above = dict.fromkeys(("__matmul__", "__rmatmul__", "convolution"))
    wide = dict.fromkeys(("cross_entropy", "max_pool3d_with_indices"), torch.float32)
    return {**named, **above, **wide}


def replacements(env: Any) -> list[tuple[Any, str, Any]]:
    """What PyTorch has otherwise during a trace in `env`: an object, a name and the value.

    `torch.autocast` gives `env` its type. That is not asked for later, since PyTorch closes it for
    the operations below a function. The device of a traced tensor is taken for the CPU.
    """
    import torch

    context, thread, modes = torch.autocast, threading.get_ident(), torch.amp.autocast_mode
    leave = vars(context)["__exit__"]
    changes: list[tuple[Any, str, Any]] = []

    def of_cpu(own: Callable) -> Callable:
        return lambda *given, **named: own(
            *("cpu" if x == "jax" else x for x in given),
            **{n: "cpu" if x == "jax" else x for n, x in named.items()},
        )

    def moved(own: Callable) -> Callable:
        def call(self: Any, *given: Any) -> Any:
            result = own(self, *given)
            if threading.get_ident() == thread:
                lower = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
                if lower == torch.float16:
                    leave(self, None, None, None)  # since `with` does not, after an error here
                    raise RecipeError("torch-autocast-float16", where=this_line())
                env.lower, env.halves = lower or None, bool(env.halves or lower)
            return result

        return call

    def cast(own: Callable) -> Callable:  # of `custom_fwd`, by the name of the device
        def call(x: Any, device: str, dtype: Any) -> Any:
            given = own(x, device, dtype)
            return own(given, "jax", dtype) if device == "cpu" else given

        return call

    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        changes.append((torch, name, of_cpu(getattr(torch, name))))
    changes.append((modes, "_cast", cast(modes._cast)))
    own_init = vars(context)["__init__"]
    changes.append((context, "__init__", lambda self, *a, **k: of_cpu(own_init)(self, *a, **k)))
    for name in ("__enter__", "__exit__"):
        changes.append((context, name, moved(vars(context)[name])))
    return changes


def closed() -> tuple[Any, str, Any]:
    """The same, in which `torch.autocast` of this thread casts nothing."""
    import torch

    own, thread = vars(torch.autocast)["__enter__"], threading.get_ident()

    def enter(self: Any) -> Any:
        result = own(self)
        if threading.get_ident() == thread:
            torch.set_autocast_enabled("cpu", False)
        return result

    return torch.autocast, "__enter__", enter


def casts(torch: Any, func: Any) -> bool:
    """Whether `func` is cast. Nothing is inside it, as in PyTorch."""
    name = _name(func)
    if name in _REFUSED:
        raise RecipeError("torch-autocast-layer", operation=f"torch.{name}", where=this_line())
    return name in _dtypes(torch)


def composed(func: Any) -> bool:
    """Whether PyTorch makes `func` of operations that it may cast."""
    return _name(func) in _COMPOSED


def cast(env: Any, func: Any, given: Any, lower: Any) -> Any:
    """The arguments `given` to `func` as they are in a context of the type `lower`. Biases stay
    wide, since their gradients are sums."""
    import torch

    name = _name(func)
    wide = [given[0][2:3], given[1].get("bias")] if name.startswith(_BIASED) else []
    kept = {id(x) for x in torch.utils._pytree.tree_leaves(wide)}

    def one(x: Any) -> Any:
        if not x.is_floating_point() or x.dtype == torch.float64 or id(x) in kept:
            return x
        return x.to(_dtypes(torch)[name] or lower)

    with env:
        return torch.utils._pytree.tree_map_only(torch.Tensor, one, given)


def rounded(env: Any, func: Any, result: Any, lower: Any) -> Any:
    """What `func` returns there, to which it has added a bias."""
    if not _name(func).startswith(_BIASED) or result.dtype.itemsize != 4:
        return result
    with env:
        return result.to(lower)


def normed(env: Any, func: Any, given: Any, result: Any) -> Any:
    """What a norm returns for numbers of half precision by wide weights: such numbers too."""
    if not _name(func).endswith(_NORMS):
        return result
    dtype = next(iter((*given[0], *given[1].values()))).dtype
    if dtype.itemsize != 2:
        return result
    several = isinstance(result, tuple)
    first, *others = result if several else (result,)
    with env:
        return (first.to(dtype), *others) if several else first.to(dtype)


def _name(func: Any) -> str:
    return getattr(getattr(func, "overloadpacket", func), "__name__", "")
