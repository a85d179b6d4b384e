"""The backward pass that a `torch.autograd.Function` states, as the gradient of the program.

JAX would differentiate the forward pass, which is another gradient for what reverses one, rounds
with a straight slope, or cuts by a rule of its own.
"""

from __future__ import annotations

import inspect
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
    of its `backward`. `again(what)` makes a context in which `what` is traced: the backward pass is
    traced after the module's call is over."""
    one = _Call(env, function, given, again)
    keys = [] if env.param.prng is REPEATED else [env.get_and_rotate_prng_key()]

    @jax.custom_vjp
    def call(keys: list[Any], *arrays: Any) -> list[Any]:
        return one.forward(keys, *arrays)[0]

    call.defvjp(one.forward, one.backward)
    arrays = call(keys, *(env.t2j_iso(x) for x in one.traced.values()))
    return one.outputs(arrays)


class _Call:
    """A call of a `function`. *Fields:* `traced`: the tensors among its arguments, by position.
    `outputs`: makes tensors of the arrays of the outputs, set by each trace of `forward`."""

    def __init__(self, env: Any, function: Any, given: tuple[Any, ...], again: Callable[..., Any]):
        import torch

        self.env, self.function, self.again, self.torch = env, function, again, torch
        self.apart = function.setup_context is not torch.autograd.Function.setup_context
        if self.apart:  # PyTorch gives defaults to `setup_context` too
            bound = inspect.signature(function.forward).bind(*given)
            bound.apply_defaults()
            given = bound.args
        self.given = given
        self.traced = {i: x for i, x in enumerate(given) if isinstance(x, env.kinds)}
        inside = torch.utils._pytree.tree_leaves(given)
        if len(self.traced) < sum(isinstance(x, env.kinds) for x in inside):
            raise TypeError("a tensor in a list or dict, which has no gradient: give it by itself")
        self._refuse_complex(list(self.traced.values()))
        self.needed = tuple(isinstance(x, env.kinds) and x.is_floating_point() for x in given)
        self.outputs: Any = None
        self.context: Any = None
        self.reached: list[bool] = []
        """Whether a gradient comes back from each output."""

    def _refuse_complex(self, tensors: list[Any]) -> None:
        if any(x is not None and x.is_complex() for x in tensors):
            raise TypeError("complex numbers in a torch.autograd.Function")

    def _split(self, tree: Any) -> tuple[list[Any], Any]:
        """The arrays of `tree`, and a function that puts arrays in their places."""
        pytree, env = self.torch.utils._pytree, self.env
        leaves, spec = pytree.tree_flatten(tree)
        if any(isinstance(x, self.torch.nn.Module) for x in leaves):
            raise TypeError("a module in ctx: save its tensors by ctx.save_for_backward")
        places = [i for i, x in enumerate(leaves) if isinstance(x, env.kinds)]
        arrays = [env.t2j_iso(leaves[i]) for i in places]
        others = [None if i in places else x for i, x in enumerate(leaves)]

        def put(arrays: Any) -> Any:
            values = list(others)
            for i, x in zip(places, arrays, strict=True):
                values[i] = env.j2t_iso(x)
            return pytree.tree_unflatten(values, spec)

        return arrays, put

    def forward(self, keys: list[Any], *arrays: Any) -> tuple[list[Any], list[Any]]:
        """The arrays of the outputs, and those that the backward pass reads."""
        env, function, inputs = self.env, self.function, list(self.given)
        for i, x in zip(self.traced, arrays, strict=True):
            inputs[i] = env.j2t_iso(x)
        context = Context(self.needed)
        with env.override_property(prng=keys[0] if keys else REPEATED):
            if self.apart:
                outputs = function.forward(*inputs)
                function.setup_context(context, tuple(inputs), outputs)
            else:
                outputs = function.forward(context, *inputs)
        if any(inputs[i].jax() is not x for i, x in zip(self.traced, arrays, strict=True)):
            raise TypeError("a forward that writes into its input: return a new tensor")
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        if not all(x is None or isinstance(x, env.kinds) for x in several):
            raise TypeError("an output that is no tensor: keep it in ctx")
        self._refuse_complex(list(several))
        self.reached = [not any(x is y for y in context.unreached) for x in several]
        context.unreached = ()
        results, self.outputs = self._split(outputs)
        saved, self.context = self._split(vars(context))
        return results, saved

    def backward(self, saved: list[Any], slopes: list[Any]) -> tuple[Any, ...]:
        """The gradients of `forward`'s arguments."""
        with self.again(f"{self.function.__name__}.backward"):
            context = Context(self.needed)
            vars(context).update(self.context(saved))
            whole = [jnp.zeros(x.shape) if x.dtype == jax.dtypes.float0 else x for x in slopes]
            outputs = self.outputs(whole)
            several = outputs if isinstance(outputs, tuple) else (outputs,)
            pairs = zip(several, self.reached, strict=True)
            reaching = [x if reached else self.torch.zeros_like(x) for x, reached in pairs]
            found = self.function.backward(context, *reaching)
            found = found if isinstance(found, tuple) else (found,)
            return None, *(self._gradient(found[i], i) for i in self.traced)

    def _gradient(self, found: Any, i: int) -> Any:
        """The gradient of an input, as an array of its shape and dtype."""
        of = self.traced[i]
        if found is None or not self.needed[i]:
            return None
        if found.shape != of.shape:
            shapes = tuple(found.shape), tuple(of.shape)
            raise TypeError("a gradient of shape {} for an input of {}".format(*shapes))
        return self.env.t2j_iso(found.to(of.dtype))
