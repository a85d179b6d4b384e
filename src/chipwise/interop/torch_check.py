"""Compares one step of the traced module with eager PyTorch, before training starts.

This finds what tracing loses: buffer updates, writes to views, and operations that are lowered to
something else.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base import RecipeError
from ..data.sources import take
from ..recipe.source import rows_of, spec_of
from ..recipe.task import Task, Tree
from . import torch_autocast
from .adapter import (
    Arguments,
    Data,
    Scored,
    examples,
    flattened,
    name_of,
    nested,
    uncalled,
    unjudged,
)
from .torch_attributes import aliased, kept, unchanged
from .torch_environment import LOCK, checkpointed_eagerly, replaced, torch_library
from .torch_random import REPEATED, forcing, repeating
from .torch_trace import Traced, as_numpy, flags, plain, totalled

EXAMPLES = 8
_OUTPUTS = 1e-3
_GRADIENTS = 2e-2
"""Relative differences that float32 explains in one step. No other lowering stays within them: GELU
by its tanh is 1e-3 off. A difference is relative to the largest value of its array, and at least to
a thousandth of the largest value of all arrays."""
_LEFT_OUT: tuple[Callable[[int], bool], ...] = (
    lambda draw: False,
    lambda draw: True,
    lambda draw: draw % 2 == 0,
    lambda draw: draw % 2 == 1,
)
"""The layers that comparisons leave out, of those left out by chance: none, all, some, the rest."""
_HALF = {False: (_OUTPUTS, _GRADIENTS), True: (50 * _OUTPUTS, 0.25)}
"""The limits where parameters are bfloat16, or `torch.autocast` casts them. Those above count then
for the step without that."""


def check(traced: Traced, scored: Scored, loss: Any, data: Data, task: Task, compare: bool) -> None:
    """Determines the buffers that training writes. With `compare`, also computes one step both
    ways. A difference is computed again in float64, where rounding moves nothing across a kink.

    *Arguments:* `loss`: the loss if it is PyTorch code, else None. With None, a weighted sum of the
    outputs is differentiated.
    """
    if compare:
        count = min(EXAMPLES, len(task.train))
        batch = data.prepared(take(task.train, np.arange(count)))
    else:
        batch = jax.eval_shape(data.prepared, rows_of(spec_of(task.train), EXAMPLES))
    shapes = {name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in traced.params.items()}
    params = nested(shapes, ".")

    def run(params: Tree, state: Tree, given: Any, train: bool) -> Tree:
        return scored(params, state, *given, jax.random.key(0), train)[2]

    if not compare:
        given = jax.eval_shape(lambda batch: data.arguments(batch, params), batch)
        return traced.find_moving(run, (given, None))
    step = _Both(traced, scored, loss, data.arguments(batch, params), data.wanted(batch))
    eager = step.eager()
    traced.env.skips = True
    try:
        traced.find_moving(run, (step.given, step.judged))
    except RecipeError as error:
        if error.code != "torch-attribute-moves" or not step.forgets():
            raise
        traced.forgets = True
        traced.find_moving(run, (step.given, step.judged))
    _refuse_unmoved(traced, eager[0])
    if not traced.env.asked:
        return _compare(step, eager)
    for left_out in _LEFT_OUT:
        with forcing(left_out):
            try:
                _compare(step, step.eager())
            except RecipeError as error:
                if error.code != "torch-step-differs" or left_out is _LEFT_OUT[0]:
                    raise
                facts = {"module": traced.name, "where": traced.env.asked}
                raise RecipeError("torch-draw-decides", **facts) from error
    return _compare(step, eager)  # `forcing` also forces the draws that choose nothing


def _compare(step: _Both, eager: tuple[_Step, _Step]) -> None:
    half = step.halves
    differs = _difference(step.traced, eager, step.traced_ones(), *_HALF[half])
    if differs is None and not half:
        return
    if differs is not None and step.traced.env.halves and differs.facts["what"] != "gradient":
        raise differs  # of what is cast, which the other steps do not show
    try:
        wide = _wide_difference(step)
    except Exception as error:  # a part computes in a type by itself, or there is no room for it
        if differs is not None:
            raise differs from error
        return
    if wide is not None:
        raise differs or wide


def _wide_difference(step: _Both) -> RecipeError | None:
    """The difference where nothing is rounded to half precision: in float64, or in float32."""
    with LOCK, replaced(*torch_autocast.closed()):
        for dtype in (jnp.float64, jnp.float32)[: 1 + step.halves]:
            try:
                with jax.enable_x64(dtype == jnp.float64):
                    wide = step.widened(dtype)
                    return _difference(step.traced, wide.eager(), wide.traced_ones())
            except Exception as error:
                reason = error
    raise reason


@dataclass(frozen=True)
class _Step:
    """The results of a step. `outputs` are by position, `gradients` and `buffers` by name.
    Evaluation has no `gradients`."""

    value: float
    """The value that was differentiated."""
    outputs: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    buffers: dict[str, np.ndarray]


@dataclass(frozen=True)
class _Both:
    """A step in eager PyTorch and as training will compute it, with the same random numbers."""

    traced: Traced
    scored: Scored
    loss: Any
    given: Arguments
    target: Any
    exact: Any = None
    """The type that it is computed in, if not that of the parameters."""

    @property
    def judged(self) -> Any:
        """The target if there is a loss of PyTorch."""
        return self.target if self.loss is not None else None

    @property
    def halves(self) -> bool:
        """Whether numbers are rounded to half precision."""
        floats = [p.dtype for p in self.traced.params.values()]
        small = [d for d in floats if jnp.issubdtype(d, jnp.floating) and d.itemsize < 4]
        return bool(self.traced.env.halves or small)

    def widened(self, dtype: Any) -> _Both:
        torch = torch_library()
        loss = self.loss
        if isinstance(loss, torch.nn.Module):
            loss = copy.deepcopy(loss).to(_torch_dtype(dtype))
        given, target = jax.tree.map(lambda x: _as(dtype, x), (self.given, self.target))
        return dataclasses.replace(self, loss=loss, given=given, target=target, exact=dtype)

    def eager(self) -> tuple[_Step, _Step]:
        """The step of eager PyTorch in training and in evaluation mode."""
        return self._eager(True), self._eager(False)

    @contextlib.contextmanager
    def _held(self, train: bool) -> Iterator[dict[str, Any]]:
        """A context in which the module computes with copies of its parameters and buffers. It
        gives the copies that have a gradient, and leaves the module as it was."""
        torch = torch_library()
        module = self.traced.module

        def copied(tensor: Any) -> Any:
            new = tensor.detach().clone()
            wide = self.exact and new.is_floating_point()
            return new.to(_torch_dtype(self.exact)) if wide else new

        own = {n: copied(p) for n, p in module.named_parameters()}
        params = {n: p.requires_grad_() for n, p in own.items() if p.is_floating_point()}
        held = own | {n: copied(b) for n, b in module.named_buffers()}
        # A checkpoint calls the module again in the backward pass: also then with these
        held_by = torch.nn.utils.stateless._reparametrize_module(module, held, tie_weights=True)
        inside = aliased(module, held)
        checkpoint = torch.utils.checkpoint.CheckpointFunction
        with (
            LOCK,
            flags(module, train),
            torch.random.fork_rng(devices=[]),
            repeating(),
            inside,
            held_by,
            replaced(checkpoint, "apply", classmethod(checkpointed_eagerly)),
        ):
            torch.default_generator.manual_seed(0)
            yield params

    def _call(self, given: Arguments) -> Any:
        tensors = jax.tree.map(_as_tensor, given)
        try:
            return self.traced.module(*tensors.args, **tensors.kwargs)
        except Exception as error:
            raise uncalled(self.traced.name, given, error) from error

    def forgets(self) -> bool:
        """Whether what the module keeps in attributes of a call changes nothing of the next one."""
        given = self.given
        other = jax.tree.map(lambda x: jnp.repeat(x[:1], len(x), axis=0), given)

        module, torch = self.traced.module, torch_library()

        def outputs(given: Arguments, train: bool) -> dict[str, np.ndarray]:
            with self._held(train):
                return _floating(self._call(given))

        for train in (True, False):
            with unchanged(module):
                before = kept(module, torch.Tensor)
                alone = outputs(other, train)
                if kept(module, torch.Tensor).keys() <= before.keys():
                    continue
            with unchanged(module):
                outputs(given, train)
                after = outputs(other, train)
            if not all(np.array_equal(x, after[name], True) for name, x in alone.items()):
                return False
        return True

    def _eager(self, train: bool) -> _Step:
        torch = torch_library()
        module = self.traced.module
        with unchanged(module), self._held(train) as params:
            outputs = self._call(self.given)
            buffers = {name: as_numpy(b) for name, b in module.named_buffers()}
            value = self._value(outputs)
            try:
                of = list(params.values()) if train else []
                slopes = torch.autograd.grad(value, of, allow_unused=True) if of else ()
            except Exception as error:
                raise uncalled(self.traced.name, self.given, error) from error
        gradients = {n: np.zeros(p.shape, np.float32) for n, p in params.items() if train}
        named = zip(gradients, slopes, strict=True)
        gradients |= {n: as_numpy(s) for n, s in named if s is not None}
        return _Step(float(value.detach()), _floating(outputs), gradients, buffers)

    def _value(self, outputs: Any) -> Any:
        torch = torch_library()
        if self.loss is None:
            return _weighted(torch.utils._pytree.tree_leaves(plain(outputs)))
        wanted = jax.tree.map(_as_tensor, self.target)
        try:
            total, count = totalled(self.loss)(outputs, wanted, examples(self.given))
        except Exception as error:
            raise unjudged(self.loss, plain(outputs), self.target, error) from error
        value = total / count
        if not getattr(value, "requires_grad", False):
            raise RecipeError("torch-loss-cut", loss=name_of(self.loss))
        return value

    def traced_ones(self) -> tuple[_Step, _Step]:
        """The step in training and in evaluation mode, as training will compute it."""
        return self._traced(True), self._traced(False)

    def _traced(self, train: bool) -> _Step:
        torch = torch_library()

        def value(params: Tree, state: Tree, given: Arguments, judged: Any) -> Any:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                total, outputs, state = self.scored(params, state, given, judged, REPEATED, train)
            if self.loss is None:
                mean = _weighted(torch.utils._pytree.tree_leaves(plain(outputs)))
            else:
                mean = total.total / total.count.astype(total.total.dtype)
            return mean, (outputs, state)

        own = self.traced.own()
        own = jax.tree.map(lambda x: _as(self.exact, x), own) if self.exact else own
        # Whole numbers have an empty gradient
        slope = jax.value_and_grad(value, has_aux=True, allow_int=True)
        # A program that runs once is sooner done if the compiler leaves it as it is
        quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        compiled = jax.jit(slope if train else value, compiler_options=quick)
        with jax.default_matmul_precision("highest"):
            got = compiled(*own, self.given, self.judged)
        (mean, (outputs, state)), slopes = got if train else (got, {})
        flat = {name: np.asarray(x) for name, x in flattened(slopes, ".").items()}
        moved = {name: np.asarray(x) for name, x in flattened(state, ".").items()}
        return _Step(float(mean), _floating(outputs), flat, moved)


def _as(dtype: Any, x: Any) -> Any:
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _torch_dtype(dtype: Any) -> Any:
    return getattr(torch_library(), jnp.dtype(dtype).name)


def _refuse_unmoved(traced: Traced, eager: _Step) -> None:
    """Raises `RecipeError` for buffers that only PyTorch moves."""
    starts = traced.buffers
    moved = [n for n, b in eager.buffers.items() if not np.array_equal(b, starts[n])]
    if left := [name for name in moved if name not in traced.moving]:
        raise RecipeError("torch-buffers-unmoved", module=traced.name, names=left)


def _difference(
    traced: Traced,
    eager: tuple[_Step, _Step],
    ours: tuple[_Step, _Step],
    outputs: float = _OUTPUTS,
    gradients: float = _GRADIENTS,
) -> RecipeError | None:
    """The error for the first array that differs by more than these limits."""
    moved = {name: eager[0].buffers[name] for name in ours[0].buffers}
    pairs = [
        ("outputs in evaluation", eager[1].outputs, ours[1].outputs, outputs),
        ("outputs in training", eager[0].outputs, ours[0].outputs, outputs),
        ("buffers", moved, ours[0].buffers, outputs),
        ("gradient", eager[0].gradients, ours[0].gradients, gradients),
    ]
    for kind, theirs, mine, most in pairs:
        least = 1e-3 * max(
            [float(np.max(np.abs(x), initial=0)) for x in theirs.values()], default=0.0
        )
        for name, expected in theirs.items():
            wide = expected.astype(np.float64)
            scale = max(float(np.max(np.abs(wide), initial=0)), least, 1e-12)
            off = float(np.max(np.abs(mine[name].astype(np.float64) - wide), initial=0)) / scale
            if not off <= most:
                return RecipeError(
                    "torch-step-differs", module=traced.name, what=kind, name=name, off=off
                )
    return None


def _weighted(leaves: list) -> Any:
    """The sum of the outputs with different weights: a scalar to differentiate."""
    torch = torch_library()
    total = 0.0
    for leaf in leaves:
        if hasattr(leaf, "dtype") and "float" in str(leaf.dtype):
            weights: Any = np.cos(np.arange(np.prod(leaf.shape)))
            if isinstance(leaf, torch.Tensor):
                weights = torch.from_numpy(weights).to(leaf.dtype)
            else:
                weights = weights.astype(leaf.dtype)
            total = total + (leaf.reshape(-1) * weights).sum()
    return total


def _floating(outputs: Any) -> dict[str, np.ndarray]:
    """The floating-point arrays in PyTorch's outputs, or in ours of the same structure, by
    position."""
    torch = torch_library()
    leaves = torch.utils._pytree.tree_leaves(plain(outputs))
    arrays = [as_numpy(x) if isinstance(x, torch.Tensor) else x for x in leaves]
    kept = {str(i): np.asarray(x) for i, x in enumerate(arrays) if hasattr(x, "dtype")}
    return {i: x for i, x in kept.items() if jnp.issubdtype(x.dtype, jnp.floating)}


def _as_tensor(array: Any) -> Any:
    """An array as a tensor for eager PyTorch, with integers as int64."""
    torch = torch_library()
    array = np.array(array)
    if array.dtype == jnp.bfloat16:
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(array.astype(np.int64) if array.dtype == np.int32 else array)
