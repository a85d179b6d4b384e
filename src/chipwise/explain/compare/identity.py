"""What a stored recipe says, as the fields of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import DataError

_OWN = ("name", "batch", "replicas", "precision", "source", "seed")  # fields of a row, or of a repeat


def identity(described: Any, what: str) -> dict[str, Any]:
    """Fields of a `Row` from what `Recipe.describe` said; `what` is how messages call its file.

    The training columns count, the number of examples is a setting like any other. Raises `DataError` for
    what describes no recipe.
    """
    if not isinstance(described, Mapping):
        described = {}
    name, batch = described.get("name"), described.get("batch")
    if not isinstance(name, str) or isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise DataError(f"{what} does not say of which recipe it is, or at which batch: it is damaged.")
    task = described.get("task")
    train = task.get("train") if isinstance(task, Mapping) else None
    columns = {k: str(v) for k, v in train.items() if k != "examples"} if isinstance(train, Mapping) else {}
    replicas, precision = described.get("replicas"), described.get("precision")
    left = {k: v for k, v in described.items() if k not in _OWN}
    settings = {k: v for k, v in flat(left) if k.removeprefix("task.train.") not in columns and v is not None}
    return {
        "recipe": name,
        "batch": batch,
        "columns": columns,
        "replicas": replicas if isinstance(replicas, int) else None,
        "precision": precision if isinstance(precision, str) else None,
        "settings": settings,
    }


def flat(made: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    """`{"a": {"b": 1}}` as `[("a.b", 1)]`."""
    found: list[tuple[str, Any]] = []
    for key, value in made.items():
        found += flat(value, f"{path}{key}.") if isinstance(value, Mapping) else [(f"{path}{key}", value)]
    return found
