"""Recipes by name or `path.py:name`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base import ChipwiseError, RecipeError, invalid, unknown
from ..base.annotations import as_annotated
from ..base.figures import one_line
from ..data.synthetic import like
from ..recipe.recipe import Recipe
from ..recipe.recipe_file import RECIPE_MODULE, import_file
from ..recipe.settings import apply, parse, typed
from . import BUILT_IN

_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

ZERO_IS_NONE = ("magnitude",)
"""Whole numbers of built-in recipes that mean none if they are 0. The others are sizes of a model,
which divides by them."""


@as_annotated
def load(
    spec: str, settings: Sequence[str] = (), data: str | Path | None = None, synthetic: bool = False
) -> Recipe:
    """The recipe named by `spec`, with `settings` such as `["lr=0.2", "batch=128"]` applied.

    *Arguments:*

    - `spec`: a built-in name or `path.py:name`, where `name` is a `Recipe` or a function that
      returns one. A setting that is a parameter of that function is passed to it. Other settings
      replace a field of the recipe or of its optimizer.
    - `data`: the folder with the data set, for functions that have a parameter `data`.
    - `synthetic`: uses random examples of the same number, shapes and ranges in the place of the
      data set, which is then neither read nor downloaded. The recipe's name says so.

    Raises `RecipeError` for unknown names (with the nearest), wrong types and broken recipe files.
    """
    if synthetic and data is not None:
        raise RecipeError("synthetic-and-data", data=data)
    source = _find(spec)
    pairs = dict(parse(text) for text in settings)
    parameters: Mapping[str, inspect.Parameter] = {}
    if isinstance(source, Recipe):
        if data is not None:
            raise RecipeError("recipe-finished", recipe=spec)
        recipe = source
    else:
        parameters = inspect.signature(source).parameters
        recipe = _called(spec, source, _arguments(spec, parameters, pairs, data))
    if synthetic:
        recipe = _made_up(recipe)
    return apply(recipe, pairs, tuple(parameters))


def switches(spec: str, settings: Sequence[str] = ()) -> list[str]:
    """The parameters of a recipe's function that are `True`, by default or by `settings`."""
    source = _find(spec)
    if isinstance(source, Recipe):
        return []
    given = dict(parse(text) for text in settings)
    values = {n: _default(one) for n, one in inspect.signature(source).parameters.items()}
    return [
        name
        for name, value in values.items()
        if isinstance(value, bool) and (typed(name, given[name], value) if name in given else value)
    ]


def _arguments(
    spec: str,
    parameters: Mapping[str, inspect.Parameter],
    pairs: dict[str, str],
    data: str | Path | None,
) -> dict[str, Any]:
    """The arguments for a call of a recipe's function. Removes the settings that are parameters of
    it from `pairs`."""
    given: dict[str, Any] = {}
    if data is not None:
        if "data" not in parameters:
            raise RecipeError("recipe-without-data", recipe=spec)
        given["data"] = data
    for name in [n for n in pairs if n in parameters and n != "data"]:
        given[name] = typed(name, pairs.pop(name), default := _default(parameters[name]))
        least = 0 if name in ZERO_IS_NONE else 1
        if spec in BUILT_IN and type(default) is int and default > 0 and given[name] < least:
            expected = f"a whole number of at least {least}"
            raise invalid("recipe-size", name, given[name], expected)
    for name, parameter in parameters.items():
        optional = parameter.default is not parameter.empty or parameter.kind in _STARRED
        if name not in given and not optional:
            option = "--data DIR" if name == "data" else f"--set {name}=..."
            raise RecipeError("parameter-missing", recipe=spec, name=name, option=option)
    return given


def _default(parameter: inspect.Parameter) -> Any:
    """The default of a parameter, in the type it is annotated with: `share: float = 0` is a
    float."""
    default = parameter.default
    if default is parameter.empty:
        return None
    if type(default) is int and parameter.annotation in (float, "float"):
        return float(default)
    return default


def _made_up(recipe: Recipe) -> Recipe:
    """`recipe` on synthetic examples, with a name that no result can be mistaken by."""
    task = recipe.task
    held_out = None if task.eval is None else like(task.eval, task.classes, seed=1)
    task = dataclasses.replace(task, train=like(task.train, task.classes), eval=held_out)
    return dataclasses.replace(recipe, task=task, name=f"{recipe.name}-synthetic")


def _find(spec: str) -> Recipe | Callable[..., Recipe]:
    if ":" not in spec and not spec.endswith(".py"):  # built in
        if spec not in BUILT_IN:
            raise unknown("recipe-unknown", "recipe, if not path.py:name", spec, BUILT_IN)
        return importlib.import_module(f"chipwise.recipes.{spec.replace('-', '_')}").recipe
    path, _, name = spec.partition(":")
    file = Path(path)
    if not file.is_file():
        raise invalid("recipe-file-missing", "recipe", path, "a file, as path.py:name", path=path)
    # A task runs on JAX, and Keras' default is TensorFlow
    os.environ.setdefault("KERAS_BACKEND", "jax")
    try:
        module = import_file(f"{RECIPE_MODULE}{file.stem}", path)
    except (ChipwiseError, KeyboardInterrupt):
        raise
    except BaseException as error:  # sys.exit() too: an import must not end the program
        raise RecipeError("recipe-file-fails", path=path, **_blame(error, file)) from error
    name = name or "recipe"
    source = getattr(module, name, None)
    if not isinstance(source, Recipe) and not callable(source):
        known = {
            n: v for n, v in vars(module).items() if isinstance(v, Recipe) or inspect.isfunction(v)
        }
        own = [
            n for n, v in known.items() if isinstance(v, Recipe) or v.__module__ == module.__name__
        ]
        raise unknown("recipe-not-in-file", f"recipe of {path}", name, own)
    return source


def _called(spec: str, source: Callable[..., Recipe], given: dict[str, Any]) -> Recipe:
    try:
        recipe = source(**given)
    except (ChipwiseError, KeyboardInterrupt):
        raise
    except BaseException as error:
        code = inspect.unwrap(source).__code__ if inspect.isfunction(source) else None
        blame = _blame(error, code and Path(code.co_filename))
        raise RecipeError("recipe-function-fails", recipe=spec, **blame) from error
    if not isinstance(recipe, Recipe):
        raise invalid("not-a-recipe", f"what {spec} returned", recipe, "a cw.Recipe", recipe=spec)
    return recipe


def _blame(error: BaseException, file: Path | None) -> dict[str, Any]:
    """The `error`, its `reason` on one line, and the innermost `line` of `file` that it passed
    through."""
    lines = [
        f.lineno
        for f in traceback.extract_tb(error.__traceback__)
        if file and Path(f.filename) == file
    ]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    line = lines[-1] if lines else None
    return {"error": type(error).__name__, "reason": one_line(error), "line": line}
