"""Finds a loss or a metric of logits that is given probabilities: the result of a softmax or a
sigmoid. Such a loss trains badly, and such a metric is another number.

What they are given is noted while a task's loss is traced, and its last operation is read from the
program.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, get_opaque_trace_state

from ..base import RecipeError
from ..models.last_activation import PROBABILITIES, last_activation

_noted: ContextVar[tuple[Any, list[tuple[str, Any]]] | None] = ContextVar("noted", default=None)


def note(name: str, logits: Any) -> None:
    """Notes that the function `name` of chipwise takes these values for logits."""
    noted = _noted.get()
    # What is traced within, as by `vmap`, must not leave its own trace
    if noted is not None and noted[0] == get_opaque_trace_state():
        noted[1].append((name, logits))


def traced(function: Callable, *given: Any) -> tuple[ClosedJaxpr, Any]:
    """The program of `function` for arguments `given`, and the shapes of its results.

    Raises `RecipeError` if a loss or metric in it takes probabilities for logits.
    """
    names: list[str] = []

    def noting(*given: Any) -> Any:
        taken: list[tuple[str, Any]] = []
        token = _noted.set((get_opaque_trace_state(), taken))
        try:
            result = function(*given)
        finally:
            _noted.reset(token)
        names.extend(name for name, _ in taken)
        return result, [logits for _, logits in taken]

    made, (shapes, _) = jax.make_jaxpr(noting, return_shape=True)(*given)
    own = len(made.jaxpr.outvars) - len(names)
    for name, value in zip(names, made.jaxpr.outvars[own:], strict=True):
        if (last := last_activation(made.jaxpr, value)) in PROBABILITIES:
            inverse = "jnp.log(p)" + " - jnp.log1p(-p)" * (last == "sigmoid")
            raise RecipeError("probabilities-as-logits", takes=name, last=last, inverse=inverse)
    return made.replace(jaxpr=made.jaxpr.replace(outvars=made.jaxpr.outvars[:own])), shapes
