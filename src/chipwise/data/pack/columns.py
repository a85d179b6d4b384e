"""The columns of tables: which one is the image, the label or the text, and how labels are
converted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...base import DataError, Fact, fact
from ..class_names import nfc
from ..sources import Columns

COLUMNS = {
    "image": ("image", "image/encoded", "img", "jpg", "png", "jpeg", "webp"),
    "label": ("label", "labels", "image/class/label", "cls", "class", "target", "fine_label"),
    "text": ("text", "content", "document", "sentence"),
    "prompt": (),
}
"""The usual names of columns. One of them is used if the user names none."""
_MOST_CLASSES = 1 << 20  # whose names a manifest has room for


def chosen(role: str, there: Sequence[str], columns: Mapping[str, str], path: Path) -> str | None:
    """The column among `there` that is the image, the label or the text, or `None`.

    Raises `DataError` if the user names a column that is missing, and for several with a usual name
    if the user names none.
    """
    if role in columns:
        if columns[role] not in there:
            wrong = "{path} has no column {column:plain} for the {role}. It has {columns:list}."
            raise DataError(
                "rows-column",
                wrong,
                path=path,
                role=role,
                column=columns[role],
                columns=sorted(there),
            )
        return columns[role]
    return only(role, [name for name in COLUMNS[role] if name in there], path)


def only(role: str, found: Sequence[str], path: Any) -> str | None:
    """The one column of `found`, or `None` without one. Raises `DataError` for several."""
    if len(found) > 1:
        facts = {"path": path, "role": role, "columns": list(found), "first": found[0]}
        raise DataError("rows-columns-several", **facts)
    return found[0] if found else None


def reading(
    roles: Mapping[str, str | None], others: Iterable[str], left: Iterable[str]
) -> list[Fact]:
    """What a report says of the columns of a table. *Arguments:* `roles`: "image" and the like to
    the column. `others`: those that are kept by their own names. `left`: those that are not."""
    read = [f"{role} from {column}" for role, column in roles.items() if column is not None]
    told = [fact("columns-read", columns=[*read, *others])]
    return told + ([fact("columns-left", columns=sorted(left))] if left else [])


def labels_of(
    values: Mapping[str, list[Any]], declared: str | None = None
) -> tuple[dict[str, Columns], tuple[str, ...]]:
    """Labels by split, and the classes: the sorted text of train, or integers from 0 to the
    largest. Raises `DataError` for text that only another split has.

    *Arguments:* `declared`: "classes" or "numbers", if the user says it."""
    every = [value for some in values.values() for value in some]
    if all(value is None for value in every):
        return {split: {} for split in values}, ()
    for split, some in values.items():
        missing = next((row for row, value in enumerate(some) if value is None), None)
        if missing is not None:
            wrong = (
                "Row {row} of {split} has no label, but others do: label it, or give --columns "
                "label=NAME."
            )
            raise DataError("rows-label-missing", wrong, row=missing, split=split)
    wrong = "--labels {declared}, and a label is {label:plain}: expected {expected}."
    facts = {"declared": declared, "label": str(every[0])[:60]}
    if declared == "numbers" and any(isinstance(value, str) for value in every):
        raise DataError("rows-label-declared", wrong, expected="a number in each row", **facts)
    if all(isinstance(value, str) for value in every):
        names = {split: list(map(nfc, some)) for split, some in values.items()}
        classes = tuple(sorted({*(names.get("train") or map(nfc, every))}))
        number = {name: i for i, name in enumerate(classes)}
        for split, some in names.items():
            refuse_unknown(split, {*some}, classes)
        numbers = {s: np.asarray([number[v] for v in some], np.int32) for s, some in names.items()}
        return {split: {"label": column} for split, column in numbers.items()}, classes
    try:
        columns = {split: np.asarray(some) for split, some in values.items()}
    except (ValueError, OverflowError) as error:  # rows with different lengths
        raise DataError("rows-label-kind", label=str(every[0])[:60]) from error
    kinds = {column.dtype.kind for column in columns.values()}
    if not kinds <= set("biuf") or any(column.ndim > 2 for column in columns.values()):
        raise DataError("rows-label-kind", label=str(every[0])[:60])
    values_alone = "f" in kinds or any(column.ndim > 1 for column in columns.values())
    if declared == "classes" and values_alone:
        expected = "text or one whole number in each row"
        raise DataError("rows-label-declared", wrong, expected=expected, **facts)
    if declared == "numbers" or values_alone:
        return {
            split: {"label": column.astype(np.float32)} for split, column in columns.items()
        }, ()
    low = min(int(c.min()) for c in columns.values())
    high = max(int(c.max()) for c in columns.values())
    if not 0 <= low <= high < _MOST_CLASSES:
        wrong = (
            "Labels go from {low} to {high}: expected at most {most:,} classes, numbered from 0. "
            "If they are values, give --labels numbers."
        )
        raise DataError("rows-label-range", wrong, low=low, high=high, most=_MOST_CLASSES)
    labels = {split: {"label": column.astype(np.int32)} for split, column in columns.items()}
    return labels, tuple(map(str, range(high + 1)))


def refuse_unknown(data: str, own: set[str], training: Sequence[str]) -> None:
    """Raises `DataError` for classes `own` of `data` that `training` lacks."""
    if lacking := sorted(own - {*training}):
        raise DataError("classes-unjoined", data=data, classes=lacking, training=training)
