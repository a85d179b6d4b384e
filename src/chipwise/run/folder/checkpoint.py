"""Checkpoints: Orbax arrays, written in the background, with a digest that is checked on reading.

A checkpoint has a flat dictionary of arrays, named by their path in the training state, and a JSON
object with the recipe, the position and the digest of both. Neither depends on the number of
devices. If the recipe has `shards`, arrays are written, read and hashed part by part, as one group
holds them. A folder gets its final name only when its files are on disk, and an older one is
removed only when that name is. So a killed process leaves the last good checkpoint, and so does a
power cut. The digest detects bytes that changed afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from ...base import CheckpointError, ChipwiseError, Fact, RecipeError, RunError, Say, fact, invalid
from ...base.annotations import as_annotated
from ...base.figures import one_line
from ...base.files import (
    check_inside,
    is_full,
    may_be_whole,
    system_number,
)
from ...machine.hosts import hosts
from ...recipe.random_keys import as_keys
from ...recipe.recipe import Recipe
from ...recipe.task import Tree, by_path
from ...step.state import TrainState, abstract_state, parameters
from ..run_schedule import KEEP
from .early_stopping import FOLDER
from .on_disk import OnDisk
from .quiet_orbax import QuietOrbax
from .run_reader import disagreement, newest_checkpoint, steps_in, stored_recipe

if TYPE_CHECKING:
    from .run_folder import RunFolder

_READINGS, _ROTATION_SECONDS = 10, 0.5
"""How often a run is read while it trains, and how long a checkpoint that it removes may be half
there."""

_ANYWAY, _DENSEST = 1 << 30, 100
"""A file's arrays may have `_ANYWAY` bytes plus `_DENSEST` times its size: a header can state any
shape."""


def flatten(tree: Tree) -> dict[str, Any]:
    """The leaves of `tree` by their path, such as `params.dense.kernel`."""
    return by_path(tree, ".")


def check_savable(state: TrainState) -> None:
    """Raises `RecipeError` for a state, given as shapes, that no checkpoint can hold. Called before
    the first step of a run that will be saved, not when its steps are done."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state.without("saved"))
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    if wrong := sorted(n for n, count in Counter(names).items() if count > 1 or n.endswith("/")):
        raise RecipeError("state-names", names=wrong)
    for name, (_, leaf) in zip(names, leaves, strict=True):
        try:
            tensorstore.dtype(leaf.dtype)
        except (TypeError, ValueError) as error:
            raise RecipeError("state-dtype", name=name, dtype=str(leaf.dtype)) from error


def digest(flat: dict[str, Any], cut: dict[str, Any] | None = None) -> str:
    """SHA-256 of names, types, shapes and bytes, sorted by name. An array that is cut is hashed
    part by part.

    *Arguments:* `cut`, for checkpoints of groups: `shards`, and `axes`, name to axis (and `shapes`,
    unused).
    """
    h = hashlib.sha256()
    axes, shards = (cut["axes"], cut["shards"]) if cut else ({}, 1)
    for name in sorted(flat):
        array = flat[name]
        # `(1,)`: the shape that `np.ascontiguousarray` gives a scalar
        h.update(f"{name}:{array.dtype}:{array.shape or (1,)};".encode())
        for part in _parts(array, axes.get(name, -1), shards):
            h.update(np.ascontiguousarray(part).tobytes())
    return h.hexdigest()


def _sealed(arrays: str, about: dict[str, Any]) -> str:
    """The digest of a checkpoint, from that of its arrays and its JSON object without `digest`."""
    stated = json.loads(
        json.dumps({name: value for name, value in about.items() if name != "digest"})
    )
    return hashlib.sha256((arrays + json.dumps(stated, sort_keys=True)).encode()).hexdigest()


def _parts(array: Any, axis: int, shards: int) -> list[Any]:
    if axis < 0:
        return [array]
    if isinstance(array, np.ndarray):
        return np.split(array, shards, axis)
    return [
        s.data for s in sorted(array.addressable_shards, key=lambda s: s.index[axis].start or 0)
    ]


def refuse_hollow(stated: int, path: Path, expected: int = 0) -> None:
    """Raises `ValueError` if arrays of `stated` bytes cannot be in the file or folder `path`, which
    is far smaller, and are larger than `expected` bytes. Called before memory is allocated."""
    there = sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
    if stated > max(expected, _ANYWAY + _DENSEST * there):
        raise ValueError(f"{stated} bytes stated, {there} there")


def _opened(place: Path) -> dict[str, Any]:
    """The arrays that Orbax wrote to the folder `place` by name, opened but not read.

    Read without Orbax: it raises the error of the first damaged array and closes its event loop
    while others are read, whose threads then print tracebacks.
    """
    base = {"driver": "ocdbt", "base": place.as_uri() + "/"}
    keys = tensorstore.KvStore.open(base).result().list().result()
    paths = (key.decode().rpartition("/") for key in keys)
    names = [name for name, _, file in paths if file in (".zarray", "zarr.json")]

    def opened(name: str) -> Any:
        kvstore = {**base, "path": name + "/"}
        return tensorstore.open({"driver": "auto", "kvstore": kvstore}, read=True, open=True)

    futures = {name: opened(name) for name in names}
    return {name: future.result() for name, future in futures.items()}


def damage(error: Exception) -> str:
    """The reason in an error of a damaged checkpoint, on one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def _placed(store: Any, sharding: Any) -> jax.Array:
    """An opened array on devices, which hold parts of it."""
    indices = sharding.addressable_devices_indices_map(store.shape)
    parts = {device: store[index].read() for device, index in indices.items()}
    arrays = [jax.device_put(part.result(), device) for device, part in parts.items()]
    return jax.make_array_from_single_device_arrays(store.shape, sharding, arrays)


@dataclass(frozen=True)
class _Preserved:
    """Orbax's `PreservationPolicy`: the `newest` checkpoints, and those of the `kept` steps."""

    newest: int
    kept: Container[int]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        recent = len(checkpoints) - self.newest
        return [i >= recent or one.step in self.kept for i, one in enumerate(checkpoints)]


class Checkpoints:
    """The checkpoints of one run folder.

    *Arguments:*

    - `read_only`: leaves the folder unchanged. A process that only reads must neither delete what a
      training process is writing, nor move damaged checkpoints.
    - `newest`: how many of the newest checkpoints are kept.
    - `kept`: the steps whose checkpoints are also kept.
    - `held`: the open run folder, in which `folder` is.
    """

    def __init__(
        self,
        folder: Path,
        read_only: bool = False,
        newest: int = KEEP,
        kept: Container[int] = (),
        held: RunFolder | None = None,
    ):
        self.folder = Path(folder).absolute()
        if re.search("[\ud800-\udfff]", str(self.folder)):  # TensorStore takes UTF-8
            expected = "a path of UTF-8, read as such: LC_ALL=C.UTF-8 or PYTHONUTF8=1 before Python"
            raise invalid("path-not-utf8", "run", self.folder, expected)
        self._place = self.folder if held is None else held.place / self.folder.name
        self.read_only = read_only
        self._quiet = QuietOrbax()
        here = hosts()
        one_host: dict[str, Any] = {}
        if here.count > 1:  # only this host reads and writes, so Orbax must not wait for the others
            one_host["multiprocessing_options"] = ocp.options.MultiprocessingOptions(
                primary_host=here.index,
                active_processes={here.index},
                barrier_sync_key_prefix=f"host{here.index}",
            )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=None if read_only else _Preserved(newest, kept),
            create=False,
            enable_async_checkpointing=not read_only,
            # Otherwise threads wait 300 s at exit for folders that could not be made
            async_options=None
            if read_only
            else ocp.AsyncOptions(create_directories_asynchronously=False),
            temporary_path_class=OnDisk.after(held.put_on_disk if held else lambda: None),
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            **one_host,
        )
        try:
            check_inside(self.folder.parent, self.folder.name)
            if not read_only:
                self._place.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(self._place, options=options)
        except OSError as error:
            raise RunError("checkpoints-unmakeable", path=str(folder), reason=error) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                "checkpoint-metadata", path=str(folder), reason=one_line(error)
            ) from error

    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    def keep(self, first: int, last: int) -> list[int]:
        """Removes the checkpoints before step `first` and after `last`. *Returns* the steps of the
        others."""
        for step in [step for step in self.steps() if not first <= step <= last]:
            self._guarded(functools.partial(self._manager.delete, step))
        return self.steps()

    def save(self, step: int, host: Tree, about: dict[str, Any], axes: Tree = None) -> None:
        """Starts to write `host`, a tree of NumPy arrays that do not change, and returns.

        *Arguments:* `axes`: if `host` is on a group's devices, the axis along which each array is
        cut. Waits for the previous checkpoint. Raises `RunError` when either cannot be written.
        """
        flat = flatten(host)
        if axes is None:
            flat = {name: np.asarray(leaf) for name, leaf in flat.items()}
        else:
            shapes = {name: [str(leaf.dtype), *leaf.shape] for name, leaf in flat.items()}
            shards = about["recipe"]["shards"]
            about = {**about, "cut": {"shards": shards, "axes": flatten(axes), "shapes": shapes}}
        arrays = digest(flat, about.get("cut"))
        empty = {
            name: [str(leaf.dtype), *leaf.shape] for name, leaf in flat.items() if not leaf.size
        }
        if empty:  # Orbax writes none without elements
            about, flat = (
                {**about, "empty": empty},
                {n: leaf for n, leaf in flat.items() if n not in empty},
            )
        about = {**about, "digest": _sealed(arrays, about)}
        if hosts().count > 1:  # Orbax then writes no array that is on the devices of a single host
            flat = {name: np.asarray(leaf) for name, leaf in flat.items()}
        self._guarded(
            lambda: self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(flat), about=ocp.args.JsonSave(about)
                ),
                force=True,
            )
        )

    def wait(self) -> None:
        """Waits until all checkpoints are on disk. Raises `RunError` if one could not be
        written."""
        self._guarded(self._manager.wait_until_finished)

    def close(self) -> None:
        # A caller that needs the last checkpoint on disk has called `wait`. Otherwise an error is
        # being raised.
        with contextlib.suppress(Exception):
            self._manager.close()
        self._quiet.close()

    def about(self, step: int) -> dict[str, Any]:
        """The JSON object of one checkpoint, without its arrays."""
        restored = self._manager.restore(
            step, args=ocp.args.Composite(about=ocp.args.JsonRestore())
        )
        return restored["about"]

    def restore(
        self, template: Tree, say: Say, shards: int = 1
    ) -> tuple[Tree, dict[str, Any]] | None:
        """The newest readable checkpoint, in the structure of `template`, and its JSON object.

        Its arrays are NumPy arrays, or on devices if `template` has shardings. Damaged checkpoints
        are reported to `say`, moved away and skipped. *Returns* `None` if the folder has no
        checkpoint.

        Raises `CheckpointError` when no checkpoint is readable, when the newest readable one is of
        another recipe, another model or other `shards`, and when the system cannot read one, since
        it may be undamaged.
        """
        steps, damaged = self.steps(), []
        for step in reversed(steps):
            try:
                flat, about = self._read(step, template, shards)
            except ChipwiseError:
                raise
            except Exception as error:  # of many types, for damaged bytes
                say(fact("checkpoint-damaged", step=step, reason=damage(error)))
                damaged.append(step)
                continue
            self._check_recipe(step, about)
            tree = _fill(template, flat, step)
            if damaged and not self.read_only:
                self.set_aside(damaged)
            return tree, about
        if steps:
            raise CheckpointError("checkpoints-unreadable", path=str(self.folder), steps=steps)
        return None

    def _check_recipe(self, step: int, about: dict[str, Any]) -> None:
        """Raises `CheckpointError` if a checkpoint is not of its run's recipe, since somebody may
        have put one of another run there."""
        run = self.folder.parent
        if not (run / "recipe.json").exists():
            return
        given = about.get("recipe")
        found = disagreement(stored_recipe(run), given if isinstance(given, dict) else {})
        if changes := [(name, there, now) for name, now, there in found]:
            path = str(self.folder / str(step))
            raise CheckpointError("checkpoint-of-another-run", path=path, changes=changes)

    def arrays(self, step: int) -> dict[str, np.ndarray]:
        """The arrays of one checkpoint by name. Raises an exception of any type when it is
        damaged."""
        return self._read(step)[0]

    def _read(
        self, step: int, template: Tree = None, shards: int | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arrays and the JSON object of one checkpoint. Raises an exception of any type when it
        is damaged, and `CheckpointError` when the system cannot read it."""
        try:
            return self._read_whole(step, template, shards)
        except ChipwiseError:
            raise
        except Exception as error:  # of many types
            if not may_be_whole(error):
                raise
            number, path = system_number(error) or 0, str(self.folder / str(step))
            named = re.search(rf"{re.escape(str(self._place))}([^\s\":]*)", str(error))
            file = str(self.folder) + named[1] if named else path
            facts = {"path": path, "file": file, "errno": number, "reason": os.strerror(number)}
            raise CheckpointError("checkpoint-closed", **facts) from error

    def _read_whole(
        self, step: int, template: Tree, shards: int | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        about = self.about(step)
        expected = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(template))
        place = self._place / str(step) / "state"
        stores = _opened(place)
        chunks = {n: math.prod(s.chunk_layout.read_chunk.shape or ()) for n, s in stores.items()}
        sizes = [max(s.size, chunks[n]) * s.dtype.numpy_dtype.itemsize for n, s in stores.items()]
        refuse_hollow(sum(sizes), place, expected)
        cut, empty, shapes = about.get("cut"), about.get("empty", {}), dict[str, Any]()
        if shards not in (stored := cut["shards"] if cut else 1, None):
            raise CheckpointError(
                "checkpoint-of-other-shards", step=step, stored=stored, shards=shards
            )
        if cut is not None and template is not None:
            there = {
                n: jax.ShapeDtypeStruct(s[1:], np.dtype(s[0])) for n, s in cut["shapes"].items()
            }
            _fill(template, there, step)
            shapes = flatten(template)
        flat, reads = dict[str, Any](), dict[str, Any]()
        for name, store in stores.items():
            if (sharding := getattr(shapes.get(name), "sharding", None)) is not None:
                flat[name] = _placed(store, sharding)
            else:
                reads[name] = store.read()
        flat |= {name: np.asarray(read.result()) for name, read in reads.items()}
        for name, (dtype, *shape) in empty.items():
            if 0 not in shape:
                raise ValueError(f"{name} has elements")
            sharding = getattr(shapes.get(name), "sharding", None)
            array = np.zeros(shape, np.dtype(dtype))
            flat[name] = array if sharding is None else jax.device_put(array, sharding)
        if about["digest"] != _sealed(digest(flat, cut), about):
            raise ValueError("its digest does not match its bytes")
        if about["step"] != step:  # somebody gave it the name of another
            raise ValueError(f"it is that of step {about['step']}")
        return flat, about

    def set_aside(self, steps: list[int]) -> None:
        """Moves checkpoints that must not be used away, so that their steps can be written
        again."""
        for step in steps:
            names = (f"damaged-checkpoint-{step}{f'-{i}' if i else ''}" for i in range(1000))
            aside = next(
                p for p in map(self._place.parent.joinpath, names) if not os.path.lexists(p)
            )
            (self._place / str(step)).rename(aside)
        self._manager.reload()

    def _guarded(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except ChipwiseError:
            raise
        except Exception as error:
            self._quiet.expected = True
            # Only the disk can fail here, which Orbax and tensorstore report with several types.
            number = system_number(error)
            text = str(error).replace(str(self._place), str(self.folder))
            reason = one_line(text, 200) if number is None else os.strerror(number)
            run = self.folder.parent
            facts = {
                "path": str(self.folder),
                "run": str(run),
                "checkpoint": newest_checkpoint(run),
                "errno": number,
            }
            code = "run-disk-full" if is_full(error) else "checkpoint-unwritable"
            raise RunError(code, **facts, reason=reason) from error


def state_of(run: Path, state_layout: Any, step: int) -> TrainState:
    """The state of a run's checkpoint for a `StateLayout`. Raises any exception when it is
    damaged."""
    template, shards = state_layout.template.without("saved"), state_layout.step_of.recipe.shards
    with contextlib.closing(Checkpoints(run / "checkpoints", read_only=True)) as checkpoints:
        return _fill(template, checkpoints._read(step, template, shards)[0], step)


def _fill(template: Tree, flat: dict[str, Any], step: int) -> Tree:
    """The arrays of `flat` in the structure of `template`. Raises `CheckpointError` unless names,
    shapes and types are equal."""
    expected = flatten(template)
    differing = sorted(set(expected) ^ set(flat))
    if differing:
        raise CheckpointError("checkpoint-of-other-arrays", step=step, arrays=differing[:3])
    for name, leaf in expected.items():
        stored = flat[name]
        if tuple(leaf.shape) != tuple(stored.shape) or leaf.dtype != stored.dtype:
            old, new = f"{stored.dtype}{list(stored.shape)}", f"{leaf.dtype}{list(leaf.shape)}"
            raise CheckpointError(
                "checkpoint-of-other-shapes", step=step, array=name, old=old, new=new
            )
    return jax.tree.unflatten(jax.tree.structure(template), [flat[name] for name in expected])


def initial_train_state(recipe: Recipe, abstract: TrainState) -> TrainState | None:
    """Returns the state at step 0 of a task that continues from another run's training state, and
    `None` for other tasks.

    *Arguments:* `abstract`: the recipe's state as shapes. Raises `RecipeError` if the other run had
    another optimizer, model or number of replicas.
    """
    given = recipe.task.start_state
    if given is None:
        return None
    begins: dict[str, Any] = {"step": None, "sums": {}}
    wanted = replace(abstract, **begins)
    names = flatten(wanted)
    try:
        state = _fill(wanted, {n: given[n] for n in names if n in given}, 0)
    except CheckpointError as error:
        differ = error.facts.get("arrays") or [error.facts["array"]]
        raise RecipeError("state-of-another-recipe", differ=differ) from error
    zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), (abstract.step, abstract.sums))
    return replace(state, step=zeros[0], sums=zeros[1])


@dataclass(frozen=True)
class Restored:
    """The result of `restore_run`."""

    params: Tree
    """The parameters as NumPy arrays, averaged if the recipe has an EMA."""
    state: Tree
    """The task's state as NumPy arrays."""
    steps: int
    """The number of steps done."""
    whole: TrainState = field(repr=False)
    """The state from which a run continues."""


def _warn(damage: Fact) -> None:
    warnings.warn(str(damage), stacklevel=3)


def _same(folder: Path, steps: list[int]) -> bool:
    """Whether the checkpoints in `folder` are still those of `steps`, after a moment."""
    time.sleep(_ROTATION_SECONDS)
    return steps_in(folder) == steps


@as_annotated
def restore_run(
    recipe: Recipe,
    run: str | Path,
    say: Say | None = None,
    *,
    best: bool = False,
) -> Restored:
    """Reads the newest readable checkpoint of the run folder `run` of `recipe`. With `best`, reads
    the checkpoint of its best evaluation, which `fit(keep_best=...)` keeps. The run may be training
    and remove what is being read: then reads the newest one again, a few times.

    *Arguments:* `say` is called for each damaged checkpoint. By default, it issues a Python
    warning. Raises `CheckpointError` when there is no readable checkpoint.
    """
    folder = Path(run) / (FOLDER if best else "checkpoints")
    check_inside(folder.parent, folder.name)
    if best and not folder.is_dir():
        raise CheckpointError("run-without-best", run=str(run))
    if not folder.is_dir():
        raise CheckpointError("run-without-checkpoints", run=str(run))
    for _ in range(_READINGS):
        before, failure = steps_in(folder), None
        damaged: list[Fact] = []
        try:
            with contextlib.closing(Checkpoints(folder, read_only=True)) as checkpoints:
                found = checkpoints.restore(abstract_state(recipe), damaged.append, recipe.shards)
        except RunError as error:
            failure = error
        if not (failure or damaged) or _same(folder, before):
            break
    for one in damaged:
        (say or _warn)(one)
    if failure:
        raise failure
    if found is None:
        raise CheckpointError("run-without-checkpoints", run=str(run))
    state: TrainState = found[0]
    params, own = as_keys((parameters(recipe, state, averaged=True), state.state))
    return Restored(params, own, int(state.step), state)
