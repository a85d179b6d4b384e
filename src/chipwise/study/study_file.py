"""`study.json`: all runs of a study and their results, rewritten after every run.

    {"schema": "chipwise.study/1", "recipe": "mnist", "source": {"recipe": "mnist", "set": [], ...},
     "settings": {"lr": ["0.2", "0.4"]}, "seeds": [0, 1],
     "points": [{"set": {"lr": "0.2"},
                 "runs": [{"seed": 0, "run": "lr=0.2/seed-0", "done": true, ...}]}]}

The run folders are authoritative: the result of a finished run is read again from its
`result.json`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..base import RunError
from ..base.displayed import Displayed
from ..base.files import put_inside, read_inside, to_write
from ..base.json_types import typed
from ..base.locks import hold
from ..recipe.recipe import difference
from . import grid

SCHEMA = "chipwise.study/1"
FILE = "study.json"


@dataclass(frozen=True)
class Run:
    """One run of a study. `metrics`, `fingerprint` and `examples_per_second` (global, median) are
    as in its result."""

    seed: int
    run: str
    """The run's folder, relative to the study's."""
    done: bool = False
    """Whether the run is finished."""
    diverged: Mapping[str, Any] | None = None
    """None, or as in its metrics.jsonl: `code`, the steps `first` and `last`, and `value`."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    seconds: float | None = None
    """Wall time over all processes of the run."""
    examples_per_second: float | None = None
    fingerprint: str | None = None

    @property
    def ended(self) -> bool:
        return self.done or self.diverged is not None


@dataclass(frozen=True)
class Point:
    """One setting of the recipe, and its runs by seed."""

    settings: grid.Settings
    runs: dict[int, Run] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return grid.name(self.settings)


@dataclass(frozen=True)
class Study(Displayed):
    """Several settings of a recipe, each with several seeds. Points are compared with the first
    one."""

    folder: Path
    recipe: str
    """The recipe's name."""
    source: dict[str, Any] | None
    """How the command line made the recipe."""
    points: list[Point] = field(default_factory=list)
    check: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    """Raises `RunError` if the folder that this process locked was moved."""

    @property
    def seeds(self) -> list[int]:
        """The seeds of all points, in the order of their first runs."""
        return list(dict.fromkeys(seed for point in self.points for seed in point.runs))

    @property
    def settings(self) -> dict[str, list[str]]:
        """The settings of all points, with their values."""
        settings: dict[str, list[str]] = {}
        for point in self.points:
            for name, value in point.settings.items():
                if value not in settings.setdefault(name, []):
                    settings[name].append(value)
        return settings

    def point(self, settings: grid.Settings) -> Point:
        """The point equal to `settings`, added at the end if there is none."""
        for point in self.points:
            if grid.identity(point.settings) == grid.identity(settings):
                return point
        self.points.append(Point(settings))
        return self.points[-1]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "recipe": self.recipe,
            "source": self.source,
            "settings": self.settings,
            "seeds": self.seeds,
            "points": [
                {"set": point.settings, "runs": [asdict(run) for run in point.runs.values()]}
                for point in self.points
            ],
        }

    def write(self) -> None:
        """Replaces `study.json`. Raises `RunError` if it cannot be written, and leaves the old
        file."""
        text = json.dumps(self.to_json(), indent=1) + "\n"
        try:
            self.check()
            put_inside(self.folder / FILE, text.encode())
        except OSError as error:
            raise RunError(
                "study-document-unwritable", path=self.folder / FILE, reason=error
            ) from None


def read(folder: str | Path) -> Study | None:
    """The study in `folder`, or `None` if there is none.

    The runs' folders are computed from settings and seeds, so a damaged file cannot point
    elsewhere. Raises `RunError` for a file that cannot be read, is damaged, or is of another
    version.
    """
    folder = Path(folder).absolute()
    file = folder / FILE
    try:
        stored = json.loads(read_inside(file))
        schema = stored.get("schema")
        if schema == SCHEMA:
            points = [Point(dict(p["set"]), _runs(p["set"], p["runs"])) for p in stored["points"]]
            if not isinstance(stored["recipe"], str) or not isinstance(
                stored["source"], dict | None
            ):
                raise ValueError("recipe or source")
            return Study(folder, stored["recipe"], stored["source"], points)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RunError("study-unreadable", file=file, reason=error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(
            "study-damaged",
            "{file} is damaged ({reason:plain}). Delete it and type the command again: "
            "finished runs are "
            "kept.",
            file=file,
            reason=" ".join(f"{type(error).__name__}: {error}".split()),
        ) from error
    raise RunError("study-schema", file=file, schema=schema, expected=SCHEMA)


@contextlib.contextmanager
def opened(run: str | Path, recipe: str, source: dict[str, Any] | None) -> Iterator[Study]:
    """Opens the study in the folder `run`, old or new, and locks it for this process."""
    folder = Path(to_write(run, "run")).absolute()
    with RunError.of_system("study-unwritable", folder=run):
        folder.mkdir(parents=True, exist_ok=True)
        lock = hold(folder, FILE)
    with lock:
        if (folder / "recipe.json").exists():
            raise RunError("single-run-here", folder=folder)
        study = read(folder) or Study(folder, recipe, source)
        old, new = (
            {"recipe": s.recipe, **(s.source or {}), "data": None}
            for s in (study, Study(folder, recipe, source))
        )
        if rows := difference(old, new):
            raise RunError(
                "study-of-another-recipe",
                "{folder} holds a study of another recipe ({differences:changes}). Name "
                "another folder "
                "with --run.",
                folder=folder,
                differences=rows,
            )
        yield replace(study, check=lock.check)


def _runs(settings: grid.Settings, stored: Sequence[Mapping[str, Any]]) -> dict[int, Run]:
    if not all(isinstance(text, str) for pair in settings.items() for text in pair):
        raise ValueError(f"settings {settings}: expected text")
    runs = {}
    for given in stored:
        seed = given["seed"]
        runs[seed] = typed(Run, {**given, "run": grid.folder(settings, seed)})
    return runs
