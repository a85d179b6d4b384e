"""`fit`: the loop over a run's events with nothing in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..base.annotations import as_annotated
from ..recipe.recipe import Recipe
from .folder.result import Result
from .on import ALL, On
from .training_loop import training


@as_annotated
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
    better: Mapping[str, str] = {},
    fresh: bool = False,
    changed_code: bool = False,
    track: str | Sequence[str] = (),
    progress: str = "auto",
) -> Result:
    """Trains `recipe` on all devices. Only `recipe` changes the result, unless with
    `On(exact=False)`. To run your own code during the training, write the loop: see `training`.

    *Arguments:*

    - `run`: a folder for metrics and checkpoints, or `None`. A run in the folder is resumed, or
      discarded if `fresh`. With `changed_code`, it is resumed although its programs differ, by
      code, a version or a setting.
    - `on`: which devices to use, and how they are fed. See `On`.
    - `progress`: `"auto"`, `"bar"`, `"lines"`, `"none"`.
    - `eval_every`, `log_every`, `checkpoint_every`: durations such as `"1ep"` or `"5%"`, or
      `"end"`: only at the end. `eval_every=None` is `"end"`.
    - `ledger`: the duration between rows of digests. By default, the ledger has rows at the steps
      of all these durations.
    - `stop_after`: the duration after which to stop and save.
    - `keep`: the number of the newest checkpoints to keep. A duration such as `"5ep"` also keeps
      one every five epochs.
    - `keep_best`: a metric such as `"eval/accuracy"`. The folder `best` keeps the state with its
      best value.
    - `patience`: the duration without a better value after which the run ends.
    - `better`: which way metrics are better, such as `{"bpb": "lower"}`. It counts before what the
      task says. See `Task.better`.
    - `track`: where rows are also sent, such as
      `["wandb:project", "mlflow:experiment", "trackio:project"]`. Other processes send them, which
      changes no bit and no speed. `chipwise track` sends what they could not send.

    Raises `RecipeError`, `DataError`, `DeviceError` or `RunError` before training begins. Raises
    `DivergedError` if the loss is not finite, and `DeviceFault` if bits differ. Raises `Stopped`
    after SIGTERM, SIGHUP or Ctrl-C, once the run is saved.
    """
    result = None
    for event in training(
        recipe,
        run,
        on=on,
        eval_every=eval_every,
        log_every=log_every,
        checkpoint_every=checkpoint_every,
        stop_after=stop_after,
        keep=keep,
        ledger=ledger,
        keep_best=keep_best,
        patience=patience,
        better=better,
        fresh=fresh,
        changed_code=changed_code,
        track=track,
        progress=progress,
    ):
        result = event.result
    assert result is not None
    return result
