"""Turns a loss written in PyTorch into a total and a count, so that replicas and uneven batches are weighted
correctly."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..errors import RecipeError
from .torch_trace import torch_library

_JAX = ("chipwise", "jax", "optax", "flax")


def is_torch(loss: Any) -> bool:
    """Whether `loss` is PyTorch code: a PyTorch module, or a function that is not from a JAX library.

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

    PyTorch's means divide by the examples (and positions), or by the sum of class weights: that divisor is
    the count. Your own function returns a value for each example, or their mean.

    Raises `RecipeError` for a loss that sums over the batch: its gradient, and with it the best rate, would
    depend on the number of replicas.
    """
    torch = torch_library()
    functional = torch.nn.functional
    modules = {functional.cross_entropy: torch.nn.CrossEntropyLoss, functional.nll_loss: torch.nn.NLLLoss}
    if not isinstance(loss, torch.nn.Module) and loss in modules:
        loss = modules[loss]()
    if getattr(loss, "reduction", "mean") == "sum":
        sentence = "{loss} sums over a replica's examples: give reduction='mean'."
        raise RecipeError("torch-loss-summed", sentence, loss=type(loss).__name__)
    if getattr(loss, "reduction", None) == "mean" and isinstance(loss, tuple(modules.values())):
        return functools.partial(_weighted, loss)

    def total(outputs: Any, target: Any, examples: int) -> tuple[Any, Any]:
        value = loss(outputs, target)
        return (value * examples, examples) if value.dim() == 0 else (value.sum(), value.numel())

    return total


def _weighted(loss: Any, outputs: Any, target: Any, examples: int) -> tuple[Any, Any]:
    """Cross-entropy and NLL: PyTorch's mean leaves out `ignore_index` and divides by the class weights."""
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
