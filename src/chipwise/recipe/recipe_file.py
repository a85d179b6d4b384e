"""A recipe file made from another recipe: it loads the old one and replaces what is new, in the open."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..atomic import replace_text
from ..errors import RecipeError
from . import schedules
from .recipe import Recipe
from .schedules import Schedule

_SCHEDULES = sorted(
    name
    for name, value in vars(schedules).items()
    if isinstance(value, type) and issubclass(value, Schedule) and value not in (Schedule, schedules.function)
)


def write_recipe(
    path: str | os.PathLike,
    *,
    old: Recipe,
    new: Recipe,
    spec: str,
    settings: Sequence[str] = (),
    title: str,
) -> Path:
    """Writes the recipe file `path`, of which `path:recipe` is `new`, and returns its path.

    *Arguments*: `old`: the recipe that `spec` and `settings`, such as `["width=16"]`, load; `new`: one that
    differs from it in fields of its own or of its optimizer, or was validated itself; `title`: the first line
    of the file.

    Raises `RecipeError` when `path` exists, is not a `.py` file, or a new value cannot be written as text;
    `DataError` when the folder cannot be written to.
    """
    to = new_file(path)
    fields = _changes(old, new, ("task", "optimizer", "validated"))
    if new.task is not old.task:
        raise RecipeError(f"{new.name} has another task than {spec}: only settings can be written to a file.")
    lines = [f"    old = cw.load({_spec(spec, to)}, {_quoted(list(settings))}, data)"]
    if new.optimizer != old.optimizer:
        if type(new.optimizer) is not type(old.optimizer) or hasattr(old.optimizer, "settings"):
            raise RecipeError(f"{new.optimizer!r} cannot be written to a file: change it in {spec} itself.")
        inner = _arguments(_changes(old.optimizer, new.optimizer, ()))
        lines.append(f"    optimizer = dataclasses.replace(old.optimizer, {inner})")
        fields["optimizer"] = "optimizer"
    if new.validated is not old.validated:
        lines.append(f"    validated = {_validated(new)}")
        fields["validated"] = "validated"
    lines.append(f"    return dataclasses.replace(old, {_arguments(fields)})" if fields else "    return old")
    body = "\n".join(lines)
    used = [name for name in _SCHEDULES if re.search(rf"\b{name}\(", body)]
    here = "Path(__file__)" in body
    text = "\n".join(
        [
            f'"""{title}\n\n    chipwise train {to.name}:recipe\n"""\n',
            *(["import dataclasses"] if "dataclasses." in body else []),
            *(["from pathlib import Path"] if here else []),
            "",
            "import chipwise as cw",
            *([f"from chipwise import {', '.join(used)}"] if used else []),
            "",
            "",
            "def recipe(data: str | None = None) -> cw.Recipe:",
            body,
            "",
        ]
    )
    return replace_text(to, text, "the recipe file", "--apply another place")


def new_file(path: str | os.PathLike) -> Path:
    """`path`, where a recipe file can be written. Raises `RecipeError` when it exists or is no `.py` file."""
    to = Path(path)
    if to.suffix != ".py":
        raise RecipeError(f"{to} is not a recipe file: give --apply a name that ends in .py.")
    if to.exists():
        raise RecipeError(f"{to} exists and is not overwritten: give --apply another name, or remove it.")
    return to


def _changes(old: Any, new: Any, skipped: tuple[str, ...]) -> dict[str, str]:
    """Field to the text of its new value, for the fields that differ."""
    found = {}
    for field in dataclasses.fields(new):
        value = getattr(new, field.name)
        if field.name in skipped or value == getattr(old, field.name):
            continue
        if not isinstance(value, Schedule | int | float | str | None) or "function(" in repr(value):
            raise RecipeError(
                f"{field.name}={value!r} cannot be written to a file: give a number or a schedule."
            )
        found[field.name] = _quoted(value)
    return found


def _validated(new: Recipe) -> str:
    """Where `new` itself is known to work, as text; another point would need a file of its own."""
    if new.validated is None:
        return "None"
    if new.validated.point != dataclasses.replace(new, validated=None):
        raise RecipeError(f"{new.name} was validated at other settings, which cannot be written to a file.")
    band = "" if new.validated.forgetting is None else f", forgetting={new.validated.forgetting!r}"
    return f"cw.Validated(source={_quoted(new.validated.source)}{band})"


def _quoted(value: Any) -> str:
    """`repr`, with the quotes that people type."""
    text = repr(value)
    return text if '"' in text else text.replace("'", '"')


def _arguments(values: dict[str, str]) -> str:
    return ", ".join(f"{name}={text}" for name, text in values.items())


def _spec(spec: str, to: Path) -> str:
    """`spec` as Python text; a file of one's own by its way from the new file, so that both can move."""
    path, _, name = spec.partition(":")
    if Path(path).suffix != ".py":
        return _quoted(spec)
    way = os.path.relpath(Path(path).resolve(), to.resolve().parent)
    return f'f"{{Path(__file__).parent / {way!r}}}:{name or "recipe"}"'
