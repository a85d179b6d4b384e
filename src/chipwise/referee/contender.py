"""A side of a comparison: a recipe by name, in a file or in a git revision's file, with its own modules."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from ..engine.ledger import head_of
from ..engine.on import On
from ..engine.program_digest import digest
from ..engine.session import Session
from ..engine.state import first_digest
from ..errors import RecipeError
from ..recipe.recipe import Recipe
from ..recipe.source import rows_of, spec_of
from ..study.study_runs import Origin

_NAMES = ("name", "seed", "source", "validated", "task")  # of the task, programs and data are digested


class Contender:
    """One side. *Fields:* `name`, as it was given; `origin` of its recipes; `root`: the folder whose modules
    are its own, so that both sides may import another `helper.py`; `None` for recipes without a file."""

    def __init__(self, name: str, origin: Origin, root: Path | None):
        self.name, self.origin, self.root = name, origin, root
        self._modules: dict[str, Any] = {}

    @classmethod
    def of(
        cls, recipe: str | Recipe, settings: Sequence[str], data: str | None, revisions: Path
    ) -> Contender:
        """*Arguments:* `recipe`: a `Recipe`, a built-in name, `path.py:name` or `REVISION:path.py:name`;
        `revisions`: the folder in which the files of git revisions are kept.

        Raises `RecipeError` for a revision or a file that git does not know."""
        if isinstance(recipe, Recipe):
            return cls(recipe.name, Origin(recipe), None)
        shown, (revision, colon, path) = " ".join([recipe, *settings]), recipe.partition(":")
        if colon and Path(path.partition(":")[0]).suffix == ".py" and Path(revision).suffix != ".py":
            recipe = checked_out(revision, path, revisions)
        file = Path(recipe.partition(":")[0])
        root = file.absolute().parent if file.suffix == ".py" else None
        return cls(shown, Origin(recipe, tuple(settings), data), root)

    @contextlib.contextmanager
    def imported(self) -> Iterator[None]:
        """A context in which the modules of `root` are this side's; the other side's are away."""
        path, before = list(sys.path), dict(sys.modules)
        sys.modules.update(self._modules)
        try:
            yield
        finally:
            self._modules = {name: one for name, one in sys.modules.items() if self._owns(one)}
            for name in self._modules:
                del sys.modules[name]
                if name in before:
                    sys.modules[name] = before[name]
            sys.path[:] = path

    def _owns(self, module: Any) -> bool:
        file = getattr(module, "__file__", None)
        if file is None or self.root is None or "site-packages" in Path(file).parts:
            return False
        return Path(file).is_relative_to(self.root)

    def make(self, seed: int) -> Recipe:
        with self.imported():
            return self.origin.make(seed=seed)

    def identity(self, seed: int, on: On) -> tuple[str, dict[str, str | None]]:
        """What decides every bit of a run with this seed: a digest of its settings, of the programs that
        begin, train and evaluate, and of data and chip; and the digests of its data, `None` if unknown."""
        recipe = self.make(seed)
        with self.imported(), Session(recipe, on) as session:
            head = head_of(session)
            task, key = recipe.task, jax.random.key(0)
            programs = [first_digest(recipe)]
            if task.eval is not None:
                params, state = jax.eval_shape(task.init, key)
                rows = rows_of(spec_of(task.eval), 1)
                evaluate = lambda p, s, b, k: task.loss(p, s, b, k, False)  # noqa: E731
                programs.append(digest([jax.make_jaxpr(evaluate)(params, state, rows, key)]))
        settings = {k: v for k, v in recipe.describe().items() if k not in _NAMES}
        whole = [settings, head["computed"], head["data"], programs]
        text = json.dumps(whole, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest(), head["data"]


def checked_out(revision: str, path: str, folder: Path) -> str:
    """`FILE:NAME` of a file of a git revision, whose files are written below `folder`, once."""
    file, colon, name = path.partition(":")
    top = Path(_git("rev-parse", "--show-toplevel", revision=revision).decode().strip())
    wanted = f"{revision}^{{commit}}"
    sha = _git("rev-parse", "--verify", "-q", "--end-of-options", wanted, revision=revision).decode().strip()
    place = folder.absolute() / sha[:12]
    if not place.exists():
        folder.mkdir(parents=True, exist_ok=True)
        packed = io.BytesIO(_git("-C", str(top), "archive", "--format=tar", sha, revision=revision))
        with tempfile.TemporaryDirectory(dir=folder) as part, tarfile.open(fileobj=packed) as tar:
            tar.extractall(Path(part, "files"), filter="data")
            Path(part, "files").rename(place)
    absolute = Path(file).absolute()
    inside = absolute.is_relative_to(top) and place / absolute.relative_to(top)
    if not inside or not inside.is_file():
        text = "{revision} has no file {path}: give its path from here, as {revision}:path.py:recipe."
        raise RecipeError("revision-file-missing", text, revision=revision, path=file)
    return f"{inside}{colon}{name}"


def _git(*words: str, revision: str) -> bytes:
    """What git prints. Raises `RecipeError` if there is no git, repository or revision."""
    try:
        return subprocess.run(["git", *words], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
        text = "git knows no revision '{revision}' here ({reason:plain}): expected one such as HEAD~1."
        raise RecipeError("revision-unknown", text, revision=revision, reason=reason) from error
