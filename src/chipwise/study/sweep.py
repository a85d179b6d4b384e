"""`sweep`: trains the runs of a study, and resumes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..engine.progress import Reporter
from ..engine.run_folder import hold
from ..engine.signals import StopRequest
from ..errors import RunError, Stopped
from ..machine.hosts import hosts
from ..recipe.recipe import Recipe, difference
from ..words.facts import Fact, fact
from . import at_once as side_by_side
from . import document, grid, runs
from .document import Point, Run, Study
from .runs import Job, Origin


def sweep(
    recipe: str | Recipe,
    settings: Mapping[str, Sequence[Any]] | None = None,
    *,
    seeds: int | Sequence[int] = 3,
    run: str | Path,
    set: Sequence[str] = (),
    data: str | None = None,
    synthetic: bool = False,
    at_once: int = 1,
    progress: str = "auto",
    after_round: Callable[[Study], None] | None = None,
    **options: Any,
) -> Study:
    """Trains `recipe` with every combination of `settings` and every seed, into one folder.

        cw.sweep("mnist", {"lr": [0.005, 0.01]}, seeds=3, run="runs/mnist-lr", data=DIR)

    All points run with the first seed, then all with the second, and so on. An existing study in `run` is
    resumed: finished runs are not repeated, others continue from their checkpoints, and more values or seeds
    extend it. A run that diverged is a result. Runs share compiled programs.

    *Arguments:*

    - `recipe`: a built-in name, `path.py:name`, or a `Recipe`.
    - `settings`: setting to values; by default only the unchanged recipe.
    - `seeds`: 5 means the seeds 0 to 4; a list names them.
    - `run`: the study's folder, with `study.json` and an ordinary folder for each run.
    - `set`: settings of all points, such as `["batch=128"]`; `data`, `synthetic`: as in `cw.load`. Only for
      recipes by name.
    - `at_once`: the number of runs at once, each in its own process, on the CPU; the bits are the same.
    - `progress`: as in `cw.fit`; of runs at once only their ends are shown.
    - `after_round`: called with the study after each seed.
    - `options`: options of `cw.fit`, such as `on=cw.On(devices=4)` or `eval_every="6ep"`.

    *Returns* the `Study`. Raises, before anything is trained, `RecipeError` for an invalid setting or value
    at any point, and `RunError` for a folder that cannot be used, is in use, or has other runs; `Stopped`
    after SIGTERM or Ctrl-C, when everything is saved; and the errors of `fit`, except `DivergedError`.
    """
    origin = Origin(recipe, tuple(set), data, synthetic)
    texts = {name: [str(value) for value in values] for name, values in (settings or {}).items()}
    grid_points, numbers = grid.points(texts), grid.seeds(seeds)
    options = runs.options_of(options)
    hosts().alone("sweep")
    side_by_side.check(at_once, origin, options["on"])
    described, name = [], ""
    for settings_of in grid_points:
        sample = origin.make(settings_of, numbers[0])
        runs.check(sample, options)
        described.append(sample.describe())
        name = sample.name
    reporter = Reporter(progress)
    with _opened(run, name, origin.source()) as study:
        points = [study.point(settings_of) for settings_of in grid_points]
        jobs = _planned(study, points, described, numbers)
        study.write()
        total = len(points) * len(numbers)
        done = total - len(jobs)
        if done:
            reporter.say(fact("runs-done", done=done, total=total, folder=study.folder))
        stop = StopRequest()
        try:
            # Closed here, however the loop ends: workers save their runs while the study is still locked
            with contextlib.closing(_trained(jobs, at_once, origin, options, stop, reporter)) as trained:
                for job, diverged in trained:
                    _note(study.point(job.settings), job, diverged)
                    study.write()
                    done += 1
                    about = {"done": done, "total": total, "run": job.name, **(diverged or {})}
                    reporter.say(Fact("run-diverged" if diverged else "run-done", about))
                    if after_round and all(job.seed in p.runs and p.runs[job.seed].ended for p in points):
                        after_round(study)
        except Stopped:
            stop.name = stop.name or "SIGTERM"
        finally:
            stop.close()
        if stop and done < total:
            raise Stopped("study-stopped", signal=stop.name, done=done, total=total, folder=study.folder)
    return study


@contextlib.contextmanager
def _opened(run: str | Path, recipe: str, source: dict[str, Any] | None) -> Iterator[Study]:
    """Opens the study in the folder `run`, old or new, and locks it for this process."""
    folder = Path(run).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = hold(folder)
    except OSError as error:
        raise RunError("study-unwritable", folder=run, reason=error.strerror or str(error)) from error
    with contextlib.closing(lock):
        if (folder / "recipe.json").exists():
            raise RunError("single-run-here", folder=folder)
        study = document.read(folder) or Study(folder, recipe, source)
        old, new = (
            {"recipe": s.recipe, **(s.source or {}), "data": None}
            for s in (study, Study(folder, recipe, source))
        )
        if rows := difference(old, new):
            raise RunError("study-of-another-recipe", folder=folder, differences=rows)
        yield study


def _planned(
    study: Study, points: Sequence[Point], described: Sequence[dict], seeds: Sequence[int]
) -> list[Job]:
    """The runs still to train, seeds outermost; finished ones are entered in `study`.

    Raises `RunError` if a run's folder has something else.
    """
    jobs = []
    for seed in seeds:
        for point, recipe in zip(points, described, strict=True):
            run = grid.folder(point.settings, seed)
            job = Job(point.settings, seed, study.folder / run)
            runs.agree(job.folder, {**recipe, "seed": seed})
            old = point.runs.get(seed, Run(seed, run))
            if old.diverged and (job.folder / "recipe.json").exists():
                continue
            point.runs[seed] = job.finished(run) or Run(seed, run)
            if not point.runs[seed].done:
                jobs.append(job)
    return jobs


def _trained(
    jobs: Sequence[Job],
    at_once: int,
    origin: Origin,
    options: dict[str, Any],
    stop: StopRequest,
    reporter: Reporter,
) -> Generator[tuple[Job, dict[str, Any] | None]]:
    """Yields each job when it ends, with its divergence or `None`. Ends early after a request to stop."""
    with side_by_side.one_compilation() as environment:
        if at_once > 1:
            yield from side_by_side.train(jobs, at_once, origin, options, environment, stop, reporter)
            return
        for job in jobs:
            if stop:
                return
            reporter.say(fact("run-begins", run=job.name), style="bold")
            yield job, job.train(origin, options, reporter.kind)


def _note(point: Point, job: Job, diverged: dict[str, Any] | None) -> None:
    run = grid.folder(point.settings, job.seed)
    ended = Run(job.seed, run, diverged=diverged) if diverged else job.finished(run)
    if ended is None:
        raise RunError("result-unreadable", folder=job.folder)
    point.runs[job.seed] = ended
