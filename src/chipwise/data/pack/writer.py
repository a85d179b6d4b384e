"""Writes a split of a pack shard by shard. Incomplete shards are written again.

`progress.json` is replaced when a shard is complete, and has everything that the manifest will say
about the shards so far. The next `Writer` on the folder resumes after the last one. The result
has the same bytes whatever the kills and however records were divided over calls.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...base import DataError
from ...base.annotations import as_annotated
from ...base.files import (
    MOST_BYTES,
    check_inside,
    fsync_folder,
    put_inside,
    read_inside,
    remove_temporaries,
)
from ...base.json_types import json_object
from ...base.locks import replaced
from ...recipe.source import narrow
from ..images import decode
from ..manifest import FORMAT, MANIFEST, RECORD, VERSION, record_dtype, render
from ..packed import check_below
from ..sources import Columns
from .shards import Moments, NpyFile, added, record_lines

SHARD_BYTES = 1 << 30  # ImageNet at 256×256 is 252 GB: hundreds of files, not thousands
PROGRESS = "progress.json"
_SHARD_FILE = re.compile(r".+-\d{5,}\.npy")
_LEAST_ROOM = 100e6  # bytes asked for on a full disk


@dataclass
class _Progress:
    """The content of `progress.json`: the complete shards, and the entries up to their end."""

    identity: str
    """The digest, as in `Writer`."""
    shards: list[dict[str, Any]] = field(default_factory=list)
    """The complete shards, as in the manifest."""
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The columns, as in the manifest."""
    counts: list[int] = field(default_factory=list)
    """The examples of each class."""
    moments: Moments = field(default_factory=Moments)
    """The sums over the pixels."""
    skipped: list[dict[str, str]] = field(default_factory=list)
    """The skipped entries as `{"name", "reason"}`."""

    @property
    def examples(self) -> int:
        return sum(shard["examples"] for shard in self.shards)


@as_annotated
class Writer:
    """Appends records to a split of a pack. `docs/format.md` describes the folder.

    *Arguments:*

    - `folder`: the split's temporary folder. The caller renames the whole pack at the end.
    - `store`: `"raw"`, or `"jpeg"` for a column `image` of encoded images.
    - `names`: the classes.
    - `below`: column of integers to their exclusive upper bound.
    - `settings`: stored in the manifest.
    - `read`: the facts on how the source was read, also stored. Their wording is no setting.
    - `splits`: the splits of the pack, so that a missing one is noticed.
    - `identity`: a digest of the source and the settings. A folder with the same identity is
      resumed.
    - `name_bytes`: the length of the longest record name in UTF-8.
    - `shard_bytes`, `shard_examples`: the most bytes and the most records in a shard.
    - `total`: expected records, for the message about a full disk.
    - `check`: called before anything gets its name. Raises an error if the folder was moved.

    *Attributes:* `complete`: whether the split was already finished.

    Only one writer may use a folder at a time, which `Packing` ensures. Raises `DataError` for a
    folder of another identity, columns that change, values out of range, and a full disk. After an
    error only `close` may be called. Complete shards remain.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        store: str,
        names: Sequence[str] = (),
        below: Mapping[str, int] | None = None,
        settings: Mapping[str, Any] | None = None,
        read: Sequence[Mapping[str, Any]] = (),
        identity: str,
        name_bytes: int,
        shard_bytes: int = SHARD_BYTES,
        shard_examples: int | None = None,
        total: int | None = None,
        splits: Sequence[str] = (),
        check: Callable[[], None] = lambda: None,
    ):
        self.folder = Path(folder)
        self.store = store
        self.names = tuple(names)
        self.below = dict(below or {})
        self.settings = dict(settings or {})
        self.read = list(read)
        self.splits = tuple(splits)
        self.shard_bytes = shard_bytes
        self.total = total
        self._check_place = check
        self.shard_examples = shard_examples or sys.maxsize
        self.complete = False
        self._line = record_dtype(store, name_bytes)
        self._progress = _Progress(identity)
        self._files: dict[str, NpyFile] = {}  # of the open shard
        self._rows = self._bytes = 0  # of its records
        with self._reporting():
            self._open()

    @property
    def written(self) -> int:
        """The number of records so far, including the open shard."""
        return self._progress.examples + self._rows

    @property
    def skipped(self) -> list[dict[str, str]]:
        """The entries skipped so far, as `{"name", "reason"}`."""
        return self._progress.skipped

    @property
    def consumed(self) -> int:
        """The number of entries written or skipped. The caller resumes there."""
        return self.written + len(self.skipped)

    def add(
        self,
        names: Sequence[str],
        columns: Mapping[str, Any],
        pixels: Sequence[np.ndarray] | None = None,
    ) -> None:
        """Adds records.

        *Arguments:* `names` `(n,)`: their origins. `columns`: column to `(n, ...)`, and for the
        store `"jpeg"` `image` to `n` encoded images. `pixels`: the decoded images, `(h, w, 3)`
        uint8 each, if available.
        """
        ends = shapes = None
        rows: Columns = {}
        for column, values in columns.items():
            if column == RECORD or not column.isidentifier():
                wrong = "A column cannot be named '{column}': give it another name, such as 'x'."
                raise DataError("pack-column-name", wrong, column=column)
            if column == "image" and self.store == "jpeg":
                pixels = [decode(data) for data in values] if pixels is None else pixels
                shapes = [list(image.shape) for image in pixels]
                ends = np.cumsum([len(data) for data in values])
                rows[column] = np.frombuffer(b"".join(values), np.uint8)
            else:
                rows[column] = np.ascontiguousarray(narrow(column, values))
        self._check(rows, len(names), shapes)
        if not len(names):
            return
        lines = record_lines(self._line, names, rows, ends)
        fixed = sum(
            values[:1].nbytes for name, values in rows.items() if ends is None or name != "image"
        )
        upto = np.arange(1, len(lines) + 1) * fixed + (0 if ends is None else ends)
        start = before = 0
        with self._reporting():
            while start < len(lines):
                room = self.shard_bytes - self._bytes
                stop = int(np.searchsorted(upto, before + room, side="right"))
                stop = min(stop, start + self.shard_examples - self._rows)
                if not self._rows:
                    stop = max(stop, start + 1)  # a record larger than a shard is a shard alone
                if stop == start:
                    self._close_shard()
                    continue
                part = {name: values[start:stop] for name, values in rows.items()}
                if ends is not None:
                    begin = int(ends[start - 1]) if start else 0
                    part["image"] = rows["image"][begin : int(ends[stop - 1])]
                    offset = self._files["image"].items if self._files else 0
                    lines["end"][start:stop] = ends[start:stop] - begin + offset
                self._count(part, pixels[start:stop] if pixels is not None else ())
                self._append({**part, RECORD: lines[start:stop]})
                self._rows += stop - start
                self._bytes += int(upto[stop - 1]) - before
                start = stop
                before = int(upto[stop - 1])

    def skip(self, name: str, reason: str) -> None:
        """Records an entry that is not packed, with the reason."""
        self.skipped.append({"name": name, "reason": reason})

    def finish(self, source: Mapping[str, Any]) -> None:
        """Completes the split: the last shard, and the manifest.

        `source`: `fingerprint` and `examples` of the source. Skipped entries are added here. Raises
        `DataError` if nothing was written, and for a manifest that no reader would take. Does
        nothing for a split that was already complete.
        """
        if self.complete:
            return
        if not self.written and self.skipped:
            wrong = "All {count:,} entries were skipped, the first is {name:plain}: {reason}"
            raise DataError("pack-nothing-left", wrong, count=len(self.skipped), **self.skipped[0])
        if not self.written:
            raise DataError(
                "pack-nothing", "There is nothing to pack: expected at least one example."
            )
        with self._reporting():
            self._close_shard()
            self._check_place()
            manifest = render(self._manifest(source)).encode()
            if len(manifest) > MOST_BYTES:
                raise DataError(
                    "pack-manifest-large",
                    folder=self.folder,
                    bytes=len(manifest),
                    most=MOST_BYTES,
                    names=len(self.names),
                )
            put_inside(self.folder / MANIFEST, manifest)
            (self.folder / PROGRESS).unlink()
            fsync_folder(self.folder)
        self.complete = True
        self.close()

    def close(self) -> None:
        """Closes the open shard. Complete ones stay, and the next `Writer` resumes after them."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        check_inside(self.folder)
        remove_temporaries(self.folder, PROGRESS, MANIFEST, alone=True)
        progress = _read(self.folder / PROGRESS)
        manifest = _read(self.folder / MANIFEST)
        begun = progress or manifest
        if begun is None:
            if others := os.listdir(self.folder):
                raise DataError("pack-folder-not-empty", folder=self.folder, name=others[0])
            self._save()  # now the folder is marked as ours
            return
        if begun.get("identity") != self._progress.identity:
            raise DataError("pack-other-settings", folder=self.folder)
        if progress is None:
            self._progress.shards = begun["shards"]
            self._progress.skipped = begun["source"]["skipped"]
            self.complete = True
            return
        try:
            self._progress = _Progress(**progress | {"moments": Moments(**progress["moments"])})
            whole = {
                file["name"] for shard in self._progress.shards for file in shard["files"].values()
            }
        except (KeyError, TypeError) as error:
            raise _damaged(self.folder / PROGRESS) from error
        for path in self.folder.iterdir():
            if _SHARD_FILE.fullmatch(path.name) and path.name not in whole:
                path.unlink()

    def _check(self, rows: Columns, n: int, shapes: list[list[int]] | None) -> None:
        """Raises `DataError` unless the records have the earlier columns and their values are in
        range."""
        columns: dict[str, dict[str, Any]] = {}
        for name, values in rows.items():
            columns[name] = {"dtype": values.dtype.name, "shape": list(values.shape[1:])}
            if name in self.below:
                columns[name]["below"] = self.below[name]
        known = self._progress.columns
        if shapes is not None:  # images may differ in size; the manifest then has no shape
            shapes += [known["image"]["shape"]] if "image" in known else []
            columns["image"]["shape"] = (
                shapes[0] if all(shape == shapes[0] for shape in shapes) else None
            )
        expected = list(known or [*columns, *(name for name in self.below if name not in columns)])
        if list(columns) != expected:
            raise DataError(
                "pack-columns", columns=list(columns), expected=expected, after=self.written
            )
        for name, column in columns.items():
            image = shapes is not None and name == "image"
            if not image and len(rows[name]) != n:
                wrong = "Column '{column}' has {rows:count row}, expected {expected}."
                raise DataError(
                    "pack-column-length", wrong, column=name, rows=len(rows[name]), expected=n
                )
            if known and not image and column != known[name]:
                raise DataError(
                    "pack-column-changed",
                    column=name,
                    after=self.written,
                    dtype=column["dtype"],
                    shape=column["shape"],
                    expected_dtype=known[name]["dtype"],
                    expected_shape=known[name]["shape"],
                )
        check_below(rows, self.below, "Packing:", np.arange(self.written, self.written + n))
        self._progress.columns = columns

    def _count(self, rows: Columns, pixels: Sequence[np.ndarray]) -> None:
        """Adds records to the examples of each class and to the sums over pixels."""
        label = rows.get("label")
        image = rows.get("image")
        counts: list[int] = []
        if label is not None and label.ndim == 2 and self.names:
            counts = label.sum(axis=0, dtype=np.int64).tolist()
        elif label is not None and label.ndim == 1 and "label" in self.below:
            counts = np.bincount(label, minlength=self.below["label"]).tolist()
        progress = self._progress
        progress.counts = added(progress.counts, counts)
        if self.store == "jpeg":
            progress.moments.add(np.concatenate([np.ravel(decoded) for decoded in pixels]), 3)
        elif image is not None and image.dtype == np.uint8 and image.ndim in (3, 4):
            progress.moments.add(image, image.shape[3] if image.ndim == 4 else 1)

    def _append(self, blocks: Columns) -> None:
        for name, block in blocks.items():
            if name not in self._files:
                path = self.folder / f"{name}-{len(self._progress.shards):05}.npy"
                self._files[name] = NpyFile(path, block.dtype, block.shape[1:])
            self._files[name].write(block)

    def _close_shard(self) -> None:
        """Completes the open shard, if any: headers, and SHA-256 of the files."""
        if not self._files:
            return
        files = {name: file.finish() for name, file in self._files.items()}
        self._progress.shards.append({"examples": self._rows, "files": files})
        self._files.clear()
        self._rows = self._bytes = 0
        self._save()

    def _save(self) -> None:
        self._check_place()
        put_inside(self.folder / PROGRESS, json.dumps(asdict(self._progress)).encode())

    def _manifest(self, source: Mapping[str, Any]) -> dict[str, Any]:
        progress = self._progress
        moments = self._progress.moments
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "identity": progress.identity,
            "splits": list(self.splits),
            "examples": self.written,
            "store": self.store,
            "columns": progress.columns,
            "names": list(self.names),
            "counts": progress.counts,
        }
        if moments.count:
            manifest |= {"mean": moments.mean, "std": moments.std}
        return manifest | {
            "source": {**source, "skipped": progress.skipped},
            "settings": self.settings,
            "read": self.read,
            "record": np.lib.format.dtype_to_descr(self._line),
            "shards": progress.shards,
        }

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """A context that turns errors of the system into a `DataError` with advice."""
        try:
            yield
        except OSError as error:
            kept = self._progress.examples
            written = self.written
            nbytes = self._bytes + sum(
                f["bytes"] for s in self._progress.shards for f in s["files"].values()
            )
            self.close()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise DataError(
                    "pack-write", folder=self.folder, kept=kept, reason=error
                ) from error
            left = (self.total - written) * nbytes / written if self.total and written else 0
            raise DataError(
                "pack-disk-full",
                folder=self.folder,
                kept=kept,
                needed=max(left, _LEAST_ROOM),
            ) from error


@as_annotated
def write_packed(
    path: str | Path,
    batches: Iterable[Mapping[str, Any]],
    *,
    classes: int | None = None,
    names: Sequence[str] = (),
    below: Mapping[str, int] | None = None,
    split: str | None = "train",
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes batches from a program as a split of a packed folder, and returns the split's path.

    *Arguments:*

    - `batches`: dicts of columns `(n, ...)`, equal except for `n`, written in order.
    - `classes`: the column `label` is in `[0, classes)`, with the names `names`.
    - `below`: the same for other integer columns, such as `{"token": 50257}`.
    - `shard_bytes`: the most bytes of the examples in a shard.

    The folder appears when it is complete. Raises `DataError` if it exists, for no examples,
    columns that change, values out of range and a full disk. After an error nothing is left behind.
    """
    folder = Path(path).expanduser() / (split or "")
    if folder.exists():
        raise DataError("pack-exists", folder=folder)
    limits = {**(below or {}), **({"label": classes} if classes is not None else {})}
    try:
        # Records of a program have no names, and the pack cannot be resumed
        with replaced(folder, fresh=False) as whole:
            writer = Writer(
                whole,
                store="raw",
                identity="",
                name_bytes=1,
                names=names,
                below=limits,
                shard_bytes=shard_bytes,
            )
            with closing(writer):
                for batch in batches:
                    writer.add([""] * len(next(iter(batch.values()), ())), batch)
                writer.finish({"fingerprint": None, "examples": writer.consumed})
    except FileExistsError as error:  # another process has made it meanwhile
        raise DataError("pack-exists", folder=folder) from error
    except (DataError, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        raise DataError("pack-unwritable", path=folder, reason=cause) from cause
    return folder


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json_object(read_inside(path, 1 << 33))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damaged(path) from error


def _damaged(path: Path) -> DataError:
    wrong = "{path} is damaged: move {folder} away and pack again."
    return DataError("pack-progress-damaged", wrong, path=path, folder=path.parent)
