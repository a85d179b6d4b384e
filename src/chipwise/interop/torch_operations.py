"""PyTorch's operations that torchax lacks, or computes otherwise than PyTorch does. They are all on
this page, but for random ones (`torch_random`) and recurrent layers (`torch_recurrent`)."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def override(env: Any, torch: Any) -> None:
    """Gives torchax's `env` these operations."""
    from torchax.ops import ops_registry

    functional, aten = torch.nn.functional, torch.ops.aten
    of_tensors: dict[Any, Callable] = {
        functional.batch_norm: _batch_norm,
        functional.instance_norm: _instance_norm,
        functional.interpolate: _interpolate,
        functional.scaled_dot_product_attention: _attention,
        aten.scaled_dot_product_attention: _attention,
        torch.Tensor.new_tensor: _new_tensor,
    }
    for operation, own in of_tensors.items():
        env.override_op_definition(operation, functools.partial(own, env))
    # PyTorch compares the devices of their arguments, so plain ones become constants before
    for operation in (torch.stft, torch.istft):
        env.override_op_definition(operation, operation)
    of_arrays: dict[Any, Callable] = {
        functional.ctc_loss: _ctc_loss,
        functional.embedding_bag: _embedding_bag,
        aten._grouped_mm: _grouped_mm,
        aten.adaptive_max_pool2d: _adaptive_max_pool,
        aten.adaptive_max_pool3d: _adaptive_max_pool,
        aten.col2im: _col2im,
        aten.index_add: _index_add,
    }
    for operation, own in of_arrays.items():
        env._ops[operation] = ops_registry.Operator(operation, own, True, True, False, False)


@functools.cache
def names_of_arguments(torch: Any) -> dict[Any, dict[str, str]]:
    """What torchax calls the arguments of PyTorch's functions, where it has other names."""
    from torchax.ops import ops_registry

    theirs = torch.overrides.get_testing_overrides()
    other = {torch.tensor_split: {"indices": "indices_or_sections"}}
    other[torch.tensor_split]["sections"] = "indices_or_sections"
    for function, operator in ops_registry.all_torch_functions.items():
        if function in theirs:
            called = (inspect.signature(f).parameters for f in (theirs[function], operator.func))
            pairs = {a: b for a, b in zip(*called, strict=False) if a != b}
            other[function] = {**other.get(function, {}), **pairs}
    return other


def _new_tensor(env, x, data, *, dtype=None, device=None, requires_grad=False):
    """A plain tensor: a constant."""
    import torch

    return torch.as_tensor(data, dtype=dtype or x.dtype).clone()


def _attention(env, query, key, value, attn_mask=None, *others, **more):
    """Attention in which what sees nothing is 0, as in PyTorch, and no NaN."""
    import torch
    from torchax.ops.jtorch import _sdpa_reference

    if attn_mask is None:
        return _sdpa_reference(query, key, value, None, *others, **more)
    if attn_mask.dtype == torch.bool:
        blind = attn_mask.logical_not().all(-1, keepdim=True)
        mask = attn_mask.logical_or(blind)
    else:
        blind = (attn_mask == -math.inf).all(-1, keepdim=True)
        mask = attn_mask.masked_fill(blind, 0.0)
    seen = _sdpa_reference(query, key, value, mask, *others, **more)
    return seen.masked_fill(blind, 0.0)


def _grouped_mm(x, w, offs=None, bias=None, out_dtype=None):
    """Rows `x` `(rows, in)`, those of each group by its own `w` `(groups, in, out)`. `offs`: where
    each group ends."""
    if offs is None:
        return x @ w
    if x.ndim != 2 or w.ndim != 3 or bias is not None:
        raise NotImplementedError(f"_grouped_mm of {x.shape} and {w.shape}")
    return jax.lax.ragged_dot(x, w, jnp.diff(offs, prepend=0).astype(jnp.int32))


def _embedding_bag(
    input,
    weight,
    offsets=None,
    max_norm=None,
    norm_type=2.0,
    scale_grad_by_freq=False,
    mode="mean",
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=None,
):
    """Sums, means or maxima of the embeddings of each bag, and 0 for an empty one."""
    if max_norm is not None or scale_grad_by_freq:
        raise NotImplementedError("embedding_bag with max_norm or scale_grad_by_freq")
    if input.ndim == 2:
        bags, bag = input.shape[0], jnp.repeat(jnp.arange(input.shape[0]), input.shape[1])
    else:
        starts = offsets[:-1] if include_last_offset else offsets
        bags = len(starts)
        bag = jnp.searchsorted(starts, jnp.arange(input.size), side="right") - 1
    flat = input.reshape(-1)
    rows = weight[flat]
    counted = jnp.ones(flat.shape) if padding_idx is None else (flat != padding_idx)
    if mode == "max":
        rows = jnp.where(counted[:, None] > 0, rows, -jnp.inf)
        most = jax.ops.segment_max(rows, bag, bags)
        return jnp.where(most == -jnp.inf, 0.0, most)
    scale = counted.astype(rows.dtype)
    if per_sample_weights is not None:
        scale = scale * per_sample_weights.reshape(-1)
    total = jax.ops.segment_sum(rows * scale[:, None], bag, bags)
    if mode == "sum":
        return total
    return total / jnp.maximum(jax.ops.segment_sum(scale, bag, bags), 1.0)[:, None]


def _ctc_loss(
    log_probs,
    targets,
    input_lengths,
    target_lengths,
    blank=0,
    reduction="mean",
    zero_infinity=False,
):
    """`log_probs` `(time, batch, classes)`, `targets` `(batch, length)`."""
    if log_probs.ndim != 3 or targets.ndim != 2:
        raise NotImplementedError("ctc_loss of targets that are joined to one row")
    rows = jnp.swapaxes(log_probs, 0, 1)
    lengths = [jnp.asarray(n).reshape(-1, 1) for n in (input_lengths, target_lengths)]
    after = [jnp.arange(x.shape[1]) >= n for x, n in zip((rows, targets), lengths, strict=True)]
    beyond, unused = (x.astype(rows.dtype) for x in after)
    each = optax.ctc_loss(rows, beyond, targets, unused, blank_id=blank)
    repeats = (targets[:, 1:] == targets[:, :-1]) & ~after[1][:, 1:]
    impossible = lengths[0][:, 0] < lengths[1][:, 0] + repeats.sum(1)
    each = jnp.where(impossible, 0.0 if zero_infinity else jnp.inf, each)
    if reduction == "mean":
        return jnp.mean(each / jnp.maximum(lengths[1][:, 0], 1))
    return jnp.sum(each) if reduction == "sum" else each


def _adaptive_max_pool(x, size):
    """The largest value of each of `size` parts, and its place among the last axes, flattened."""
    whole = x.shape[-len(size) :]
    places = jnp.arange(math.prod(whole)).reshape(whole)
    best, at = [], []
    for part in itertools.product(*(range(n) for n in size)):
        cut = tuple(
            slice(i * n // m, -(-(i + 1) * n // m))
            for i, n, m in zip(part, whole, size, strict=True)
        )
        values = x[(..., *cut)].reshape(*x.shape[: -len(size)], -1)
        best.append(values.max(-1))
        at.append(places[cut].reshape(-1)[values.argmax(-1)])
    shape = (*x.shape[: -len(size)], *size)
    return jnp.stack(best, -1).reshape(shape), jnp.stack(at, -1).reshape(shape)


def _col2im(x, output_size, kernel_size, dilation, padding, stride):
    """`torch.nn.functional.fold`: the sum of patches `(..., channels * kernel, places)`."""
    axes = range(2)
    wide = [n + 2 * p for n, p in zip(output_size, padding, strict=True)]
    steps = [(wide[i] - dilation[i] * (kernel_size[i] - 1) - 1) // stride[i] + 1 for i in axes]
    lead = x.shape[:-2]
    patches = x.reshape(*lead, -1, *kernel_size, *steps)
    out = jnp.zeros((*lead, patches.shape[len(lead)], *wide), x.dtype)
    for at in itertools.product(*map(range, kernel_size)):
        first = [at[i] * dilation[i] for i in axes]
        cut = (slice(first[i], first[i] + stride[i] * steps[i], stride[i]) for i in axes)
        out = out.at[(..., *cut)].add(patches[(..., *at, slice(None), slice(None))])
    return out[(..., *(slice(p, n - p) for p, n in zip(padding, wide, strict=True)))]


def _index_add(x, dim, index, source, *, alpha=1):
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].add(alpha * source)


def _instance_norm(
    env,
    input,
    running_mean=None,
    running_var=None,
    weight=None,
    bias=None,
    use_input_stats=True,
    momentum=0.1,
    eps=1e-5,
):
    """`torch.nn.functional.instance_norm` with running statistics, the means over examples."""
    from torchax.tensor import OperatorNotFound

    if running_mean is None:
        raise OperatorNotFound("instance_norm")  # torchax has that one
    if use_input_stats:
        x = input.jax()
        axes = tuple(range(2, x.ndim))
        for held, new in (
            (running_mean, jnp.mean(x, axes)),
            (running_var, jnp.var(x, axes, ddof=1)),
        ):
            old = held.jax()
            held._elem = ((1 - momentum) * old + momentum * new.mean(0)).astype(old.dtype)
        return _normalised(x, weight, bias, eps, env)
    return _batch_norm(env, input, running_mean, running_var, weight, bias, False, momentum, eps)


def _normalised(x, weight, bias, eps, env):
    axes = tuple(range(2, x.ndim))
    out = (x - x.mean(axes, keepdims=True)) * jax.lax.rsqrt(x.var(axes, keepdims=True) + eps)
    spread = (1, -1, *[1] * len(axes))
    out = out if weight is None else out * weight.jax().reshape(spread)
    return env.j2t_iso(out if bias is None else out + bias.jax().reshape(spread))


def _interpolate(env, input, size=None, scale_factor=None, mode="nearest", *others, **more):
    """`torch.nn.functional.interpolate` by the nearest pixel, also for a batch of any size."""
    if mode != "nearest" or others or more.get("recompute_scale_factor"):
        from torchax.tensor import OperatorNotFound

        raise OperatorNotFound("interpolate")  # torchax has the other ones
    x = input.jax()
    given = scale_factor if size is None else size
    each = given if isinstance(given, (tuple, list)) else (given,) * (x.ndim - 2)
    for axis, want in enumerate(each, 2):
        old = x.shape[axis]
        new = int(old * want) if size is None else int(want)
        step = np.float32(1 / want) if size is None else np.float32(old) / np.float32(new)
        exact = np.floor(np.arange(new, dtype=np.float32) * step)
        x = jnp.take(x, np.minimum(exact.astype(np.int32), old - 1), axis=axis)
    return env.j2t_iso(x)


def _batch_norm(
    env,
    input,
    running_mean,
    running_var,
    weight=None,
    bias=None,
    training=False,
    momentum=0.1,
    eps=1e-5,
):
    """`torch.nn.functional.batch_norm`: normalises with the biased variance, stores the unbiased
    one."""
    x = input.jax()
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    axes = (0, *range(2, x.ndim))
    spread = (1, -1, *[1] * (x.ndim - 2))
    if training:
        mean = jnp.mean(wide, axis=axes)
        var = jnp.var(wide, axis=axes)
        if running_mean is not None:
            count = x.size // x.shape[1]
            unbiased = var * (count / max(count - 1, 1))
            for held, new in ((running_mean, mean), (running_var, unbiased)):
                old = held.jax()
                held._elem = ((1 - momentum) * old + momentum * new).astype(old.dtype)
    else:
        mean = running_mean.jax()
        var = running_var.jax()
    scale = jax.lax.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight.jax()
    out = (wide - mean.reshape(spread)) * scale.reshape(spread)
    if bias is not None:
        out = out + bias.jax().reshape(spread)
    return env.j2t_iso(out.astype(x.dtype))
