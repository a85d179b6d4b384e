"""Casts what `torch.autocast("cpu")` casts. PyTorch does so below what a trace sees, and for its
own device alone."""

from __future__ import annotations

import functools
from typing import Any


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
    above = ("__matmul__", "__rmatmul__", "einsum", "tensordot")  # PyTorch makes products of them
    return {**named, "cross_entropy": torch.float32, **dict.fromkeys(above)}


def cast(torch: Any, func: Any, given: Any, lower: Any) -> Any:
    """The arguments `given` to `func` as they are in a context of the type `lower`."""
    dtypes = _dtypes(torch)
    name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
    if name not in dtypes:
        return given

    def one(x: Any) -> Any:
        if not x.is_floating_point() or x.dtype == torch.float64:
            return x
        return x.to(dtypes[name] or lower)

    return torch.utils._pytree.tree_map_only(torch.Tensor, one, given)
