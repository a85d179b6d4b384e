"""`sweep`: trains the runs of a study, and resumes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base import Fact, Stopped, fact
from ..base.annotations import as_annotated
from ..machine.compilation_cache import compiled_once
from ..machine.hosts import hosts
from ..recipe.recipe import Recipe
from ..run.progress import Reporter
from ..run.signals import StopRequest
from . import grid, study_file, study_runs
from .study_file import Study
from .study_runs import Origin


@as_annotated
def sweep(
    recipe: str | Recipe,
    settings: Mapping[str, Sequence[Any]] | None = None,
    *,
    seeds: int | Sequence[int] = 3,
    run: str | Path,
    set: Sequence[str] = (),
    data: str | Path | None = None,
    synthetic: bool = False,
    progress: str = "auto",
    metric: str | None = None,
    after_round: Callable[[Study], None] | None = None,
    **options: Any,
) -> Study:
    """Trains `recipe` with every combination of `settings` and every seed, into one folder.

        cw.sweep("mnist", {"lr": [0.005, 0.01]}, seeds=3, run="runs/mnist-lr", data=DIR)

    All points run with the first seed, then all with the second, and so on. An existing study in
    `run` is resumed: finished runs are not repeated, others resume from their checkpoints, and
    more values or seeds extend it. A run that diverged is a result. Runs share compiled programs.

    *Arguments:*

    - `recipe`: a built-in name, `path.py:name`, or a `Recipe`.
    - `settings`: setting to values. By default only the unchanged recipe runs.
    - `seeds`: 5 means the seeds 0 to 4. A list names them.
    - `run`: the study's folder, with `study.json` and an ordinary folder for each run.
    - `set`: settings of all points, such as `["batch=128"]`. Only for recipes by name.
    - `data`, `synthetic`: as in `cw.load`. Only for recipes by name.
    - `progress`: as in `cw.fit`.
    - `metric`: the metric that decides. The recipe or `better` says which way it is better.
    - `after_round`: called with the study after each seed.
    - `options`: options of `cw.fit`, such as `on=cw.On(devices=4)` or `eval_every="6ep"`.

    *Returns* the `Study`.

    Before anything is trained, raises `RecipeError` for an invalid setting or value at any point,
    and `RunError` for a folder that cannot be used, is in use, or has other runs. Raises `Stopped`
    after SIGTERM, SIGHUP or Ctrl-C, when everything is saved. Also raises the errors of `fit`,
    except `DivergedError`.
    """
    origin = Origin(recipe, tuple(set), data, synthetic)
    texts = {name: [str(value) for value in values] for name, values in (settings or {}).items()}
    grid_points = grid.points(texts)
    numbers = grid.seeds(seeds)
    options = study_runs.options_of(options)
    hosts().alone("sweep")
    described = [
        study_runs.checked(origin.make(point, numbers[0]), options, metric) for point in grid_points
    ]
    reporter = Reporter(progress)
    with contextlib.ExitStack() as closing:
        # ---- the study, old or new, and what is still to train
        study = closing.enter_context(
            study_file.opened(run, described[-1]["name"], origin.source())
        )
        points = [study.point(point) for point in grid_points]
        jobs = study_runs.planned(study, points, described, numbers, options)
        study_runs.check_finished(study, points, origin, options)
        study.write()
        total = len(points) * len(numbers)
        if done := total - len(jobs):
            reporter.say(fact("runs-done", done=done, total=total, folder=study.folder))

        # ---- train
        stop = closing.enter_context(contextlib.closing(StopRequest()))
        closing.enter_context(compiled_once())
        try:
            for job in jobs:
                if stop:
                    break
                reporter.say(fact("run-begins", run=job.name), style="bold")
                diverged = job.train(origin, options, reporter.kind)
                study.point(job.settings).runs[job.seed] = job.ended(diverged)
                study.write()
                done += 1
                about = {"done": done, "total": total, "run": job.name, **(diverged or {})}
                reporter.say(Fact("run-diverged" if diverged else "run-done", about))
                if after_round and all(
                    job.seed in p.runs and p.runs[job.seed].ended for p in points
                ):
                    after_round(study)
        except Stopped:
            stop.name = stop.name or "SIGTERM"
        if stop and done < total:
            raise Stopped(
                "study-stopped", signal=stop.name, done=done, total=total, folder=study.folder
            )
    return study
