"""The arguments that say to a model in JAX whether it trains.

Those with a usual name (`MODES`) are set, and so are those that the user names. Of the others, one
may decide the same: the model draws random numbers or moves its statistics with one value, and does
not with the other. Nobody would set it, so its value is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

import jax
from jax.interpreters.partial_eval import dce_jaxpr

from ..base import RecipeError, invalid, unknown
from ..recipe.task import Task
from .adapter import Arguments, Data, own_promotion

MODES = {
    **dict.fromkeys(("train", "training", "is_training"), True),
    **dict.fromkeys(("deterministic", "inference", "use_running_average", "eval"), False),
}
"""The usual names of these arguments, to their values in training."""
_NONE = inspect.Parameter.empty
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Mode = Annotated[
    str | Mapping[str, bool],
    "an argument's name, or a dict of it to its value in training, {'is_train': True}",
]


def parameters(kind: type, *without: str) -> dict[str, inspect.Parameter]:
    """The parameters of a call of a model of this kind, but `self` and those that are named."""
    _, *known = inspect.signature(kind.__call__).parameters.items()  # type: ignore[operator]
    return {name: one for name, one in known if name not in without}


def modes_of(
    model: str,
    known: Mapping[str, inspect.Parameter],
    mode: str | Mapping[str, bool] | None,
) -> dict[str, bool]:
    """The arguments that say whether `model` trains, to their values in training.

    *Arguments:* `known`: the model's arguments by name. `mode`: the user's, beside those of
    `MODES`. `{}`: none.

    Raises `RecipeError` for a name that is no argument, and for one that does not say its value.
    """
    # What has another value, such as `training: dict`, is no mode
    may = {n for n, p in known.items() if isinstance(p.default, bool | None) or p.default is _NONE}
    usual = {name: value for name, value in MODES.items() if name in may}
    if not mode:
        return usual if mode is None else {}
    for name in [mode] if isinstance(mode, str) else mode:
        if name not in known:
            raise unknown("mode-unknown", f"argument of {model}", name, list(known))
    if not isinstance(mode, str):
        return {**usual, **mode}
    if mode not in MODES:
        expected = f"its value in training, mode={{'{mode}': True}} or {{'{mode}': False}}"
        raise invalid("mode-without-value", "mode", mode, expected)
    return {**usual, mode: MODES[mode]}


def in_mode(
    modes: Mapping[str, bool], given: Arguments, train: bool
) -> tuple[dict[str, bool], Arguments]:
    """The arguments that say whether a model trains, and the arrays of `given`, which may have one
    that `read_modes` tries."""
    tried = {name: value for name, value in given.kwargs.items() if isinstance(value, bool)}
    arrays = {name: value for name, value in given.kwargs.items() if name not in tried}
    flags = {**{name: value == train for name, value in modes.items()}, **tried}
    return flags, given._replace(kwargs=arrays)


def check_alike(model: str, training: Mapping[str, bool]) -> None:
    """Raises `RecipeError` if some layers alone were made for evaluation, which training undoes.
    *Arguments:* `training`: a layer's name to whether it was made to train."""
    names = [name for name, trains in training.items() if not trains]
    if 0 < len(names) < len(training):
        raise RecipeError("mode-of-some", model=model, names=names)


def read_modes(
    model: str,
    built: Task,
    known: Mapping[str, inspect.Parameter],
    modes: Mapping[str, bool],
    data: Data,
    forward: Callable,
    declared: bool,
    options: Collection[str] = (),
) -> dict[str, str]:
    """What is known of how `model` trains and evaluates, for `Task.read`.

    *Arguments:* `known`: its arguments. `modes`: those that are set. `forward`: that of
    `with_loss`. `declared`: whether the user has named the modes. `options`: those that a
    constructor has set, which are asked for if the model draws in evaluation.

    Raises `RecipeError` for an argument without a default that nothing gives, and, unless
    `declared`, for one that is True or False, that nothing sets, and that decides whether the model
    trains.
    """
    given = data.one()
    taken = {*list(known)[: len(given.args)], *given.kwargs, *modes}
    unset = {n: p for n, p in known.items() if n not in taken and p.kind not in _ANY}
    if missing := [n for n, p in unset.items() if p.default is _NONE]:
        raise RecipeError("argument-ungiven", model=model, names=missing, first=missing[0])
    said = ", ".join(f"{name}={value}" for name, value in modes.items())
    read = {"mode": f"{said} in training"} if said else {}

    def effects(train: bool = True, **tried: bool) -> tuple[bool, int]:
        """Whether the model draws, and how many arrays of its state it moves."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        params, state = jax.eval_shape(built.init, key)

        def run(params: Any, state: Any, given: Any, key: Any) -> Any:
            more = given._replace(kwargs={**given.kwargs, **tried})
            return forward(params, state, more, key, train)[:2]

        with own_promotion():
            made = jax.make_jaxpr(run)(params, state, given, key)
        inputs, results = made.jaxpr.invars, made.jaxpr.outvars
        _, used = dce_jaxpr(made.jaxpr, [True] * len(results))
        after = results[len(results) - len(jax.tree.leaves(state)) :]
        return used[-1], sum(all(v is not old for old in inputs) for v in after)

    try:
        usual, still = effects(), effects(False)
    except Exception:  # `stated` says what fails
        return read
    for name, one in ({} if declared else unset).items():
        if isinstance(one.default, bool) or (one.default is None and "bool" in str(one.annotation)):
            try:
                yes, no = (
                    usual if value is one.default else effects(**{name: value})
                    for value in (True, False)
                )
            except Exception:  # what fails with one of them does not say whether it trains
                continue
            option = name in options or usual == max(yes, no)  # the others switch it in training
            if yes != no and (any(still) or not option):
                facts = {"argument": name, "value": yes > no, "set": str(dict(modes))}
                both = str({**modes, name: yes > no})
                raise RecipeError("mode-unset", model=model, both=both, **facts)
    if still[0]:
        read["draws"] = "in evaluation too"
    if built.has_batch_norm and not usual[1]:
        read["statistics"] = "not moved in training"
    return read
