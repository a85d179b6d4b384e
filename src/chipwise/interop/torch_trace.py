"""Turns a PyTorch module into a pure function of JAX arrays, with torchax, and its loss into sums.

Buffers that the training program writes to are the task's state. The others are constants of the
program. Random layers use the step's key.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base import ChipwiseError, RecipeError, invalid
from ..base.figures import one_line
from ..recipe import freezing
from ..recipe.task import Tree, by_path
from ..recipe.user_code import BY_VALUE, line_of
from . import host_random, torch_random
from .adapter import Arguments, flattened, nested, not_a_model, own_promotion
from .torch_attributes import aliased, kept, unchanged
from .torch_environment import LOCK, environment, torch_library

_EXPECTED = "a torch.nn.Module or a function that makes one"
_JAX = ("chipwise", "jax", "optax", "flax")
_BACKWARD = {
    "_backward_hooks": "register_hook or register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
"""Where PyTorch keeps the hooks of its backward pass, and what registers them."""
_CONTAINERS = (Mapping, tuple, list)


class Traced:
    """A module, or a function that makes one, as `init` and `call`.

    *Fields:* `module`. `params` and `buffers`: name to NumPy array, from its `named_parameters` and
    `named_buffers`. `moving`: the names of the buffers that training writes to, set by
    `find_moving`.
    """

    def __init__(self, given: Any):
        self._torch = torch = torch_library()
        self.env = environment()
        self._make: Any = None if isinstance(given, torch.nn.Module) else given
        if self._make is not None and not callable(given):
            raise not_a_model("torch", repr(given), _EXPECTED)
        self.module = given if self._make is None else self._made(0)
        if not isinstance(self.module, torch.nn.Module):
            raise not_a_model(
                "torch", f"a function that returns a {type(self.module).__name__}", _EXPECTED
            )
        _refuse_elsewhere(self.module)
        self.params = {name: as_numpy(p) for name, p in self.module.named_parameters()}
        self.buffers = {name: as_numpy(b) for name, b in self.module.named_buffers()}
        self.moving: set[str] = set()
        self.forgets = False  # what it keeps in plain attributes: set by a comparison

    @property
    def name(self) -> str:
        return type(self.module).__name__

    @property
    def frozen(self) -> tuple[str, ...]:
        """The paths of parameters that ask for no gradient."""
        named = self.module.named_parameters()
        return tuple(name.replace(".", "/") for name, p in named if not p.requires_grad)

    def init(self, key: jax.Array) -> tuple[Tree, Tree]:
        """`(params, state)`: the module's weights, or those of a new module from the function.
        PyTorch initialises it on the host, seeded by `key`."""
        own = self.own()
        if self._make is None:
            return own
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), own)
        # A program shows nothing of a callback, so its digest has what the function makes of seed 0
        arrays = [*self.params.values(), *self.buffers.values()]
        sample = hashlib.sha256(b"".join(x.tobytes() for x in arrays)).digest()
        given = (jax.random.key_data(key), np.frombuffer(sample, np.uint32))
        return jax.pure_callback(self._drawn, shapes, *given, vmap_method="sequential")

    def _drawn(self, words: Any, _: Any) -> tuple[Tree, Tree]:
        module = self._made(int(np.asarray(words).ravel()[-1]))
        parts = (module.named_parameters(), module.named_buffers())
        return self._tree(*({name: as_numpy(t) for name, t in part} for part in parts))

    def _made(self, seed: int) -> Any:
        with host_random.seeded(self._torch, seed):
            return self._make()

    def own(self) -> tuple[Tree, Tree]:
        """`(params, state)` of `module` as it was passed."""
        return jax.tree.map(jnp.asarray, self._tree(self.params, self.buffers))

    def _tree(self, params: dict[str, Any], buffers: dict[str, Any]) -> tuple[Tree, Tree]:
        state = {name: _narrowed(buffers[name]) for name in sorted(self.moving)}
        return nested({name: _narrowed(p) for name, p in params.items()}, "."), nested(state, ".")

    def find_moving(self, run: Callable[..., Tree], given: Any) -> None:
        """Finds the buffers that training writes to, by tracing `run`, `(params, state, given,
        train) -> state`, in both modes. *Arguments:* `given`: arrays or shapes.

        Raises `RecipeError` if a call draws from a generator of the host.
        """
        written: set[str] = set()

        def watched(given: Any) -> None:
            self.moving = set(self.buffers)
            params, state = self.own()
            before = flattened(state, ".")
            after = flattened(run(params, state, given, True), ".")
            written.update(name for name in before if after[name] is not before[name])
            run(params, state, given, False)

        def trace() -> None:
            jax.eval_shape(lambda given: watched(given), given)  # traced anew, not from a cache

        try:
            host_random.refuse_draws(self._torch, self.module, trace)
        finally:
            self.moving = written

    def call(
        self,
        params: Tree,
        state: Tree,
        given: Arguments,
        key: Any,
        train: bool,
        then: Any = None,
    ) -> tuple[Any, Tree]:
        """`(outputs, state)` of the module. `then`, a function of PyTorch outputs, replaces the
        outputs."""
        if train:  # they may be registered after the task is made
            _refuse_hooks(self.module)
        trained = flattened(params, ".")
        floats = [p.dtype for p in trained.values() if jnp.issubdtype(p.dtype, jnp.floating)]
        fixed = {n: _narrowed(b) for n, b in self.buffers.items() if n not in self.moving}
        for name, value in fixed.items():
            narrow = floats and jnp.issubdtype(value.dtype, jnp.floating)
            fixed[name] = jnp.asarray(value, floats[0] if narrow else None)
        with (
            self._running(key, given),
            flags(self.module, train),
            _scopes(self.module, self.env),
            unchanged(self.module),
        ):
            held = self.wrapped({**trained, **fixed, **flattened(state, ".")})
            with self._traceable(self.name), aliased(self.module, held):
                wrapped = self.wrapped(given)
                outputs = self._torch.func.functional_call(self.module, held, *wrapped)
                found = kept(self.module, type(self.env).kinds)
                known = set(map(id, held.values()))
                names = sorted({name for x, name in found.items() if x not in known})
                if self.env.pending is not None:
                    raise TypeError("a random choice that leaves no layer out: use torch.where")
                if names and not self.forgets:
                    raise RecipeError("torch-attribute-moves", module=self.name, names=names)
            if then is not None:
                with self._traceable(f"The loss of {self.name}"):
                    outputs = then(outputs)
            new = self.env.t2j_iso({name: held[name] for name in flattened(state, ".")})
            with self._traceable(f"What {self.name} returns"):
                return self.env.t2j_iso(plain(outputs)), nested(new, ".")

    def wrapped(self, tree: Any) -> Any:
        """JAX arrays as torchax tensors, for the module."""
        return self.env.j2t_iso(jax.tree.map(jnp.asarray, tree))

    @contextlib.contextmanager
    def _running(self, key: Any, given: Arguments) -> Iterator[None]:
        if self._torch.is_autocast_enabled("cpu"):
            raise RecipeError("torch-autocast-outside", module=self.name)
        prng = jax.random.key(0) if key is None else key
        with (
            LOCK,
            own_promotion(),
            warnings.catch_warnings(),
            self.env.override_property(prng=prng),
        ):
            # Int64 is int32 here
            warnings.filterwarnings("ignore", message="Explicitly requested dtype")
            warnings.filterwarnings("ignore", category=DeprecationWarning)  # torchax's own
            checked = self._torch.distributions.Distribution
            before = checked._validate_args
            checked.set_default_validate_args(False)  # it asks for values
            try:
                sizes = [n for x in jax.tree.leaves(given) for n in x.shape]
                any_size = not all(isinstance(n, int) for n in sizes)
                with self.env.tracing(any_size, self._traceable):
                    yield
            finally:
                checked.set_default_validate_args(before)

    @contextlib.contextmanager
    def _traceable(self, what: str) -> Iterator[None]:
        """A context for a call of `what`, the module or its loss. Raises its error as a
        `RecipeError`."""
        try:
            yield
        except ChipwiseError:
            raise
        except Exception as error:
            raise _refused(what, self.module, error) from error


def _refused(what: str, module: Any, error: Exception) -> RecipeError:
    """The error for `what`, `module` or its loss, that cannot be traced."""
    import torchax.tensor

    own, inside = line_of(error, installed=False), line_of(error)
    lines = [line[0] for line in (own or inside,) if line]
    layer = [] if own else _layer(module, error)
    where = " at ".join(layer + lines) or "PyTorch's own code"
    facts = {"module": what, "where": where, "reason": one_line(error)}
    if isinstance(error, torchax.tensor.OperatorNotFound):
        operation = str(error).removeprefix("Operator with name ").removesuffix(" has no lowering")
        return RecipeError("torch-operation-missing", **facts, operation=operation)
    if isinstance(error, torch_random.HostDraw):
        return RecipeError("torch-draws-once", module=what, where=where)
    if isinstance(error, torch_random.DrawDecides):
        return RecipeError("torch-draw-decides", module=what, where=where)
    if isinstance(error, BY_VALUE):
        return RecipeError("torch-depends-on-values", **facts)
    return RecipeError(
        "torch-not-traced", "{module} cannot be traced ({where}): {reason}.", **facts
    )


def _layer(module: Any, error: Exception) -> list[str]:
    """The innermost part of `module` that `error` comes from, if one is known."""
    places = {id(part): place for place, part in module.named_modules()}
    frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    for part in (frame.f_locals.get("self") for frame, _ in frames):
        if places.get(id(part)):
            return [f"layer '{places[id(part)]}', {type(part).__name__}"]
    return []


@contextlib.contextmanager
def flags(module: Any, train: bool) -> Iterator[None]:
    """A context with `module` in training or evaluation mode, set by its `train` method, and batch
    norm with frozen statistics in evaluation mode. The old mode is restored afterwards."""
    before = {part: part.training for part in module.modules()}
    module.train(train)
    norm = torch_library().nn.modules.batchnorm._NormBase
    for place, part in module.named_modules() if train else ():
        names = [f"{place}.{name}" for name, _ in part.named_buffers(recurse=False)]
        if isinstance(part, norm) and freezing.holds(
            name.lstrip(".").replace(".", "/") for name in names
        ):
            part.training = False
    try:
        yield
    finally:
        for part, was in before.items():
            part.training = was


@contextlib.contextmanager
def _scopes(module: Any, env: Any) -> Iterator[None]:
    """A context in which the operations of each part of `module` carry its path.
    `chipwise audit A B` shows the path. Scopes are names only, so no bit depends on them. A part
    that is left out by chance returns its first argument."""
    entered: list[tuple[str, Any, Any]] = []
    numbers = torch_library().default_generator

    def enter(place: str, part: Any, args: Any, kwargs: Any) -> None:
        around = f"{entered[-1][0]}." if entered else ""
        scope = jax.named_scope(place.removeprefix(around))
        scope.__enter__()
        choice, env.pending = env.pending, None
        first = None if choice is None else next(iter((*args, *kwargs.values())))
        entered.append((place, scope, (choice, first, numbers.get_state())))

    def leave(part: Any, args: Any, output: Any) -> Any:
        _, scope, (choice, first, state) = entered.pop()
        scope.__exit__(None, None, None)
        if choice is None or output is None:
            return None
        if choice.known:  # PyTorch does not call it, so nothing is drawn in it
            numbers.set_state(state)
        whole, *rest = output if isinstance(output, tuple) else (output,)
        if whole.shape != first.shape:
            raise torch_random.DrawDecides  # a layer that is left out would pass its input on
        chosen = torch_library().where(choice, first, whole)
        return (chosen, *rest) if isinstance(output, tuple) else chosen

    with contextlib.ExitStack() as hooks:
        for place, part in module.named_modules():
            if place:
                called = functools.partial(enter, place)
                before = part.register_forward_pre_hook(called, with_kwargs=True)
                after = part.register_forward_hook(leave, always_call=True)
                hooks.callback(after.remove)
                hooks.callback(before.remove)
        yield


def plain(outputs: Any) -> Any:
    """Outputs with mappings of any kind, such as those of Hugging Face, as dicts in JAX's order of
    names. They leave out what is neither an array nor a container of them, such as a cache of keys
    and values for the next call."""
    if isinstance(outputs, Mapping):
        there = {
            n: x for n, x in outputs.items() if isinstance(x, _CONTAINERS) or hasattr(x, "dtype")
        }
        return {name: plain(there[name]) for name in sorted(there)}
    return type(outputs)(map(plain, outputs)) if type(outputs) in (tuple, list) else outputs


def answers(module: Any, outputs: Any) -> Any:
    """The outputs of a prediction by name, those in containers as "hidden_states.0". Without what a
    model of Hugging Face says to leave out there, such as the memory for a next call."""
    left = getattr(getattr(module, "config", None), "keys_to_ignore_at_inference", ())
    if not isinstance(outputs, Mapping):
        return outputs
    kept = {name: x for name, x in outputs.items() if name not in left}
    named = by_path(kept, ".")
    if len(named) < len(jax.tree.leaves(kept)):
        raise RecipeError("torch-output-twice", module=type(module).__name__, names=list(named))
    return named


def as_numpy(tensor: Any) -> np.ndarray:
    """A copy of a tensor as a NumPy array. Converts PyTorch's bfloat16 to JAX's."""
    tensor = tensor.detach()
    if str(tensor.dtype) == "torch.bfloat16":
        return tensor.float().numpy().astype(jnp.bfloat16)
    return np.array(tensor.numpy())


def _narrowed(value: Any) -> Any:
    """Casts 64-bit numbers as JAX does: to 32 bits unless x64 is enabled."""
    return (
        value.astype(jax.dtypes.canonicalize_dtype(value.dtype))
        if isinstance(value, np.ndarray)
        else value
    )


def _refuse_elsewhere(module: Any) -> None:
    places = sorted({str(t.device) for t in [*module.parameters(), *module.buffers()]} - {"cpu"})
    if places:
        expected = "the CPU: call module.to('cpu') first"
        raise invalid("torch-elsewhere", f"the device of {type(module).__name__}", places, expected)
    _refuse_hooks(module)


def _refuse_hooks(module: Any) -> None:
    """Raises `RecipeError` for hooks of the backward pass, since JAX's own one never calls them."""
    everywhere = torch_library().nn.modules.module
    for attribute, how in _BACKWARD.items():
        named = [*module.named_modules(), *module.named_parameters()]
        names = [name or "itself" for name, of in named if getattr(of, attribute, None)]
        names += ["every module"] * bool(getattr(everywhere, f"_global{attribute}", None))
        if names:
            kind = type(module).__name__
            raise RecipeError("torch-backward-hook", module=kind, names=names, hook=how)


def is_torch(loss: Any) -> bool:
    """Whether `loss` is PyTorch code: a PyTorch module, or a function that is not from a JAX
    library.

    Raises `RecipeError` for other objects.
    """
    torch = torch_library()
    if isinstance(loss, torch.nn.Module):
        return True
    if not callable(loss):
        raise RecipeError("adapter-loss", given=repr(loss))
    while isinstance(loss, functools.partial):
        loss = loss.func
    return (getattr(inspect.unwrap(loss), "__module__", "") or "").split(".")[0] not in _JAX


def totalled(loss: Any) -> Callable[[Any, Any, int], tuple[Any, Any]]:
    """`(outputs, target, examples) -> (total, count)`, tensors or numbers, for a loss in PyTorch.

    PyTorch's means divide by the examples (and positions), or by the sum of class weights: that
    divisor is the count. Your own function returns a value for each example, or their mean.

    Raises `RecipeError` for a loss that sums over the batch: its gradient, and with it the best
    rate, would depend on the number of replicas.
    """
    torch = torch_library()
    functional = torch.nn.functional
    modules = (
        (functional.cross_entropy, torch.nn.CrossEntropyLoss),
        (functional.nll_loss, torch.nn.NLLLoss),
    )
    loss = next((kind() for function, kind in modules if loss is function), loss)
    if getattr(loss, "reduction", "mean") == "sum":
        raise RecipeError("torch-loss-summed", loss=type(loss).__name__)
    forward = getattr(type(loss), "forward", None)  # a subclass may have its own
    theirs = any(forward is kind.forward for _, kind in modules)
    if theirs and getattr(loss, "reduction", None) == "mean":
        return functools.partial(_weighted, loss)

    def total(outputs: Any, target: Any, examples: int) -> tuple[Any, Any]:
        value = loss(outputs, target)
        return (value * examples, examples) if value.dim() == 0 else (value.sum(), value.numel())

    return total


def _weighted(loss: Any, outputs: Any, target: Any, examples: int) -> tuple[Any, Any]:
    """Cross-entropy and NLL: PyTorch's mean leaves out `ignore_index` and divides by the class
    weights."""
    summed = copy.copy(loss)
    summed.reduction = "sum"
    total = summed(outputs, target)
    if target.is_floating_point():  # probabilities: divided only by the examples and positions
        return total, target.numel() // target.shape[1]
    counts = target != loss.ignore_index
    if loss.weight is None:
        return total, counts.sum()
    weight = loss.weight[target.clamp(0, len(loss.weight) - 1).long()]
    return total, (weight * counts).sum()
