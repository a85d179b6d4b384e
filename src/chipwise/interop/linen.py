"""Train a Flax Linen module: `cw.linen.task(Net(), loss, train=data)`.

Variables keep Linen's structure: `params` is the collection of that name, and all other collections
(`batch_stats`) are state. So `net.apply({"params": result.params, **result.state}, x)` is the
trained model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ..base import unknown
from ..base.annotations import as_annotated
from ..recipe import freezing
from ..recipe.task import Task, Tree
from ..recipe.user_code import user_code
from .adapter import (
    Data,
    Judging,
    Source,
    called_with,
    not_a_model,
    own_promotion,
    stated,
    with_loss,
)

_TRAIN = {"train": True, "training": True, "is_training": True}
_EVAL = {"deterministic": False, "inference": False, "use_running_average": False, "eval": False}
MODES = {**_TRAIN, **_EVAL}
"""The names that modules give to the argument for their mode, to its value in training."""


@as_annotated
def task(
    module: Any,
    loss: Judging,
    *,
    mode: str | None = None,
    rngs: tuple[str, ...] = ("dropout",),
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
    """Makes a `Task` of a Linen module and a loss.

    *Arguments:*

    - `loss`: `(outputs, target)`. It returns values `(batch,)`, their mean, or a `Sum`.
    - `mode`: the argument of the module's `__call__` for training or evaluation. None: the first
      one of `MODES` that it has.
    - `rngs`: the random streams of its layers. Each gets its own key in every step and replica.
    - The others: as in `interop.adapter.Data`.

    Raises `RecipeError` if it is not a module, or has no argument `mode`.
    """
    from flax import linen

    if not isinstance(module, linen.Module):
        raise not_a_model("linen", repr(module), "a flax.linen.Module, such as Net()")
    known = inspect.signature(type(module).__call__).parameters
    names = [name for name in MODES if name in known]
    if mode is not None and mode not in known:
        raise unknown("linen-mode", f"argument of {type(module).__name__}", mode, list(known)[1:])
    name = mode or (names[0] if names else None)
    columns = Data(train, eval, inputs, target, metrics, augment, mix, classes, better, eval_group)

    def hold(call: Callable, given: tuple, named: dict, context: Any) -> Any:
        """Makes batch norm with frozen statistics use them."""
        norm = context.module
        if isinstance(norm, linen.BatchNorm) and freezing.holds(["/".join((*norm.path, "mean"))]):
            object.__setattr__(norm, "use_running_average", None)
            named = {**named, "use_running_average": True}
            given = given[:1]
        return call(*given, **named)

    def flag(train: bool) -> dict[str, Any]:
        return {} if name is None else {name: MODES.get(name, True) == train}

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        one = columns.one()
        with own_promotion(), user_code(called_with(type(module).__name__, one)):
            # Shapes only: the compiler would take minutes to fold a forward pass over constants
            variables = module.lazy_init(
                {"params": key, **_streams(key)}, *one.args, **one.kwargs, **flag(False)
            )
        state = {kind: values for kind, values in variables.items() if kind != "params"}
        return variables.get("params", {}), state

    def _streams(key: jax.Array) -> dict[str, jax.Array]:
        return {stream: jax.random.fold_in(key, i) for i, stream in enumerate(rngs)}

    def forward(params, state, given, key, train):
        streams = {} if key is None else _streams(key)
        changing = list(state) if train else False
        with linen.intercept_methods(hold):
            out = module.apply(
                {"params": params, **state},
                *given.args,
                **given.kwargs,
                **flag(train),
                rngs=streams,
                mutable=changing,
            )
        outputs, new = out if train else (out, state)
        return outputs, dict(new), None

    kind = type(module).__name__
    return stated(columns.task("linen", kind, init, with_loss(forward, loss, kind)), kind, loss)
