"""A trained model: a recipe with the parameters and the state that evaluation uses."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..base import DataError, Fact, RecipeError, RunError, Say, fact, silent
from ..base.annotations import as_annotated
from ..data.class_names import Renamed, names_in, names_of, told
from ..data.manifest import MANIFEST, render
from ..data.remote import fetched_before, is_url
from ..data.sources import Source
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from ..recipes import BUILT_IN
from ..recipes.load import load
from ..run.event import Event
from ..run.folder.checkpoint import restore_run
from ..run.folder.result import Result
from ..run.folder.run_reader import StoredRun, disagreement, read_run
from ..step.state import count, fingerprint, trained_part
from .inputs import with_evaluation


@as_annotated
@dataclass(frozen=True)
class Trained:
    """A trained model."""

    recipe: Recipe
    params: Tree = field(repr=False)
    """NumPy arrays. The averaged parameters if the recipe has an EMA."""
    state: Tree = field(repr=False)
    """NumPy arrays."""
    steps: int = 0
    """The number of steps trained."""
    run: str = ""
    """The run folder, or "" without one."""
    apart: Tree = field(default=None, repr=False)
    """The arrays that were trained, of a run folder. Here adapters are apart, in `params` they are
    merged."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the bytes of parameters and state."""
        return fingerprint((self.params, self.state))

    @property
    def parameters(self) -> int:
        return count(self.params)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes: the task's, else the data's, else `()`."""
        task = self.recipe.task
        names = task.class_names or names_of(task.train)
        return names if task.classes in (None, len(names)) else ()

    def evaluation(self) -> Source:
        """The evaluation data. Raises `DataError` if the task has none."""
        if self.recipe.task.eval is None:
            raise DataError("no-evaluation-data")
        return self.recipe.task.eval


def trained(
    model: Result | Trained | Event | str | Path,
    recipe: Recipe | str | None = None,
    say: Say = silent,
    *,
    data: str | None = None,
    with_data: bool = False,
    eval_data: Any = None,
    best: bool = False,
) -> Trained:
    """The model of a `Result`, an `Event`, or a run folder's newest checkpoint. With `best`, the
    model of the folder's best checkpoint.

    *Arguments:*

    - `recipe`: the recipe of the run, or its name on the command line. Needed unless it is a
      built-in one. A Python file that only the folder names is never executed.
    - `say`: called with warnings.
    - `data`: where to read the run's data instead.
    - `with_data`: the run's own data is needed, or that at `data`.
    - `eval_data`: evaluate on it, see `with_evaluation`.

    Raises `RunError`, `RecipeError` if the recipe must be named, or `DataError` for the run's data.
    """
    if isinstance(model, Trained):
        return model
    if isinstance(model, Event):
        return Trained(model.recipe, *model.parameters(), model.done)
    if isinstance(model, Result) and not isinstance(recipe, str):
        known = _knowing(recipe or model.trained, names_in(model.trained.task))
        return Trained(known, model.params, model.state, model.steps, model.run or "")
    if not isinstance(model, str | Path):
        raise RecipeError("not-a-trained-model", kind=type(model).__name__)
    loaded = _loaded(read_run(model), recipe, say, data, with_data and eval_data is None)
    if eval_data is not None:
        loaded = with_evaluation(loaded, eval_data)
        if (joining := told(loaded.task)) is not None:
            say(joining)
    state = restore_run(loaded, model, say, best=best)
    apart = trained_part(loaded, state.whole, averaged=True)
    return Trained(loaded, state.params, state.state, state.steps, str(model), apart)


@as_annotated
def result(run: str | Path, recipe: Recipe | str | None = None) -> Result:
    """Reads a run folder back: the `Result` that `fit` returned, or that of the newest checkpoint
    of a run that is not finished.

        best = cw.result("runs/mine").best  # as of the evaluation that keep_best kept

    *Arguments:* `recipe`: as in `cw.predict`, needed unless it is a built-in one. Raises `RunError`
    if `run` is no run folder or its recipe must be named, `RecipeError`, `CheckpointError` without
    a checkpoint.
    """
    stored = read_run(run)
    return Result.read(_loaded(stored, recipe, _warn), stored, _warn)


def _warn(message: Fact) -> None:
    warnings.warn(str(message), stacklevel=3)


def _loaded(
    run: StoredRun,
    recipe: Recipe | str | None,
    say: Say,
    data: str | None = None,
    with_data: bool = False,
) -> Recipe:
    """The recipe of a run. Passes differences from the recipe as run to `say`."""
    if isinstance(recipe, Recipe):
        loaded = recipe
    else:
        loaded = (
            recipe_of(run, recipe, data)
            if with_data or data
            else _wherever_its_data_is(run, recipe)
        )
    both = run.recipe, loaded.describe()
    if changed := disagreement(*(both if with_data else map(_without_data, both)), beginning=False):
        say(fact("recipe-changed", recipe=loaded.name, run=str(run.path), changed=changed))
    if isinstance(texts := run.recipe.get("texts"), dict):
        loaded = replace(loaded, task=replace(loaded.task, texts=texts))
    names = run.recipe.get("classes")
    return _knowing(loaded, tuple(map(str, names)) if isinstance(names, list) else ())


def _knowing(recipe: Recipe, names: tuple[str, ...]) -> Recipe:
    """`recipe` with the classes of the training, whatever its data has now."""
    task = recipe.task
    if names in ((), names_in(task)):
        return recipe
    return replace(recipe, task=replace(task, train=Renamed(task.train, names), class_names=()))


def recipe_of(run: StoredRun, recipe: str | None = None, data: str | None = None) -> Recipe:
    """The recipe of a run, with the run's data or the data at `data`.

    A run folder may come from anybody. So a recipe file that it names is not executed: the caller
    must name it as `recipe`, such as `"my_task.py:recipe"`. And a URL that it names is fetched only
    if it was fetched here before. Raises `RunError` if the recipe must be named, and `DataError` if
    the URL must.
    """
    source = run.source or {}
    if recipe is None:
        if not source:
            raise RunError("run-recipe-in-python", run=str(run.path))
        if source["recipe"] not in BUILT_IN:
            raise RunError("run-recipe-in-file", run=str(run.path), recipe=source["recipe"])
    named, held_out = (
        one if isinstance(one := source.get(n), str) else None for n in ("data", "eval_data")
    )
    for option, at in (("--data", None if data else named), ("--eval-data", held_out)):
        if at is not None and is_url(at) and not fetched_before(at):
            raise DataError("run-data-at-url", run=str(run.path), option=option, url=at)
    synthetic = source.get("synthetic") is True and data is None
    loaded = load(recipe or source["recipe"], source.get("set", ()), data or named, synthetic)
    loaded = replace(loaded, source={**source, "recipe": recipe or source["recipe"]})
    return loaded if held_out is None else with_evaluation(loaded, held_out)


def _wherever_its_data_is(run: StoredRun, recipe: str | None = None) -> Recipe:
    """`recipe_of`, also if its data is missing: with the run's descriptions of its packs, else
    without data. Raises `DataError` if the model needs more of a pack than its description."""
    try:
        return recipe_of(run, recipe)
    except DataError as missing:
        source, packs = run.source or {}, run.recipe.get("packs")
        alone = {**run.recipe, "source": {**source, "eval_data": None}}
        if isinstance(packs, dict) and source.get("data"):
            try:
                return _of_descriptions(replace(run, recipe=alone), recipe, packs)
            except (DataError, RecipeError) as error:
                if error.code == "tokens-without-end":  # the model has that token's number
                    raise missing from None
        alone["source"]["data"] = None
        return recipe_of(replace(run, recipe=alone), recipe)


def _of_descriptions(run: StoredRun, recipe: str | None, packs: dict[str, Any]) -> Recipe:
    """`recipe_of` with a folder that has only the descriptions of `packs`, by split."""
    with tempfile.TemporaryDirectory() as place:
        for split in ("train", "eval"):
            if isinstance(pack := packs.get(split), dict):
                (folder := Path(place, split)).mkdir()
                (folder / MANIFEST).write_text(render(pack), encoding="ascii")
        return recipe_of(run, recipe, place)


def _without_data(described: dict[str, Any]) -> dict[str, Any]:
    """A recipe's description without what depends on the data."""
    task = described.get("task")
    task = (
        {k: v for k, v in task.items() if k not in ("train", "eval")}
        if isinstance(task, dict)
        else task
    )
    return {**described, "task": task}
