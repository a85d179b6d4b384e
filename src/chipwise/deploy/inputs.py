"""Data to predict or evaluate: opens a path and scales its images to the size that the model reads.

A path is a packed folder, arrays (`.npy`, `.npz`), or a folder or tar of images, without classes or
labels.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..base import DataError, RecipeError, unreadable
from ..base.figures import one_line
from ..base.files import open_regular
from ..data.class_names import Renamed
from ..data.folder import SUFFIXES, TARS, Files, list_tar, walk
from ..data.images import decode
from ..data.manifest import MANIFEST
from ..data.packed import PackedFolder
from ..data.remote import local
from ..data.sources import Arrays, ByBatch, Columns, Source, Spec, described
from ..data.stages import stage
from ..machine.limits import memory
from ..recipe.recipe import Recipe
from ..recipe.source import spec_of
from ..recipes.load import load

_MOST_EXPANDED = 1 << 28  # bytes of the arrays of a small `.npz`
_GREY = np.asarray([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601, as Pillow's "L"


class Pictures(ByBatch):
    """All images in a folder or a tar, at any depth, sorted by path, as one column without labels.

    *Arguments:* `shape`: the pixels that the model reads, `(h, w, 3)`, or `(h, w)` or `(h, w, 1)`
    for grey. Each image is scaled to cover it and cropped at the centre. `column`: the name of the
    column.

    Raises `DataError` if there is no image. Raises `DataError` on access, with the file's name, if
    an image cannot be decoded.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], column: str = "image"):
        self.path = path
        self.shape = shape
        self.column = column
        self._files: Files = walk(path) if path.is_dir() else list_tar(path)
        self._order = sorted(range(len(self._files.paths)), key=lambda i: self._files.paths[i])
        if not self._order:
            raise DataError("no-images", path=path, suffixes=sorted(SUFFIXES))

    @property
    def spec(self) -> Spec:
        return {self.column: jax.ShapeDtypeStruct(self.shape, np.uint8)}

    def __len__(self) -> int:
        return len(self._order)

    def fill(self, indices: np.ndarray, out: Columns) -> None:
        """Decodes the images at `indices` `(n,)` into `out`. Thread-safe."""
        height, width, *channels = self.shape
        for row, index in enumerate(np.asarray(indices).tolist()):
            key = self._files.keys[self._order[index]]
            try:
                with stage("read"):
                    data = self._files.read(key)
                with stage("decode"):
                    pixels = decode(data, (height, width))
            except OSError as error:
                raise unreadable(self.path / self.record_name(index), error) from error
            except DataError as error:
                name = self.record_name(index)
                raise DataError(
                    "image-unreadable", path=self.path, file=name, problem=error.fact
                ) from error
            if channels != [3]:
                pixels = np.rint(pixels @ _GREY).astype(np.uint8).reshape(self.shape)
            out[self.column][row] = pixels

    def record_name(self, index: int) -> str:
        """The path of example `index`, relative to the folder. A byte that is no UTF-8 is `�`."""
        name = "/".join(self._files.paths[self._order[index]])
        return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def open_data(data: Any, inputs: Spec) -> Source:
    """The source at the path `data`, for a model that reads `inputs`. A source is returned as it
    is.

    Raises `DataError` if the path has nothing that a model can read.
    """
    if not isinstance(data, str | os.PathLike):
        return data
    path = local(str(data))
    if not path.exists():
        raise DataError("data-absent", data=str(data))
    if path.suffix in (".npy", ".npz") and path.is_file():
        return _arrays(path, inputs)
    images = {name: s for name, s in inputs.items() if _is_image(s)}
    size = next(iter(images.values())).shape[:2] if len(images) == 1 else None
    if (path / MANIFEST).is_file():
        return _packed(path, None, size)
    splits = sorted(p.parent.name for p in path.glob(f"*/{MANIFEST}"))
    if splits:
        if len(splits) > 1:
            raise DataError(
                "predict-which-split", path=path, paths=[str(path / one) for one in splits]
            )
        return _packed(path, splits[0], size)
    if (path.is_dir() or path.name.lower().endswith(TARS)) and len(inputs) == len(images) == 1:
        ((column, s),) = images.items()
        return Pictures(path, s.shape, column)
    raise DataError("predict-data-unknown", path=path, expected=described(inputs))


def open_for(recipe: Recipe, data: Any, inputs: Spec) -> Source:
    """Opens `data` as `open_data` does. For a recipe from the command line, it also opens another
    folder in the form of the recipe's data set."""
    try:
        return open_data(data, inputs)
    except DataError as error:
        named = recipe.source or {}
        if error.code != "predict-data-unknown" or not named:
            raise
        try:
            held_out = load(named["recipe"], named.get("set", ()), str(data)).task.eval
        except (DataError, RecipeError):
            # neither of the kinds that there are: the first says them all
            raise error from None
        if held_out is None:
            raise
        return held_out


def with_evaluation(recipe: Recipe, data: Any) -> Recipe:
    """`recipe` with `data` to evaluate on, opened by `open_for`. Raises `DataError` for data that
    cannot be read, and for columns that differ from those of the training data by more than the
    width of whole numbers."""
    expected = spec_of(recipe.task.train)
    source = recipe.task.joined(open_for(recipe, data, expected))
    given = spec_of(source)
    if wrong := [n for n, s in expected.items() if n not in given or _kind(given[n]) != _kind(s)]:
        raise DataError(
            "evaluation-columns",
            "The data to evaluate has {columns:list}, but training had {wrong:and} as "
            "{expected:list}: make "
            "them match.",
            columns=described(given),
            wrong=wrong,
            expected=described({n: expected[n] for n in wrong}),
        )
    return dataclasses.replace(recipe, task=dataclasses.replace(recipe.task, eval=source))


def _kind(s: Any) -> tuple:
    # Labels and tokens of any width are the same numbers; pixels of another kind are not
    dtype = np.dtype(s.dtype)
    return s.shape, "whole" if dtype.kind in "iu" else dtype


def name_of(source: Any) -> Callable[[int], str] | None:
    """The function that names the examples of a source, if it has one."""
    return getattr(source, "record_name", None)


def _is_image(s: Any) -> bool:
    return s.dtype == np.uint8 and (
        len(s.shape) == 2 or (len(s.shape) == 3 and s.shape[2] in (1, 3))
    )


def _packed(path: Path, split: str | None, size: tuple[int, ...] | None) -> Source:
    packed = PackedFolder(path, split)
    if packed.store == "jpeg" and size is not None:
        return PackedFolder(path, split, size=(size[0], size[1]))
    return packed


def _refuse_expanding(archive: Any, size: int) -> None:
    """Raises `ValueError` if the arrays of an `.npz` of `size` bytes fill the memory."""
    total = sum(member.file_size for member in archive.infolist())
    most = memory().available_bytes // 2
    if total > most or total > max(_MOST_EXPANDED, 100 * size):
        raise ValueError(
            f"its arrays are {total:,} bytes: give .npy files, which are not read at once"
        )


def _arrays(path: Path, inputs: Spec) -> Source:
    try:
        given: Any = {}
        classes: Any = np.asarray(())
        if path.suffix == ".npy":
            given[next(iter(inputs))] = np.lib.format.open_memmap(path, mode="r")
        else:  # opened here: NumPy leaves a damaged one open
            with open_regular(path) as file, np.load(file, allow_pickle=False) as columns:
                _refuse_expanding(columns.zip, os.fstat(file.fileno()).st_size)
                # Their names, often
                given = {name: columns[name] for name in columns if name != "classes"}
                if "label" in given and "classes" in columns:
                    classes = columns["classes"]
        source = Arrays(**given)
        names = classes.astype(str).tolist() if classes.dtype.kind in "SU" else []
        # Not the text of each example, in which names come again
        stated = classes.ndim == 1 and (len(names) != len(source) or len({*names}) == len(names))
        return Renamed(source, names) if names and stated else source
    except DataError:
        raise
    except Exception as error:  # damaged archives raise what zipfile and zlib like
        raise DataError("npy-damaged", path=path, reason=one_line(error, 160)) from error
