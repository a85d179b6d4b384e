"""Converts a PyTorch optimizer and scheduler to a recipe's optimizer with the same updates.

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=2000)
    recipe = cw.Recipe(..., optimizer=cw.torch.optimizer(optimizer, scheduler, step="step"))

The result is `cw.sgd`, `cw.adam` or `cw.adamw` if these compute the same. Dampening, Adam with L2, and groups
with their own settings become an optax chain.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..errors import RecipeError
from ..recipe.optimizer import Optimizer
from ..recipe.optimizers import adam, adamw, from_optax, sgd
from .torch_schedulers import momentum_of, rate_of
from .torch_trace import torch_library

_KINDS = ("SGD", "Adam", "AdamW")
_INPUTS = ("lr", "momentum", "b1", "weight_decay")
"""Settings of a group that are inputs of the step; the others are fixed in its program."""


def optimizer(
    optimizer: Any, scheduler: Any = None, *, module: Any = None, step: str | None = None
) -> Optimizer:
    """An optimizer for a recipe, with the updates of PyTorch's `optimizer` and `scheduler`.

    *Arguments:*

    - `optimizer`: a new `torch.optim.SGD`, `Adam` or `AdamW`.
    - `scheduler`: a new `OneCycleLR`, `CosineAnnealingLR`, `StepLR`, `MultiStepLR`, `LinearLR` or a
      `SequentialLR` of these, made for `optimizer`.
    - `step`: how often the training loop calls `scheduler.step()`: "step" or "epoch".
    - `module`: the module of the parameters, for their names; needed with several parameter groups.
      Parameters that are in no group are not updated, as in PyTorch.

    The gradient is that of the mean loss over the batch. Raises `RecipeError` for optimizers, schedulers and
    settings that have no counterpart here.
    """
    torch = torch_library()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RecipeError("torch-no-optimizer", given=type(optimizer).__name__)
    kind = type(optimizer).__name__
    if kind not in _KINDS or not type(optimizer).__module__.startswith("torch.optim"):
        raise RecipeError("torch-optimizer-unknown", kind=kind, known=list(_KINDS))
    if optimizer.state:
        raise RecipeError("torch-optimizer-used", kind=kind)
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise RecipeError("torch-scheduler-foreign", kind=type(scheduler).__name__)
    decoupled = {bool(group.get("decoupled_weight_decay")) for group in optimizer.param_groups}
    if kind == "Adam" and True in decoupled:  # Adam(decoupled_weight_decay=True) is AdamW
        if len(decoupled) > 1:
            raise RecipeError("torch-optimizer-setting", kind=kind, name="decoupled_weight_decay")
        kind = "AdamW"
    own = [_settings(kind, group) for group in optimizer.param_groups]
    for i, group in enumerate(own):
        group["lr"] = rate_of(scheduler, i, optimizer.param_groups[i], step)
        name = "momentum" if kind == "SGD" else "b1"
        group[name] = momentum_of(scheduler, i, optimizer.param_groups[i], step, group[name])
    names = _names(optimizer, module)
    if names is None:
        return _single(kind, own[0])
    fixed = tuple({k: v for k, v in one.items() if k not in _INPUTS} for one in own)
    hyper = {f"{k}_{i}" if i else k: v for i, one in enumerate(own) for k, v in one.items() if k in _INPUTS}
    return from_optax(functools.partial(groups, kind=kind, fixed=fixed, names=names), **hyper)


class Names(tuple):
    """Pairs of a parameter and its group, with a short repr, since it is in a recipe's description."""

    def __repr__(self) -> str:
        counts = [sum(at == i for _, at in self) for i in range(1 + max(at for _, at in self))]
        return f"{'+'.join(map(str, counts))} parameters"


def groups(kind: str, fixed: tuple[dict[str, Any], ...], names: Names, **inputs: Any) -> Any:
    """PyTorch's parameter groups as an optax transformation. *Arguments:* `fixed`: for each group the
    settings that are not inputs; `inputs` of all groups: `lr` and others of the first, `lr_1` of the
    second."""
    known = dict(names)

    def labels(params: Any) -> Any:
        def one(path: Any, _: Any) -> str:
            return str(known.get(jax.tree_util.keystr(path, simple=True, separator="/"), "none"))

        return jax.tree_util.tree_map_with_path(one, params)

    parts = {"none": optax.set_to_zero()}
    for i, own in enumerate(fixed):
        given = {k: inputs[f"{k}_{i}" if i else k] for k in _INPUTS if (f"{k}_{i}" if i else k) in inputs}
        parts[str(i)] = chain(kind, **own, **given)
    return optax.partition(parts, labels)


def _single(kind: str, group: dict[str, Any]) -> Optimizer:
    given = dict(group)
    if kind == "SGD" and not group["dampening"]:
        del given["dampening"]
        return sgd(**given)
    if kind == "AdamW":
        return adamw(**given)
    if kind == "Adam" and not group["weight_decay"]:
        del given["weight_decay"]
        return adam(**given)
    fixed = {k: v for k, v in group.items() if k not in _INPUTS}
    inputs = {k: v for k, v in group.items() if k in _INPUTS}
    return from_optax(functools.partial(chain, kind, **fixed), elementwise=True, **inputs)


def chain(kind: str, **group: Any) -> optax.GradientTransformation:
    """The update rule of one group. *Arguments:* its settings, with the inputs as arrays."""
    decay = optax.stateless(
        lambda updates, params: jax.tree.map(lambda u, p: u + group["weight_decay"] * p, updates, params)
    )
    rate = optax.scale_by_learning_rate(group["lr"])
    if kind == "SGD":
        return optax.chain(decay, _momentum(group["momentum"], group["dampening"], group["nesterov"]), rate)
    moments = optax.scale_by_adam(group["b1"], group["b2"], group["eps"])
    return optax.chain(moments, decay, rate) if kind == "AdamW" else optax.chain(decay, moments, rate)


def _momentum(momentum: Any, dampening: float, nesterov: bool) -> optax.GradientTransformation:
    """`torch.optim.SGD`: the velocity of the first step is the gradient, without dampening."""

    def init(params: Any) -> Any:
        return {"first": jnp.ones(()), "velocity": jax.tree.map(jnp.zeros_like, params)}

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        first = state["first"] > 0

        def moved(g: Any, v: Any) -> Any:
            return jnp.where(first, g, momentum * v + (1 - dampening) * g)

        velocity = jax.tree.map(moved, grads, state["velocity"])
        steps = jax.tree.map(lambda g, v: g + momentum * v, grads, velocity) if nesterov else velocity
        return steps, {"first": jnp.zeros_like(state["first"]), "velocity": velocity}

    return optax.GradientTransformation(init, update)


def _settings(kind: str, group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings by our names. Raises `RecipeError` for settings without a counterpart."""
    for name in ("maximize", "amsgrad"):
        if group.get(name):
            raise RecipeError("torch-optimizer-setting", kind=kind, name=name)
    if kind == "SGD":
        names = ("momentum", "dampening", "nesterov")
        own = {name: group[name] for name in names}
    else:
        own = {"b1": group["betas"][0], "b2": group["betas"][1], "eps": group["eps"]}
    return {**{k: _number(v) for k, v in own.items()}, "weight_decay": _number(group["weight_decay"])}


def _number(value: Any) -> Any:
    return value if isinstance(value, bool) else float(value)


def _names(optimizer: Any, module: Any) -> Names | None:
    """Parameter to the number of its group; None if one group has all parameters."""
    groups = optimizer.param_groups
    held = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
    if module is None:
        if len(groups) == 1:
            return None
        if any("param_names" not in group for group in groups):
            raise RecipeError("torch-groups-unnamed", groups=len(groups))
        pairs = [(name, i) for i, group in enumerate(groups) for name in group["param_names"]]
    else:
        named = dict(module.named_parameters())
        if not set(held) <= {id(p) for p in named.values()}:
            raise RecipeError("torch-optimizer-foreign", module=type(module).__name__)
        if len(groups) == 1 and len(held) == len(named):
            return None
        pairs = [(name, held[id(p)]) for name, p in named.items() if id(p) in held]
    return Names((name.replace(".", "/"), i) for name, i in pairs)
