"""A trained model: a recipe with the parameters and the state that evaluation uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..data.sources import Source
from ..engine.checkpoint import restore_run
from ..engine.result import Result
from ..engine.state import count, fingerprint
from ..engine.stored import StoredRun, disagreement, read_run
from ..errors import DataError, RecipeError, RunError
from ..recipe.recipe import Recipe
from ..recipe.settings import load
from ..recipe.task import Tree
from ..recipes import BUILT_IN
from ..words.facts import Fact, fact


@dataclass(frozen=True)
class Trained:
    """A trained model.

    *Fields:* `recipe`; `params` and `state` as NumPy arrays, the averaged parameters where the recipe has an
    EMA; `steps` trained; `run`, the folder it came from, or "".
    """

    recipe: Recipe
    params: Tree = field(repr=False)
    state: Tree = field(repr=False)
    steps: int = 0
    run: str = ""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the bytes of parameters and state."""
        return fingerprint((self.params, self.state))

    @property
    def parameters(self) -> int:
        return count(self.params)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes in words: the task's, else those that its data names; `()` where nobody does."""
        task = self.recipe.task
        found = task.class_names or tuple(getattr(task.train, "names", ()))
        return tuple(map(str, found)) if task.classes in (None, len(found)) else ()

    def evaluation(self) -> Source:
        """The evaluation data. Raises `DataError` when the task has none."""
        if self.recipe.task.eval is None:
            raise DataError("no-evaluation-data")
        return self.recipe.task.eval


def trained(
    model: Result | Trained | str | Path,
    recipe: Recipe | None = None,
    say: Callable[[Fact], None] = lambda told: None,
) -> Trained:
    """The model of a `Result`, or of the newest checkpoint of a run folder.

    *Arguments:* `recipe`: the one it was trained with; a folder of a built-in recipe names it itself. What a
    folder says is never executed: where it names a Python file, the caller must. `say` is given warnings.

    Raises `RunError`, or `RecipeError` where the recipe must be named.
    """
    if isinstance(model, Trained):
        return model
    if isinstance(model, Result):
        return Trained(recipe or model.trained, model.params, model.state, model.steps, model.run or "")
    if not isinstance(model, str | Path):
        raise RecipeError("not-a-trained-model", kind=type(model).__name__)
    stored = read_run(model)
    made = recipe if recipe is not None else _wherever_its_data_is(stored)
    changed = disagreement(_without_data(stored.recipe), _without_data(made.describe()), beginning=False)
    if changed:
        say(fact("recipe-changed", recipe=made.name, run=str(model), changed=changed))
    found = restore_run(made, model, say)
    return Trained(made, found.params, found.state, found.steps, str(model))


def settings_of(run: str | Path) -> list[str]:
    """The settings, such as `"lr=0.2"`, that the command line trained a run with."""
    return list((read_run(run).source or {}).get("set", ()))


def recipe_of(run: StoredRun, recipe: str | None = None, data: str | None = None) -> Recipe:
    """The recipe that a run was trained with, its data too, or that at `data`.

    A run folder may come from anybody: of a recipe file it names the path, and only the `recipe` that the
    caller names, such as `"my_task.py:recipe"`, is executed. Raises `RunError` where one must be named.
    """
    source = run.source or {}
    if recipe is None:
        if not source:
            raise RunError("run-recipe-in-python", run=str(run.path))
        if source["recipe"] not in BUILT_IN:
            raise RunError("run-recipe-in-file", run=str(run.path), recipe=source["recipe"])
    synthetic = source.get("synthetic") is True and data is None
    return load(recipe or source["recipe"], source.get("set", ()), data or source.get("data"), synthetic)


def _wherever_its_data_is(run: StoredRun) -> Recipe:
    """`recipe_of`, also where its data is gone or elsewhere: the model may not need it."""
    try:
        return recipe_of(run)
    except DataError:
        return recipe_of(replace(run, recipe={**run.recipe, "source": {**(run.source or {}), "data": None}}))


def _without_data(described: dict[str, Any]) -> dict[str, Any]:
    """Of a description: what the model is of, and not what it was trained on."""
    task = described.get("task")
    task = {k: v for k, v in task.items() if k not in ("train", "eval")} if isinstance(task, dict) else task
    return {**described, "task": task}
