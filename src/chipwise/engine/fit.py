"""`fit`: the loop over a run's moments with nothing in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..recipe.recipe import Recipe
from .moments import moments
from .on import ALL, On
from .result import Result


def fit(
    recipe: Recipe,
    run: str | Path | None = None,
    *,
    on: On = ALL,
    eval_every: str | None = "1ep",
    log_every: str | None = None,
    checkpoint_every: str | None = None,
    stop_after: str | None = None,
    keep: int | str | None = None,
    ledger: str | None = None,
    keep_best: str | None = None,
    patience: str | None = None,
    fresh: bool = False,
    changed_code: bool = False,
    track: str | Sequence[str] = (),
    progress: str = "auto",
) -> Result:
    """Trains `recipe` on all devices. Only `recipe` changes the result, unless with `On(exact=False)`. To run
    code of your own meanwhile, write the loop: see `moments`.

    *Arguments:*

    - `run`: a folder for metrics and checkpoints, or `None`; a run in it goes on, or is discarded if `fresh`;
      with `changed_code` it goes on although its programs differ, by code, a version or a setting.
    - `on`: which devices, and how they are fed; see `On`. `progress`: `"auto"`, `"bar"`, `"lines"`, `"none"`.
    - `eval_every` (`None`: only at the end), `log_every`, `checkpoint_every`: durations, `"1ep"` or `"5%"`;
      `ledger`: of rows of digests, by default at all of these; `stop_after`: stop then, and save.
    - `keep`: so many of the newest checkpoints, or `"5ep"`: also one every five epochs; `keep_best`: a
      metric, `"eval/accuracy"`, whose best is kept in `best`; `patience`: the run ends after so long without
      a better.
    - `track`: where rows also go, such as `["wandb:project", "mlflow:experiment", "trackio:project"]`, by
      processes that change no bit and no speed. What could not be sent, `chipwise track` sends.

    Raises `RecipeError`, `DataError`, `DeviceError`, `RunError` before training begins; `DivergedError` (loss
    not finite), `DeviceFault` (bits differ); `Stopped` after SIGTERM or Ctrl-C, once the run is saved.
    """
    loop, result = moments(**locals()), None
    for moment in loop:
        result = moment.result
    assert result is not None
    return result
