"""`chipwise eval RUN`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..errors import RunError
from . import options


def evaluate_run(
    run: Annotated[str, typer.Argument(help="A run folder.")],
    batch: Annotated[
        int | None, typer.Option(min=1, help="Global batch; by default chosen from the memory needed.")
    ] = None,
    data: options.Data = None,
    devices: options.Devices = None,
    simulate: options.Simulate = None,
    json_: options.Json = False,
) -> None:
    """Evaluate the newest checkpoint of a run, every example exactly once.

    \b
    Examples:
      chipwise eval runs/mnist-1
      chipwise eval runs/mnist-1 --batch 7 --simulate 8 --json
    """
    on = options.on(devices, simulate)
    from ..engine.fit import evaluate
    from ..engine.restore import restore_run
    from ..engine.run_folder import disagreement, stored_recipe
    from ..recipe.settings import load

    def warn(text: str) -> None:
        typer.echo(f"warning: {text}", err=True)

    stored = stored_recipe(Path(run))
    source = stored.get("source")
    if not isinstance(source, dict):
        raise RunError(f"{run} was trained from Python: call cw.evaluate(recipe, params, state) there.")
    synthetic = source.get("synthetic", False) and data is None
    recipe = load(source["recipe"], source["set"], data or source["data"], synthetic)
    changed = disagreement(stored, recipe.describe())
    if changed:
        warn(f"{source['recipe']} is no longer the recipe of {run} ({changed}).")
    restored = restore_run(recipe, run, warn)
    metrics = evaluate(recipe, restored.params, restored.state, batch=batch, on=on)
    shown = {
        "run": str(run),
        "steps": restored.steps,
        "examples": len(recipe.task.eval or ()),
        "metrics": metrics,
    }
    if json_:
        print(json.dumps(shown, default=lambda v: v.tolist()))
        return
    for name, value in metrics.items():
        print(f"eval/{name}  {value:.6g}" if isinstance(value, float) else f"eval/{name}  {value}")
