"""How far the processes of a run compare its data: digests of its parts, which the run records.

    compared(source).text    "files:91c4... sizes:5e0a... contents/2048:77d1..."

Some parts are cheap to compare for all examples: arrays, names and sizes of files, labels that a
source knows, and its own `digest`. Of the rest, some examples are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..base import DataError, Fact, fact
from ..recipe.source import as_columns, kind_of, narrow
from ..recipe.task import Task
from .cached import Cached, steady
from .class_names import Renamed
from .draws import Drawn
from .order import spread
from .sources import (
    Arrays,
    Columns,
    Lazy,
    columns_digest,
    example_bytes,
    has,
    materialize,
    nbytes,
    spec_of,
    take,
)
from .windows import Windows

_WHOLE_BYTES = 4 << 30  # of arrays, which are hashed at a gigabyte a second
_READ, _READ_BYTES, _SECONDS = 1 << 14, 64 << 20, 1.0  # of examples that are not in memory, at most
_FIRST_PORTION = 8
_GROWTH = 4


Parts = dict[str, str]
"""Part to digest. A name such as `contents/2048` has the number of examples, so that it is compared
only with a digest of the same number."""


@dataclass(frozen=True)
class Compared:
    """How far a source is compared."""

    parts: Parts
    read: int
    """The number of examples whose contents are in `parts`."""
    examples: int
    """The number of all examples."""
    source: str = ""
    """The kind of the source, or ""."""

    @property
    def text(self) -> str:
        """The parts as text, as a run records them."""
        return " ".join(map(":".join, self.parts.items()))

    @property
    def whole(self) -> bool:
        """Whether no example can change unseen."""
        return self.read >= self.examples

    def told(self, name: str) -> Fact | None:
        """The fact that a run reports about its `name` data at its start. `None` if all of the data
        is compared."""
        if self.whole:
            return None
        of_all = [part for part in self.parts if not part.rpartition("/")[2].isdigit()]
        code = "data-compared" if of_all else "data-sampled" if self.read else "data-uncompared"
        return fact(
            code, name=name, what=of_all, read=self.read, examples=self.examples, source=self.source
        )


Data = dict[str, Compared]
"""Name ("training" or "evaluation") to how far that data is compared."""


def compared_data(task: Task) -> Data:
    """How far the training and evaluation data of `task` is compared. See `compared`."""
    return {"training": compared(task.train), "evaluation": compared(task.eval)}


def texts(data: Data) -> dict[str, str | None]:
    """The texts that a run records for `data`, by name. `None` for data without parts."""
    return {name: one.text or None for name, one in data.items()}


def changed_data(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yields the name of each data whose texts in `before` and `now` differ, and the parts that
    differ. A part that only one of them has is not compared."""
    for name, text in now.items():
        old = _parts(before.get(name))
        new = _parts(text)
        parts = [part.partition("/")[0] for part in new if old.get(part, new[part]) != new[part]]
        if parts:
            yield name, list(dict.fromkeys(parts))  # portions have one name


def uncompared(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yields the name of each data with parts that only one of `before` and `now` has, and the
    parts."""
    for name in now:
        if parts := sorted(_parts(before.get(name)).keys() ^ _parts(now[name]).keys()):
            yield f"{name} data ({', '.join(parts)})"


def _parts(text: str | None) -> Parts:
    return {
        name: digest for name, _, digest in (part.rpartition(":") for part in (text or "").split())
    }


def compared(source: Any) -> Compared:
    """How far `source` is compared. `None` is no data. Reads some of it in this thread, so nothing
    else may read it at the same time.

    Raises `DataError` for a `digest` that is neither a string nor bytes.
    """
    if source is None:
        return Compared({}, 0, 0)
    source = source.source if isinstance(source, Cached) else source
    if isinstance(source, Renamed):
        inner = compared(source.source)
        names = repr((source.names, source.own))
        return replace(inner, parts={**inner.parts, "names": sha_of_all([names])})
    if has(source, "compared"):
        return source.compared()
    n = len(source)
    kind = kind_of(source).__name__
    if (columns := _arrays(source)) is not None:
        return Compared({"examples": columns_digest(columns)}, n, n)
    parts = _labels(source)
    stated = getattr(source, "digest", None)
    if (stated := stated() if callable(stated) else stated) is not None:
        if not isinstance(stated, str | bytes):
            raise DataError("source-digest", source=kind, kind=type(stated).__name__)
        return Compared({**parts, "digest": sha_of_all([stated])}, n, n)
    read, made = _read(source)
    return Compared(made | parts, read, n, kind)


def sha_of_all(values: Iterable[str | bytes]) -> str:
    """SHA-256 of strings or bytes, one after another, each with its length."""
    digest = hashlib.sha256()
    for value in values:
        data = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()


def of_portions(
    n: int, example_bytes: float, digests: Callable[[np.ndarray], Parts]
) -> tuple[int, Parts]:
    """Digests of some of `n` examples, in portions of growing size, for about a second at most. A
    slow disk reads fewer portions. Two results are compared by the portions that both have.

    *Arguments:* `digests`: a function of indices that returns name to digest of those examples.
    *Returns* how many examples were read, and `name/count` to the digest of the first `count`.
    """
    most = min(_READ, max(1, int(_READ_BYTES / example_bytes)))
    order = np.random.default_rng(0).permutation(spread(n, most))  # so that each portion is spread
    began = time.monotonic()
    read = 0
    end = _FIRST_PORTION
    parts: Parts = {}
    chained: Parts = {}
    while read < len(order) and (not read or time.monotonic() - began < _SECONDS / _GROWTH):
        portion = digests(order[read:end])
        read = min(end, len(order))
        end = _GROWTH * end
        chained = {
            name: sha_of_all([chained.get(name, ""), digest]) for name, digest in portion.items()
        }
        parts |= {f"{name}/{read}": digest for name, digest in chained.items()}
    return read, parts


def _arrays(source: Any) -> Columns | None:
    """All columns of a source that is arrays in memory, unless they are too large to hash. Windows
    are the array that they are cut from."""
    if isinstance(source, Arrays | Lazy):
        return materialize(source) if nbytes(source) <= _WHOLE_BYTES else None
    if isinstance(source, Windows) and source.series.nbytes <= _WHOLE_BYTES:
        return {"series": source.series, "where": np.asarray(source.where)}
    if _of_torch(source) == "TensorDataset" and nbytes(source) <= _WHOLE_BYTES:
        return as_columns(dict(enumerate(source.tensors)), 0)
    return None


def _of_torch(source: Any) -> str | None:
    """The name of the source's class if it is PyTorch's own, else `None`."""
    kind = type(source)
    return kind.__name__ if kind.__module__ == "torch.utils.data.dataset" else None


def _labels(source: Any) -> Parts:
    """The digest of the labels of all examples, if the source knows them without reading an
    example."""
    with contextlib.suppress(Exception):  # attributes of these names may be anything
        labels = narrow("label", _known_labels(source))
        if len(labels) == len(source):
            return {"labels": columns_digest({"label": labels})}
    return {}


def _known_labels(source: Any) -> Any:
    if isinstance(source, Arrays | Lazy):
        return source.columns["label"]
    if _of_torch(source) == "Subset":
        return np.asarray(_known_labels(source.dataset))[np.asarray(source.indices)]
    if _of_torch(source) == "ConcatDataset":
        return np.concatenate([_known_labels(part) for part in source.datasets])
    if type(source).__module__.startswith("datasets."):  # Hugging Face's
        return source.with_format("numpy", columns=["label"])[:]["label"]
    labels = getattr(source, "labels", None)
    return source.targets if labels is None else labels  # as torchvision's data sets call them


def _read(source: Any) -> tuple[int, Parts]:
    """The number of examples that were read, and digests of their labels and of the rest. Code in
    `[i]` draws as in an evaluation."""

    def digests(rows: np.ndarray) -> Parts:
        columns = take(reader, rows)
        labels = {"label": columns.pop("label")} if "label" in columns else {}
        return {"labels": columns_digest(labels), "examples": columns_digest(columns)}

    try:
        reader = steady(source)
        if isinstance(reader, Drawn):
            reader.check()
        return of_portions(len(source), example_bytes(spec_of(source)), digests)
    except Exception:  # it draws without a key, or cannot be read, which training says better
        return 0, {}
