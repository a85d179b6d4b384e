"""The result of a run."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..machine.fingerprint import this_machine
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from .log import Log
from .meter import share_of_peak
from .saver import Saver
from .state import fingerprint, parameters


@dataclass(frozen=True)
class Result:
    """The result of a run.

    *Fields:* `metrics`, the last `"train/..."` and `"eval/..."` values; `fingerprint`, SHA-256 of the trained
    parameters' bytes; `steps` done; `examples_per_second` (global, median) and `speed` (with quartiles and
    the batch); `seconds` by section; `feed`: the source of the data, whether the device waited for it and
    what would help (empty without steps); `best`: for `fit`'s `keep_best`, the metric, its value and step,
    and whether the run ended early; `devices`; `machine`, a `machine.fingerprint.Fingerprint` as JSON;
    `params` (averaged if the recipe has an EMA) and `state` as NumPy arrays; `history`, all logged rows;
    `trained`, the `Recipe`.
    """

    recipe: str
    steps: int
    metrics: dict[str, Any]
    fingerprint: str
    devices: dict[str, Any]
    machine: dict[str, Any]
    examples_per_second: float | None
    speed: dict[str, Any]
    seconds: dict[str, float]
    feed: dict[str, Any]
    best: dict[str, Any] | None
    run: str | None
    params: Tree = field(repr=False)
    state: Tree = field(repr=False)
    history: list[dict[str, Any]] = field(repr=False)
    trained: Recipe = field(repr=False)

    @classmethod
    def of(cls, log: Log, saver: Saver) -> Result:
        """The result of a run whose steps are done. Waits."""
        session, meter, best = log.session, log.meter, saver.best
        recipe, state = session.recipe, session.snapshot()
        speed, feed = meter.summary(), {}
        flops, kind = session.programs.flops_per_step_per_device, session.machine.kind
        speed["share_of_peak"] = share_of_peak(flops, speed["steps_per_second"], kind, recipe.precision)
        if session.step > log.begin:
            meter.seconds["wait_data"] = session.watch.waited
            feed = session.watch.report(session.step - log.begin, recipe.batch, meter.seconds["train"])
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
            seconds={name: round(value, 4) for name, value in seconds.items() if math.isfinite(value)},
            feed=feed,
            best=best.to_json(best.over and session.step < session.total),
            run=saver.run,
            params=parameters(recipe, state, averaged=True),
            state=state.state,
            history=log.history,
            trained=recipe,
        )

    @property
    def complete(self) -> bool:
        """Whether the run needs no further steps: they are all done, or it ended early."""
        return self.steps == self.trained.clock.total or bool(self.best and self.best["ended_early"])

    def to_json(self) -> dict[str, Any]:
        """All fields but the arrays, the history and the recipe, as JSON values (NaN as null)."""
        skipped = ("params", "state", "history", "trained")
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in skipped}
        return json.loads(json.dumps(values, default=_plain), parse_constant=lambda _: None)

    def _repr_html_(self) -> str:
        """For notebooks: the curves and the result."""
        from ..explain.display import of_result

        return of_result(self)

    def to_torch(self, module: Any) -> Any:
        """Writes the trained weights into the PyTorch `module` of the task, and returns it."""
        from ..interop.torch import to_module

        return to_module(module, self.params, self.state)

    def to_keras(self, model: Any) -> Any:
        """Writes the trained weights into the Keras `model` of the task, and returns it."""
        from ..interop.keras import to_model

        return to_model(model, self.params, self.state)

    def to_equinox(self, model: Any) -> Any:
        """The trained Equinox module, or `(module, state)` if it has a state; `model` as for the task."""
        from ..interop.equinox import to_model

        return to_model(model, self.params, self.state)


def _plain(value):
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else str(value)
