"""Train a Flax Linen module: `cw.linen.task(Net(), loss, train=data)`.

Variables keep Linen's structure: `params` is the collection of that name, and all other collections
(`batch_stats`) are state. So `net.apply({"params": result.params, **result.state}, x)` is the
trained model.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ..base.annotations import as_annotated
from ..recipe import freezing
from ..recipe.task import Task, Tree
from ..recipe.user_code import user_code
from .adapter import (
    Arguments,
    Data,
    Judging,
    Source,
    called_with,
    not_a_model,
    own_promotion,
    stated,
    with_loss,
)
from .modes import Mode, in_mode, modes_of, parameters, read_modes


@as_annotated
def task(
    module: Any,
    loss: Judging,
    *,
    mode: Mode | None = None,
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
    - `mode`: the argument of the module's `__call__`, or its field, that says whether it trains:
      `{"is_train": True}`, with its value in training, or a usual name such as "deterministic"
      (`interop.modes.MODES`). Those with a usual name are set beside it. `{}`: none is set.
    - `rngs`: the random streams of its layers. Each gets its own key in every step and replica.
    - The others: as in `interop.adapter.Data`.

    Raises `RecipeError` if it is not a module, has no argument `mode`, or has another one that
    decides whether it draws random numbers or moves its state. A field with a value is an option of
    the architecture and stays as it is, unless the module would draw in evaluation.
    """
    from flax import linen

    if not isinstance(module, linen.Module):
        raise not_a_model("linen", repr(module), "a flax.linen.Module, such as Net()")
    kind = type(module).__name__
    call = parameters(type(module))
    fields = _fields(module, call)
    modes = modes_of(kind, {**call, **fields}, mode)
    columns = Data(train, eval, inputs, target, metrics, augment, mix, classes, better, eval_group)

    def hold(call: Callable, given: tuple, named: dict, context: Any) -> Any:
        """Makes batch norm with frozen statistics use them."""
        norm = context.module
        if isinstance(norm, linen.BatchNorm) and freezing.holds(["/".join((*norm.path, "mean"))]):
            object.__setattr__(norm, "use_running_average", None)
            named = {**named, "use_running_average": True}
            given = given[:1]
        return call(*given, **named)

    def told(given: Arguments, train: bool) -> tuple[Any, Arguments]:
        """The module and its arguments, with what says whether it trains."""
        flags, given = in_mode(modes, given, train)
        own = {name: flags.pop(name) for name in fields if name in flags}
        given = given._replace(kwargs={**given.kwargs, **flags})
        return (module.clone(**own) if own else module), given  # type: ignore[arg-type]

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        net, one = told(columns.one(), False)
        with own_promotion(), user_code(called_with(type(module).__name__, one)):
            # Shapes only: the compiler would take minutes to fold a forward pass over constants
            variables = net.lazy_init({"params": key, **_streams(key)}, *one.args, **one.kwargs)
        state = {kind: values for kind, values in variables.items() if kind != "params"}
        return variables.get("params", {}), state

    def _streams(key: jax.Array) -> dict[str, jax.Array]:
        return {stream: jax.random.fold_in(key, i) for i, stream in enumerate(rngs)}

    def forward(params, state, given, key, train):
        net, given = told(given, train)
        streams = {} if key is None else _streams(key)
        changing = list(state) if train else False
        with linen.intercept_methods(hold):
            out = net.apply(
                {"params": params, **state},
                *given.args,
                **given.kwargs,
                rngs=streams,
                mutable=changing,
            )
        outputs, new = out if train else (out, state)
        return outputs, dict(new), None

    built = columns.task("linen", kind, init, with_loss(forward, loss, kind))
    set_by = {name for name, one in fields.items() if one.default is not None}
    asked = {**call, **fields}
    read = read_modes(kind, built, asked, modes, columns, forward, mode is not None, set_by)
    return stated(built, kind, loss, read)


def _fields(module: Any, call: Mapping[str, Any]) -> dict[str, inspect.Parameter]:
    """The module's fields as parameters with their values, but for arguments of its call."""
    return {
        one.name: inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(module, one.name),
            annotation=one.type,
        )
        for one in dataclasses.fields(module)
        if one.name not in ("parent", "name", *call)
    }
