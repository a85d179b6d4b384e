"""Checkpoints: Orbax arrays, written in the background, with a digest that is checked on reading.

A checkpoint is a flat dictionary of arrays, named by their path in the training state, beside a
JSON object with the recipe, the position and the digest. Neither knows the number of devices.
Orbax gives a folder its final name only when it is complete, so a killed process leaves the last
good checkpoint; the digest finds bytes that changed afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from ..errors import CheckpointError, ChipwiseError, RunError
from ..recipe.task import Tree
from .run_folder import last_good

KEEP = 3  # enough to fall back twice
_FULL = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]

# Orbax logs every save at WARNING and every damaged file at ERROR, which `restore` says in its own words.
logging.getLogger("absl").setLevel(logging.CRITICAL)


def flatten(tree: Tree) -> dict[str, Any]:
    """Leaves by their path in the tree, such as `params.dense.kernel`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def digest(flat: dict[str, np.ndarray]) -> str:
    """SHA-256 over names, types, shapes and bytes, in the order of the names."""
    h = hashlib.sha256()
    for name in sorted(flat):
        array = np.ascontiguousarray(flat[name])
        h.update(f"{name}:{array.dtype}:{array.shape};".encode())
        h.update(array.tobytes())
    return h.hexdigest()


class Checkpoints:
    """The checkpoints of one run folder.

    `read_only` leaves the folder as it is: a process that only looks must neither sweep away what a
    training process is just writing nor move what is damaged.
    """

    def __init__(self, folder: Path, read_only: bool = False):
        _quiet_abandoned_work()
        self.folder = Path(folder).absolute()
        self.read_only = read_only
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEEP,
            create=not read_only,
            enable_async_checkpointing=not read_only,
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
        )
        try:
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        except OSError as error:
            raise RunError(f"Cannot make checkpoints in {folder}: {error.strerror or error}.") from error

    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, host: Tree, about: dict[str, Any]) -> None:
        """Begins to write `host`, a tree of NumPy arrays that nobody changes, and returns.

        Raises `RunError` when this or the previous one, which is waited for, cannot be written.
        """
        flat = {name: np.asarray(leaf) for name, leaf in flatten(host).items()}
        about = {**about, "digest": digest(flat)}
        self._guarded(
            lambda: self._manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardSave(flat), about=ocp.args.JsonSave(about)),
                force=True,
            )
        )

    def wait(self) -> None:
        """Returns when everything begun is on disk. Raises `RunError` if it could not be written."""
        self._guarded(self._manager.wait_until_finished)

    def close(self) -> None:
        # Who needs the last one on disk has called `wait`; here an error is already on its way up.
        with contextlib.suppress(Exception):
            self._manager.close()

    def about(self, step: int) -> dict[str, Any]:
        """The JSON object of one checkpoint, without its arrays."""
        restored = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))
        return restored["about"]

    def restore(self, template: Tree, say: Callable[[str], None]) -> tuple[Tree, dict[str, Any]] | None:
        """The newest readable checkpoint as NumPy arrays in the structure of `template`, and its JSON.

        A damaged one is reported through `say`, moved out of the way, and the one before it is taken.
        `None` when the folder holds no checkpoint; raises `CheckpointError` when it holds some and none
        is readable, or when the newest readable one is of another model.
        """
        steps, damaged = self.steps(), []
        for step in reversed(steps):
            try:
                flat, about = self._read(step)
            except Exception as error:  # damaged bytes make Orbax raise anything
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
                say(f"The checkpoint of step {step} is damaged ({reason}); trying the one before it.")
                damaged.append(step)
                continue
            tree = _fill(template, flat, step)
            if damaged and not self.read_only:
                self._set_aside(damaged)
            return tree, about
        if steps:
            raise CheckpointError(
                f"None of the checkpoints in {self.folder} can be read (steps {', '.join(map(str, steps))}): "
                f"start anew with --fresh or another --run folder."
            )
        return None

    def _read(self, step: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The arrays and the JSON object of one checkpoint; raises anything when it is damaged."""
        about = self.about(step)
        restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
        flat = {name: np.asarray(leaf) for name, leaf in restored["state"].items()}
        if digest(flat) != about["digest"]:
            raise ValueError("its digest does not match its bytes")
        return flat, about

    def _set_aside(self, steps: list[int]) -> None:
        """Moves damaged checkpoints out of the way, so that their steps can be written again."""
        for step in steps:
            names = (f"damaged-checkpoint-{step}{f'-{i}' if i else ''}" for i in range(1000))
            aside = next(p for p in map(self.folder.parent.joinpath, names) if not p.exists())
            (self.folder / str(step)).rename(aside)
        self._manager.reload()

    def _guarded(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except ChipwiseError:
            raise
        except Exception as error:
            # The arrays are plain and the folder is ours: what fails is the disk, though Orbax and
            # tensorstore report that in several types.
            reason = next((text for text in _FULL if text in str(error)), "")
            reason = (
                reason
                or getattr(error, "strerror", None)
                or (str(error).splitlines() or [repr(error)])[0][:200]
            )
            raise RunError(
                f"Cannot write a checkpoint in {self.folder}: {reason}. {last_good(self.folder)}"
                f"Make space, then resume with --run {self.folder.parent} and the same settings."
            ) from error


@functools.cache  # once a process
def _quiet_abandoned_work() -> None:
    """Keeps tensorstore's threads from printing tracebacks of their own.

    Orbax reads and writes arrays side by side in an event loop. When one fails, and its error goes up as
    it should, the loop is closed while others are on their way, and each of them then reports that.
    """
    before = sys.unraisablehook

    def hook(event):
        if isinstance(event.exc_value, RuntimeError) and str(event.exc_value) == "Event loop is closed":
            return
        before(event)

    sys.unraisablehook = hook


def _fill(template: Tree, flat: dict[str, np.ndarray], step: int) -> Tree:
    wanted = flatten(template)
    odd = sorted(set(wanted) ^ set(flat))
    different = f"it holds other arrays ({', '.join(odd[:3])})" if odd else ""
    for name in () if odd else wanted:
        there, here = flat[name], wanted[name]
        if tuple(here.shape) != there.shape or here.dtype != there.dtype:
            different = f"{name} is {there.dtype}{there.shape} there, {here.dtype}{tuple(here.shape)} now"
            break
    if different:
        raise CheckpointError(
            f"The checkpoint of step {step} is of another model: {different}. Go back to the code it was "
            f"trained with, or start anew with --fresh or another --run folder."
        )
    return jax.tree.unflatten(jax.tree.structure(template), [flat[name] for name in wanted])
