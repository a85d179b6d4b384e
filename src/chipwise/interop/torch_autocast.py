"""Casts what `torch.autocast("cpu")` casts. PyTorch does so below what a trace sees, and for its
own device alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_BIASED = ("linear", "conv")
"""How the names of products with a bias begin, their third argument."""


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
    # PyTorch makes products of some, and has others below them
    above = ("__matmul__", "__rmatmul__", "convolution", "einsum", "tensordot")
    return {**named, "cross_entropy": torch.float32, **dict.fromkeys(above)}


def followed(env: Any, own: Callable) -> Callable:
    """The method `own` that opens or closes `torch.autocast`, after which `env` has its type. Not
    asked for later, since PyTorch closes it for the operations below a function."""
    import torch

    def call(context: Any, *given: Any) -> Any:
        result = own(context, *given)
        lower = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        env.lower, env.halves = lower or None, bool(env.halves or lower)
        return result

    return call


def cast(torch: Any, func: Any, given: Any, lower: Any) -> Any:
    """The arguments `given` to `func` as they are in a context of the type `lower`. Biases stay
    wide, since their gradients are sums."""
    dtypes, name = _dtypes(torch), _name(func)
    if name not in dtypes:
        return given
    wide = [given[0][2:3], given[1].get("bias")] if name.startswith(_BIASED) else []
    kept = {id(x) for x in torch.utils._pytree.tree_leaves(wide)}

    def one(x: Any) -> Any:
        if not x.is_floating_point() or x.dtype == torch.float64 or id(x) in kept:
            return x
        return x.to(dtypes[name] or lower)

    return torch.utils._pytree.tree_map_only(torch.Tensor, one, given)


def rounded(torch: Any, func: Any, result: Any, lower: Any) -> Any:
    """What `func` returns there, to which it has added a bias."""
    biased = _name(func).startswith(_BIASED) and isinstance(result, torch.Tensor)
    return result.to(lower) if biased and result.dtype == torch.float32 else result


def _name(func: Any) -> str:
    return getattr(getattr(func, "overloadpacket", func), "__name__", "")
