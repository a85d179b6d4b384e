"""`--set key=value`: text that becomes a value of the field that it replaces."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

from ..base import RecipeError, invalid, unknown
from .recipe import Recipe
from .schedules import Schedule

_RATE = 0.1  # an example of a number for a schedule, whose own peak may be code
_FIXED = ("task", "optimizer", "name", "validated", "source")  # made by the recipe file, not typed


def apply(recipe: Recipe, settings: dict[str, str], others: tuple[str, ...] = ()) -> Recipe:
    """`recipe` with fields of it or of its optimizer replaced, each value checked against its type.

    A number for a schedule scales it to that peak, so `lr=0.2` keeps a one-cycle's shape.
    """
    own = [f.name for f in dataclasses.fields(recipe) if f.name not in _FIXED]
    inner = recipe.optimizer.settings
    for name, text in settings.items():
        if name == "ema":
            value = typed(name, text, None if text.lower() == "none" else 0.999)
            recipe = dataclasses.replace(recipe, ema=value)
        elif name in ("replicas", "blocks"):  # at once: one divides the other
            both = {n: settings[n] for n in ("replicas", "blocks") if n in settings}
            values = {
                n: typed(n, s, None if (n, s) == ("blocks", "none") else 1) for n, s in both.items()
            }
            recipe = dataclasses.replace(recipe, **values)
        elif name in own:
            recipe = dataclasses.replace(recipe, **{name: typed(name, text, getattr(recipe, name))})
        elif name in inner:
            old = inner[name]
            if isinstance(old, Schedule):
                value = old.with_peak(typed(name, text, _RATE))
            else:
                value = typed(name, text, float(old) if type(old) is int else old)
            recipe = dataclasses.replace(
                recipe, optimizer=recipe.optimizer.replace(**{name: value})
            )
            inner = recipe.optimizer.settings
        else:
            known = list(dict.fromkeys([*own, *inner, *(o for o in others if o != "data")]))
            raise unknown("recipe-setting-unknown", f"setting of {recipe.name}", name, known)
    return recipe


def parse(text: str) -> tuple[str, str]:
    """Name and value of a setting such as `"lr=0.2"`."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise invalid("set-not-a-pair", "--set", text, "key=value, such as lr=0.2")
    return name.strip(), value.strip()


def typed(name: str, text: str, old: Any) -> Any:
    """`text` as a value of the type of `old`. Accepts literals only and executes nothing."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        # of deeply nested text
        value = text
    # As a float too
    number = isinstance(value, float) or (type(value) is int and abs(value) < 1 << 1023)
    if isinstance(old, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        code = "set-not-a-bool"
    elif isinstance(old, int):
        if number and float(value).is_integer():
            return int(value)
        code = "set-not-whole"
    elif isinstance(old, float):
        if number:
            return float(value)
        code = "set-not-a-number"
    elif isinstance(old, str):
        return text
    else:  # None or no default: whatever literal it is
        return None if text.lower() == "none" else value
    raise RecipeError(code, name=name, given=text, old=str(old))
