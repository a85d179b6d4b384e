"""Predictions of a trained model, in memory or as a file that is written part by part.

The file has the same bytes on any number of devices. It gets its name when it is complete.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..base import DataError, DeviceError, RecipeError, Say, fact, silent
from ..base.annotations import as_annotated
from ..base.files import to_write
from ..base.locks import replaced
from ..data.class_names import told
from ..data.sources import Columns as Examples
from ..machine.arithmetic import check_flags, fixed
from ..machine.detect import detect
from ..recipe.recipe import Recipe
from ..run.event import Event
from ..run.folder.result import Result
from ..run.on import ALL, On
from ..run.placement import Placement
from ..run.predict import Predictor, inputs_of, returned
from .inputs import name_of, open_data
from .model import Trained, trained
from .table import Columns, Rows, chances, format_of, write
from .weight_names import NamedArrays

_PART_ROWS, _PART_BYTES = 1 << 16, 1 << 25  # of a part; memory holds a few parts


_Part = tuple[Examples, NamedArrays]
"""The columns beside the model's inputs, and the outputs, of some examples."""


@dataclass(frozen=True)
class Predictions:
    """Predictions of a model for a data set."""

    examples: int
    """The number of examples."""
    outputs: Any = field(repr=False)
    """NumPy arrays `(examples, ...)` that `Task.predict` returns, or None if they were written to
    `file`."""
    file: Path | None
    accuracy: float | None
    """The accuracy of a classifier, if the data has labels."""
    seconds: float
    """Wall time."""
    actual: np.ndarray | None = field(default=None, repr=False)
    """The labels, `(examples,)`, if there is an accuracy and no `file`."""
    class_names: tuple[str, ...] = ()
    """The names of the classes, `()` if unknown."""
    returns: str = "logits"
    """The kind of the outputs: "logits", "probabilities" or "values"."""

    @property
    def labels(self) -> np.ndarray:
        """The most probable class of each example, `(examples,)` int32. Of equally probable
        classes, the lowest."""
        return np.argmax(self._of_classes, axis=1).astype(np.int32)

    @property
    def probabilities(self) -> np.ndarray:
        """The probabilities of all classes: `(examples, classes)` float32."""
        return chances(self._of_classes, self.returns)

    @property
    def _of_classes(self) -> np.ndarray:
        if not isinstance(self.outputs, np.ndarray) or self.outputs.ndim != 2:
            raise RecipeError("predictions-without-logits")
        return self.outputs


@as_annotated
@fixed()
def predict(
    model: Result | Trained | Event | str | Path,
    data: Any = None,
    *,
    recipe: Recipe | None = None,
    on: On = ALL,
    batch: int | None = None,
    out: str | Path | None = None,
    top: int = 1,
    probabilities: bool = False,
    fresh: bool = False,
    say: Say = silent,
) -> Predictions:
    """Predicts every example of `data` once, in order, on all devices.

    The bits are the same on any number of devices.

    *Arguments:*

    - `model`: a `Result`, or a run folder, whose newest checkpoint is read. If the recipe has an
      EMA, the averaged parameters are used, as in evaluation.
    - `recipe`: needed for a folder whose recipe is not built in.
    - `data`: a source, or the path of a packed folder, of `.npy` or `.npz` arrays, or of a folder
      or tar of images. By default the recipe's evaluation data.
    - `batch`: the number of examples that are read at a time, for all devices. It changes no
      output.
    - `out`: write a `.parquet`, `.csv` or `.jsonl` file, part by part, instead of keeping
      everything in memory.
    - `top`: the number of classes in a row.
    - `probabilities`: also write the probabilities of all classes.
    - `fresh`: replace an existing file.
    - `say`: called with warnings and progress. If neither the task nor its last operation states
      what a classifier's outputs are, they are taken for logits, and this says so.

    Raises `RecipeError` for a task without `predict`, `RunError`, `DataError` or `DeviceError`.
    """
    if top < 1:
        raise RecipeError("top-below-one", "top={top}: expected at least 1.", top=top)
    if jax.process_count() > 1:
        raise DeviceError("predict-one-host", processes=jax.process_count())
    began = time.perf_counter()
    known = trained(model, recipe, say, with_data=data is None)
    inputs = inputs_of(known.recipe)
    task = known.recipe.task
    source = known.evaluation() if data is None else task.joined(open_data(data, inputs))
    if data is not None and (joining := told(task, source)) is not None:
        say(joining)
    if not len(source):
        raise DataError("source-empty")
    file = None if out is None else Path(to_write(out, "out"))
    if file is not None:
        format_of(file)
        if file.exists() and not fresh:
            raise DataError("predictions-exist", path=file)
    machine = detect(on.devices, on.platform)
    if on.exact:
        check_flags(machine.platform)
    placement = Placement.of(machine, known.recipe.shards, most=len(source))
    predictor = Predictor(
        known.recipe, known.params, known.state, source, placement, batch, on.workers
    )
    with contextlib.closing(predictor):
        classes = task.classes
        returns = returned(known.recipe, predictor.outputs)
        shapes = {n: s.shape for n, s in predictor.outputs.items()}
        classifier = returns != "values" and shapes == {"outputs": (classes,)}
        names = known.class_names if classifier else ()
        if returns is None:
            say(fact("outputs-unstated"))
            returns = "logits"
        if file is None:
            outputs, actual = _whole(predictor, classifier)
            right = None if actual is None else _right(outputs, actual)
        else:
            outputs = actual = None
            kind = returns if classifier else "values"
            columns = Columns(kind, names, min(top, classes or 1), probabilities)
            right = _written(predictor, columns, file, say)
    accuracy = None if right is None else right / len(source)
    seconds = time.perf_counter() - began
    return Predictions(
        examples=len(source),
        outputs=outputs,
        file=file,
        accuracy=accuracy,
        seconds=seconds,
        actual=actual,
        class_names=names,
        returns=returns,
    )


def _whole(predictor: Predictor, classifier: bool) -> tuple[Any, np.ndarray | None]:
    """The outputs of all examples, and the labels of a classifier, if known."""
    beside, outputs = _joined(list(predictor()))
    return (outputs["outputs"] if list(outputs) == ["outputs"] else outputs), _labels(
        beside, classifier
    )


def _labels(beside: Examples, classifier: bool) -> np.ndarray | None:
    """The classes of a classifier's examples, one each, if known."""
    label = beside.get("label")
    known = classifier and label is not None and label.ndim == 1 and label.dtype.kind in "iu"
    return label if known else None


def _written(predictor: Predictor, columns: Columns, file: Path, say: Say) -> int | None:
    """Writes the predictions to `file`. *Returns* how many examples a classifier gets right, if
    known. Raises `RunError` while another process makes the same file."""
    rights: list[int | None] = []

    def parts() -> Iterator[Rows]:
        first = 0
        names = name_of(predictor.source)
        for beside, outputs in _parts(predictor):
            last = first + len(next(iter(outputs.values())))
            label = _labels(beside, columns.classifier)
            rights.append(None if label is None else _right(outputs["outputs"], label))
            called = None if names is None else [names(i) for i in range(first, last)]
            yield columns.rows(first, called, beside.get("label"), outputs)
            first = last
            say(fact("predict-done", done=first, total=predictor.examples))

    with DataError.of_system("predictions-unwritable", path=file), replaced(file) as whole:
        write(parts(), whole, format_of(file))
    known = [count for count in rights if count is not None]
    return sum(known) if len(known) == len(rights) else None


def _right(outputs: np.ndarray, label: np.ndarray) -> int:
    return int(np.sum(np.argmax(outputs, axis=1) == label))


def _parts(predictor: Predictor) -> Iterator[_Part]:
    """The predictor's outputs in parts whose size no device and no `batch` changes, since a part
    is a row group of Parquet."""
    each = sum(4 * int(np.prod(s.shape)) + 64 for s in predictor.outputs.values())
    blocks = min(_PART_ROWS, _PART_BYTES // each) // predictor.block
    rows = predictor.block * max(1, blocks)
    kept: list[_Part] = []
    held = 0
    for beside, outputs in predictor():
        kept.append((beside, outputs))
        held += len(next(iter(outputs.values())))
        while held >= rows:
            whole = _joined(kept)
            yield _cut(whole, slice(None, rows))
            kept = [_cut(whole, slice(rows, None))]
            held = held - rows
    if held:
        yield _joined(kept)


def _joined(kept: list[_Part]) -> Any:
    if len(kept) == 1:
        return kept[0]
    return tuple(
        {n: np.concatenate([pair[i][n] for pair in kept]) for n in kept[0][i]} for i in (0, 1)
    )


def _cut(pair: _Part, rows: slice) -> Any:
    return tuple({n: c[rows] for n, c in one.items()} for one in pair)
