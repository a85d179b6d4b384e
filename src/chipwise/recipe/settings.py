"""Recipes by name or `path.py:name`, and `--set key=value` on top of them."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..data.synthetic import like
from ..errors import ChipwiseError, RecipeError, nearest
from ..recipes import BUILT_IN
from .optimizers import Optimizer
from .recipe import Recipe
from .schedules import Schedule

RECIPE_MODULE = "chipwise_recipe_"  # how modules are called that came from recipe files
_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_RATE = 0.1  # an example of a number for a schedule, whose own peak may be code
_FIXED = ("task", "optimizer", "name", "validated")  # made by the recipe file, not typed on a command line


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
        raise RecipeError(f"--synthetic makes the data up: leave out --data {data}, or --synthetic.")
    made = _find(spec)
    pairs = dict(_parse(text) for text in settings)
    if isinstance(made, Recipe):
        if data is not None:
            raise RecipeError(f"{spec} is a finished Recipe and takes no --data: make it a function of data.")
        recipe = made
    else:
        parameters = inspect.signature(made).parameters
        given: dict[str, Any] = {}
        if data is not None:
            if "data" not in parameters:
                raise RecipeError(f"{spec} has no parameter 'data', so --data cannot be used with it.")
            given["data"] = data
        for name in [n for n in pairs if n in parameters and n != "data"]:
            given[name] = _typed(name, pairs.pop(name), _default(parameters[name]))
        for name, parameter in parameters.items():
            optional = parameter.default is not parameter.empty or parameter.kind in _STARRED
            if name not in given and not optional:
                how = "--data DIR" if name == "data" else f"--set {name}=..."
                raise RecipeError(f"{spec} needs a value for its parameter '{name}': give {how}.")
        recipe = _called(spec, made, given)
        if not isinstance(recipe, Recipe):
            raise RecipeError(f"{spec} returned {type(recipe).__name__}, expected a cw.Recipe.")
    if synthetic:
        recipe = _made_up(recipe)
    return apply(recipe, pairs, () if isinstance(made, Recipe) else tuple(inspect.signature(made).parameters))


def _made_up(recipe: Recipe) -> Recipe:
    """`recipe` on made-up examples, with a name that no result can be mistaken by."""
    task = recipe.task
    task = dataclasses.replace(
        task,
        train=like(task.train, task.classes),
        eval=None if task.eval is None else like(task.eval, task.classes, seed=1),
    )
    return dataclasses.replace(recipe, task=task, name=f"{recipe.name}-synthetic")


def apply(recipe: Recipe, settings: dict[str, str], others: tuple[str, ...] = ()) -> Recipe:
    """`recipe` with fields of it or of its optimizer replaced, each value checked against its type.

    A number for a schedule scales it to that peak, so `lr=0.2` keeps a one-cycle's shape.
    """
    own = [f.name for f in dataclasses.fields(recipe) if f.name not in _FIXED]
    inner = _of_optimizer(recipe.optimizer)
    for name, text in settings.items():
        if name == "ema":
            value = _typed(name, text, None if text.lower() == "none" else 0.999)
            recipe = dataclasses.replace(recipe, ema=value)
        elif name in own:
            recipe = dataclasses.replace(recipe, **{name: _typed(name, text, getattr(recipe, name))})
        elif name in inner:
            old = inner[name]
            if isinstance(old, Schedule):
                value = old.with_peak(_typed(name, text, _RATE))
            else:
                value = _typed(name, text, float(old) if type(old) is int else old)
            recipe = dataclasses.replace(recipe, optimizer=recipe.optimizer.replace(**{name: value}))
            inner = _of_optimizer(recipe.optimizer)
        else:
            known = [*own, *inner, *(o for o in others if o != "data")]
            raise RecipeError(
                f"Recipe '{recipe.name}' has no setting '{name}'.{nearest(name, known)} "
                f"Settings: {', '.join(dict.fromkeys(known))}."
            )
    return recipe


def _of_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Name to present value of what `--set` reaches in an optimizer."""
    return optimizer.settings


def _find(spec: str) -> Recipe | Callable[..., Recipe]:
    if ":" not in spec and not spec.endswith(".py"):
        if spec not in BUILT_IN:
            raise RecipeError(
                f"Unknown recipe '{spec}'.{nearest(spec, BUILT_IN)} Built in: {', '.join(BUILT_IN)}; "
                f"your own: path.py:name."
            )
        return importlib.import_module(f"chipwise.recipes.{BUILT_IN[spec]}").recipe
    path, _, name = spec.partition(":")
    file = Path(path)
    if not file.is_file():
        raise RecipeError(
            f"There is no recipe file {path}: expected path.py:name, for example my_task.py:recipe."
        )
    try:
        module = import_file(f"{RECIPE_MODULE}{file.stem}", path)
    except ChipwiseError:
        raise
    except Exception as error:
        raise RecipeError(f"{path} does not run: {_blame(error, file)}.") from error
    name = name or "recipe"
    made = getattr(module, name, None)
    if not isinstance(made, Recipe) and not callable(made):
        own = [n for n, v in vars(module).items() if isinstance(v, Recipe) or _defined_in(module, v)]
        raise RecipeError(
            f"{path} has no recipe '{name}'.{nearest(name, own)} Found: {', '.join(own) or 'none'}."
        )
    return made


def import_file(name: str, path: str) -> Any:
    """The Python file at `path`, run and registered as the module `name`. Raises what it raises."""
    file = Path(path)
    module_spec = importlib.util.spec_from_file_location(name, file)
    if module_spec is None or module_spec.loader is None:
        raise RecipeError(f"{path} is not a Python file: expected path.py:name.")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    home = str(file.resolve().parent)
    if home not in sys.path:  # as `python path.py` does, so that it finds the files beside it
        sys.path.insert(0, home)
    module_spec.loader.exec_module(module)
    return module


def _defined_in(module: Any, value: Any) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__


def _called(spec: str, made: Callable[..., Recipe], given: dict[str, Any]) -> Any:
    try:
        return made(**given)
    except ChipwiseError:
        raise
    except Exception as error:
        code = inspect.unwrap(made).__code__ if inspect.isfunction(made) else None
        raise RecipeError(f"{spec} failed: {_blame(error, code and Path(code.co_filename))}.") from error


def _blame(error: Exception, file: Path | None) -> str:
    """The error on one line, after the innermost line of `file` that it passed through."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if file and Path(f.filename) == file]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())}"


def _parse(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise RecipeError(f"--set {text} is not key=value, for example --set lr=0.2.")
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
    except (ValueError, SyntaxError, TypeError):
        value = text
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(old, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        expected = "true or false"
    elif isinstance(old, int):
        if number and float(value).is_integer():
            return int(value)
        expected = "a whole number"
    elif isinstance(old, float):
        if number:
            return float(value)
        expected = "a number"
    elif isinstance(old, str):
        return text
    else:  # None or no default: whatever literal it is
        return None if text.lower() == "none" else value
    raise RecipeError(f"--set {name}={text}: expected {expected}, as in {name}={old}.")
