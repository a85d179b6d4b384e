"""The rows of a run: metrics read one step late, shown, stored and kept."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import numpy as np

from ..data.watch import Watch
from ..errors import DivergedError, RunError
from ..recipe.recipe import Recipe
from .checkpoint import Checkpoints
from .finish import finished
from .meter import Meter
from .progress import Reporter
from .run_folder import RunFolder


class Log:
    """Collects rows `{"step", "epoch", "seconds", "train/...", "eval/...", speeds}`.

    `seconds` is the wall time of the run, start and compilation included, over all its processes; what
    was done after the checkpoint from which a run was resumed does not count.

    `history` has every row, those of a resumed run's past included; `final` the last value of each
    metric; `logged` is the last step whose training metrics were read.
    """

    def __init__(
        self,
        recipe: Recipe,
        meter: Meter,
        reporter: Reporter,
        folder: RunFolder | None,
        saved: Checkpoints | None,
        begin: int,
        history: list[dict[str, Any]],
        seconds: float = 0.0,
    ):
        self.recipe, self.meter, self.reporter = recipe, meter, reporter
        self.folder, self.saved = folder, saved
        self.examples = recipe.clock.examples
        self.history, self.logged = history, begin
        self.final: dict[str, Any] = {}
        for row in history:
            self.final |= {k: v for k, v in row.items() if k.startswith(("train/", "eval/"))}
        self._before = seconds
        self._pending: tuple[int, dict] | None = None

    @property
    def seconds(self) -> float:
        """The run's wall time so far, `seconds` of its processes before this one included."""
        return round(self._before + self.meter.total(), 3)

    def take(self, step: int, sums: dict) -> None:
        """Keeps the device's metric sums of the steps up to `step`, to be read by `collect`."""
        self._pending = (step, sums)

    def collect(self, watch: Watch) -> None:
        """Reads what `take` kept. Called after the next step was started, so the device is not idle.

        *Arguments:* `watch`, which knows how long the device waited for data.
        Raises `DivergedError` when the loss is not finite.
        """
        if self._pending is None:
            return
        (step, sums), self._pending = self._pending, None
        counted = {name: s for name, s in jax.device_get(sums).items() if np.all(s.count)}
        values = {f"train/{name}": value for name, value in finished(counted).items()}
        speed = self.meter.mark(step)
        loss = values.get("train/loss", float("nan"))
        if not np.isfinite(loss):
            raise self.diverged(f"The training loss became {loss}", step)
        row = self._row(step, values)
        if speed is not None:
            row |= {"steps_per_second": speed, "examples_per_second": speed * self.recipe.batch}
            row |= watch.row((step - self.logged) / speed)
        self.logged = step
        self.final |= values
        self.reporter.update(row)
        self._keep(row)

    def evaluated(self, step: int, metrics: dict[str, Any]) -> None:
        """Notes what an evaluation found after `step` steps."""
        values = {f"eval/{name}": value for name, value in metrics.items()}
        if any(old["step"] == step and not old.keys().isdisjoint(values) for old in self.history):
            self.final = values | self.final  # a finished run, looked at again: what it said stays
            return
        self.final |= values
        row = self._row(step, values)
        self.reporter.update(row)
        self._keep(row)

    def diverged(self, what: str, step: int) -> DivergedError:
        """The error that ends a run, with its window of steps and the last good checkpoint.

        The run folder gets a row that says so in `"diverged"`, which a resumed run drops again.
        """
        first = self.logged + 1
        where = f"{what} in step {step}" if first == step else f"{what} between steps {first} and {step}"
        if self.folder is not None:
            # A full disk must not hide why the run ends
            with contextlib.suppress(RunError):
                self.folder.log({**self._row(step, {}), "diverged": where})
        good = ""
        if self.folder is not None and self.saved is not None:
            self.saved.wait()  # one may still be on its way to the disk
            if steps := self.saved.steps():
                good = f" The last good checkpoint is of step {steps[-1]} in {self.folder.path}."
        return DivergedError(
            f"{where}.{good} "
            f"Try a lower rate (--set lr=...), gradient clipping (--set clip=1.0) or precision f32."
        )

    def _row(self, step: int, values: dict[str, Any]) -> dict[str, Any]:
        epoch = round(step * self.recipe.batch / self.examples, 6)
        return {"step": step, "epoch": epoch, "seconds": self.seconds, **values}

    def _keep(self, row: dict[str, Any]) -> None:
        self.history.append(row)
        if self.folder is not None:
            self.folder.log({k: v for k, v in row.items() if not isinstance(v, np.ndarray)})
