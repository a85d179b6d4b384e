"""A recipe file made from another recipe: it loads the old one and replaces what is new, in the open."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..atomic import replace_text
from ..errors import RecipeError
from .recipe import Recipe
from .schedule import Schedule, function

_OTHERWISE = ("task", "optimizer", "validated")  # fields that are not written as they print


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
    fields = {
        field.name: _text(field.name, getattr(new, field.name))
        for field in dataclasses.fields(new)
        if field.name not in _OTHERWISE and getattr(new, field.name) != getattr(old, field.name)
    }
    if new.task is not old.task:
        raise RecipeError("task-unwritable", name=new.name, recipe=spec)
    used: list[str] = []
    lines = [f"    old = cw.load({_spec(spec, to)}, {_quoted(list(settings))}, data)"]
    if new.optimizer != old.optimizer:
        before, after = old.optimizer.settings, new.optimizer.settings
        if before.keys() != after.keys() or old.optimizer.replace(**after) != new.optimizer:
            raise RecipeError("optimizer-unwritable", optimizer=repr(new.optimizer), recipe=spec)
        changed = {name: value for name, value in after.items() if value != before[name]}
        inner = _arguments({name: _text(name, value) for name, value in changed.items()})
        lines.append(f"    optimizer = old.optimizer.replace({inner})")
        used = sorted(set().union(*map(_names, changed.values())))
        fields["optimizer"] = "optimizer"
    if new.validated is not old.validated:
        lines.append(f"    validated = {_validated(new)}")
        fields["validated"] = "validated"
    lines.append(f"    return dataclasses.replace(old, {_arguments(fields)})" if fields else "    return old")
    body = "\n".join(lines)
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
        raise RecipeError("not-a-recipe-file", path=str(to))
    if to.exists():
        raise RecipeError("recipe-file-exists", path=str(to))
    return to


def _text(name: str, value: Any) -> str:
    """A new value as Python text. Raises `RecipeError` for one that is code."""
    if not isinstance(value, Schedule | int | float | str | None) or function.__name__ in _names(value):
        raise RecipeError("setting-unwritable", name=name, value=repr(value))
    return _quoted(value)


def _names(value: Any) -> set[str]:
    """The names of the schedules in a setting."""
    if not isinstance(value, Schedule):
        return set()
    stored: Any = value.json()
    names = set()
    while isinstance(stored, dict):
        names.add(stored["schedule"])
        stored = stored.get("of")
    return names


def _validated(new: Recipe) -> str:
    """Where `new` itself is known to work, as text; another point would need a file of its own."""
    if new.validated is None:
        return "None"
    if new.validated.point != dataclasses.replace(new, validated=None):
        raise RecipeError("validation-unwritable", name=new.name)
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
