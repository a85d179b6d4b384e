"""torchax' environment, in which PyTorch's operations become those of JAX.

Plain tensors are constants, there is one device, and gradients stop in `torch.no_grad()`. What
torchax lacks or computes otherwise is in `torch_operations`, `torch_random` and `torch_recurrent`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from ..base import RecipeError, library
from ..base.figures import one_line
from ..recipe.user_code import BY_VALUE, this_line
from . import (
    torch_autocast,
    torch_function,
    torch_operations,
    torch_random,
    torch_recurrent,
    torch_sizes,
)
from .adapter import own_promotion
from .torch_warnings import asserted, only_warns

_INTO_PLAIN = "{} writes into a tensor that was made without device=x.device"
_INDEXING = "torch._dynamo._trace_wrapped_higher_order_op"
"""Where PyTorch has an index by tensors that `torch.vmap` maps over."""
LOCK = threading.RLock()
"""A trace changes a module's training flags and PyTorch's classes. So only one runs at a time."""
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
    torch_operations.override(env, torch)
    torch_recurrent.override(env, torch)
    return env


def _is_composite(torch: Any, func: Any) -> bool:
    """Whether PyTorch's C++ makes `func` of other operations."""
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    overload = isinstance(func, torch._ops.OpOverload)
    return overload and known(func.name(), "CompositeImplicitAutograd")


def _set_item(own: Any, torch: Any, view: Any, index: Any, value: Any) -> None:
    """Writes into a view at an index that may hold tensors, as masks. torchax' own takes slices."""
    if not any(isinstance(x, torch.Tensor) for x in torch.utils._pytree.tree_leaves(index)):
        own(view, index, value)
        return
    whole = view.torch()
    whole[index] = value
    view.update(whole)


def checkpointed(_: Any, function: Any, preserve: Any, *given: Any) -> Any:
    """The `apply` of PyTorch's reentrant checkpoint, with the gradient of its forward pass. The own
    one refuses `torch.autograd.grad`, and asks PyTorch for the gradient."""
    return function(*given)


def checkpointed_eagerly(kind: Any, function: Any, preserve: Any, *given: Any) -> Any:
    """The same for eager PyTorch, where no gradient comes out if none goes in."""
    import torch

    tensors = (x for x in given if isinstance(x, torch.Tensor))
    with torch.set_grad_enabled(torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return checkpointed(kind, function, preserve, *given)


@contextlib.contextmanager
def replaced(kind: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which the class `kind` has the attribute `name` with this `value`."""
    own = {key: held for key, held in vars(kind).items() if key == name}
    setattr(kind, name, value)
    try:
        yield
    finally:
        delattr(kind, name)
        for held in own.values():
            setattr(kind, name, held)


def _with_constants(torch: Any, torchax: Any) -> Any:
    """torchax' class, with plain tensors as constants and random operations."""
    traced = (torchax.Tensor, torchax.View)
    pytree = torch.utils._pytree

    class Environment(torchax.Environment):
        kinds = traced
        number: float | None = None
        """What was drawn last if it is a single number that is known."""
        backward = False
        """Whether the backward pass of a `torch.autograd.Function` is traced, after its module's
        call: what the module holds are its first weights then, and draws would repeat."""
        may_draw = True
        """Not in what `torch.vmap` maps, unless it says that all examples draw the same."""

        @contextlib.contextmanager
        def drawing(self, may_draw: bool) -> Iterator[None]:
            before, self.may_draw = self.may_draw, may_draw
            try:
                yield
            finally:
                self.may_draw = before

        def _to_copy(self, the_tensor: Any, new_dtype: Any, new_device: Any) -> Any:
            """`x.cpu()` and the like stay in the program, which has one device."""
            new_device = None if isinstance(the_tensor, traced) else new_device
            return super()._to_copy(the_tensor, new_dtype, new_device)

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
                if self.skips and isinstance(written, torch.nn.Parameter):
                    # Of a layer that the call makes: a comparison finds whether it is read
                    return written.data.fill_(math.nan)
                raise torch_random.HostDraw
            given = pytree.tree_map_only(torch.Tensor, self.constant, (args, kwargs))
            with self._dispatch_mode:
                return torch_random.result(self.draw, func, *given)

        def draw(self, kind: str, shape: Any, *limits: Any) -> Any:
            """The numbers of `jax.random`'s function `kind`, of the next key."""
            if self.backward:
                raise TypeError("a backward that draws: draw in forward, and keep it in ctx")
            if not self.may_draw:
                raise TypeError("torch.vmap of what draws: type randomness='same'")
            self.number = None
            if self.param.prng is torch_random.REPEATED:
                numbers = torch_random.repeated(kind, shape, *limits)
                if not numbers.shape:
                    self.number = float(numbers)
                return self.j2t_iso(numbers)
            key = self.get_and_rotate_prng_key()
            return self.j2t_iso(torch_random.values(key, kind, shape, *limits))

        def constant(self, x: Any) -> Any:
            """A plain PyTorch tensor as a constant of the program."""
            if type(x) not in (torch.Tensor, torch.nn.Parameter):
                return x
            with jax.ensure_compile_time_eval():  # a mask may say which elements there are
                return self.j2t_iso(self.t2j_copy(x))

        def t2j_iso(self, torchtensors: Any) -> Any:
            sized = pytree.tree_map_only(
                (torch.SymInt, torch.Size), torch_sizes.as_jax, torchtensors
            )
            return super().t2j_iso(pytree.tree_map_only(torch.Tensor, self.constant, sized))

    return Environment


def _with_operations(torch: Any, torchax: Any) -> Any:
    """The class above, with gradients that stop and the operations that torchax lacks."""
    from torchax.ops import op_base, ops_registry

    pytree = torch.utils._pytree
    creating = (torch.rand, torch.randn, torch.randint)

    base: Any = _with_constants(torch, torchax)

    class Environment(base):
        cut = False
        """Whether the module is in `torch.no_grad()`."""
        any_size = False
        """Whether the batch may have any size."""
        inside = False
        """Whether it is in the forward pass of a `torch.autograd.Function`. That is without a
        gradient already, and its backward is the gradient, so there the modes change nothing."""

        def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            given = (args, kwargs or {})
            plain = torch.nn.Parameter
            if self.backward and any(type(x) is plain for x in pytree.tree_leaves(given)):
                raise TypeError("a backward that reads a parameter: ctx.save_for_backward keeps it")
            if func is torch._C._set_grad_enabled:
                if not self.inside:
                    self.cut = not args[0]
                return func(*args)
            if func in creating:  # PyTorch calls their operations, which are below
                raise torchax.OperatorNotFound
            sized = torch_sizes.among(torch, given)
            if sized and func in torchax.TENSOR_CONSTRUCTORS:
                given = (args, {**given[1], "device": "jax"})
            if getattr(func, "overloadpacket", None) in torch_random.operations():
                return self.random(func, *given)
            overload = isinstance(func, torch._ops.OpOverload)
            if sized or self.holds(given):
                if overload and type(torch_random.written_by(func, *given)) is torch.Tensor:
                    raise TypeError(_INTO_PLAIN.format(func.name()))
                args, kwargs = pytree.tree_map_only(torch.Tensor, self.constant, given)
                names = torch_operations.names_of_arguments(torch).get(func, {})
                given = (args, {names.get(name, name): value for name, value in kwargs.items()})
            elif overload and not self.knows(func):  # such as hann_window
                return func(*given[0], **{n: x for n, x in given[1].items() if n != "device"})
            result = super().dispatch(func, types, *given)
            result = torch_autocast.normed(self, func, given, result)
            if not self.cut:
                return result
            own = {id(x) for x in pytree.tree_leaves(given)}  # also what it writes into
            return pytree.tree_map_only(
                torchax.Tensor, lambda x: x if id(x) in own else x.detach(), result
            )

        def _get_op_or_decomp(self, func: Any) -> Any:
            name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
            written = name.endswith("_") and getattr(torch.ops.aten, name[:-1], None)
            try:
                known = super()._get_op_or_decomp(func)
            except torchax.OperatorNotFound:
                if self.any_size and _is_composite(torch, func):
                    return ops_registry.Operator(func, func.decompose, False, True, False, False)
                if not written:
                    raise
            else:  # a decomposition would write into a copy of a view
                if not written or known.is_view_op or known.is_user_defined:
                    return known
            # `floor_`: what `floor` returns, written back
            return ops_registry.Operator(func, op_base.InplaceOp(written), False, True, False, True)

        def knows(self, func: Any) -> bool:
            try:
                return self._get_op_or_decomp(func) is not None
            except torchax.OperatorNotFound:
                return False

    return Environment


def _with_casts(torch: Any, torchax: Any) -> Any:
    """The class above, with what `torch.autocast` casts."""
    pytree = torch.utils._pytree
    base: Any = _with_operations(torch, torchax)

    class Environment(base):
        lower: Any = None
        """The type that `torch.autocast` asks for if it is open."""
        halves = False
        """Whether it was, in any trace."""

        def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            given = (args, kwargs or {})
            if self.lower is None or not self.holds(given):
                return super().dispatch(func, types, *given)
            if not torch_autocast.casts(torch, func):
                if torch_autocast.composed(func):
                    raise torchax.OperatorNotFound
                return super().dispatch(func, types, *given)
            lower, self.lower = self.lower, None
            try:
                given = pytree.tree_map_only(torch.Tensor, self.constant, given)
                given = torch_autocast.cast(self, func, given, lower)
                inner = isinstance(func, torch._ops.OpOverload) or self.knows(func)
                result = (
                    super().dispatch(func, types, *given) if inner else func(*given[0], **given[1])
                )
                return torch_autocast.rounded(self, func, result, lower)
            finally:
                self.lower = lower

    return Environment


def _with_functions(torch: Any, torchax: Any) -> Any:
    """The class above, with the gradients that a `torch.autograd.Function` states."""
    pytree = torch.utils._pytree
    base: Any = _with_casts(torch, torchax)

    class Environment(base):
        inside: bool
        cut: bool

        @contextlib.contextmanager
        def stated_gradients(self, any_size: bool, traceable: Any) -> Iterator[None]:
            """A context in which these are called. See `tracing`, which enters it."""
            function = torch.autograd.Function
            own = vars(function)["apply"].__func__

            @contextlib.contextmanager
            def again(what: str) -> Iterator[None]:
                tracing = self.tracing(any_size, traceable)
                with LOCK, own_promotion(), tracing, traceable(what):
                    self.backward = True
                    try:
                        yield
                    finally:
                        self.backward = False

            def apply(cls: Any, *args: Any) -> Any:
                if cls is torch.utils.checkpoint.CheckpointFunction:
                    return checkpointed(cls, *args)
                if cls.__module__ == _INDEXING:  # by tensors in a list, of no gradient
                    return cls.forward(*args)
                before, self.inside = self.inside, True
                try:
                    if not self.holds(args):
                        return own(cls, *args)
                    outputs = torch_function.called(self, cls, args, again)
                finally:
                    self.inside = before
                if not self.cut:
                    return outputs
                return pytree.tree_map_only(self.kinds, lambda x: x.detach(), outputs)

            with replaced(function, "apply", classmethod(apply)):
                yield

    return Environment


def _class(torch: Any, torchax: Any) -> Any:
    """The class above, which can be entered, knows what is drawn, and leaves out layers by it."""
    pytree = torch.utils._pytree
    less = {torch.ops.aten.lt.Scalar: operator.lt, torch.ops.aten.le.Scalar: operator.le}
    asks = (torch.Tensor.item, torch.Tensor.__bool__)
    reads = (torch.Tensor.item, torch.ops.aten._local_scalar_dense.default)
    base: Any = _with_functions(torch, torchax)

    class Environment(base):
        inside: bool
        skips = False
        """Whether layers may be left out by chance."""
        asked = ""
        """The first line that asked for one."""
        pending: Any = None
        """The choice to leave out the next layer."""

        @contextlib.contextmanager
        def tracing(self, any_size: bool, traceable: Any) -> Iterator[None]:
            """A context in which a module may be traced. `any_size`: with a batch of any size.
            `traceable` makes a context that says whose errors are raised in it."""

            self.cut, self.inside, self.pending, self.lower = False, False, None, None
            self.any_size = any_size
            with contextlib.ExitStack() as patched:
                # torchax' say yes, and PyTorch's trunc_normal_ leaves those as they are
                sizes = torch_sizes.attributes(torch) if any_size else {}
                for kind in self.kinds:
                    for name, value in {"is_meta": False, **sizes}.items():
                        patched.enter_context(replaced(kind, name, value))
                view = torchax.View
                set_item = functools.partial(_set_item, vars(view)["__setitem__"], torch)
                patched.enter_context(replaced(view, "__setitem__", lambda *a: set_item(*a)))
                patched.enter_context(self.stated_gradients(any_size, traceable))
                norm = torch.nn.modules.batchnorm._BatchNorm
                forward = torch_operations.cumulative(vars(norm)["forward"])
                patched.enter_context(replaced(norm, "forward", forward))
                for change in torch_autocast.replacements(self):
                    patched.enter_context(replaced(*change))
                for place in (torch, torch.func):
                    vmap = torch_operations.mapped(self)
                    patched.enter_context(replaced(place, "vmap", vmap))
                if any_size:  # some of PyTorch's C++ asks for sizes that its Python does not
                    patched.enter_context(torch._dispatch.python.enable_python_dispatcher())
                with torch.enable_grad(), self:
                    yield

        def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            """The result of `func`. A tensor that depends on nothing given has an attribute
            `drawn`: whether it depends on a draw. A choice by one has `known`: whether the numbers
            of this comparison surely leave the layer out."""
            if func is torch.Tensor.__bool__ and self.skips and hasattr(args[0], "chosen"):
                # No: the layer is called, and what it returns is chosen where it returns
                if not args[0].chosen:
                    self.asked = self.asked or this_line()
                    args[0].chosen, self.pending = True, args[0]
                return False
            held = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, self.kinds)]
            if func in asks and held and isinstance(held[0].jax(), jax.core.Tracer):
                met = asserted()
                if met is not None:
                    return met if func is torch.Tensor.item else bool(met)
            origins = {getattr(x, "drawn", None) for x in held}
            drawn = None if None in origins else True in origins
            try:
                result = super().dispatch(func, types, args, kwargs)
            except BY_VALUE as error:
                if func in reads and only_warns():
                    return False
                if drawn:
                    raise torch_random.DrawDecides from error
                raise
            number = None
            if getattr(func, "overloadpacket", None) in torch_random.operations():
                drawn, number = True, self.number
            inner = isinstance(func, torch._ops.OpOverload)  # a function ends in one of these
            for x in pytree.tree_leaves(result):
                if isinstance(x, self.kinds) and (inner or not hasattr(x, "drawn")):
                    x.drawn, x.number = drawn, number
            if func in less and getattr(args[0], "drawn", False) and not args[0].shape:
                number, known = args[0].number, less[func]
                result.chosen, result.known = False, number is not None and known(number, args[1])
            return result

    return Environment
