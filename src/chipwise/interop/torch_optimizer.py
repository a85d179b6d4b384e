"""Converts a PyTorch optimizer and scheduler to a recipe's optimizer with the same updates.

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=2000)
    recipe = cw.Recipe(..., optimizer=cw.torch.optimizer(optimizer, scheduler, step="step"))

The result is `cw.sgd`, `cw.adamw` or another optimizer of `cw.recipe`, which has PyTorch's
`weight_decay` as `l2` where that adds it to the gradient. Groups with their own settings become an
optax chain of these. A copy of the scheduler runs here once, and its settings become a table. So
every scheduler is exact, also those that users write.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
import warnings
from dataclasses import fields
from typing import Any

import jax
import numpy as np
import optax

from ..base import RecipeError, invalid, near, unknown
from ..base.annotations import as_annotated
from ..base.figures import one_line
from ..recipe import adaptive
from ..recipe.optimizers import Optimizer, adam, adamw, from_optax, sgd
from ..recipe.schedules import tabulated
from ..recipe.task import by_path
from .torch_environment import torch_library

_KINDS: dict[str, Any] = {
    "SGD": sgd,
    "Adam": adam,
    "AdamW": adamw,
    "Adagrad": adaptive.adagrad,
    "Adadelta": adaptive.adadelta,
    "RMSprop": adaptive.rmsprop,
    "Adamax": adaptive.adamax,
    "NAdam": adaptive.nadam,
    "RAdam": adaptive.radam,
    "ASGD": adaptive.asgd,
    "Rprop": adaptive.rprop,
}
_REFUSED = {
    "LBFGS": "torch-optimizer-evaluates",
    "SparseAdam": "torch-optimizer-sparse",
    "Muon": "torch-optimizer-other",
    "Adafactor": "torch-optimizer-other",
}
_INPUTS = ("lr", "momentum", "b1", "weight_decay", "l2")
"""Settings of a group that are inputs of the step. The others are fixed in its program."""
_FLAGS = ("dampening", "amsgrad", "maximize")
"""Settings that are stored with a run only where they are set."""


@as_annotated
def optimizer(
    optimizer: Any,
    scheduler: Any = None,
    *,
    module: Any = None,
    step: str | None = None,
    length: int | None = None,
) -> Optimizer:
    """An optimizer for a recipe, with the updates of PyTorch's `optimizer` and `scheduler`.

    *Arguments:*

    - `optimizer`: a new optimizer of `torch.optim`. `LBFGS`, `SparseAdam`, `Muon` and `Adafactor`
      are refused by name.
    - `scheduler`: any new scheduler of `optimizer` whose `step()` needs no argument.
    - `step`: how often the training loop calls `scheduler.step()`: "step" or "epoch".
    - `length`: the run's length in these units. The scheduler is run here for this length.
      `OneCycleLR` knows its own. In a longer run the last values stay.
    - `module`: the module of the parameters, for their names. Needed with several parameter groups
      and for some of a module's parameters. Those that are in no group are not updated, as in
      PyTorch.

    The gradient is that of the mean loss over the batch. Raises `RecipeError` for optimizers and
    settings that have no counterpart here, for a scheduler that cannot be run in advance and, in
    use, for groups without a parameter of the task, and without `module` for fewer parameters than
    a PyTorch task trains.
    """
    torch = torch_library()
    if not isinstance(optimizer, torch.optim.Optimizer):
        expected = "a torch.optim.Optimizer, such as torch.optim.SGD(net.parameters(), lr=0.1)"
        raise invalid("torch-no-optimizer", "optimizer", optimizer, expected)
    kind = type(optimizer).__name__
    theirs = type(optimizer).__module__.startswith("torch.optim")
    if theirs and kind in _REFUSED:
        raise RecipeError(_REFUSED[kind], kind=kind)
    if not theirs or kind not in _KINDS:
        raise unknown(
            "torch-optimizer-unknown",
            "optimizer of torch.optim",
            kind,
            _KINDS,
            instead="cw.from_optax",
        )
    # Adagrad makes its state, of step 0, when it is made itself
    if any("step" not in one or one["step"] for one in optimizer.state.values()):
        raise RecipeError(
            "torch-optimizer-used", "This {kind} has made steps: give a new one.", kind=kind
        )
    everywhere = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides the module
    for when in ("pre", "post"):
        hooks = getattr(optimizer, f"_optimizer_step_{when}_hooks", None)
        if hooks or getattr(everywhere, f"_global_optimizer_{when}_hooks", None):
            raise RecipeError("torch-step-hook", kind=kind, hook=f"register_step_{when}_hook")
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise RecipeError("torch-scheduler-foreign", kind=type(scheduler).__name__)
    decoupled = {bool(group.get("decoupled_weight_decay")) for group in optimizer.param_groups}
    if kind == "Adam" and True in decoupled:  # Adam(decoupled_weight_decay=True) is AdamW
        if len(decoupled) > 1:
            raise RecipeError("torch-optimizer-setting", kind=kind, name="decoupled_weight_decay")
        kind = "AdamW"
    own = _settings(kind, optimizer)
    if scheduler is not None:
        own = _scheduled(kind, scheduler, step, length)
    own = [{k: v for k, v in one.items() if v or k not in _FLAGS} for one in own]
    names = _names(optimizer, module)
    if names is None:
        made: Optimizer = _KINDS[kind](**own[0])
        count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        return made.of_values(count if module is None else None)
    fixed = tuple({k: v for k, v in one.items() if k not in _INPUTS} for one in own)
    hyper = {
        _called(kind, k, i): v for i, one in enumerate(own) for k, v in one.items() if k in _INPUTS
    }
    return from_optax(functools.partial(groups, kind=kind, fixed=fixed, names=names), **hyper)


class GroupNames(tuple):
    """Pairs of a parameter and its group, with a short repr, since it is in a recipe's
    description."""

    def __repr__(self) -> str:
        counts = [sum(at == i for _, at in self) for i in range(1 + max(at for _, at in self))]
        return f"{'+'.join(map(str, counts))} parameters"


def groups(kind: str, fixed: tuple[dict[str, Any], ...], names: GroupNames, **inputs: Any) -> Any:
    """PyTorch's parameter groups as an optax transformation. Adapters are in their matrix's group.

    *Arguments:* `fixed`: for each group the settings that are not inputs. `inputs`: those of all
    groups, named `lr` and so on for the first group, `lr_1` for the second.

    In use, raises `RecipeError` if no parameter has one of `names`.
    """
    known = dict(names)

    def labels(params: Any) -> Any:
        paths = list(by_path(params))
        of = [known.get(p, known.get(re.sub("/lora_[ab]$", "", p), "none")) for p in paths]
        if set(of) == {"none"}:
            first = next(iter(known))
            raise RecipeError("torch-groups-elsewhere", name=first, near=near(first, paths))
        return jax.tree.unflatten(jax.tree.structure(params), map(str, of))

    parts = {"none": optax.set_to_zero()}
    for i, own in enumerate(fixed):
        settings = [f.name for f in fields(_KINDS[kind])]
        called = {k: _called(kind, k, i) for k in _INPUTS if k in settings}
        given = {k: inputs[name] for k, name in called.items() if name in inputs}
        parts[str(i)] = _KINDS[kind](lr=0.0, **own)._transform({**own, **given}, True, None)
    return optax.partition(parts, labels)


def _called(kind: str, setting: str, group: int) -> str:
    """The input of the step that is a group's setting."""
    if (kind, setting) == ("Adam", "l2"):  # stored runs call it as PyTorch does
        setting = "weight_decay"
    return f"{setting}_{group}" if group else setting


def _settings(kind: str, optimizer: Any) -> list[dict[str, Any]]:
    """The settings of each group."""
    names = ("initial_accumulator_value",)  # Adagrad's constructor reads it, once for all groups
    begun = {name: optimizer.defaults[name] for name in names if name in optimizer.defaults}
    return [_of_group(kind, {**group, **begun}) for group in optimizer.param_groups]


def _of_group(kind: str, group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings by the names they have here. Raises `RecipeError` for one without a
    counterpart."""
    if group.get("t0", _NEVER) != _NEVER:
        raise RecipeError("torch-optimizer-averages", kind=kind, t0=group["t0"])
    named = dict(group)
    if "betas" in group:
        named["b1"], named["b2"] = group["betas"]
    if kind == "RMSprop":
        named["rho"] = group["alpha"]
    if kind == "Rprop":  # which moves by the smallest step where its rate is 0
        named["lr"] = max(group["lr"], group["step_sizes"][0])
    if kind not in ("SGD", "AdamW") and not group.get("decoupled_weight_decay"):
        named["l2"] = named.pop("weight_decay", 0.0)
    known = [f.name for f in fields(_KINDS[kind]) if f.name in named]
    return {name: _number(named[name]) for name in known}


_NEVER = 1e6
"""The default of `t0` of `torch.optim.ASGD`, the step at which its average begins."""


def _number(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(float, value))
    return value if isinstance(value, bool) else float(value)


def _scheduled(
    kind: str, scheduler: Any, step: str | None, length: int | None
) -> list[dict[str, Any]]:
    """The settings of each group, as tables where a copy of `scheduler` changes them."""
    name = type(scheduler).__name__
    if step not in ("step", "epoch"):
        raise invalid("torch-scheduler-step", "step", step, "'step' or 'epoch'")
    if isinstance(scheduler, torch_library().optim.lr_scheduler.ReduceLROnPlateau):
        raise RecipeError("torch-scheduler-reads-loss", kind=name)
    if steps := getattr(scheduler, "last_epoch", 0):
        raise RecipeError("torch-scheduler-used", kind=name, steps=steps)
    length = getattr(scheduler, "total_steps", None) if length is None else length
    if not isinstance(length, int) or length < 1:
        expected = f"the run's {step}s, such as 30"
        raise invalid("torch-scheduler-length", f"length with {name}", length, expected)
    shared = {id(p): p for group in scheduler.optimizer.param_groups for p in group["params"]}
    rows = []
    try:
        own = copy.deepcopy(scheduler, shared)  # but for the parameters
        for time in range(length):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that the optimizer makes no steps
                if time:
                    own.step()
            rows.append(_settings(kind, own.optimizer))
    except Exception as error:  # whatever a scheduler of the user's raises
        raise RecipeError(
            "torch-scheduler-fails", kind=name, length=length, step=step, reason=one_line(error)
        ) from error
    return [
        {name: _series(name, [row[i][name] for row in rows], step) for name in group}
        for i, group in enumerate(rows[0])
    ]


def _series(name: str, values: list[Any], step: str) -> Any:
    """A constant setting, or the table of a setting that a scheduler changes."""
    if all(value == values[0] for value in values):
        return values[0]
    if name not in _INPUTS:
        raise invalid(
            "torch-scheduler-fixed", "what a scheduler changes", name, f"one of {_INPUTS}"
        )
    # As many digits as the step uses: they are stored with every run.
    return tabulated([float(str(np.float32(value))) for value in values], step)


def _names(optimizer: Any, module: Any) -> GroupNames | None:
    """Parameter to the number of its group. None if one group has all parameters."""
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
    return GroupNames((name.replace(".", "/"), i) for name, i in pairs)
