"""The backward pass that a `torch.autograd.Function` states, as the gradient of the program.

JAX would differentiate the forward pass, which is another gradient for what reverses one, rounds
with a straight slope, or cuts by a rule of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .torch_random import REPEATED


class Context:
    """The `ctx` of both passes: what PyTorch's has, and whatever the forward pass adds to it."""

    def __init__(self, needed: tuple[bool, ...]):
        self.needs_input_grad = needed
        self.saved_tensors: tuple[Any, ...] = ()
        self.unreached: tuple[Any, ...] = ()
        """The outputs that no gradient comes back from."""

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Keeps nothing: there is no derivative in forward mode."""

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.unreached = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Changes nothing: a gradient that is missing is 0 here."""

    def mark_dirty(self, *tensors: Any) -> None:
        raise TypeError("ctx.mark_dirty: return a new tensor")


def called(env: Any, function: Any, given: tuple[Any, ...], again: Callable[..., Any]) -> Any:
    """What `function`, a class of `torch.autograd.Function`, returns for `given`, with the gradient
    of its `backward`. `again(key, what)` makes a context in which `what` is traced with a key: the
    backward pass is traced after the module's call is over."""
    import torch

    pytree = torch.utils._pytree
    traced = [i for i, x in enumerate(given) if isinstance(x, env.kinds)]
    needed = tuple(i in traced and given[i].is_floating_point() for i in range(len(given)))
    repeated = env.param.prng is REPEATED
    keys = [] if repeated else [env.get_and_rotate_prng_key()]
    shape: dict[str, Any] = {}
    """What the outputs and the context have besides arrays: set by each trace of `run`."""

    def split(tree: Any) -> tuple[list[Any], Any]:
        """The arrays of `tree`, and a function that puts arrays in their places."""
        leaves, spec = pytree.tree_flatten(tree)
        places = [i for i, x in enumerate(leaves) if isinstance(x, env.kinds)]
        arrays = [env.t2j_iso(leaves[i]) for i in places]
        others = [None if i in places else x for i, x in enumerate(leaves)]

        def put(arrays: Any) -> Any:
            values = list(others)
            for i, x in zip(places, arrays, strict=True):
                values[i] = env.j2t_iso(x)
            return pytree.tree_unflatten(values, spec)

        return arrays, put

    def run(keys: list[Any], *arrays: Any) -> tuple[list[Any], list[Any]]:
        """The arrays of the outputs, and those that the backward pass reads."""
        inputs = list(given)
        for i, x in zip(traced, arrays, strict=True):
            inputs[i] = env.j2t_iso(x)
        context = Context(needed)
        with env.override_property(prng=keys[0] if keys else REPEATED):
            if function.setup_context is torch.autograd.Function.setup_context:
                outputs = function.forward(context, *inputs)
            else:
                outputs = function.forward(*inputs)
                function.setup_context(context, tuple(inputs), outputs)
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        shape["reached"] = [
            x is None or not any(x is y for y in context.unreached) for x in several
        ]
        context.unreached = ()
        results, shape["outputs"] = split(outputs)
        saved, shape["context"] = split(vars(context))
        return results, saved

    @jax.custom_vjp
    def call(keys: list[Any], *arrays: Any) -> list[Any]:
        return run(keys, *arrays)[0]

    def forward(keys: list[Any], *arrays: Any) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
        outputs, saved = run(keys, *arrays)
        return outputs, (keys, saved)

    def backward(kept: tuple[list[Any], list[Any]], slopes: list[Any]) -> tuple[Any, ...]:
        keys, saved = kept
        with again(keys[0] if keys else REPEATED, f"{function.__name__}.backward"):
            context = Context(needed)
            vars(context).update(shape["context"](saved))
            whole = [jnp.zeros(x.shape) if x.dtype == jax.dtypes.float0 else x for x in slopes]
            outputs = shape["outputs"](whole)
            several = outputs if isinstance(outputs, tuple) else (outputs,)
            pairs = zip(several, shape["reached"], strict=True)
            found = function.backward(context, *(x if reached else x * 0 for x, reached in pairs))
            found = found if isinstance(found, tuple) else (found,)
            return None, *(env.t2j_iso(found[i]) if needed[i] else None for i in traced)

    call.defvjp(forward, backward)
    arrays = call(keys, *(env.t2j_iso(given[i]) for i in traced))
    return shape["outputs"](arrays)
