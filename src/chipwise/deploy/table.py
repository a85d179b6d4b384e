"""Predictions as rows of a table: Parquet, CSV or JSON lines, a part at a time.

A classifier's row has the label, its name and its probability, the next classes as `prediction_2`
and so on, and all probabilities on request. Other models' rows have their outputs.
"""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..base import DataError, RecipeError

FORMATS = (".parquet", ".csv", ".jsonl")
Rows = dict[str, Any]  # column to n values: an array (n,) or (n, values), or a list of text


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities `(n, classes)` float32 of logits, on the host: the same on any machine's
    devices."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    odds = np.exp(shifted)
    return (odds / odds.sum(axis=-1, keepdims=True)).astype(np.float32)


def chances(outputs: np.ndarray, returns: str) -> np.ndarray:
    """Probabilities `(n, classes)` float32 of a classifier's outputs, "logits" or
    "probabilities"."""
    return outputs.astype(np.float32) if returns == "probabilities" else softmax(outputs)


@dataclass(frozen=True)
class Columns:
    """The columns of a table."""

    returns: str
    """The kind of the outputs: "logits" or "probabilities" of a classifier, "values" of other
    models."""
    class_names: tuple[str, ...] = ()
    """`()` if unknown."""
    top: int = 1
    """The number of classes in a row."""
    probabilities: bool = False
    """Whether a row has the probabilities of all classes."""

    @property
    def classifier(self) -> bool:
        return self.returns != "values"

    def rows(
        self,
        first: int,
        names: Sequence[str] | None,
        label: np.ndarray | None,
        outputs: dict[str, Any],
    ) -> Rows:
        """The columns of the examples from `first` on. `label` `(n,)`: the data's labels, if it has
        any."""
        count = len(next(iter(outputs.values())))
        rows: Rows = {"index": np.arange(first, first + count, dtype=np.int64)}
        if names is not None:
            rows["name"] = list(names)
        if label is not None and label.ndim == 1:
            rows["label"] = label
        if not self.classifier:
            if taken := sorted(rows.keys() & outputs.keys()):
                raise RecipeError("predictions-names-taken", names=taken)
            return {
                **rows,
                **{n: v.reshape(count, -1) if v.ndim > 2 else v for n, v in outputs.items()},
            }
        each = chances(outputs["outputs"], self.returns)
        # Of the outputs, since small probabilities are 0. The lower one of equal classes
        falling = -outputs["outputs"].astype(np.float32)
        best = np.argsort(falling, axis=1, kind="stable")[:, : self.top]
        for place in range(best.shape[1]):
            mark = "" if place == 0 else f"_{place + 1}"
            rows[f"prediction{mark}"] = best[:, place].astype(np.int32)
            if self.class_names:
                rows[f"class{mark}"] = [self.class_names[i] for i in best[:, place].tolist()]
            rows[f"probability{mark}"] = np.take_along_axis(each, best[:, place, None], axis=1)[
                :, 0
            ]
        if self.probabilities:
            rows["probabilities"] = each
        return rows


def format_of(file: Path) -> str:
    """`.parquet`, `.csv` or `.jsonl`. Raises `DataError` for others, or if the library is
    missing."""
    suffix = file.suffix.lower()
    if suffix not in FORMATS:
        raise DataError("predictions-format", path=file, formats=list(FORMATS))
    if suffix == ".parquet":
        arrow()
    return suffix


def arrow() -> Any:
    """pyarrow. Raises `DataError` if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError("pyarrow-missing") from error
    return pyarrow


def write(parts: Iterable[Rows], to: Path, suffix: str) -> None:
    """Writes the rows of all parts in order. Holds one part in memory at a time."""
    if suffix == ".parquet":
        _write_parquet(parts, to)
        return
    with open(to, "w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        for number, part in enumerate(parts):
            rows = zip(*(_texts(values, suffix) for values in part.values()), strict=True)
            if suffix == ".csv":
                lines.writerows(rows if number else [list(part), *rows])
                continue
            heads = [json.dumps(name) for name in part]
            for row in rows:
                pairs = ", ".join(f"{h}: {v}" for h, v in zip(heads, row, strict=True))
                file.write("{" + pairs + "}\n")


def _write_parquet(parts: Iterable[Rows], to: Path) -> None:
    pa = arrow()
    with contextlib.ExitStack() as stack:
        writer: Any = None
        for part in parts:
            table = pa.table({name: _arrow_column(pa, values) for name, values in part.items()})
            writer = writer or stack.enter_context(pa.parquet.ParquetWriter(to, table.schema))
            writer.write_table(table)


def _arrow_column(pa: Any, values: Any) -> Any:
    if isinstance(values, list) or values.ndim == 1:
        return pa.array(values)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def _texts(values: Any, suffix: str) -> list[Any]:
    """Values as text for a line. JSON text is quoted here, CSV text by its writer."""
    if isinstance(values, list):
        return [json.dumps(text) for text in values] if suffix == ".jsonl" else values
    one = _number(values.dtype)
    if values.ndim == 1:
        return [one(value) for value in values]
    return [f"[{', '.join(map(one, row))}]" for row in values]


def _number(dtype: np.dtype) -> Callable[[Any], str]:
    """A formatter with the shortest digits that read back as the same value. Writes numbers that
    are not finite as null, since JSON has none."""
    if dtype.kind == "f":
        return lambda v: str(v) if np.isfinite(v) else "null"
    return lambda v: json.dumps(v.item())
