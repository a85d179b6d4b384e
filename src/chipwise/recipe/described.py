"""A recipe's description as rows of a table, for a recipe in hand and for what a run stores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.figures import counted, known, one_line, printable
from ..base.json_types import part
from .duration import Clock
from .schedules import as_typed

_MORE = ("blocks", "shards", "precision", "seed", "ema", "adapters")


_UNNAMED = ("recipe", "__init__")  # names of files that say nothing of what is inside


def title(described: Mapping[str, Any]) -> str:
    """What people call a recipe: its name, or that of its file, or of the folder around it.

    *Arguments:* `described`: has the `name` of a recipe and its `source`, as `recipe.json` does.
    Nothing in it is trusted.
    """
    name, source = str(described.get("name") or ""), part(described, "source")
    file, _, _ = str(source.get("recipe") or "").rpartition(":")
    unnamed = name.removesuffix("-synthetic") == "recipe" and file
    return title_of_file(file) + name.removeprefix("recipe") if unnamed else name


def title_of_file(file: str) -> str:
    """The name of a recipe's file without its ending, or that of the folder around it if the file's
    says nothing."""
    place = Path(file).absolute()
    return place.stem if place.stem not in _UNNAMED else place.parent.name or place.stem


def described_rows(described: Mapping[str, Any], clock: Clock | None) -> list[tuple[str, str]]:
    """The settings as run, with computed values: (setting, value).

    *Arguments:* `described`: the output of `Recipe.describe`, or a run's `recipe.json`, which also
    has the `texts` of its task and what was `read` of its model. Nothing in it is trusted. `clock`:
    the recipe's, if it is known.
    """
    task = part(described, "task")
    optimizer = part(described, "optimizer")
    rows = [("recipe", described.get("name"))]
    for name, words in (("train", "training examples"), ("eval", "evaluation examples")):
        data = part(task, name)
        many = data.pop("examples", None)
        columns = ", ".join(f"{k} {v}" for k, v in data.items())
        shown = f"{many:,}" if isinstance(many, int) else many
        rows.append((words, f"{shown} ({columns})" if data or many else "none"))
    texts = part(described, "texts")
    if isinstance(begin := texts.get("begin"), list):
        shown = " ".join(map(str, begin)) or "none"
        rows.append(("documents", f"begin {shown}, end {texts.get('end') or 'as usual'}"))
    rows += [(name, task.get(name)) for name in ("eval_group", "augment", "mix")]
    rows += part(described, "read").items()
    batch = described.get("batch")
    replicas = described.get("replicas")
    if known(batch) and isinstance(replicas, int) and replicas > 0:
        rows.append(("batch", f"{batch:,} = {counted(replicas, 'replica')} × {batch / replicas:g}"))
    duration = str(described.get("duration"))
    if clock is not None:
        duration += f" = {clock.total:,} steps ({clock.examples / clock.batch:.4g} an epoch)"
    rows += [("duration", duration), ("optimizer", optimizer.pop("optimizer", "unknown"))]
    rows += [(f"  {key}", as_typed(v)) for key, v in optimizer.items() if v is not None]
    rows += [(name, described.get(name)) for name in _MORE]
    return [(printable(name), one_line(value)) for name, value in rows if value is not None]
