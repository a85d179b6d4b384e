"""One run of a study: whether it can be, whether it is done, and training it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.workers import chosen as readers
from ..engine import loader
from ..engine.fit import Agenda, fit
from ..engine.placement import lay_out
from ..engine.program import check_steps_per_call
from ..engine.restore import abstract_state
from ..engine.run_folder import disagreement, stored_recipe
from ..engine.stored import number, read_result, read_rows
from ..errors import DivergedError, RunError
from ..machine.detect import detect
from ..recipe.recipe import Recipe
from . import grid
from .document import Run
from .origin import Origin

_OWN = ("recipe", "run", "stop_after", "fresh", "progress", "source")  # that a study decides itself
_DEFAULTS = {n: p.default for n, p in inspect.signature(fit).parameters.items() if n not in _OWN}


def options_of(given: dict[str, Any]) -> dict[str, Any]:
    """All options of `cw.fit` that runs of a study share. Raises `TypeError` for others."""
    for name in given:
        if name not in _DEFAULTS:
            raise TypeError(f"a study has no option {name!r}; of cw.fit it takes {', '.join(_DEFAULTS)}")
    return {**_DEFAULTS, **given}


@dataclass(frozen=True)
class Job:
    """*Fields:* `settings` of the point; `seed`; `folder`: the run's, absolute."""

    settings: grid.Settings
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return f"{grid.name(self.settings)}, seed {self.seed}" if self.settings else f"seed {self.seed}"


def check(recipe: Recipe, options: dict[str, Any]) -> None:
    """Raises what `fit` raises before it reads data: what is wrong with any point is known before the first
    is trained."""
    clock, on = recipe.clock, options["on"]
    Agenda.of(clock, options["eval_every"], options["log_every"], options["checkpoint_every"], None)
    for schedule in recipe.optimizer.hyper.values():
        schedule.table(clock, 0, min(1, clock.total or 0))
    machine = detect(on.devices, on.platform)
    asked = on.devices is not None
    layout, _ = lay_out(machine, recipe.batch, recipe.replicas, asked=asked, exact=on.exact)
    readers(recipe.task.train, on.workers)
    resident = loader.resident(recipe.task.train, machine.devices[0], on.feed)
    if options["steps_per_call"] not in (None, 1):
        check_steps_per_call(options["steps_per_call"], layout, resident)
    abstract_state(recipe)


def agree(folder: Path, recipe: dict[str, Any]) -> None:
    """Raises `RunError` when `folder` holds a run of another recipe than described."""
    if (folder / "recipe.json").exists() and (rows := disagreement(stored_recipe(folder), recipe)):
        raise RunError(
            f"{folder} holds a run of another recipe ({rows}). Use the same settings, name another folder "
            f"with --run, or delete that run's folder to train it again."
        )


def found(job: Job, run: str) -> Run | None:
    """The finished run in the job's folder, if there is one."""
    result, _ = read_result(job.folder)
    if result is None:
        return None  # not finished, or damaged: then `fit` goes on from its checkpoint
    rows, _ = read_rows(job.folder)
    # Over all its processes; without such rows, of the last one
    seconds = next((s for row in reversed(rows) if (s := number(row.get("seconds"))) is not None), None)
    try:
        total = result["seconds"]["total"] if seconds is None else seconds
        return Run.checked({**result, "seed": job.seed, "run": run, "done": True, "seconds": total})
    except (KeyError, TypeError, ValueError):
        return None


def train(job: Job, origin: Origin, options: dict[str, Any], progress: str) -> str | None:
    """Trains the run, or the rest of it. *Returns* when it diverged, or `None`; raises what `fit` raises."""
    recipe = origin.make(job.settings, job.seed)
    source = origin.source(job.settings, job.seed)
    try:
        fit(recipe, job.folder, progress=progress, source=source, **options)
    except DivergedError as error:
        return when(str(error))
    return None


def when(diverged: str) -> str:
    """Of what a `DivergedError` says, its first sentence: what became infinite, and between which steps."""
    return diverged.partition(". ")[0]
