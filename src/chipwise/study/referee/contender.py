"""A side of a comparison: a recipe by name, in a file or in a git revision's file, with its own
modules."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base import RecipeError
from ...base.json_types import as_stored
from ...data.compared import Data
from ...recipe.recipe import Recipe
from ...run.folder.ledger import head_of
from ...run.session import Session
from ...step.state import first_digest
from ..study_runs import Origin, ending, known_of

# Of the task, programs and data are digested
_NAMES = ("name", "seed", "source", "validated", "task")

_OURS = Path(__file__).resolve().parents[3]  # has this package
_SHARED = {"__main__", "chipwise", *sys.stdlib_module_names}
"""Modules that both sides share, wherever they lie, as they do installed packages."""


class Contender:
    """One side.

    *Fields:*

    - `name`: the name as given.
    - `origin`: the origin of the side's recipes.
    - `root`: the folder of the side's own modules, so that each side may import its own
      `helper.py`. `None` for recipes without a file.
    - `trees`: the folders whose modules may differ between the sides: the repository of each file,
      or else the file's folder, and the files of each revision.
    - `moved`: the repository and the folder with its files of the revision, if there is one.
    - `settings`: those of the recipe that decide its bits, once `identity` has been asked for.
    """

    def __init__(
        self, name: str, origin: Origin, root: Path | None, moved: tuple[Path, Path] | None = None
    ):
        self.name, self.origin, self.root, self.moved = name, origin, root, moved
        self.trees = {*(moved or ()), *(() if root is None else (root, _top(root)))}
        if moved is not None:
            weakref.finalize(self, shutil.rmtree, moved[1], ignore_errors=True)
        self._modules: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}

    @classmethod
    def each(
        cls,
        recipes: Sequence[str | Recipe],
        settings: Sequence[Sequence[str]],
        data: str | Path | None,
    ) -> list[Contender]:
        """The sides of a comparison (see `of`), which share their `trees`."""
        sides = [cls.of(r, s, data) for r, s in zip(recipes, settings, strict=True)]
        trees = {tree for side in sides for tree in side.trees}
        for side in sides:
            side.trees = trees
        return sides

    @classmethod
    def of(
        cls, recipe: str | Recipe, settings: Sequence[str], data: str | Path | None
    ) -> Contender:
        """The side of a `Recipe`, a built-in name, `path.py:name` or `REVISION:path.py:name`.

        Raises `RecipeError` for a revision or a file that git does not know.
        """
        if isinstance(recipe, Recipe):
            return cls(recipe.name, Origin(recipe, tuple(settings), data), None)
        shown, (revision, colon, path) = " ".join([recipe, *settings]), recipe.partition(":")
        moved = None
        if (
            colon
            and Path(path.partition(":")[0]).suffix == ".py"
            and Path(revision).suffix != ".py"
        ):
            # A private folder, since these files are executed: nobody else may have put them there
            place = Path(tempfile.mkdtemp(prefix="chipwise-revision-")).resolve()
            atexit.register(shutil.rmtree, place, ignore_errors=True)
            recipe = checked_out(revision, path, place)
            moved = _top(Path.cwd()), place
        file = Path(recipe.partition(":")[0])
        root = file.absolute().parent if file.suffix == ".py" else None
        return cls(shown, Origin(recipe, tuple(settings), data), root, moved)

    @contextlib.contextmanager
    def imported(self) -> Iterator[None]:
        """A context in which all modules of `trees` are this side's. On exit it takes them away,
        and puts back those that the process has."""
        if self.root is None:
            yield
            return
        path, hidden = list(sys.path), self._taken()
        sys.path[:] = [str(self.root), *map(self._own, path)]
        sys.modules.update(self._modules)
        try:
            yield
        finally:
            self._modules = self._taken()
            sys.modules.update(hidden)
            sys.path[:] = path

    def _taken(self) -> dict[str, Any]:
        """Takes the modules of `trees` out of `sys.modules`. *Returns* them."""
        below = tuple(f"{tree}{os.sep}" for tree in self.trees)

        def is_below(name: str, module: Any) -> bool:
            about = getattr(module, "__dict__", {})
            file = about.get("__file__")  # a folder without __init__.py has none
            paths = [str(path) for path in ([file] if file else about.get("__path__", ()))]
            return name.partition(".")[0] not in _SHARED and any(
                path.startswith(below) and "site-packages" not in path for path in paths
            )

        taken = {name: one for name, one in list(sys.modules.items()) if is_below(name, one)}
        for name in taken:
            del sys.modules[name]
        return taken

    def _own(self, entry: str) -> str:
        """An entry of `sys.path`, in the side's revision if it is there."""
        path = Path(entry).resolve()
        if self.moved is None or not path.is_relative_to(self.moved[0]) or path == _OURS:
            return entry
        own = self.moved[1] / path.relative_to(self.moved[0])
        return str(own) if own.is_dir() else entry

    def make(self, seed: int) -> Recipe:
        with self.imported():
            return self.origin.make(seed=seed)

    def identity(self, seed: int, options: Mapping[str, Any]) -> tuple[str, Data, dict[str, str]]:
        """A digest of all inputs that decide the result of a run with this seed, how far its data
        is compared, and which way its metrics are better. The inputs are the recipe's settings, the
        programs that begin, train and evaluate, the data, the chip, and what ends the run early."""
        recipe = self.make(seed)
        with self.imported(), Session(recipe, options["on"]) as session:
            head = head_of(session)
            known = known_of(session)
            programs = [first_digest(recipe), known.evaluation]
        settings = {k: v for k, v in recipe.describe().items() if k not in _NAMES}
        self.settings = as_stored(settings, str)
        whole = [settings, head["computed"], head["data"], programs]
        if rule := ending(options["keep_best"], options["patience"]):
            whole.append({**rule, "eval_every": options["eval_every"], "better": options["better"]})
        text = json.dumps(whole, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest(), session.data_compared, known.better


def _top(folder: Path) -> Path:
    """The repository of a folder. Outside of any it is the folder."""
    try:
        top = _git("-C", str(folder), "rev-parse", "--show-toplevel", revision="HEAD")
    except RecipeError:
        return folder
    return Path(top.decode().strip())


def checked_out(revision: str, path: str, place: Path) -> str:
    """`FILE:NAME` for a file of a git revision. Writes the revision's files to the empty folder
    `place`."""
    file, colon, name = path.partition(":")
    top = Path(_git("rev-parse", "--show-toplevel", revision=revision).decode().strip())
    wanted = f"{revision}^{{commit}}"
    sha = (
        _git("rev-parse", "--verify", "-q", "--end-of-options", wanted, revision=revision)
        .decode()
        .strip()
    )
    packed = io.BytesIO(_git("-C", str(top), "archive", "--format=tar", sha, revision=revision))

    def kept(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
        try:
            return tarfile.data_filter(member, folder)
        except tarfile.FilterError:  # a link that leaves the repository
            return None

    with tarfile.open(fileobj=packed) as tar:
        tar.extractall(place, filter=kept)
    absolute = Path(os.path.normpath(Path(file).absolute()))
    inside = absolute.is_relative_to(top) and place / absolute.relative_to(top)
    if not inside or not inside.is_file():
        text = (
            "{revision} has no file {path}: give its path from here, as {revision}:path.py:recipe."
        )
        raise RecipeError("revision-file-missing", text, revision=revision, path=file)
    return f"{inside}{colon}{name}"


def _git(*words: str, revision: str) -> bytes:
    """The output of git. Raises `RecipeError` if there is no git, repository or revision."""
    try:
        return subprocess.run(["git", *words], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
        text = (
            "git knows no revision '{revision}' here ({reason:plain}): expected one such as HEAD~1."
        )
        raise RecipeError("revision-unknown", text, revision=revision, reason=reason) from error
