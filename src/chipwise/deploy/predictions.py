"""Predictions of a trained model, in memory or as a file that is written part by part.

Complete parts are not computed again: after a stop the same command continues, on any number of devices, and
ends with the same bytes. The file gets its name when it is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..atomic import check_inside, hold, open_inside, put_inside, read_inside, to_write
from ..data.sources import Columns as Examples
from ..data.sources import described, sample_digest
from ..engine.on import ALL, On
from ..engine.placement import Placement
from ..engine.predict import Predictor, inputs_of, returned
from ..engine.result import Result
from ..errors import DataError, DeviceError, RecipeError
from ..machine.arithmetic import check_flags, fixed
from ..machine.detect import detect
from ..recipe.recipe import Recipe
from ..words.facts import Fact, fact
from .inputs import name_of, open_data
from .model import Trained, trained
from .table import Columns, chances, encode, format_of, join

_PART_ROWS, _PART_BYTES = 1 << 16, 1 << 25  # of a part; memory holds a few parts
_ABOUT = "predictions.json"


@dataclass(frozen=True)
class Predictions:
    """Predictions of a model for a data set.

    *Fields:* `examples`: their number; `outputs`: what `Task.predict` returns, NumPy arrays `(examples,
    ...)`, or None if they were written to `file`; `accuracy`: of a classifier, if the data has labels;
    `seconds`: wall time; `actual`: the labels, `(examples,)`, where there is an accuracy and no `file`;
    `class_names`: maybe `()`; `returns`: what the outputs are, "logits",
    "probabilities" or "values".
    """

    examples: int
    outputs: Any = field(repr=False)
    file: Path | None
    accuracy: float | None
    seconds: float
    actual: np.ndarray | None = field(default=None, repr=False)
    class_names: tuple[str, ...] = ()
    returns: str = "logits"

    @property
    def labels(self) -> np.ndarray:
        """The most probable class of each example, `(examples,)` int32; the lower one of equal classes."""
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


@fixed()
def predict(
    model: Result | Trained | str | Path,
    data: Any = None,
    *,
    recipe: Recipe | None = None,
    on: On = ALL,
    batch: int | None = None,
    out: str | Path | None = None,
    top: int = 1,
    probabilities: bool = False,
    fresh: bool = False,
    say: Callable[[Fact], None] = lambda _: None,
) -> Predictions:
    """Predicts every example of `data` once, in order, on all devices.

    The bits are the same on any number of devices.

    *Arguments:*

    - `model`: a `Result`, or a run folder, whose newest checkpoint is read. If the recipe has an EMA, the
      averaged parameters are used, as in evaluation. `recipe`: needed for a folder whose recipe is not built
      in.
    - `data`: a source, or the path of a packed folder, of `.npy` or `.npz` arrays, or of a folder or tar of
      images; by default the recipe's evaluation data.
    - `batch`: examples that are read at a time, for all devices; it changes no output.
    - `out`: write a `.parquet`, `.csv` or `.jsonl` file, part by part, instead of keeping everything in
      memory; `top`: the number of classes in a row; `probabilities`: also write those of all classes;
      `fresh`: replace an existing file. `say` is called with warnings and progress.

    Raises `RecipeError` for a task without `predict`, `RunError`, `DataError` or `DeviceError`.
    """
    if top < 1:
        raise RecipeError("top-below-one", "top={top}: expected at least 1.", top=top)
    if jax.process_count() > 1:
        raise DeviceError("predict-one-host", processes=jax.process_count())
    began = time.perf_counter()
    known = trained(model, recipe, say, with_data=data is None)
    inputs = inputs_of(known.recipe)
    source = known.evaluation() if data is None else open_data(data, inputs)
    if not len(source):
        raise DataError("source-empty")
    file = None if out is None else Path(to_write(out, "out"))
    suffix = "" if file is None else format_of(file)
    if file is not None and file.exists() and not fresh:
        raise DataError("predictions-exist", path=file)
    path = os.path.abspath(data) if isinstance(data, str | os.PathLike) else ""
    machine = detect(on.devices, on.platform)
    if on.exact:
        check_flags(machine.platform)
    placement = Placement.of(machine, known.recipe.shards, most=len(source))
    predictor = Predictor(known.recipe, known.params, known.state, source, placement, batch, on.workers)
    with contextlib.closing(predictor):
        classes, returns = known.recipe.task.classes, returned(known.recipe, predictor.outputs)
        shapes = {n: s.shape for n, s in predictor.outputs.items()}
        classifier = returns != "values" and shapes == {"outputs": (classes,)}
        names = known.class_names if classifier else ()
        columns = Columns(returns if classifier else "values", names, min(top, classes or 1), probabilities)
        if file is None:
            outputs, actual = _whole(predictor, classifier)
            right = None if actual is None else int(np.sum(np.argmax(outputs, axis=1) == actual))
        else:
            job = _Job(known, predictor, columns, file, suffix, path, fresh)
            outputs, actual, right = None, None, job.run(say)
    accuracy = None if right is None else right / len(source)
    seconds = time.perf_counter() - began
    return Predictions(len(source), outputs, file, accuracy, seconds, actual, names, returns)


def _whole(predictor: Predictor, classifier: bool) -> tuple[Any, np.ndarray | None]:
    """The outputs of all examples, and the labels of a classifier, if known."""
    beside, outputs = _joined(list(predictor()))
    return (outputs["outputs"] if list(outputs) == ["outputs"] else outputs), _labels(beside, classifier)


def _labels(beside: Examples, classifier: bool) -> np.ndarray | None:
    """The classes of a classifier's examples, one each, if known."""
    label = beside.get("label")
    known = classifier and label is not None and label.ndim == 1 and label.dtype.kind in "iu"
    return label if known else None


class _Job:
    """Predictions being written to a file: the parts in a folder beside it, and a description of the job."""

    def __init__(
        self,
        known: Trained,
        predictor: Predictor,
        columns: Columns,
        file: Path,
        suffix: str,
        data: str,
        fresh: bool,
    ):
        self.predictor, self.columns, self.file, self.suffix = predictor, columns, file, suffix
        each = sum(4 * int(np.prod(s.shape)) + 64 for s in predictor.outputs.values())
        blocks = min(_PART_ROWS, _PART_BYTES // each) // predictor.block
        self.part_rows = predictor.block * max(1, blocks)
        self.folder = file.parent / f".{file.name}.parts"
        self.about: dict[str, Any] = {
            "model": known.fingerprint,
            "data": {
                "path": data,
                "examples": predictor.examples,
                "columns": described(predictor.source_spec),
                "sample": sample_digest(predictor.source),
            },
            "block": predictor.block,
            "part": self.part_rows,
            "top": columns.top,
            "probabilities": columns.probabilities,
            "returns": columns.returns,
        }
        self.fresh = fresh

    def run(self, say: Callable[[Fact], None]) -> int | None:
        """Computes the missing parts and joins all. *Returns* how many examples a classifier gets right, if
        known. Raises `RunError` while another process makes the same file."""
        try:
            check_inside(self.file.parent, self.folder.name)
            self.folder.mkdir(parents=True, exist_ok=True)
            with hold(self.folder):
                try:
                    right = self._made(say)
                finally:
                    if not self._sorted():
                        shutil.rmtree(self.folder, ignore_errors=True)
        except OSError as error:
            raise DataError("predictions-unwritable", path=self.file, reason=error) from error
        return right

    def _made(self, say: Callable[[Fact], None]) -> int | None:
        there = [] if self.fresh else self._there()
        if not there:
            self._clear()
        first = min(len(there) * self.part_rows, self.predictor.examples)
        if there:
            say(fact("predict-resumed", done=first, total=self.predictor.examples, path=self.file))
        names = name_of(self.predictor.source)
        for beside, outputs in self._parts(first):
            count = len(next(iter(outputs.values())))
            label = _labels(beside, self.columns.classifier)
            right = None if label is None else int(np.sum(np.argmax(outputs["outputs"], axis=1) == label))
            called = [names(i) for i in range(first, first + count)] if names is not None else None
            rows = self.columns.rows(first, called, beside.get("label"), outputs)
            head = list(rows)
            name = f"{first:012d}-{'x' if right is None else right}{self.suffix}"
            put_inside(self.folder / name, encode(rows, self.suffix))
            if "head" not in self.about:
                self.about["head"] = head
                put_inside(self.folder / _ABOUT, json.dumps(self.about).encode())
            first += count
            say(fact("predict-done", done=first, total=self.predictor.examples))
        return self._join()

    def _parts(self, first: int) -> Iterator[tuple[Examples, dict[str, np.ndarray]]]:
        """The predictor's outputs from example `first` on, `part_rows` examples at a time."""
        if first >= self.predictor.examples:
            return
        kept: list[tuple[Examples, dict[str, np.ndarray]]] = []
        held = 0
        for beside, outputs in self.predictor(first):
            kept.append((beside, outputs))
            held += len(next(iter(outputs.values())))
            while held >= self.part_rows:
                whole = _joined(kept)
                yield _cut(whole, slice(None, self.part_rows))
                kept, held = [_cut(whole, slice(self.part_rows, None))], held - self.part_rows
        if held:
            yield _joined(kept)

    def _there(self) -> list[Path]:
        """The complete parts, from the first one up to the first gap."""
        try:
            about = json.loads(read_inside(self.folder / _ABOUT))
            head = about.pop("head")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # a job that wrote no part
            return []
        wrong = sorted(name for name in self.about if about.get(name) != self.about[name])
        if wrong:
            raise DataError("predictions-of-others", path=self.file, folder=self.folder, differ=wrong)
        self.about["head"] = head
        parts = self._sorted()
        starts = [int(p.name.split("-")[0]) for p in parts]
        whole = [p for i, p in enumerate(parts) if starts[i] == i * self.part_rows]
        return whole if len(whole) == len(parts) else []

    def _clear(self) -> None:
        """Removes parts that are no beginning of this file."""
        self.about.pop("head", None)
        for part in [*self._sorted(), self.folder / _ABOUT]:
            part.unlink(missing_ok=True)

    def _sorted(self) -> list[Path]:
        return sorted(p for p in self.folder.glob(f"*{self.suffix}") if p.name[:12].isdecimal())

    def _join(self) -> int | None:
        parts = self._sorted()
        whole = self.folder / f"whole{self.suffix}"
        with os.fdopen(open_inside(whole, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as out:
            join(parts, out, self.suffix, self.about["head"])
        os.replace(whole, self.file)
        shutil.rmtree(self.folder, ignore_errors=True)
        counts = [p.stem.split("-")[1] for p in parts]
        return sum(map(int, counts)) if all(n.isdecimal() for n in counts) else None


def _joined(kept: list[tuple[Examples, dict[str, np.ndarray]]]) -> Any:
    if len(kept) == 1:
        return kept[0]
    return tuple({n: np.concatenate([pair[i][n] for pair in kept]) for n in kept[0][i]} for i in (0, 1))


def _cut(pair: tuple[Examples, dict[str, np.ndarray]], rows: slice) -> Any:
    return tuple({n: c[rows] for n, c in one.items()} for one in pair)
