"""Train a PyTorch module with `cw.torch.task(module, loss, train=data)`. `result.to_torch(module)`
returns the weights.

    net = torchvision.models.resnet18(num_classes=10)
    task = cw.torch.task(net, torch.nn.CrossEntropyLoss(), train=train, eval=test,
                         metrics={"accuracy": cw.losses.correct})
    result = cw.fit(cw.Recipe(task=task, batch=256, duration="10ep", optimizer=cw.sgd(lr=0.1)))
    result.to_torch(net)

torchax traces the module into a JAX program, so replicas, the fixed order of sums and plans work as
for any other task. PyTorch itself runs once, in `task`, for a comparison.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..base import RecipeError
from ..base.annotations import as_annotated
from ..recipe.task import Sum, Task, Tree
from ..recipe.user_code import user_code
from .adapter import (
    Data,
    Scored,
    Source,
    as_sum,
    examples,
    fitting,
    flattened,
    own_promotion,
    stated,
)
from .modes import MODES, check_alike
from .torch_check import check as compare
from .torch_environment import torch_library
from .torch_optimizer import optimizer as optimizer
from .torch_trace import Traced, answers, flags, is_torch, totalled


@as_annotated
def task(
    module: Any,
    loss: Any,
    *,
    check: bool = True,
    train: Source,
    eval: Source | None = None,
    inputs: Any = None,
    target: Any = "label",
    metrics: Mapping[str, Callable] | None = None,
    augment: Callable | None = None,
    mix: Callable | None = None,
    classes: int | None = None,
    better: Mapping[str, str] = {},
    eval_group: int = 1,
) -> Task:
    """Makes a `Task` of a PyTorch module and a loss.

    *Arguments:*

    - `module`: a `torch.nn.Module` on the CPU, with the initial weights, or a function without
      arguments that makes one. With a function, the initial weights depend on the recipe's seed.
    - `loss`: `(outputs, target)` in PyTorch (`torch.nn.CrossEntropyLoss()`, or your own function),
      or a function of chipwise, JAX or optax (`cw.losses.softmax_cross_entropy`).
    - `check`: compare one step on the first examples with eager PyTorch: outputs in both modes,
      gradients and buffers.
    - The others: as in `interop.adapter.Data`. `inputs` and `metrics` are JAX functions.

    Parameters and buffers that training writes keep their names, with `/` for `.` in
    `Recipe(frozen=...)`. Parameters that ask for no gradient (`requires_grad=False`) are frozen, as
    `Task.frozen` says. Other buffers are constants of the program.

    Raises `RecipeError` if PyTorch or torchax is missing or their versions do not fit, if the
    module overrides methods for Lightning's Trainer or has an argument for its mode, is on another
    device, uses an operation that torchax lacks or control flow that depends on values, if tracing
    loses a buffer's update, or if the step differs from eager PyTorch's.
    """
    traced = Traced(module)
    _check_methods(traced.module)
    columns = Data(train, eval, inputs, target, metrics, augment, mix, classes, better, eval_group)
    scored = _scored(traced, loss)
    built = columns.task("torch", traced.name, lambda key: traced.init(key), scored)
    compare(traced, scored, loss if is_torch(loss) else None, columns, built, check)
    return dataclasses.replace(stated(built, traced.name, loss), frozen=traced.frozen)


@as_annotated
def to_module(module: Any, params: Tree, state: Tree) -> Any:
    """Writes trained weights and updated buffers into `module` and returns it.

    *Arguments:* `params`, `state`: of a `Result` whose task came from such a module. Raises
    `RecipeError` if the weights do not fit the module. Then it has written nothing.
    """
    torch = torch_library()
    weights = dict(module.named_parameters())
    buffers = {n: b for n, b in module.named_buffers() if n in flattened(state, ".")}
    new: list[tuple[Any, np.ndarray]] = []
    for kind, tensors, tree in (("parameters", weights, params), ("buffers", buffers, state)):
        values = fitting(tree, ".", {n: tuple(t.shape) for n, t in tensors.items()}, kind)
        new += [(tensor, np.asarray(values[name])) for name, tensor in tensors.items()]
    with torch.no_grad():
        for tensor, value in new:
            wide = value.astype(np.float32) if value.dtype == jnp.bfloat16 else value
            tensor.copy_(torch.from_numpy(np.array(wide)))
    return module


def _check_methods(module: Any) -> None:
    """Raises `RecipeError` if the module's class overrides methods of Lightning besides `forward`,
    if that has an argument for the mode, which nothing would set, or if parts alone are in
    evaluation mode."""
    kind = type(module)
    known = inspect.signature(module.forward).parameters
    if names := [n for n in MODES if n in known and isinstance(known[n].default, bool)]:
        raise RecipeError("torch-mode-argument", module=kind.__name__, names=names)
    made = {name: part.training for name, part in module.named_modules()}
    with flags(module, True):  # by its own `train`, which may leave some out
        kept = {name for name, part in module.named_modules() if not part.training}
    check_alike(kind.__name__, {name: made[name] for name in made if name not in kept})
    for depth, base in enumerate(kind.__mro__):
        if base.__name__ == "LightningModule":
            own = {name for above in kind.__mro__[:depth] for name in vars(above)}
            if names := [n for n in dir(base) if n in own and n[0] != "_" and n != "forward"]:
                raise RecipeError("torch-own-step", module=kind.__name__, names=names)


def _scored(traced: Traced, loss: Any) -> Scored:
    judge = totalled(loss) if is_torch(loss) else None

    def scored(params, state, given, target, key, train):
        if judge is None or target is None:
            outputs, state = traced.call(params, state, given, key, train)
            if target is None:
                outputs = answers(traced.module, outputs) if key is None else outputs
                return Sum(0.0, 0.0), outputs, state
            with own_promotion(), user_code(f"The loss of {traced.name}"):
                value = as_sum(loss(outputs, target), examples(given))
            return value, outputs, state

        def judged(outputs: Any) -> tuple[Any, Any, Any]:
            total, count = judge(_wide(outputs), traced.wrapped(target), examples(given))
            return outputs, total, count

        (outputs, total, count), state = traced.call(params, state, given, key, train, judged)
        return Sum(jnp.asarray(total), jnp.asarray(count).astype(jnp.float32)), outputs, state

    return scored


def _wide(outputs: Any) -> Any:
    """Casts half precision to float32, since a loss in bfloat16 has only 8 bits."""
    torch = torch_library()

    def one(x: Any) -> Any:
        return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x

    return torch.utils._pytree.tree_map_only(torch.Tensor, one, outputs)
