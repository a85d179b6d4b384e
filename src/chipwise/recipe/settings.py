"""Recipes by name or `path.py:name`, and `--set key=value` on top of them."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ChipwiseError, RecipeError, invalid, unknown
from ..words.figures import one_line
from .recipe import Recipe
from .schedules import Schedule

RECIPE_MODULE = "chipwise_recipe_"  # how modules are called that came from recipe files
_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_RATE = 0.1  # an example of a number for a schedule, whose own peak may be code
_FIXED = ("task", "optimizer", "name", "validated", "source")  # made by the recipe file, not typed


def load(spec: str, settings: Sequence[str] = (), data: str | None = None, synthetic: bool = False) -> Recipe:
    """The recipe named by `spec`, with `settings` such as `["lr=0.2", "batch=128"]` applied.

    *Arguments:* `spec`: a built-in name or `path.py:name`, where `name` is a `Recipe` or a function
    that returns one; a setting that is a parameter of that function is passed to it, others replace
    a field of the recipe or of its optimizer. `data`: folder with the data set, for functions that
    have a parameter `data`. `synthetic`: made-up examples of the same number, shapes and ranges in the
    place of the data set, which is then neither read nor downloaded; the recipe's name says so.

    Raises `RecipeError` for unknown names (with the nearest), wrong types and broken recipe files.
    """
    if synthetic and data is not None:
        raise RecipeError("synthetic-and-data", data=data)
    source = _find(spec)
    pairs = dict(_parse(text) for text in settings)
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


def _arguments(
    spec: str, parameters: Mapping[str, inspect.Parameter], pairs: dict[str, str], data: str | None
) -> dict[str, Any]:
    """What to call a recipe's function with; takes the settings that are parameters of it out of `pairs`."""
    given: dict[str, Any] = {}
    if data is not None:
        if "data" not in parameters:
            raise RecipeError("recipe-without-data", recipe=spec)
        given["data"] = data
    for name in [n for n in pairs if n in parameters and n != "data"]:
        given[name] = _typed(name, pairs.pop(name), _default(parameters[name]))
    for name, parameter in parameters.items():
        optional = parameter.default is not parameter.empty or parameter.kind in _STARRED
        if name not in given and not optional:
            option = "--data DIR" if name == "data" else f"--set {name}=..."
            raise RecipeError("parameter-missing", recipe=spec, name=name, option=option)
    return given


def _made_up(recipe: Recipe) -> Recipe:
    """`recipe` on made-up examples, with a name that no result can be mistaken by."""
    from ..data.synthetic import like  # to the right of this package: for the one option that asks for it

    task = recipe.task
    held_out = None if task.eval is None else like(task.eval, task.classes, seed=1)
    task = dataclasses.replace(task, train=like(task.train, task.classes), eval=held_out)
    return dataclasses.replace(recipe, task=task, name=f"{recipe.name}-synthetic")


def apply(recipe: Recipe, settings: dict[str, str], others: tuple[str, ...] = ()) -> Recipe:
    """`recipe` with fields of it or of its optimizer replaced, each value checked against its type.

    A number for a schedule scales it to that peak, so `lr=0.2` keeps a one-cycle's shape.
    """
    own = [f.name for f in dataclasses.fields(recipe) if f.name not in _FIXED]
    inner = recipe.optimizer.settings
    for name, text in settings.items():
        if name == "ema":
            value = _typed(name, text, None if text.lower() == "none" else 0.999)
            recipe = dataclasses.replace(recipe, ema=value)
        elif name in ("replicas", "blocks"):  # at once: one divides the other
            both = {n: settings[n] for n in ("replicas", "blocks") if n in settings}
            values = {n: _typed(n, s, None if (n, s) == ("blocks", "none") else 1) for n, s in both.items()}
            recipe = dataclasses.replace(recipe, **values)
        elif name in own:
            recipe = dataclasses.replace(recipe, **{name: _typed(name, text, getattr(recipe, name))})
        elif name in inner:
            old = inner[name]
            if isinstance(old, Schedule):
                value = old.with_peak(_typed(name, text, _RATE))
            else:
                value = _typed(name, text, float(old) if type(old) is int else old)
            recipe = dataclasses.replace(recipe, optimizer=recipe.optimizer.replace(**{name: value}))
            inner = recipe.optimizer.settings
        else:
            known = list(dict.fromkeys([*own, *inner, *(o for o in others if o != "data")]))
            raise unknown("recipe-setting-unknown", f"setting of {recipe.name}", name, known)
    return recipe


def _find(spec: str) -> Recipe | Callable[..., Recipe]:
    if ":" not in spec and not spec.endswith(".py"):  # built in
        from ..recipes import BUILT_IN  # to the right of this package: the recipes by name

        if spec not in BUILT_IN:
            raise unknown("recipe-unknown", "recipe, if not path.py:name", spec, BUILT_IN)
        return importlib.import_module(f"chipwise.recipes.{spec.replace('-', '_')}").recipe
    path, _, name = spec.partition(":")
    file = Path(path)
    if not file.is_file():
        raise invalid("recipe-file-missing", "recipe", path, "a file, as path.py:name", path=path)
    os.environ.setdefault("KERAS_BACKEND", "jax")  # a task runs on JAX, and Keras' default is TensorFlow
    try:
        module = import_file(f"{RECIPE_MODULE}{file.stem}", path)
    except (ChipwiseError, KeyboardInterrupt):
        raise
    except BaseException as error:  # sys.exit() too: an import must not end the program
        raise RecipeError("recipe-file-fails", path=path, **_blame(error, file)) from error
    name = name or "recipe"
    source = getattr(module, name, None)
    if not isinstance(source, Recipe) and not callable(source):
        known = {n: v for n, v in vars(module).items() if isinstance(v, Recipe) or inspect.isfunction(v)}
        own = [n for n, v in known.items() if isinstance(v, Recipe) or v.__module__ == module.__name__]
        raise unknown("recipe-not-in-file", f"recipe of {path}", name, own)
    return source


def import_file(name: str, path: str) -> Any:
    """The Python file at `path`, run and registered as the module `name`. Raises what it raises."""
    file = Path(path)
    module_spec = importlib.util.spec_from_file_location(name, file)
    if module_spec is None or module_spec.loader is None:
        raise RecipeError("not-a-python-file", "{path} is no Python file: expected path.py:name.", path=path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    home = str(file.resolve().parent)
    if home not in sys.path:  # as `python path.py` does, so that it finds the files beside it
        sys.path.insert(0, home)
    module_spec.loader.exec_module(module)
    return module


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
    """The `error`, its `reason` on one line, and the innermost `line` of `file` that it passed through."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if file and Path(f.filename) == file]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    line = lines[-1] if lines else None
    return {"error": type(error).__name__, "reason": one_line(error), "line": line}


def _parse(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise invalid("set-not-a-pair", "--set", text, "key=value, such as lr=0.2")
    return name.strip(), value.strip()


def _default(parameter: inspect.Parameter) -> Any:
    """The default of a parameter, in the type it is annotated with: `share: float = 0` is a float."""
    default = parameter.default
    if default is parameter.empty:
        return None
    if type(default) is int and parameter.annotation in (float, "float"):
        return float(default)
    return default


def _typed(name: str, text: str, old: Any) -> Any:
    """`text` as a value of the type of `old`. Literals only: nothing is executed."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # of deeply nested text
        value = text
    number = isinstance(value, float) or (type(value) is int and abs(value) < 1 << 1023)  # as a float too
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
