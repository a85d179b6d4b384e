"""The run folder: who holds it, the recipe as run, metrics as lines and as TensorBoard events."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..recipe.recipe import difference
from .hold import hold
from .stored import parsed_row, read_result


class RunFolder:
    """A folder that one process at a time may train in.

        recipe.json      the recipe as run
        metrics.jsonl    one object a log step: step, epoch, train/..., eval/..., speeds
        tensorboard/     the same as event files, but for what is not finite
        checkpoints/     Orbax, the newest three
        result.json      written when the run is complete

    A metric that is not finite is `null` there, since JSON has no word for it.

    Raises `RunError` when the folder cannot be made or written, is in use by another process, has
    too little space, or holds a run of another recipe. Nothing is written before these checks pass,
    but for the folder itself and its lock.
    """

    def __init__(self, path: str | Path, recipe: dict[str, Any], needed_bytes: int, fresh: bool = False):
        self.path = Path(path).absolute()
        place = next(p for p in (self.path, *self.path.parents) if p.exists())
        if not place.is_dir():
            raise RunError(f"{place} is a file, not a folder: name another folder with --run.")
        existed = place == self.path
        if not os.access(place, os.W_OK | os.X_OK):
            raise RunError(
                f"Cannot write to {path}: no permission in {place}. Name another folder with --run."
            )
        free = shutil.disk_usage(place).free
        if free < needed_bytes:
            raise RunError(
                f"{path} has {free / 1e6:,.1f} MB free and the run needs about {needed_bytes / 1e6:,.1f} MB "
                f"for its checkpoints: make space or name another folder with --run."
            )
        self._lock: Any = None
        self._events: Any = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = hold(self.path)
            if fresh:
                self._clear()
            self._agree(recipe)
        except OSError as error:
            if self._lock is not None and not existed:  # ours alone, and nothing in it yet
                self._leave_nothing()
            self.close()
            raise self._error(error) from error
        except BaseException:
            self.close()
            raise

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Drops metric lines after `step`, which a resumed run will write again; returns the others, with NaN
        for the metrics that were not finite."""
        file = self.path / "metrics.jsonl"
        kept = []
        try:
            if file.exists():
                for line in file.read_text(errors="replace").splitlines():
                    row = parsed_row(line)
                    if row is not None and row["step"] <= step:
                        kept.append({k: math.nan if v is None else v for k, v in row.items()})
                self._replace(file, "".join(_json(row) + "\n" for row in kept))
        except OSError as error:
            raise self._error(error) from error
        self._purge = step + 1 if kept else None
        importlib.import_module("tensorboardX")  # takes a second, which training should not wait for
        return kept

    _purge: int | None = None

    def log(self, row: dict[str, Any]) -> None:
        """Appends one line of metrics and the finite ones of its numbers as TensorBoard scalars."""
        try:
            with open(self.path / "metrics.jsonl", "a") as file:
                file.write(_json(row) + "\n")
            if self._events is None:
                from tensorboardX import SummaryWriter

                self._events = SummaryWriter(str(self.path / "tensorboard"), purge_step=self._purge)
            for name, value in row.items():
                if isinstance(value, (int, float)) and math.isfinite(value) and name not in ("step",):
                    self._events.add_scalar(name, value, row["step"])
        except OSError as error:
            raise self._error(error) from error

    def finish(self, result: dict[str, Any]) -> None:
        """Writes `result.json`, whole or not at all."""
        try:
            self._replace(self.path / "result.json", _json(result, indent=2) + "\n")
        except OSError as error:
            raise self._error(error) from error

    def result(self) -> dict[str, Any] | None:
        """What `finish` wrote; `None` when it did not, or when that is damaged."""
        return read_result(self.path)[0]

    def close(self) -> None:
        if self._events is not None:
            # What it still holds are copies of what metrics.jsonl has: not worth an error that would
            # hide the one for which the run ends.
            with contextlib.suppress(OSError):
                self._events.close()
            self._events = None
        if self._lock is not None:
            with contextlib.suppress(OSError):  # a full disk, when the process's number was not written
                self._lock.close()  # releases it
            self._lock = None

    def _leave_nothing(self) -> None:
        for name in ("recipe.json.part", "lock"):
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _clear(self) -> None:
        # Somebody's home folder named by mistake may hold checkpoints of something else.
        if not (self.path / "recipe.json").exists():
            others = sorted(p.name for p in self.path.iterdir() if p.name != "lock")
            if others:
                raise RunError(
                    f"{self.path} holds no run that --fresh could discard, but {', '.join(others[:3])}: "
                    f"name another folder with --run."
                )
        for name in ("recipe.json", "metrics.jsonl", "result.json"):
            (self.path / name).unlink(missing_ok=True)
        for name in ("checkpoints", "tensorboard"):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def _agree(self, recipe: dict[str, Any]) -> None:
        file = self.path / "recipe.json"
        given = json.loads(json.dumps(recipe))
        if file.exists():
            rows = disagreement(stored_recipe(self.path), given)
            if rows:
                raise RunError(
                    f"{self.path} holds a run of another recipe ({rows}). Resume with the same settings, "
                    f"name another folder with --run, or discard that run with --fresh."
                )
        else:
            self._replace(file, json.dumps(given, indent=2) + "\n")

    def _replace(self, file: Path, text: str) -> None:
        temporary = file.with_name(file.name + ".part")
        temporary.write_text(text)
        os.replace(temporary, file)

    def _error(self, error: OSError) -> RunError:
        good = last_good(self.checkpoints)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return RunError(
                f"No space left in {self.path} ({error.strerror}). {good}"
                f"Make space, then resume with --run {self.path} and the same settings."
            )
        reason = error.strerror or error
        return RunError(f"Cannot use {self.path} as a run folder: {reason}. {good}Name another with --run.")


def stored_recipe(run: Path) -> dict[str, Any]:
    """What `recipe.json` of the run folder `run` says.

    Raises `RunError` when there is none, or when it is damaged.
    """
    file = run / "recipe.json"
    try:
        stored = json.loads(file.read_bytes())
        if not isinstance(stored, dict):
            raise ValueError(f"it holds a {type(stored).__name__}")
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"{run} is not a run folder (no recipe.json): expected what chipwise train --run made."
        ) from None
    except OSError as error:
        raise RunError(f"Cannot read {file}: {error.strerror or error}.") from error
    except ValueError as error:
        raise RunError(
            f"{file} is damaged ({error}): put a copy back, or delete it and train on with --run {run} "
            f"and the settings it was trained with."
        ) from error
    return stored


def disagreement(stored: dict[str, Any], given: dict[str, Any]) -> str:
    """What two descriptions of a recipe differ in, on one line; empty when in nothing. Where a recipe
    came from (`source`) does not count."""
    a, b = ({k: v for k, v in d.items() if k != "source"} for d in (stored, json.loads(json.dumps(given))))
    return "; ".join(f"{name}: {old!r} there, {new!r} now" for name, old, new in difference(a, b))


def last_good(checkpoints: Path) -> str:
    """A sentence that names the newest checkpoint in the folder `checkpoints`, or says there is none."""
    # A checkpoint gets its final name, the step, only when it is complete.
    steps = [int(p.name) for p in checkpoints.glob("*") if p.name.isdigit()]
    return f"The last good checkpoint is of step {max(steps)}. " if steps else "There is no checkpoint yet. "


def _json(value: dict[str, Any], indent: int | None = None) -> str:
    """As JSON, which has neither NaN nor infinities: `null` stands for both."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
