"""torchax' environment, in which PyTorch's operations become those of JAX, and all that is done
otherwise than by torchax.

Plain tensors are constants. Random operations are those of `torch_random`, recurrent layers those
of `torch_recurrent`. Gradients stop in `torch.no_grad()`.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base import RecipeError, library
from ..base.figures import one_line
from . import torch_random, torch_recurrent

INSTALL = "pip install 'chipwise[torch]'"


def torch_library() -> Any:
    """Imports PyTorch. Raises `RecipeError` with the pip line if it is missing."""
    return library("torch", "adapter-library", command=INSTALL)


def environment() -> Any:
    """torchax's environment with PyTorch's batch norm, in which plain tensors are constants."""
    torch = torch_library()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchax's own, at import
        try:
            import torchax.tensor as torchax
        except ImportError:
            raise RecipeError("torchax-missing", torch=torch.__version__, command=INSTALL) from None
        except Exception as error:  # 0.0.13 beside torch 2.13: an AttributeError
            raise RecipeError(
                "torchax-unfit", torch=torch.__version__, reason=one_line(error), command=INSTALL
            ) from error

    env = _class(torch, torchax)()
    for operation, own in (
        (torch.nn.functional.batch_norm, _batch_norm),
        (torch.nn.functional.interpolate, _interpolate),
    ):
        env.override_op_definition(operation, functools.partial(own, env))
    torch_recurrent.override(env, torch)
    return env


def _class(torch: Any, torchax: Any) -> Any:
    from torchax.ops import op_base, ops_registry

    traced = (torchax.Tensor, torchax.View)
    for kind in traced:  # torchax' say yes, and PyTorch's trunc_normal_ leaves those as they are
        kind.is_meta = False
    pytree = torch.utils._pytree
    creating = (torch.rand, torch.randn, torch.randint)

    class Environment(torchax.Environment):
        kinds = traced
        cut = False
        """Whether the module is in `torch.no_grad()`."""

        def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            given = (args, kwargs or {})
            if func is torch._C._set_grad_enabled:
                # A `torch.autograd.Function` is without a gradient already, and JAX makes its own
                if args[0] or torch.is_grad_enabled():
                    self.cut = not args[0]
                return func(*args)
            if func in creating:  # PyTorch calls their operations, which are below
                raise torchax.OperatorNotFound
            if getattr(func, "overloadpacket", None) in torch_random.operations():
                return self.random(func, *given)
            if self.holds(given):
                given = pytree.tree_map_only(torch.Tensor, self.constant, given)
            result = super().dispatch(func, types, *given)
            if not self.cut:
                return result
            own = {id(x) for x in pytree.tree_leaves(given)}  # also what it writes into
            return pytree.tree_map_only(
                torchax.Tensor, lambda x: x if id(x) in own else x.detach(), result
            )

        def _get_op_or_decomp(self, func: Any) -> Any:
            try:
                return super()._get_op_or_decomp(func)
            except torchax.OperatorNotFound:  # `floor_`: what `floor` returns, written back
                name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
                if not (name.endswith("_") and hasattr(torch.ops.aten, name[:-1])):
                    raise
                written = op_base.InplaceOp(getattr(torch.ops.aten, name[:-1]))
                return ops_registry.Operator(func, written, False, True, False, True)

        def holds(self, given: Any) -> bool:
            """Whether a traced tensor is among these arguments."""
            return any(isinstance(x, traced) for x in pytree.tree_leaves(given))

        def random(self, func: Any, args: Any, kwargs: Any) -> Any:
            """The result of a random operation, also on plain tensors."""
            if kwargs.get("generator") is not None:
                if self.holds((args, kwargs)):
                    raise torchax.OperatorNotFound(f"{func.name()} with generator=")
                return func(*args, **kwargs)
            written = torch_random.written_by(func, args, kwargs)
            if written is not None and not isinstance(written, traced):
                raise torch_random.HostDraw
            given = pytree.tree_map_only(torch.Tensor, self.constant, (args, kwargs))
            with self._dispatch_mode:
                return torch_random.result(self.draw, func, *given)

        def draw(self, kind: str, shape: Any, *limits: Any) -> Any:
            """The numbers of `jax.random`'s function `kind`, of the next key."""
            repeated = self.param.prng is torch_random.REPEATED
            key = torch_random.repeated_key() if repeated else self.get_and_rotate_prng_key()
            return self.j2t_iso(torch_random.values(key, kind, shape, *limits))

        def constant(self, x: Any) -> Any:
            """A plain PyTorch tensor as a constant of the program."""
            return (
                self.j2t_iso(self.t2j_copy(x))
                if type(x) in (torch.Tensor, torch.nn.Parameter)
                else x
            )

        def t2j_iso(self, torchtensors: Any) -> Any:
            return super().t2j_iso(pytree.tree_map_only(torch.Tensor, self.constant, torchtensors))

    return Environment


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
