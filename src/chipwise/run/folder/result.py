"""The result of a run."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...base import CheckpointError, Say
from ...base.displayed import Displayed
from ...machine.fingerprint import this_machine
from ...recipe.random_keys import as_keys
from ...recipe.recipe import Recipe
from ...recipe.task import Tree
from ...step.state import fingerprint, parameters
from ..log import Log
from ..meter import share_of_peak
from .checkpoint import restore_run
from .checkpointing import Saver
from .early_stopping import Kept
from .run_reader import StoredRun, number, read_run


@dataclass(frozen=True)
class Result(Displayed):
    """The result of a run.

    `cw.result("runs/mine")` reads it back from a run folder.
    """

    recipe: str
    """The recipe's name."""
    steps: int
    """The number of steps done."""
    metrics: dict[str, Any]
    """The last `"train/..."` and `"eval/..."` values."""
    fingerprint: str
    """SHA-256 of the trained parameters' bytes."""
    devices: dict[str, Any]
    """The machine, the layout, the precision and the size of the model."""
    machine: dict[str, Any]
    """A `machine.fingerprint.Fingerprint` as JSON."""
    examples_per_second: float | None
    """The median of the global speed."""
    speed: dict[str, Any]
    """The speed with quartiles and the batch."""
    seconds: dict[str, float]
    """Seconds by section."""
    feed: dict[str, Any]
    """The source of the data, whether the device waited for it, and what would help. Empty without
    steps."""
    kept: Kept | None
    """For `keep_best` of `fit`: the metric, its value and step, and whether the run ended early.
    `best` is the result at that step."""
    better: dict[str, str]
    """The better values of each metric, if known: `{"accuracy": "higher"}`."""
    run: str | None
    """The run folder, or `None`."""
    ledger: str | None
    """The digest of the run's ledger (`run.folder.ledger`)."""
    verified: dict[str, Any]
    """The replicas that two devices computed (`Verifier.json`)."""
    params: Tree = field(repr=False)
    """The parameters as NumPy arrays, averaged if the recipe has an EMA. Random keys are keys."""
    state: Tree = field(repr=False)
    """The task's state as NumPy arrays. Random keys are keys."""
    history: list[dict[str, Any]] = field(repr=False)
    """All logged rows."""
    trained: Recipe = field(repr=False)
    """The `Recipe`."""

    @classmethod
    def of(cls, log: Log, saver: Saver) -> Result:
        """The result of a run whose steps are done. Waits."""
        session, meter, best = log.session, log.meter, saver.best
        recipe, state = session.recipe, session.snapshot()
        speed, feed = meter.summary(), {}
        flops, chip = session.programs.flops_per_step_per_device, session.machine.listed
        speed["share_of_peak"] = share_of_peak(
            flops, speed["steps_per_second"], chip, recipe.precision
        )
        if session.step > log.begin:
            meter.seconds["wait_data"] = session.watch.waited
            feed = session.watch.report(
                session.step - log.begin, recipe.batch, meter.seconds["train"]
            )
        seconds = {**meter.seconds, "total": meter.total()}
        return cls(
            recipe=recipe.name,
            steps=session.step,
            metrics=log.final,
            fingerprint=fingerprint(parameters(recipe, state)),
            devices=session.describe(),
            machine=this_machine(session.placement.devices).to_json(),
            examples_per_second=speed["examples_per_second"],
            speed=speed,
            seconds={
                name: round(value, 4) for name, value in seconds.items() if math.isfinite(value)
            },
            feed=feed,
            kept=best.kept(best.over and session.step < session.total),
            better=best.known,
            run=saver.run,
            ledger=log.ledger.digest(),
            verified=session.verifier.json(),
            params=as_keys(parameters(recipe, state, averaged=True)),
            state=as_keys(state.state),
            history=log.history,
            trained=recipe,
        )

    @classmethod
    def read(
        cls,
        recipe: Recipe,
        run: StoredRun,
        say: Say | None = None,
        *,
        best: bool = False,
    ) -> Result:
        """Reads the result of a run folder at its newest checkpoint, or at the `best` one. For an
        unfinished run, and at the best step, the metrics are those of the rows so far. Raises as
        `restore_run` does."""
        restored = restore_run(recipe, run.path, say, best=best)
        rows = [{k: math.nan if v is None else v for k, v in row.items()} for row in run.rows]
        history = [row for row in rows if row["step"] <= restored.steps]
        stated = run.result or {}
        metrics = {
            k: v for row in history for k, v in row.items() if k.startswith(("train/", "eval/"))
        }
        if not best and isinstance(whole := stated.get("metrics"), dict):
            metrics |= {k: np.asarray(v) for k, v in whole.items() if isinstance(v, list)}
        parts: dict[str, Any] = {
            name: value if isinstance(value := stated.get(name), dict) else {}
            for name in ("devices", "machine", "speed", "seconds", "feed", "verified")
        }
        return cls(
            recipe=recipe.name,
            steps=restored.steps,
            metrics=metrics,
            fingerprint=fingerprint(parameters(recipe, restored.whole)),
            examples_per_second=number(stated.get("examples_per_second")),
            kept=run.kept,
            better=run.better,
            ledger=value if isinstance(value := stated.get("ledger"), str) else None,
            run=str(run.path),
            params=restored.params,
            state=restored.state,
            history=history,
            trained=recipe,
            **parts,
        )

    @functools.cached_property
    def best(self) -> Result:
        """The result at the best evaluation, from the checkpoint that `keep_best` kept. Pass it to
        `cw.predict`, `cw.export` or `cw.evaluate`. Raises `CheckpointError` if there is no such
        checkpoint."""
        if self.kept is None or self.run is None:
            raise CheckpointError("run-without-best", run=self.run)
        return Result.read(self.trained, read_run(self.run), best=True)

    @property
    def ended_early(self) -> bool:
        """Whether the run ended by `patience`."""
        return self.kept is not None and self.kept.ended_early

    @property
    def complete(self) -> bool:
        """Whether the run needs no further steps: they are all done, or it ended early."""
        return self.steps == self.trained.clock.total or self.ended_early

    def to_json(self) -> dict[str, Any]:
        """All fields but the arrays, the history and the recipe, as JSON values (NaN as null)."""
        skipped = ("params", "state", "history", "trained", "kept")
        values = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in skipped
        }
        values["best"] = None if self.kept is None else vars(self.kept)
        return json.loads(json.dumps(values, default=_plain), parse_constant=lambda _: None)

    def to_torch(self, module: Any) -> Any:
        """Writes the trained weights into the PyTorch `module` of the task, and returns it."""
        from ...interop.torch import to_module

        return to_module(module, self.params, self.state)

    def to_keras(self, model: Any) -> Any:
        """Writes the trained weights into the Keras `model` of the task, and returns it."""
        from ...interop.keras import to_model

        return to_model(model, self.params, self.state)

    def to_equinox(self, model: Any) -> Any:
        """Returns the trained Equinox module, or `(module, state)` if it has a state. `model` is as
        for the task."""
        from ...interop.equinox import to_model

        return to_model(model, self.params, self.state)


def _plain(value):
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else str(value)
