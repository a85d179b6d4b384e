"""The splits of a source: which one is to train on, and which one to evaluate on.

A source with `validation` and `test` has two to evaluate on, and a pack has one. The user says
which. They are never merged, and a report names what is left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ...base import DataError, Fact, fact

EVAL = ("eval", "val", "valid", "validation", "test")
"""The usual names of a split to evaluate on."""


def splits_of(files: Sequence[Path], given: str | None) -> dict[Path, str]:
    """The splits that the names of `files` state, such as "validation". Without one, a file is of
    "train". *Arguments:* `given`: the split to evaluate on, if the user names one.

    Raises `DataError` for such a file beside one that states "train".
    """
    stated = {file: split_in(file.name, given) for file in files}
    if "train" in stated.values():
        refuse_unstated(files[0].parent, [file.name for file in files if stated[file] is None])
    return {file: split or "train" for file, split in stated.items()}


def split_in(name: str, given: str | None) -> str | None:
    """The split that a file's name states: "validation" of `wiki.validation.txt`."""
    known = "|".join(map(re.escape, ("train", *EVAL, *([given.lower()] if given else ()))))
    match = re.search(rf"(?:^|[-_./])({known})(?=[-_./]|$)", name.lower())
    return match[1] if match else None


def refuse_unstated(path: Path, names: Collection[str]) -> None:
    """Raises `DataError` for `names`, if any, of files or folders beside one of "train" that state
    no split."""
    if names:
        raise DataError("split-unstated", path=path, names=sorted(names))


def evaluated(
    there: Collection[str], given: str | None, path: Any
) -> tuple[dict[str, str], list[Fact]]:
    """The splits of `there` that are packed, name to "train" or "eval", and what a report says.

    *Arguments:* `given`: the split to evaluate on, if the user names one.

    Raises `DataError` if it is not there, and for several without a name.
    """
    others = [name for name in EVAL if name in there] or sorted({*there} - {"train"})
    if given is None and len(others) > 1:
        raise DataError("splits-several", path=path, splits=others, first=others[0])
    if given is not None and (given == "train" or given not in there):
        raise DataError("split-unknown", path=path, split=given, splits=sorted(there))
    roles = {name: name for name in there if name == "train"}
    if (name := given or next(iter(others), None)) is None:
        return roles, []
    told = [fact("split-read", split=name)] if name != "eval" else []
    if left := sorted({*there} - {"train", name}):
        told.append(fact("splits-left", splits=left))
    return roles | {name: "eval"}, told
