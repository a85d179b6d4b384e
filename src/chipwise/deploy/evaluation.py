"""`cw.evaluate`: the metrics of a trained model on any data, such as a third split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..base.annotations import as_annotated
from ..recipe.recipe import Recipe
from ..run.evaluate import evaluate as of_parameters
from ..run.event import Event
from ..run.folder.result import Result
from ..run.on import ALL, On
from .inputs import with_evaluation
from .model import Trained, trained


@as_annotated
def evaluate(
    model: Result | Trained | Event | str | Path,
    data: Any = None,
    *,
    recipe: Recipe | None = None,
    batch: int | None = None,
    on: On = ALL,
) -> dict[str, Any]:
    """Returns metric name to value of a trained model. Counts every example of `data` exactly once.

        cw.evaluate(result)  # the recipe's evaluation data
        cw.evaluate(cw.result("runs/mine").best, cw.PackedFolder("photos", "test"))

    The values have the same bits on any number of devices.

    *Arguments:*

    - `model`, `recipe`: as in `cw.predict`. Use `cw.deploy.Trained(recipe, params, state)` for your
      own arrays.
    - `data`: a source with the columns of the training data, or the path of a packed folder or of
      `.npz` arrays. By default the recipe's evaluation data.
    - `batch`: the examples that are read at a time, on all devices. It changes no value.
    - `on`: only its devices matter.

    Raises `DataError` for data that the task cannot read and for empty data. Raises `RunError`,
    `RecipeError` and `DeviceError`.
    """
    known = trained(model, recipe, with_data=data is None)
    there = known.recipe if data is None else with_evaluation(known.recipe, data)
    return of_parameters(there, known.params, known.state, batch=batch, on=on)
