"""The last operation of a traced model. It shows in the program whether the outputs are
probabilities."""

from __future__ import annotations

from typing import Any

from jax.extend.core import Literal

_SHAPES = ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose")
_PRODUCTS = ("dot_general", "conv_general_dilated")
_SUMS = ("reduce_sum", "reduce_window_sum")
PROBABILITIES = ("softmax", "sigmoid")
"""The activations whose results are probabilities."""


def last_activation(jaxpr: Any, value: Any = None) -> str | None:
    """The activation that computed `value`, by default a model's first output: "softmax",
    "sigmoid", "log-softmax", "linear" (a product with a bias, or its sum or mean over positions),
    or None."""
    value = jaxpr.outvars[0] if value is None else value
    return _activation(_made(jaxpr, value, []))


def _activation(made: Any) -> str | None:
    name, below = _opened(made)
    parts = [_opened(one) for one in below]
    kinds = [kind for kind, _ in parts]
    if name == "div" and kinds == ["exp", "reduce_sum"]:
        (summed,) = parts[1][1]
        return "softmax" if summed is not None and summed[0] is below[0][0] else None
    if name == "logistic":
        return "sigmoid"
    if name == "sub" and kinds == ["sub", "log"]:
        return "log-softmax" if _opened(parts[1][1][0])[0] == "reduce_sum" else None
    constant = name in ("div", "mul") and isinstance(made[0].invars[1], Literal)
    if name in _SUMS or (constant and kinds[0] in _SUMS):  # also as a mean
        return "linear" if _activation(below[0]) == "linear" else None
    return (
        "linear" if name in _PRODUCTS or (name == "add" and set(kinds) & set(_PRODUCTS)) else None
    )


def _opened(made: Any) -> tuple[str, list[Any]]:
    """The name of an operation, and the results of `_made` for its operands."""
    if made is None:
        return "", []
    operation, (jaxpr, calls) = made
    return operation.primitive.name, [_made(jaxpr, value, calls) for value in operation.invars]


def _made(jaxpr: Any, value: Any, calls: list[Any]) -> Any:
    """The operation that computed `value`, and its place. Changes of shape and type are skipped.
    `None` for an argument or a constant. *Arguments:* `calls`: the callers of `jaxpr`, from the
    outside in."""
    while not isinstance(value, Literal):
        operation = next(
            (e for e in reversed(jaxpr.eqns) if any(v is value for v in e.outvars)), None
        )
        if operation is None:
            if not calls or not any(v is value for v in jaxpr.invars):
                return None
            at = [v is value for v in jaxpr.invars].index(True)
            (jaxpr, operation), calls = calls[-1], calls[:-1]
            value = operation.invars[at]
            continue
        inner = next(
            (p for p in operation.params.values() if hasattr(p, "jaxpr") or hasattr(p, "eqns")),
            None,
        )
        inner = getattr(inner, "jaxpr", inner)
        if inner is not None and [len(inner.invars), len(inner.outvars)] == [
            len(operation.invars),
            len(operation.outvars),
        ]:
            at = [v is value for v in operation.outvars].index(True)
            calls = [*calls, (jaxpr, operation)]
            jaxpr = inner
            value = inner.outvars[at]
        elif operation.primitive.name in _SHAPES:
            value = operation.invars[0]
        else:
            return operation, (jaxpr, calls)
    return None
