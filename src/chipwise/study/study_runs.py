"""The runs of a study: makes their recipes, checks them, and trains one."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..base import DivergedError, RecipeError, RunError, unknown
from ..base.files import check_inside
from ..base.json_types import typed
from ..machine.kernels import TUNED
from ..recipe.direction import bare, directions, judged
from ..recipe.recipe import Recipe, difference
from ..recipe.settings import apply, parse
from ..recipes.load import load
from ..run.evaluate import evaluation
from ..run.fit import fit
from ..run.folder.ledger import check_unchanged
from ..run.folder.run_reader import (
    disagreement,
    metrics_of,
    number,
    part,
    read_ledger,
    read_result,
    read_rows,
    settings_in,
    sha_of,
    stored_recipe,
)
from ..run.run_schedule import Agenda
from ..run.session import Session
from . import grid
from .study_file import Point, Run, Study

_OWN = ("recipe", "run", "stop_after", "fresh", "progress")  # of `fit`, set by the study
_DEFAULTS = {n: p.default for n, p in inspect.signature(fit).parameters.items() if n not in _OWN}


@dataclass(frozen=True)
class Origin:
    """The origin of recipes: a name and settings, or a recipe made in Python. Only names take
    `set`, `data` and `synthetic`."""

    recipe: str | Recipe
    """A built-in name, `path.py:name`, or a `Recipe`."""
    set: tuple[str, ...] = ()
    """Settings such as `"lr=0.2"` that all runs share."""
    data: str | Path | None = None
    synthetic: bool = False
    """`data` and `synthetic` are as in `cw.load`."""

    def __post_init__(self):
        if isinstance(self.recipe, Recipe) and (self.set or self.data or self.synthetic):
            raise RecipeError("recipe-is-finished")

    @property
    def name(self) -> str:
        """The recipe's name, with an absolute path for a file, so that it works from any
        directory."""
        assert isinstance(self.recipe, str)
        path, _, name = self.recipe.partition(":")
        return f"{Path(path).absolute()}:{name}" if Path(path).suffix == ".py" else self.recipe

    def make(self, settings: Mapping[str, str] | None = None, seed: int | None = None) -> Recipe:
        """The recipe with further `settings` and a `seed`, which is then none of `set`. Raises
        `RecipeError` for invalid ones."""
        settings = dict(settings or {})
        if seed is not None and "seed" in dict(map(parse, self.set)):
            raise RecipeError("seed-is-no-setting")
        if isinstance(self.recipe, Recipe):
            recipe = apply(self.recipe, settings)
            return recipe if seed is None else dataclasses.replace(recipe, seed=seed)
        recipe = load(self.recipe, self._all(settings, seed), self.data, self.synthetic)
        recipe = dataclasses.replace(recipe, source=self.source(settings, seed))
        if seed is not None and recipe.seed != seed:
            raise RecipeError(
                "seed-dropped",
                "{recipe} ignores its parameter seed: the recipe has seed {seed}. Pass it on: "
                "cw.Recipe(seed=seed, ...).",
                recipe=self.recipe,
                seed=recipe.seed,
            )
        return recipe

    def source(
        self, settings: Mapping[str, str] | None = None, seed: int | None = None
    ) -> dict[str, Any] | None:
        """The arguments from which `make` makes the recipe, to store with a run. `None` for a
        recipe made in Python."""
        if isinstance(self.recipe, Recipe):
            return None
        data = self.data
        if data and "://" not in str(data):
            data = str(Path(data).expanduser().absolute())
        source = {"recipe": self.name, "set": self._all(settings or {}, seed), "data": data}
        return {**source, "synthetic": True} if self.synthetic else source

    def _all(self, settings: Mapping[str, str], seed: int | None) -> list[str]:
        own = [f"{name}={value}" for name, value in settings.items()]
        return [*self.set, *own, *([] if seed is None else [f"seed={seed}"])]


@dataclass(frozen=True)
class StudyRun:
    """A run to train."""

    settings: grid.Settings
    """The settings of the point."""
    seed: int
    folder: Path
    """The run's folder, absolute."""
    expected: Mapping[str, Any] = field(default_factory=dict)
    """What the recipe of a finished run there must state."""

    @property
    def name(self) -> str:
        return (
            f"{grid.name(self.settings)}, seed {self.seed}"
            if self.settings
            else f"seed {self.seed}"
        )

    @property
    def run(self) -> str:
        """The folder, relative to the study's."""
        return grid.folder(self.settings, self.seed)

    def train(
        self, origin: Origin, options: dict[str, Any], progress: str
    ) -> dict[str, Any] | None:
        """Trains the run, or the rest of it, as `fit` does. *Returns* its divergence, or `None`."""
        try:
            fit(origin.make(self.settings, self.seed), self.folder, progress=progress, **options)
        except DivergedError as error:
            return {
                "code": error.code,
                **{name: error.facts[name] for name in ("first", "last", "value")},
            }
        return None

    def ended(self, diverged: dict[str, Any] | None) -> Run:
        """The run, which has just been trained. *Arguments:* `diverged`: the value that `train`
        returned."""
        run = Run(self.seed, self.run, diverged=diverged) if diverged else self._stated()
        if run is None:
            raise RunError("result-unreadable", folder=self.folder)
        return run

    def finished(self) -> Run | None:
        """The finished run in the folder, if any. A result alone is none: anybody may have put it
        there. It counts with its recipe and its ledger, and `fit` trains what does not."""
        stored = self.folder / "recipe.json"
        if not stored.exists() or not is_proven(self.folder, recipe := stored_recipe(self.folder)):
            return None
        if any(recipe.get(name) != value for name, value in self.expected.items()):
            return None
        return self._stated()

    def _stated(self) -> Run | None:
        """The run as its result states it."""
        result, _ = read_result(self.folder)
        if result is None:
            return None  # unfinished or damaged: `fit` resumes from its checkpoint
        rows, _ = read_rows(self.folder)
        # Over all processes; if rows lack it, of the last one
        seconds = next(
            (s for row in reversed(rows) if (s := number(row.get("seconds"))) is not None), None
        )
        try:
            total = result["seconds"]["total"] if seconds is None else seconds
            return typed(
                Run, {**result, "seed": self.seed, "run": self.run, "done": True, "seconds": total}
            )
        except (KeyError, TypeError, ValueError):
            return None


def is_proven(folder: Path, recipe: Mapping[str, Any]) -> bool:
    """Whether the result in a run folder is that of the ledger and the rows there, and the ledger
    that of the `recipe` there."""
    result, _ = read_result(folder)
    ledger = read_ledger(folder)
    if result is None or ledger is None or not ledger.was(result.get("ledger")):
        return False
    if ledger.heads[0].get("recipe") != sha_of(settings_in(recipe)):
        return False
    rows, _ = read_rows(folder)
    last = {name: value for row in rows for name, value in metrics_of(row).items()}
    stated = metrics_of(result["metrics"]) if isinstance(result.get("metrics"), dict) else {}
    return all(last.get(name) == value for name, value in stated.items())


def options_of(given: dict[str, Any]) -> dict[str, Any]:
    """All options of `cw.fit` for the runs of a study, with defaults. Raises `TypeError` for
    others."""
    for name in given:
        if name not in _DEFAULTS:
            raise TypeError(
                f"a study has no option {name!r}; of cw.fit it takes {', '.join(_DEFAULTS)}"
            )
    return {**_DEFAULTS, **given}


def checked(recipe: Recipe, options: dict[str, Any], metric: str | None = None) -> dict[str, Any]:
    """The description of a point's recipe, which may include data. Makes the checks of `fit` before
    it reads data, so that all points are checked before the first is trained. *Arguments:*
    `metric`: the one that decides."""
    clock = recipe.clock
    on = options["on"]
    Agenda.of(clock, options["eval_every"], options["log_every"], options["checkpoint_every"], None)
    for schedule in recipe.optimizer.hyper.values():
        schedule.table(clock, 0, min(1, clock.total or 0))
    if on.kernels == TUNED:
        raise RecipeError("kernels-of-study")
    session = Session(recipe, on)
    if metric is not None:
        known = known_of(session)
        if bare(metric) not in known.names:
            raise unknown("metric-unknown", "metric", bare(metric), known.names)
        judged(metric, options["better"], known.better)
    return recipe.describe()


class Known(NamedTuple):
    """What is known of a recipe's metrics before it is trained."""

    names: list[str]
    better: dict[str, str]
    """The direction of each metric, if it is known."""
    evaluation: str
    """The digest of the evaluation."""


def known_of(session: Session) -> Known:
    """What is known of the metrics of a session's recipe. Traces the loss, and computes nothing."""
    sums = session.abstract.sums
    task = session.recipe.task
    digest = ""
    if task.eval is not None:
        evaluated = evaluation(session.recipe, task.eval)
        sums = sums | evaluated.sums
        digest = evaluated.digest
    return Known(sorted(sums), directions(sums, task.directions_of(sums)), digest)


def ending(best: str | None, patience: str | None) -> dict[str, str | None]:
    """What ends a run early, from these options of `fit`. Without patience nothing does."""
    return {"keep_best": best, "patience": patience} if patience else {}


def agree(folder: Path, recipe: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Raises `RunError` if `folder` has a run of another recipe than `recipe`, a description, or a
    finished one that another rule ended."""
    if not (folder / "recipe.json").exists():
        return
    rows = disagreement(stored_recipe(folder), recipe)
    result, _ = read_result(folder)
    if result is not None:
        best = part(result, "best")
        before = ending(best.get("metric"), best.get("patience"))
        rows += difference(before, ending(options["keep_best"], options["patience"]))
    if rows:
        raise RunError(
            "study-run-of-another-recipe",
            "{folder} holds a run of another recipe ({differences:changes}). Delete it, or "
            "name another "
            "--run.",
            folder=folder,
            differences=rows,
        )


def check_finished(
    study: Study, points: Sequence[Point], origin: Origin, options: dict[str, Any]
) -> None:
    """Raises `RunError` if a run of `points` that ended was computed by other code, or from other
    data, than its recipe now has. The runs of a point differ only in their seeds, so one of them is
    compared."""
    for point in () if options["changed_code"] else points:
        run = next((run for run in point.runs.values() if run.ended), None)
        if run is not None:
            with Session(origin.make(point.settings, run.seed), options["on"]) as session:
                check_unchanged(study.folder / run.run, session)


def planned(
    study: Study,
    points: Sequence[Point],
    described: Sequence[dict],
    seeds: Sequence[int],
    options: Mapping[str, Any],
) -> list[StudyRun]:
    """The runs still to train, seeds outermost. Enters finished runs in `study`.

    *Arguments:* `described`: each point's recipe, of any seed. Raises `RunError` if a run's folder
    has something else.
    """
    jobs = []
    check_inside(
        study.folder, *{Path(grid.folder(p.settings, s)).parts[0] for p in points for s in seeds}
    )
    for seed in seeds:
        for point, recipe in zip(points, described, strict=True):
            job = StudyRun(point.settings, seed, study.folder / grid.folder(point.settings, seed))
            agree(job.folder, {**recipe, "seed": seed}, options)
            old = point.runs.get(seed)
            if old is not None and old.diverged and (job.folder / "recipe.json").exists():
                continue
            point.runs[seed] = job.finished() or Run(seed, job.run)
            if not point.runs[seed].done:
                jobs.append(job)
    return jobs
