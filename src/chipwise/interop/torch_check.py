"""Compares one step of the traced module with eager PyTorch, before training starts.

This finds what tracing loses: buffer updates, gradients changed by `no_grad` or a custom
`backward`, writes to views, and operations that are lowered to something else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base import RecipeError
from ..data.sources import take
from ..recipe.source import spec_of
from ..recipe.task import Task, Tree
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
from .torch_trace import Traced, as_numpy, flags, plain, torch_library, totalled

EXAMPLES = 8
_OUTPUTS = 1e-3
_GRADIENTS = 2e-2
"""Relative differences that float32 explains in one step. No other lowering stays within them: GELU
by its tanh is 1e-3 off. A difference is relative to the largest value of its array, and at least to
a thousandth of the largest value of all arrays."""
_HALF = 50  # times as much if parameters are bfloat16


def check(traced: Traced, scored: Scored, loss: Any, data: Data, task: Task, compare: bool) -> None:
    """Determines the buffers that training writes. With `compare`, also computes one step both
    ways.

    *Arguments:* `loss`: the loss if it is PyTorch code, else None. With None, a weighted sum of the
    outputs is differentiated.
    """
    if compare:
        count = min(EXAMPLES, len(task.train))
        batch = _prepared(task, take(task.train, np.arange(count)))
    else:
        spec = {n: jnp.zeros((EXAMPLES, *s.shape), s.dtype) for n, s in spec_of(task.train).items()}
        batch = jax.eval_shape(lambda batch: _prepared(task, batch), spec)

    def run(params: Tree, state: Tree, given: Any, train: bool) -> Tree:
        return scored(params, state, *given, jax.random.key(0), train)[2]

    jax.eval_shape(traced.init, jax.random.key(0))
    shapes = {name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in traced.params.items()}
    params = nested(shapes, ".")
    if not compare:
        given = jax.eval_shape(lambda batch: data.arguments(batch, params), batch)
        return traced.find_moving(run, (given, None))
    given = data.arguments(batch, params)
    target = data.wanted(batch)
    with _still(traced.module):
        trained = _eager(traced, given, target, loss, True)
        evaluated = _eager(traced, given, target, loss, False)
        traced.find_moving(run, (given, target if loss is not None else None))
        _compare(
            traced,
            trained,
            evaluated,
            *_traced(traced, scored, given, target, loss is not None),
        )
    return None


@dataclass(frozen=True)
class _Step:
    """The results of a step. `outputs` are by position, `gradients` and `buffers` by name."""

    value: float
    """The value that was differentiated."""
    outputs: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    buffers: dict[str, np.ndarray]


def _prepared(task: Task, batch: Any) -> dict[str, jax.Array]:
    batch = {name: jnp.asarray(column) for name, column in batch.items()}
    keys = jax.random.split(jax.random.key(0), 1 + len(next(iter(batch.values()))))
    if task.augment is not None:
        batch = jax.vmap(task.augment)(batch, keys[1:])
    return task.mix(batch, keys[0]) if task.mix is not None else batch


@contextlib.contextmanager
def _still(module: Any) -> Iterator[None]:
    """A context without PyTorch's dropout, since the two sides draw different random numbers."""
    torch = torch_library()
    before = []
    for part in module.modules():
        name = "p" if isinstance(part, torch.nn.modules.dropout._DropoutNd) else "dropout"
        if name == "p" or isinstance(part, (torch.nn.MultiheadAttention, torch.nn.RNNBase)):
            before.append((part, name, getattr(part, name)))
            setattr(part, name, 0.0)
    try:
        yield
    finally:
        for part, name, value in before:
            setattr(part, name, value)


def _eager(traced: Traced, given: Arguments, target: Any, loss: Any, train: bool) -> _Step:
    torch = torch_library()
    params = {n: p.detach().clone().requires_grad_() for n, p in traced.module.named_parameters()}
    buffers = {n: b.detach().clone() for n, b in traced.module.named_buffers()}
    tensors = jax.tree.map(_as_tensor, given)
    wanted = jax.tree.map(_as_tensor, target)
    held = {**params, **buffers}
    with flags(traced.module, train), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            outputs = torch.func.functional_call(traced.module, held, *tensors)
        except Exception as error:
            raise uncalled(traced.name, given, error) from error
        if loss is not None:
            try:
                total, count = totalled(loss)(outputs, wanted, examples(given))
            except Exception as error:
                raise unjudged(loss, plain(outputs), target, error) from error
            value = total / count
            if not getattr(value, "requires_grad", False):
                raise RecipeError("torch-loss-cut", loss=name_of(loss))
        else:
            value = _weighted(torch.utils._pytree.tree_leaves(plain(outputs)))
        try:
            slopes = torch.autograd.grad(value, list(params.values()), allow_unused=True)
        except Exception as error:
            raise uncalled(traced.name, given, error) from error
    gradients = {n: np.zeros(p.shape, np.float32) for n, p in params.items()}
    gradients |= {n: as_numpy(s) for n, s in zip(params, slopes, strict=True) if s is not None}
    return _Step(
        float(value.detach()),
        _floating(outputs),
        gradients,
        {name: as_numpy(held[name]) for name in buffers},
    )


def _traced(
    traced: Traced, scored: Scored, given: Arguments, target: Any, judged: bool
) -> tuple[_Step, _Step]:
    """The step in training and in evaluation mode, as training will compute it."""
    torch = torch_library()

    def value(params: Tree, state: Tree, train: bool) -> Any:
        total, outputs, state = scored(
            params, state, given, target if judged else None, jax.random.key(0), train
        )
        leaves = torch.utils._pytree.tree_leaves(plain(outputs))
        return (
            total.total / total.count.astype(total.total.dtype) if judged else _weighted(leaves)
        ), (
            outputs,
            state,
        )

    steps = []
    for train in (True, False):
        with jax.default_matmul_precision("highest"):
            compiled = jax.jit(
                jax.value_and_grad(lambda p, s, train=train: value(p, s, train), has_aux=True)
            )
            (loss, (outputs, state)), slopes = compiled(*traced.own())
        flat = {name: np.asarray(x) for name, x in flattened(slopes, ".").items()}
        moved = {name: np.asarray(x) for name, x in flattened(state, ".").items()}
        steps.append(_Step(float(loss), _floating(outputs), flat, moved))
    return steps[0], steps[1]


def _compare(traced: Traced, eager: _Step, judged: _Step, ours: _Step, ours_judged: _Step) -> None:
    starts = traced.buffers
    left = [
        n
        for n, b in eager.buffers.items()
        if not np.array_equal(b, starts[n]) and n not in ours.buffers
    ]
    if left:
        raise RecipeError("torch-buffers-unmoved", module=traced.name, names=left)
    half = _HALF if any(p.dtype.itemsize < 4 for p in traced.params.values()) else 1
    pairs = [("outputs in evaluation", judged.outputs, ours_judged.outputs, _OUTPUTS)]
    pairs.append(("outputs in training", eager.outputs, ours.outputs, _OUTPUTS))
    moved = {name: eager.buffers[name] for name in ours.buffers}
    pairs.append(("buffers", moved, ours.buffers, _OUTPUTS))
    pairs.append(("gradient", eager.gradients, ours.gradients, _GRADIENTS))
    for kind, theirs, mine, most in pairs:
        least = 1e-3 * max(
            [float(np.max(np.abs(x), initial=0)) for x in theirs.values()], default=0.0
        )
        for name, expected in theirs.items():
            wide = expected.astype(np.float64)
            scale = max(float(np.max(np.abs(wide), initial=0)), least, 1e-12)
            off = float(np.max(np.abs(mine[name].astype(np.float64) - wide), initial=0)) / scale
            if not off <= most * half:
                raise RecipeError(
                    "torch-step-differs", module=traced.name, what=kind, name=name, off=off
                )


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
