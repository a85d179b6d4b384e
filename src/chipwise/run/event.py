"""An event of a training run: its measurements, and the calls that the user's code may make
there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ..base import RecipeError
from ..recipe.random_keys import as_keys
from ..recipe.task import Tree
from ..step.state import parameters
from .folder.media import Medium, check_name, check_picture, check_text
from .folder.result import Result
from .log import Log


class Event:
    """An event of `cw.training`, valid until the next one.

    *Fields:*

    - `kind`: "log", "evaluation", "checkpoint" (one is being written) or "end".
    - `step`, of `total`, and `epoch`.
    - `metrics`: the "train/..." or "eval/..." values measured here. At other events, the last value
      of each metric.
    - `rates`: "lr", "steps_per_second" and the other values of a log row.
    - `done`: the number of steps started. `parameters` returns the parameters after these. This is
      `step + 1` at a log step, which is read late so that the device has work, and otherwise
      `step`.
    - `recipe`.
    - `result`: the result of the run, at the end.

    On several hosts, all make the same calls, and those of host 0 to `stop` and `save` count.
    """

    def __init__(self, kind: str, row: Mapping[str, Any], log: Log, result: Result | None = None):
        self.kind, self.step, self.epoch, self.result = kind, row["step"], row["epoch"], result
        self.recipe, self.total, self.done = log.recipe, log.session.total, log.session.step
        here = {n: v for n, v in row.items() if n.startswith(("train/", "eval/"))}
        self.metrics = here or dict(log.final)
        self.rates = {n: v for n, v in row.items() if n not in {*here, "step", "epoch", "seconds"}}
        self.stopping = self.saving = self.over = False
        self._log = log

    def stop(self) -> None:
        """Ends the run after this event. The run is saved and evaluated, and returns its result. It
        can be resumed later."""
        self.stopping = True

    def save(self) -> None:
        """Writes a checkpoint after this event, of the state after `done` steps."""
        if self._log.ledger.saver.run is None:
            raise RecipeError(
                "save-nowhere", 'save() needs a folder: cw.training(recipe, "runs/mine").'
            )
        self.saving = True

    def parameters(self) -> tuple[Tree, Tree]:
        """The parameters, averaged if the recipe has an EMA, and the task's state, as copies in
        NumPy arrays. Waits. `cw.predict(event, data)` and `cw.evaluate(event, data)` take the event
        itself.
        """
        if self.result is not None:
            return self.result.params, self.result.state
        self._now()
        if self.recipe.ema is None:
            return as_keys(jax.device_get(self._log.session.parameters()))
        state = self._log.session.snapshot()
        return as_keys(jax.device_get((parameters(self.recipe, state, averaged=True), state.state)))

    def log(self, values: Mapping[str, float]) -> None:
        """Adds a row of your own numbers at `step`, such as `{"mine/bleu": 0.31}`, to the run's
        metrics. Does nothing if the run had these numbers before it was resumed."""
        self._now()
        self._log.add(self.step, {check_name(name): float(value) for name, value in values.items()})

    def text(self, name: str, text: str) -> None:
        """Stores a text of at most 65,536 characters at `step`, such as a sample of the model. It
        is written to the run folder, from which TensorBoard and the run's trackers read it. A run
        stores at most 64 MiB of texts and pictures."""
        self._show(name, check_text(text))

    def picture(self, name: str, pixels: Any) -> None:
        """Stores a picture as `text` stores a text. `pixels` is an array `(height, width, 3)`
        uint8, RGB, of at most 4,194,304 pixels."""
        self._show(name, check_picture(pixels))

    def _show(self, name: str, medium: Medium) -> None:
        self._now()
        check_name(name)
        if self._log.ledger.saver.run is None:
            text = 'text() and picture() need a folder: cw.training(recipe, "runs/mine").'
            raise RecipeError("show-nowhere", text)
        self._log.show(self.step, name, medium)

    def _now(self) -> None:
        if self.over:
            raise RecipeError("event-over", kind=self.kind, step=self.step)
