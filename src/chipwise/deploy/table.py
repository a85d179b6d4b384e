"""Predictions as rows of a table: Parquet, CSV or JSON lines, a part at a time.

A classifier's row has the label, its name and its probability, the next classes as `prediction_2` and so on,
and all probabilities on request. Other models' rows have their outputs.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..atomic import read_inside
from ..errors import DataError

FORMATS = (".parquet", ".csv", ".jsonl")
_MOST = 1 << 31  # bytes of a part
Rows = dict[str, Any]  # column to n values: an array (n,) or (n, values), or a list of text


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities `(n, classes)` float32 of logits, on the host: the same on any machine's devices."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    odds = np.exp(shifted)
    return (odds / odds.sum(axis=-1, keepdims=True)).astype(np.float32)


def chances(outputs: np.ndarray, returns: str) -> np.ndarray:
    """Probabilities `(n, classes)` float32 of a classifier's outputs, "logits" or "probabilities"."""
    return outputs.astype(np.float32) if returns == "probabilities" else softmax(outputs)


@dataclass(frozen=True)
class Columns:
    """The columns of a table.

    *Fields:* `returns`: a classifier's outputs are "logits" or "probabilities", others "values";
    `class_names`, maybe `()`; `top`: the number of
    classes in a row; `probabilities`: whether it has those of all classes.
    """

    returns: str
    class_names: tuple[str, ...] = ()
    top: int = 1
    probabilities: bool = False

    @property
    def classifier(self) -> bool:
        return self.returns != "values"

    def rows(
        self, first: int, names: Sequence[str] | None, label: np.ndarray | None, outputs: dict[str, Any]
    ) -> Rows:
        """The columns of the examples from `first` on. `label` `(n,)`: the data's labels, if it has any."""
        count = len(next(iter(outputs.values())))
        rows: Rows = {"index": np.arange(first, first + count, dtype=np.int64)}
        if names is not None:
            rows["name"] = list(names)
        if label is not None and label.ndim == 1:
            rows["label"] = label
        if not self.classifier:
            return {**rows, **{n: v.reshape(count, -1) if v.ndim > 2 else v for n, v in outputs.items()}}
        each = chances(outputs["outputs"], self.returns)
        best = np.argsort(-each, axis=1, kind="stable")[:, : self.top]  # the lower one of equal classes
        for place in range(best.shape[1]):
            mark = "" if place == 0 else f"_{place + 1}"
            rows[f"prediction{mark}"] = best[:, place].astype(np.int32)
            if self.class_names:
                rows[f"class{mark}"] = [self.class_names[i] for i in best[:, place].tolist()]
            rows[f"probability{mark}"] = np.take_along_axis(each, best[:, place, None], axis=1)[:, 0]
        if self.probabilities:
            rows["probabilities"] = each
        return rows


def format_of(file: Path) -> str:
    """`.parquet`, `.csv` or `.jsonl`. Raises `DataError` for others, or if the library is missing."""
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


def encode(rows: Rows, suffix: str) -> bytes:
    """Encodes rows as a part: CSV without its header, or a whole Parquet file."""
    if suffix == ".parquet":
        pa = arrow()
        sink = io.BytesIO()
        pa.parquet.write_table(pa.table({n: _arrow_column(pa, v) for n, v in rows.items()}), sink)
        return sink.getvalue()
    columns = [_texts(values, suffix) for values in rows.values()]
    out = io.StringIO()
    if suffix == ".csv":
        csv.writer(out, lineterminator="\n").writerows(zip(*columns, strict=True))
    else:
        heads = [json.dumps(name) for name in rows]
        for row in zip(*columns, strict=True):
            out.write("{" + ", ".join(f"{h}: {v}" for h, v in zip(heads, row, strict=True)) + "}\n")
    return out.getvalue().encode("utf-8")


def join(parts: Sequence[Path], out: IO[bytes], suffix: str, head: Sequence[str]) -> None:
    """Joins the parts in order to one file; holds one part in memory at a time."""
    if suffix == ".parquet":
        pa, writer = arrow(), None
        for part in parts:
            table = pa.parquet.read_table(io.BytesIO(read_inside(part, _MOST)))
            writer = writer or pa.parquet.ParquetWriter(out, table.schema)
            writer.write_table(table)
        if writer is not None:
            writer.close()
        return
    if suffix == ".csv":
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(head)
        out.write(text.getvalue().encode("utf-8"))
    for part in parts:
        out.write(read_inside(part, _MOST))


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
    """A formatter with the shortest digits that read back as the same value; JSON has no NaN."""
    if dtype.kind == "f":
        return lambda v: _short(v) if np.isfinite(v) else "null"
    return lambda v: json.dumps(v.item())


def _short(value: Any) -> str:
    text = np.format_float_scientific(value, unique=True, trim="-")
    return text if not 1e-4 <= abs(value) < 1e7 else np.format_float_positional(value, unique=True, trim="0")
