"""`export`: writes a trained model in another format, and runs the file before it reports
success."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..base import DataError, Fact, RecipeError, Say, invalid, silent
from ..base.annotations import as_annotated
from ..base.files import to_write
from ..base.locks import replaced
from ..data.sources import Arrays, Source, take
from ..data.synthetic import like
from ..recipe.recipe import Recipe
from ..recipe.source import spec_of
from ..run.event import Event
from ..run.folder.result import Result
from ..run.predict import inputs_of
from .formats import WEIGHTS, Request, format_named
from .inputs import open_data
from .model import Trained, trained
from .predictions import predict
from .weight_names import NamedArrays

EXAMPLES = 1000
TOLERANCE = 1e-3  # relative to the largest output: float32 sums in another order
# A smaller largest output counts as this: rounding errors of larger terms that cancel remain
_LEAST = 1e-3


@dataclass(frozen=True)
class Export:
    """An exported model, and how it was checked."""

    file: Path
    format: str
    runs: str
    """The library that ran the file."""
    examples: int
    """The number of examples that were compared with the model itself, in float32."""
    difference: float
    """The largest absolute difference of outputs."""
    largest: float
    """The largest absolute output."""
    labels_differ: int | None
    """0 for a classifier, None for other models."""
    data: str
    """One of "evaluation", "given" and "made-up", or "" for weights alone, which are read back."""
    bytes: int
    seconds: float
    batch: int | None = None
    """The number of examples that the file takes at a time, None for any."""


@as_annotated
def export(
    model: Result | Trained | Event | str | Path,
    to: str,
    out: str | Path | None = None,
    *,
    recipe: Recipe | None = None,
    data: Any = None,
    examples: int = EXAMPLES,
    batch: int | None = None,
    fresh: bool = False,
    say: Say = silent,
) -> Export:
    """Writes a trained model as a file of another format, and checks it by running it.

    The file takes the data's columns as stored, such as uint8 pixels, in batches of any size, or of
    `batch`. It computes in float32, whatever the recipe's precision. It gets its name only if its
    outputs agree with the model's: equal labels, and values within 0.1 % of the largest.

    *Arguments:*

    - `model`, `recipe`: as in `cw.predict`.
    - `to`: one of `"stablehlo"` (any model, which `jax.export` reads), `"onnx"`, `"safetensors"`
      (only the weights), `"huggingface"` (a folder for transformers, of a built-in GPT-2, Llama,
      BERT, ViT or ResNet), `"peft"` (a folder of the adapters alone, for Hugging Face's PEFT, of a
      GPT-2 or Llama).
    - `out`: the file. By default the run's or the recipe's name with the format's suffix.
    - `data`: examples to compare on, as in `cw.predict`. By default the evaluation data, or made-up
      examples if the recipe has no data.
    - `examples`: the largest number of examples to compare.
    - `batch`: make a program for this number of examples alone, for a model that has to know it.
    - `fresh`: replace an existing file, or a folder that has no other files than the export's.
    - `say`: called with warnings.

    Raises `RecipeError` if the format cannot hold the model or the file's outputs differ. Raises
    `RunError` and `DataError`.
    """
    began = time.perf_counter()
    kind = format_named(to)
    known = trained(model, recipe, say)
    name = Path(known.run).name if known.run else known.recipe.name
    file = Path(to_write(name + kind.suffix if out is None else out, "out"))
    if file.exists() and not fresh:
        raise DataError("export-exists", path=file)
    known = dataclasses.replace(known, recipe=dataclasses.replace(known.recipe, precision="f32"))
    runs = to not in WEIGHTS
    if batch is not None and (batch < 1 or not runs):
        raise invalid("export-batch", "batch", batch, "None for weights, else 1 or more")
    inputs = inputs_of(known.recipe) if runs else {}
    rows, expected, classifier, where = (
        _compared(known, data, inputs, examples, say) if runs else ({}, {}, "", "")
    )
    names = {n: (classifier if n == "outputs" and classifier else n) for n in expected}
    compared: tuple[float, float, int | None] = (0.0, 0.0, None)
    request = Request(known, inputs, names, batch)
    try:
        with replaced(file, fresh) as temporary:
            kind.write(request, temporary)
            _refuse_other_files(file, temporary)
            if (run := kind.open(request, temporary)) is not None:
                outputs = _run(run, rows, batch)
                outputs = {n: outputs[names[n]] for n in names}
                try:
                    compared = _compare(expected, outputs, classifier, to)
                except RecipeError as error:
                    if not np.isfinite(error.facts.get("difference", 0.0)):
                        raise
                    first = Arrays(**{n: c[:1] for n, c in rows.items()})
                    alone = _compared(known, first, inputs, 1, silent)[1]
                    _refuse_neighbours(expected, alone, classifier, to)
                    raise
            size = sum(
                one.stat().st_size for one in (temporary, *temporary.rglob("*")) if one.is_file()
            )
    except FileExistsError as error:  # came back, or another process has made it meanwhile
        raise DataError("export-exists", path=file) from error
    except OSError as error:
        raise DataError("export-unwritable", path=file, reason=error) from error
    count = len(next(iter(rows.values()), ()))
    seconds = time.perf_counter() - began
    return Export(file, to, kind.runs, count, *compared, where, size, seconds, batch)


def _examples(known: Trained, data: Any, inputs: Any) -> tuple[Source, str]:
    """The examples to compare on, and which kind they are."""
    if data is not None:
        return open_data(data, inputs), "given"
    task = known.recipe.task
    if task.eval is not None:
        try:
            task.eval[0]
            return task.eval, "evaluation"
        except DataError:  # the recipe is known, but its data is missing
            pass
    source: Any = task.eval if task.eval is not None else task.train
    if not spec_of(source).keys() >= inputs.keys():
        source = task.train
    return like(source, task.classes), "made-up"


def _compared(
    known: Trained, data: Any, inputs: Any, examples: int, say: Say
) -> tuple[dict, dict, str, str]:
    """The examples to compare on, the model's own outputs, their kind if it is a classifier
    ("logits" or "probabilities"), else "", and the kind of the examples."""

    def say_of_outputs(message: Fact) -> None:
        if message.code == "outputs-unstated":
            say(message)

    source, where = _examples(known, data, inputs)
    rows: Any = take(source, np.arange(min(len(source), max(1, examples))))
    predicted = predict(known, Arrays(**rows), say=say_of_outputs)
    outputs = (
        predicted.outputs if isinstance(predicted.outputs, dict) else {"outputs": predicted.outputs}
    )
    shape = {name: value.shape[1:] for name, value in outputs.items()}
    classifier = predicted.returns != "values" and shape == {
        "outputs": (known.recipe.task.classes,)
    }
    return {n: rows[n] for n in inputs}, outputs, predicted.returns if classifier else "", where


def _run(run: Callable, rows: NamedArrays, batch: int | None) -> NamedArrays:
    """Runs the file in batches of 1, 100 and the rest, or of `batch`, filled up with the last
    example."""
    total = len(next(iter(rows.values())))
    cuts = [0, 1, *range(101, total, 100), total] if total > 1 else [0, 1]
    parts = []
    for first, last in itertools.pairwise(
        cuts if batch is None else range(0, total + batch, batch)
    ):
        at = np.minimum(np.arange(first, last), total - 1)
        parts.append(run({name: np.ascontiguousarray(c[at]) for name, c in rows.items()}))
    return {name: np.concatenate([part[name] for part in parts])[:total] for name in parts[0]}


def _refuse_neighbours(expected: NamedArrays, alone: NamedArrays, classifier: str, to: str) -> None:
    """Raises `RecipeError` if the outputs of the first example are others when it is `alone`."""
    try:
        _compare({n: v[:1] for n, v in expected.items()}, alone, classifier, to)
    except RecipeError as error:
        raise RecipeError("export-of-neighbours", format=to) from error


def _refuse_other_files(old: Path, made: Path) -> None:
    """Raises `DataError` if the folder `old` has files that the folder `made` lacks: it may be a
    run, or hold other models."""
    if old.is_dir() and made.is_dir():
        others = {one.name for one in old.iterdir()} - {one.name for one in made.iterdir()}
        if others:
            raise DataError("export-folder-holds", path=old, names=sorted(others))


def _compare(
    expected: NamedArrays, actual: NamedArrays, classifier: str, to: str
) -> tuple[float, float, int | None]:
    """The largest difference, the largest output, and how many labels differ. Raises `RecipeError`
    if the exported model computes something else."""
    wide = {n: np.asarray(v, np.float64) for n, v in expected.items()}
    for name, value in wide.items():
        if actual[name].shape != value.shape:
            given = list(actual[name].shape)
            shape = list(value.shape)
            raise RecipeError("export-shape", format=to, name=name, got=given, expected=shape)
    gaps = [float(np.max(np.abs(v - actual[n]), initial=0)) for n, v in wide.items()]
    largest = max(float(np.max(np.abs(v), initial=0)) for v in wide.values())
    gap = float("nan") if any(map(np.isnan, gaps)) else max(gaps)
    labels = None
    if classifier:
        labels = int(np.sum(wide["outputs"].argmax(1) != actual["outputs"].argmax(1)))
    if not gap <= TOLERANCE * max(largest, _LEAST) or labels:
        raise RecipeError(
            "export-differs",
            format=to,
            examples=len(next(iter(wide.values()))),
            difference=gap,
            largest=largest,
            labels=labels or 0,
        )
    return gap, largest, labels
