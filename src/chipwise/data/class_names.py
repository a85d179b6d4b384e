"""The names of classes, and data whose labels are joined to those of other data by these names.

A label is a number, and each source counts its own classes. The folder `dog` may be class 1 of the
training data and class 0 of the data to evaluate. So a second source is read through a table from
its numbers to those of the first. Where one of the two states no names, its numbers stay.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..base import DataError, Fact, RecipeError, fact
from ..base.annotations import as_annotated
from ..recipe.source import Columns, Spec, kind_of, read_example, spec_of
from .draws import Wrapped
from .sources import check_labels, empty, fill, has


@as_annotated
class Renamed(Wrapped):
    """A source whose classes are called `names`, in the order of their numbers.

        test = cw.data.Renamed(cw.Arrays(image=x, label=y), ("cat", "dog"))

    By these names its labels are joined to those of other data, as an evaluation's to those of the
    training. `()` states no names, so that the numbers count.

    *Attributes:* `own`: if the source is joined to other data, its own names, in the order of its
    numbers. `names` are then those of the other data, and `numbers` `(len(own),)` the other's
    numbers of them.
    """

    own: tuple[str, ...] = ()
    numbers: np.ndarray | None = None

    def __init__(self, source: Any, names: Sequence[str]):
        super().__init__(source)
        self.names = tuple(names)
        self.classes = len(self.names) or None
        if has(source, "fill"):  # or it is not called by several threads
            self.fill = self._fill
        for name in ("prefetch", "record_name", "below"):
            if has(source, name):
                setattr(self, name, getattr(source, name))

    @property
    def spec(self) -> Spec:
        spec = super().spec
        if (own := spec.get("label")) is not None:
            made = self.join(np.zeros((1, *own.shape), own.dtype))
            spec["label"] = jax.ShapeDtypeStruct(made.shape[1:], made.dtype)
        return spec

    def __getitem__(self, index: int) -> Columns:
        example = self.source[index]
        if self.numbers is None:
            return example
        columns = read_example(example, index)  # without `spec`, which may read and draw
        if (own := columns.get("label")) is not None:
            columns["label"] = self.join(own[None], np.asarray([index]))[0]
        return columns

    def _fill(self, indices: np.ndarray, out: Columns) -> None:
        own = {name: s for name, s in spec_of(self.source).items() if name == "label"}
        labels = empty(own, len(indices))
        fill(self.source, indices, out | labels)
        for name, column in labels.items():
            out[name][...] = self.join(column, indices)

    def join(self, labels: np.ndarray, indices: np.ndarray | None = None) -> np.ndarray:
        """A column of the source's labels `(n, ...)` in the numbers of `names`. `indices` `(n,)`
        are the numbers of the examples, for errors.

        Vectors `(n, classes)`, one value for each class, get 0 for those that the source lacks.
        Raises `DataError` for other labels that are no numbers of its classes.
        """
        if self.numbers is None:
            return labels
        if labels.shape[1:] == self.numbers.shape:
            out = np.zeros((len(labels), len(self.names)), labels.dtype)
            out[:, self.numbers] = labels
            return out
        check_labels({"label": labels}, len(self.own), called(self.source), indices)
        return self.numbers[labels]


def nfc(name: str) -> str:
    """A name in the one form of Unicode that all its spellings have: an é may be one character or
    two."""
    return unicodedata.normalize("NFC", name)


def called(source: Any) -> Any:
    """How messages call a source."""
    return getattr(source, "path", kind_of(source).__name__)


def names_of(source: Any) -> tuple[str, ...]:
    """The names of the classes of the column `label` that `source` states, or `()`. Reads no
    example.

    Sources of chipwise have `names`, PyTorch's a list `classes`, others `class_names`. Hugging
    Face's data sets have a column of `ClassLabel`.
    """
    if isinstance(source, Renamed):
        return source.names
    features = getattr(source, "features", None)
    count = getattr(source, "classes", 0)
    label = features.get("label") if isinstance(features, Mapping) else None
    names = getattr(source, "names", None)
    # Only beside a number of classes: those of another object may be its files
    stated = [names] if isinstance(names, tuple) and count in (None, len(names)) else []
    for names in [*stated, getattr(label, "names", None), getattr(source, "class_names", 0), count]:
        if isinstance(names, list | tuple) and names and all(type(name) is str for name in names):
            return tuple(names)
    if isinstance(source, Wrapped):
        return names_of(source.source)
    return names_of(source.dataset) if type(source).__name__ == "Subset" else ()


def names_in(task: Any) -> tuple[str, ...]:
    """The names of the classes of a task: those of its training data, else `Task.class_names`.

    Raises `RecipeError` if both have a name, each as another class.
    """
    own, given = names_of(task.train), task.class_names
    place, other = (_first(names) for names in (own, given))
    if wrong := [name for name, i in place.items() if other.get(name, i) != i]:
        raise RecipeError("class-names-contradict", classes=wrong, class_names=given, training=own)
    return own or given


def _first(names: Sequence[str]) -> dict[str, int]:
    number: dict[str, int] = {}
    for i, name in enumerate(names):
        number.setdefault(nfc(name), i)
    return number


def joined(names: tuple[str, ...], source: Any) -> Any:
    """`source` with labels in the numbers of the classes `names` of other data.

    Returns `source` itself if its classes are the same, or if one of the two has no names. Raises
    `DataError` as `numbers_of` does.
    """
    source = source.source if isinstance(source, Renamed) and source.own else source
    own = names_of(source)
    if not names or own in ((), names):
        return source
    made = Renamed(source, names)
    made.own = own
    made.numbers = numbers_of(names, own, called(source))
    return made


def numbers_of(names: Sequence[str], own: Sequence[str], data: Any) -> np.ndarray:
    """The numbers among `names` of the classes `own` of `data`, `(len(own),)`. Raises `DataError`
    for a class that is not there once."""
    known = [nfc(name) for name in names]
    times = Counter(known)
    number = {name: i for i, name in enumerate(known)}
    if wrong := [name for name in own if times[nfc(name)] != 1]:
        raise DataError("classes-unjoined", data=data, classes=wrong, training=names)
    return np.asarray([number[nfc(name)] for name in own], np.int32)


def alike(names: Sequence[str]) -> list[Fact]:
    """The facts that a report begins with about names that a person may read as one."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(" ".join(nfc(name).casefold().split()), []).append(name)
    return [fact("classes-alike", names=some) for some in groups.values() if len(some) > 1]


def unjoined(
    known: Sequence[str], own: Sequence[str], given: Sequence[str], split: str
) -> Fact | None:
    """The fact that a report has if only one of two splits states the names of its classes, and
    the user has given none. *Arguments:* `known`: the names of the splits before `split`. `own`:
    its own."""
    if given or split == "train" or bool(known) == bool(own):
        return None
    return _by_number(split if known else "train", known or own)


def _by_number(side: str, names: Sequence[str]) -> Fact:
    """The fact that one side, which states no names, is taken by the numbers of the other's."""
    numbers = [f"{name}={i}" for i, name in enumerate(names)]
    return fact("labels-by-number", side=side, numbers=numbers)


def told(task: Any, source: Any = None) -> Fact | None:
    """The fact that a report begins with about data that is joined by names, or that could not be,
    since only one side states them. *Arguments:* `source`: by default the task's evaluation
    data."""
    side = "eval" if source is None else called(source)
    source = task.eval if source is None else source
    if source is None:
        return None
    if not isinstance(source, Renamed) or not source.own:
        own, known = names_of(source), names_of(task.train)
        side = side if known and not own else "train" if own and not names_in(task) else None
        if side is None or "label" not in spec_of(source):
            return None
        return _by_number(side, known or own)
    lacking = sorted(set(source.names) - set(source.own))
    code = "labels-joined" if lacking else "labels-joined-all"
    return fact(code, data=called(source.source), own=source.own, lacking=lacking)
