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

from ..models.conv_first import conv_first, has_form


def override(env: Any, torch: Any) -> None:
    """Gives torchax's `env` these operations."""
    from torchax.ops import ops_registry

    functional, aten = torch.nn.functional, torch.ops.aten
    of_tensors: dict[Any, Callable] = {
        functional.affine_grid: _affine_grid,
        functional.batch_norm: _batch_norm,
        functional.instance_norm: _instance_norm,
        functional.interpolate: _interpolate,
        functional.scaled_dot_product_attention: _attention,
        aten.scaled_dot_product_attention: _attention,
        torch.Tensor.new_tensor: _new_tensor,
        torch.as_tensor: _as_tensor,
    }
    for operation, own in of_tensors.items():
        env.override_op_definition(operation, functools.partial(own, env))
    copy = functools.partial(_copy, env, env._get_op_or_decomp(aten.copy_).func)
    env.override_op_definition(aten.copy_, copy, is_view_op=True)
    convolution = env._get_op_or_decomp(aten.convolution).func
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
        aten.convolution: functools.partial(_convolution, convolution),
        aten.index_add: _index_add,
        aten.max_unpool2d: _max_unpool,
        aten.max_unpool3d: _max_unpool,
        aten.mT: lambda x: x.mT,
        aten.squeeze.default: _squeeze,
        aten.take_along_dim: _take_along_dim,
        aten._upsample_bilinear2d_aa: functools.partial(_resized, "linear"),
        aten._upsample_bicubic2d_aa: functools.partial(_resized, "cubic"),
        aten.embedding_renorm_: _renorm,
        torch.embedding_renorm_: _renorm,
        torch.take_along_dim: _take_along_dim,
    }
    for axes in (1, 2, 3):
        indexed = getattr(functional, f"max_pool{axes}d_with_indices")
        of_arrays[indexed] = functools.partial(_max_pool, axes)
    pools = (functional.max_pool2d, aten.max_pool2d_with_indices, aten.max_pool3d_with_indices)
    for operation, axes in zip(pools, (2, 2, 3), strict=True):
        theirs = env._get_op_or_decomp(operation).func
        of_arrays[operation] = functools.partial(_dilated, axes, theirs)
    for operation in (aten.logcumsumexp, aten.cummax, aten.cummin):
        theirs = env._get_op_or_decomp(operation).func
        of_arrays[operation] = functools.partial(_along, theirs)
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
            # PyTorch's own list leaves out some: what torchax has by this name is no other one
            named, called = (
                inspect.signature(f).parameters for f in (theirs[function], operator.func)
            )
            pairs = {a: b for a, b in zip(named, called, strict=False) if a not in called}
            other[function] = {**other.get(function, {}), **pairs}
    return other


def _new_tensor(env, x, data, *, dtype=None, device=None, requires_grad=False):
    """A plain tensor: a constant."""
    import torch

    return torch.as_tensor(data, dtype=dtype or x.dtype).clone()


def _copy(env, theirs, x, y, *more):
    """torchax' own one copies no views."""
    return theirs(x, env.v2t_iso(y), *more, env=env)


def _as_tensor(env, data, dtype=None, device=None):
    import torch

    x = data if isinstance(data, env.kinds) else env.constant(torch.as_tensor(data))
    return x if dtype is None else x.to(dtype)


def _affine_grid(env, theta, size, align_corners=None):
    """PyTorch's own one compares the sizes."""
    import torch

    if not theta.is_floating_point():
        raise ValueError(f"affine_grid of {theta.dtype}, which is no floating point type")
    return torch.affine_grid_generator(theta, size, bool(align_corners))


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
    """`log_probs` `(time, batch, classes)`, `targets` `(batch, length)` or joined to one row."""
    if log_probs.ndim != 3:
        raise NotImplementedError("ctc_loss without a batch")
    if targets.ndim == 1:
        known = not isinstance(target_lengths, jax.core.Tracer)
        longest = int(np.asarray(target_lengths).max()) if known else targets.size
        ends = jnp.cumsum(jnp.asarray(target_lengths))[:, None]
        at = ends - jnp.reshape(target_lengths, (-1, 1)) + jnp.arange(longest)
        targets = targets[jnp.minimum(at, targets.size - 1)]
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


def _convolution(theirs, x, weight, bias, stride, padding, dilation, transposed, *more):
    """Some 2-D convolutions have a form that is fast on CPUs."""
    padding = _spread(weight.ndim - 2, padding)  # "valid" is a single 0
    steps: Any = tuple(int(n) for n in stride)
    sides: Any = tuple((int(n), int(n)) for n in padding)
    usual = x.ndim == 4 and not transposed and set(dilation) == {1} and x.dtype == weight.dtype
    if not (
        usual
        and jnp.issubdtype(x.dtype, jnp.floating)
        and has_form(x, weight, steps, sides, more[-1])
    ):
        return theirs(x, weight, bias, stride, padding, dilation, transposed, *more)
    y = conv_first(x, weight, steps, sides)
    return y if bias is None else y + bias[:, None, None]


def _windows(x, spread, steps, fill):
    """The elements of each window of the last axes of `x`, on a new last axis."""
    kernel, stride, padding, dilation = spread
    short = [
        max((k - 1) * d + s * (n - 1) + 1 - p - size, 0)
        for k, d, s, n, p, size in zip(
            kernel, dilation, stride, steps, padding, x.shape[-len(kernel) :], strict=True
        )
    ]
    ends = [(0, 0)] * (x.ndim - len(kernel)) + list(zip(padding, short, strict=True))
    wide = jnp.pad(x, ends, constant_values=fill)
    parts = []
    for at in itertools.product(*map(range, kernel)):
        first = [a * d for a, d in zip(at, dilation, strict=True)]
        cut = (slice(f, f + s * n, s) for f, s, n in zip(first, stride, steps, strict=True))
        parts.append(wide[(..., *cut)])
    return jnp.stack(parts, -1)


def _spread(axes, given):
    return (given,) * axes if isinstance(given, int) else tuple(given) * (axes // len(given))


def _max_pool(
    axes,
    input,
    kernel_size,
    stride=None,
    padding=0,
    dilation=1,
    ceil_mode=False,
    return_indices=True,
):
    """The largest value of each window, and its place among the last axes, flattened."""
    stride = kernel_size if stride in (None, (), []) else stride
    spread = [_spread(axes, n) for n in (kernel_size, stride, padding, dilation)]
    sizes, steps = input.shape[-axes:], []
    for size, k, s, p, d in zip(sizes, *spread, strict=True):
        room = size + 2 * p - d * (k - 1) - 1
        count = (-(-room // s) if ceil_mode else room // s) + 1
        steps.append(count - (ceil_mode and (count - 1) * s >= size + p))
    values = _windows(input, spread, steps, -jnp.inf)
    places = _windows(jnp.arange(math.prod(sizes)).reshape(sizes), spread, steps, 0)
    best = values.argmax(-1)[..., None]
    at = jnp.take_along_axis(jnp.broadcast_to(places, values.shape), best, -1)
    return jnp.take_along_axis(values, best, -1)[..., 0], at[..., 0]


def _dilated(
    axes,
    theirs,
    input,
    kernel_size,
    stride=None,
    padding=0,
    dilation=1,
    ceil_mode=False,
    return_indices=True,
):
    """torchax' maximum of windows has no gradient if these are dilated."""
    given = (input, kernel_size, stride, padding, dilation, ceil_mode)
    if set(_spread(axes, dilation)) == {1}:
        return theirs(*given)
    found = _max_pool(axes, *given)
    return found if return_indices else found[0]


def _max_unpool(x, indices, output_size, *_):
    """The values at their places. Each has the gradient of its place, also if several have one."""
    lead = x.shape[: -len(output_size)]
    flat, at = (a.reshape(*lead, -1) for a in (x, indices))
    zeros = jnp.zeros((*lead, math.prod(output_size)), x.dtype)
    fixed = jax.lax.stop_gradient(flat)
    rows = [jax.lax.broadcasted_iota(at.dtype, at.shape, i) for i in range(len(lead))]
    placed = zeros.at[(*rows, at)].set(fixed) + zeros.at[(*rows, at)].add(flat - fixed)
    return placed.reshape(*lead, *output_size)


def _along(theirs, x, dim):
    return theirs(x, dim % max(x.ndim, 1))


def _resized(method, x, output_size, align_corners, *scales):
    if align_corners:
        raise NotImplementedError("interpolate with antialias and align_corners")
    shape = (*x.shape[:2], *output_size)
    if None in (scales or [None]):
        return jax.image.resize(x, shape, method)
    # PyTorch keeps the scale that is given, though the sizes are whole
    return jax.image.scale_and_translate(x, shape, (2, 3), jnp.array(scales), jnp.zeros(2), method)


def _squeeze(x):
    """Leaves out axes of size 1. That of a batch of any size stays."""
    return jnp.squeeze(x, tuple(axis for axis, size in enumerate(x.shape) if size == 1))


def _take_along_dim(input, indices, dim=None):
    if dim is None:
        return jnp.take(input.reshape(-1), indices.reshape(-1))
    return jnp.take_along_axis(input, indices, dim)


def _renorm(*_):
    raise NotImplementedError(
        "an embedding with max_norm=m, which writes into its weights: leave max_norm out, and type"
        " x * (m / n.detach().clamp(min=m)) of its rows x, where n is x.norm(dim=-1, keepdim=True)"
    )


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
            if isinstance(momentum, env.kinds):
                momentum = momentum.jax()
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


def cumulative(own: Callable) -> Callable:
    """`forward` of PyTorch's batch norm, `own`, also with `momentum=None`: the mean of all batches,
    for which PyTorch reads their number."""
    import torch

    def forward(self: Any, input: Any) -> Any:
        if self.momentum is not None or not (self.training and self.track_running_stats):
            return own(self, input)
        self._check_input_dim(input)
        self.num_batches_tracked.add_(1)
        moved = (self.running_mean, self.running_var, self.weight, self.bias)
        part = 1.0 / self.num_batches_tracked
        return torch.nn.functional.batch_norm(input, *moved, True, part, self.eps)

    return forward


def mapped(env: Any) -> Callable:
    """`torch.vmap` by JAX's, since PyTorch's own one knows no traced tensors."""

    def vmap(func, in_dims=0, out_dims=0, randomness="error", *, chunk_size=None):
        if randomness == "different":
            raise NotImplementedError("torch.vmap with randomness='different'")

        def called(*args, **kwargs):
            def one(*arrays):
                return env.t2j_iso(func(*env.j2t_iso(arrays), **kwargs))

            with env.drawing(randomness == "same"):
                return env.j2t_iso(jax.vmap(one, in_dims, out_dims)(*env.t2j_iso(args)))

        return called

    return vmap
