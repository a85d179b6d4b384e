"""A moment of a training run: what it measured, and what the user's code may do there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ..errors import RecipeError
from ..recipe.task import Tree
from .log import Log
from .media import Medium, check_name, check_picture, check_text
from .result import Result
from .state import parameters


class Moment:
    """A moment of `cw.moments`, valid until the next one.

    *Fields:* `kind`: "log", "evaluation", "checkpoint" (one is being written) or "end"; `step`, of `total`,
    and `epoch`; `metrics`: the "train/..." or "eval/..." values measured here, at the others the last of all;
    `rates`: "lr", "steps_per_second" and what else a log row has; `done`: the steps started, whose parameters
    one gets: `step + 1` at a log step, which is read late so that the device has work, otherwise `step`;
    `recipe`; `result`, at the end.

    On several hosts all make the same calls, and host 0's `stop` and `save` count.
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
        """Ends the run after this moment: it is saved and evaluated, and the result comes. It can go on."""
        self.stopping = True

    def save(self) -> None:
        """Writes a checkpoint after this moment, of the state after `done` steps."""
        if self._log.ledger.saver.run is None:
            raise RecipeError("save-nowhere", 'save() needs a folder: cw.moments(recipe, "runs/mine").')
        self.saving = True

    def parameters(self) -> tuple[Tree, Tree]:
        """The parameters, averaged if the recipe has an EMA, and the task's state, as copies in NumPy arrays.
        Waits. `cw.predict(moment, data)` and `cw.evaluate(moment, data)` take the moment itself.
        """
        if self.result is not None:
            return self.result.params, self.result.state
        self._now()
        if self.recipe.ema is None:
            return jax.device_get(self._log.session.parameters())
        state = self._log.session.snapshot()
        return jax.device_get((parameters(self.recipe, state, averaged=True), state.state))

    def log(self, values: Mapping[str, float]) -> None:
        """Adds a row of your own numbers at `step`, such as `{"mine/bleu": 0.31}`, to the run's metrics,
        unless the run had it before it was resumed."""
        self._now()
        self._log.add(self.step, {check_name(name): float(value) for name, value in values.items()})

    def text(self, name: str, text: str) -> None:
        """Keeps a text of at most 65,536 characters at `step`, such as what the model writes: in the run
        folder, from which TensorBoard and the run's trackers have it. A run keeps 64 MiB of them."""
        self._show(name, check_text(text))

    def picture(self, name: str, pixels: Any) -> None:
        """As `text`, of pixels: an array `(height, width, 3)` uint8, RGB, of at most 4,194,304."""
        self._show(name, check_picture(pixels))

    def _show(self, name: str, medium: Medium) -> None:
        self._now()
        check_name(name)
        if self._log.ledger.saver.run is None:
            text = 'text() and picture() need a folder: cw.moments(recipe, "runs/mine").'
            raise RecipeError("show-nowhere", text)
        self._log.show(self.step, name, medium)

    def _now(self) -> None:
        if self.over:
            raise RecipeError("moment-over", kind=self.kind, step=self.step)
