"""Reads JSON values with types."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from .figures import known


class Misfit(ValueError):
    """A JSON value is not of its type.

    *Attributes:* `code`: "field-missing", "field-type" or "runs". `facts`: the `field`, and unless
    it is missing its `value` and the types `expected`.
    """

    def __init__(self, code: str, field: str, value: Any = None, expected: Sequence[str] = ()):
        self.code = code
        self.facts: dict[str, Any] = {"field": field}
        if code != "field-missing":
            self.facts |= {"value": json.dumps(value)[:60], "expected": list(expected)}
        super().__init__(" ".join(map(str, (code, *self.facts.values()))))


def as_stored(value: Any, default: Callable[[Any], Any] | None = None) -> Any:
    """A value as it is when it is read back from JSON as Python writes it: tuples as lists, NaN and
    infinities as they are, and other kinds as what `default` makes of them. Raises `TypeError` for
    those without a `default`."""
    return json.loads(json.dumps(value, default=default))


def json_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object in a text. Raises `ValueError` for anything else, or `RecursionError` for
    values thousands deep."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}")
    return value


def part(stored: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """A copy of the object `name` within a stored one. Empty if it is missing or no object."""
    value = (stored or {}).get(name)
    return dict(value) if isinstance(value, Mapping) else {}


def typed(kind: Any, value: Any, field: str = "") -> Any:
    """The JSON value `value` as a `kind`: a dataclass, whose fields with a default may be missing,
    a mapping, a tuple of one or more numbers, or a scalar. `float` is any number below 1e300 in
    size. Raises `Misfit`."""
    inside = get_args(kind)
    if is_dataclass(kind):
        given, hints = typed(dict, value, field), get_type_hints(kind)
        values = {}
        for one in fields(kind):
            path = f"{field}.{one.name}".removeprefix(".")
            if one.name in given:
                values[one.name] = typed(hints[one.name], given[one.name], path)
            elif one.default is MISSING and one.default_factory is MISSING:
                raise Misfit("field-missing", path)
        return kind(**values)  # type: ignore[operator]
    if get_origin(kind) in (dict, Mapping):
        return {
            n: typed(inside[1], item, f"{field}.{n}")
            for n, item in typed(dict, value, field).items()
        }
    if get_origin(kind) is tuple:
        if not typed(list, value, field) or not all(map(known, value)):
            raise Misfit("runs", field, value)
        return tuple(value)
    kinds = [get_origin(one) or one for one in inside or (kind,)]
    kinds = [dict if one is Mapping else one for one in kinds]
    # bool is an int to Python, and not to JSON
    if (
        kind is Any
        or (float in kinds and known(value))
        or (type(value) in kinds and type(value) is not float)
    ):
        return value
    raise Misfit("field-type", field, value, [_JSON[one] for one in kinds])


_JSON = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
}
_JSON[type(None)] = "null"
