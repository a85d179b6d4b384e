"""The step of `fit` for your own loops."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np

from ..base import RecipeError
from ..base.annotations import as_annotated
from ..machine.arithmetic import fixed
from ..machine.hosts import hosts
from ..recipe.random_keys import as_keys
from ..recipe.recipe import Recipe
from ..recipe.task import Tree, finished
from ..step.state import fingerprint, refuse_part
from .on import ALL, On
from .session import Session


@as_annotated
class Stepper:
    """The steps of `fit`, one call each, for your own loop.

        with cw.Stepper(recipe) as stepper:  # reads the data, compiles
            while stepper.done < stepper.total:
                stepper.step()
            print(stepper.metrics(), stepper.evaluate(), stepper.fingerprint())

    This gives the same bits as `cw.fit(recipe)`, but without a run folder, checkpoints, signal
    handling, and a stop at a NaN loss.

    *Arguments:* `on` as in `fit`.

    *Fields:* `total`: the recipe's steps. `done`: the steps started.

    Raises `RecipeError`, `DataError` or `DeviceError` before anything is compiled, as `fit` does.
    """

    @fixed()
    def __init__(self, recipe: Recipe, on: On = ALL):
        with hosts().failing():
            self._session = Session(recipe, on)
            refuse_part(recipe, self._session.abstract.params)
            for warning in self._session.warnings:
                warnings.warn(str(warning), stacklevel=2)
            try:
                self._session.begin()
                if self.total:
                    self._session.compile()
            except BaseException:  # otherwise the threads that read data would remain
                self._session.close()
                raise

    @property
    def total(self) -> int:
        return self._session.total

    @property
    def done(self) -> int:
        return self._session.step

    @fixed()
    def step(self) -> None:
        """Starts the next step. Waits for the device only if some tens of steps are queued.

        Raises `RecipeError` after the recipe's last step, where its schedules end.
        """
        if self.done == self.total:
            duration = str(self._session.recipe.duration)
            raise RecipeError("stepper-ended", total=self.total, duration=duration)
        self._session.advance()

    @fixed()
    def metrics(self) -> dict[str, Any]:
        """Returns training metrics of the steps since the last call, name to value. Without steps,
        there are none. Waits."""
        sums = jax.device_get(self._session.drain())
        return finished({name: s for name, s in sums.items() if np.all(s.count)})

    @fixed()
    def evaluate(self) -> dict[str, Any]:
        """Metric name to value over the task's `eval` source, with the averaged parameters if there
        are any. Waits. Raises `DataError` when the task has no evaluation data."""
        return self._session.evaluate()

    @fixed()
    def state(self) -> tuple[Tree, Tree]:
        """The parameters (not their average) and the task's state, as copies in NumPy arrays.
        Waits."""
        return as_keys(self._session.parameters())

    def fingerprint(self) -> str:
        """SHA-256 of the parameters' bytes: `Result.fingerprint`. Waits."""
        return fingerprint(self.state()[0])

    def close(self) -> None:
        """Ends the threads that read data. The state stays readable."""
        self._session.close()

    def __enter__(self) -> Stepper:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        self._session.__exit__(kind, error, where)
