"""One split of a pack, written so that a kill at any moment costs seconds of work and not one byte.

Records are appended to `.npy` shards. Every 2 seconds or 64 MiB the files are synced, and `journal.json` says
how far each of them is good; the next `Writer` on the folder cuts them there and goes on. What comes out is
the same, byte for byte, whatever the kills and however the records were cut into calls.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from ...errors import DataError
from ...words.figures import byte_size
from ..images import decode
from ..manifest import FORMAT, MANIFEST, RECORD, VERSION, record_dtype, render
from ..packed import check_below
from ..sources import Columns, narrow
from .moments import Moments
from .shards import Shards

SHARD_BYTES = 1 << 30  # ImageNet at 256×256 is 252 GB: hundreds of files, not thousands
JOURNAL = "journal.json"
_COMMIT_BYTES, _COMMIT_SECONDS = 64 << 20, 2.0
_LEAST_ROOM = 100e6  # what is asked for on a full disk
_BLOCK_BYTES, _BLOCK_RECORDS = 2 << 20, 1024  # records that come one by one are written in blocks


class Writer:
    """Appends records to one split of a pack; `docs/format.md` says what is in the folder.

    *Arguments:*

    - `folder`: the split's folder while it is being made; who calls renames the whole pack at the end.
    - `store`: `"raw"`, or `"jpeg"` for a column `image` of encoded images.
    - `names`: the classes; `below`: column of whole numbers to the number that they stay below.
    - `settings`: kept in the manifest as they are; `splits`: of the pack, so that a missing one is noticed.
    - `identity`: a digest of what is packed and how. A folder of the same identity is gone on with.
    - `name_bytes`: of the longest record's name in UTF-8; `shard_bytes`: of the records in a shard.
    - `total`: records expected, for the message that the disk is full.

    *Attributes:* `written`, records so far; `skipped`, the entries left out as `{"name", "reason"}`;
    `complete`, whether the split was finished before and needs nothing more.

    Raises `DataError` for a folder in use or of another identity, columns that change, values out of
    range, and a disk that is full. After an error only `close` may follow; what is committed stays.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        store: str,
        names: Sequence[str] = (),
        below: Mapping[str, int] | None = None,
        settings: Mapping[str, Any] | None = None,
        identity: str,
        name_bytes: int,
        shard_bytes: int = SHARD_BYTES,
        total: int | None = None,
        splits: Sequence[str] = (),
    ):
        self.folder, self.store, self.names = Path(folder), store, tuple(names)
        self.below, self.settings = dict(below or {}), dict(settings or {})
        self.identity, self.total, self.splits = identity, total, tuple(splits)
        self.written = 0
        self.skipped: list[dict[str, str]] = []
        self.complete = False
        self._record = record_dtype(store, name_bytes)
        self._columns: dict[str, dict[str, Any]] = {}  # as in the manifest
        self._counts: list[int] = []
        self._moments = Moments()
        self._shards = Shards(self.folder, shard_bytes)
        self._pending: list[tuple[str, Mapping[str, Any], np.ndarray | None]] = []
        self._pending_bytes = self._unsaved_bytes = self._saved = 0
        self._lock: int | None = None
        try:
            with self._reporting():
                self._open()
        except BaseException:
            self.close()
            raise

    @property
    def consumed(self) -> int:
        """Entries of the listing that are settled, written or skipped: the caller goes on from there."""
        return self.written + len(self.skipped)

    def add(
        self, name: str, columns: Mapping[str, np.ndarray | bytes], pixels: np.ndarray | None = None
    ) -> None:
        """Adds one record.

        *Arguments:* `name`: where it came from; `columns`: column to an array or number, and for the
        store `"jpeg"` `image` to encoded bytes; `pixels` `(h, w, 3)` uint8: these bytes decoded, if at hand.
        """
        image = columns.get("image")
        if isinstance(image, bytes) and pixels is None:
            pixels = decode(image)
        self._pending.append((name, columns, pixels))
        self._pending_bytes += len(image) if isinstance(image, bytes) else getattr(image, "nbytes", 0)
        self._pending_bytes += 0 if pixels is None else pixels.nbytes
        self.written += 1
        full = self._pending_bytes >= _BLOCK_BYTES or len(self._pending) >= _BLOCK_RECORDS
        if full or self._late():
            with self._reporting():
                self._flush()
                self._save_if_due()

    def add_batch(self, names: Sequence[str], columns: Mapping[str, np.ndarray]) -> None:
        """Adds records of a raw pack: `names` `(n,)`, and column to `(n, ...)`."""
        with self._reporting():
            self._flush()
            self._put(names, columns)
            self.written += len(names)
            self._save_if_due()

    def skip(self, name: str, reason: str) -> None:
        """Settles an entry of the listing that is not packed, and says why."""
        self.skipped.append({"name": name, "reason": reason})
        if self._late():
            self.commit()

    def commit(self) -> None:
        """Makes everything so far survive a kill: the files are synced, and the journal says so."""
        with self._reporting():
            self._flush()
            self._save()

    def finish(self, source: Mapping[str, Any]) -> None:
        """Completes the split: the last shard's headers and checksums, and the manifest.

        `source`: `fingerprint` and `examples` of what was packed; what was skipped is added here. Raises
        `DataError` when nothing was written. Does nothing for a split that was complete before.
        """
        if self.complete:
            return
        with self._reporting():
            self._flush()
            if not self.written:
                raise DataError(
                    f"There is nothing to pack: expected at least one example, got {self._none()}."
                )
            self._shards.close_shard()
            self._save()
            _replace(self.folder / MANIFEST, render(self._manifest(source)))
            (self.folder / JOURNAL).unlink()
            _sync(self.folder)
        self.complete = True
        self.close()

    def close(self) -> None:
        """Lets go of the folder. What is committed stays, and the next `Writer` goes on from there."""
        self._shards.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"{self.folder} is being written by another process: wait for its end."
            ) from error
        journal, manifest = _read(self.folder / JOURNAL), _read(self.folder / MANIFEST)
        found = journal or manifest
        if found is None:
            self._begin()
        elif found.get("identity") != self.identity:
            raise DataError(
                f"{self.folder} was begun from another source or with other settings: give the same ones to "
                f"go on with it, or remove it (rm -r {self.folder}) to begin anew."
            )
        elif journal is None:
            assert manifest is not None
            self.written, self.skipped = manifest["examples"], manifest["source"]["skipped"]
            self.complete = True
            self.close()
        else:
            self._go_on(journal)
        self._saved, self._saved_at = self.written, time.monotonic()

    def _go_on(self, journal: dict[str, Any]) -> None:
        try:
            self._columns, self._counts = journal["columns"], journal["counts"]
            self._moments, self.skipped = Moments(**journal["moments"]), journal["skipped"]
            self._shards.restore(journal["shards"])
        except (KeyError, TypeError) as error:
            raise DataError(_damaged(self.folder / JOURNAL, error)) from error
        self.written = self._shards.written

    def _begin(self) -> None:
        for path in self.folder.iterdir():
            if path.name != f".{JOURNAL}.new":
                raise DataError(
                    f"{self.folder} holds other files ({path.name}): remove it, or pack elsewhere."
                )
        self._save()  # from here on the folder is known as ours

    def _late(self) -> bool:
        return time.monotonic() - self._saved_at > _COMMIT_SECONDS

    def _save_if_due(self) -> None:
        if self._unsaved_bytes >= _COMMIT_BYTES or self._late():
            self._save()

    def _save(self) -> None:
        self._shards.sync()
        journal = {
            "identity": self.identity,
            "columns": self._columns,
            "counts": self._counts,
            "moments": vars(self._moments),
            "skipped": self.skipped,
            "shards": self._shards.state,
        }
        _replace(self.folder / JOURNAL, json.dumps(journal))
        self._saved, self._saved_at, self._unsaved_bytes = self.written, time.monotonic(), 0

    def _flush(self) -> None:
        """Writes what `add` gathered as one block."""
        if not self._pending:
            return
        names, examples, pixels = zip(*self._pending, strict=True)
        self._pending, self._pending_bytes = [], 0
        if any(example.keys() != examples[0].keys() for example in examples):
            raise DataError(
                f"Records must be alike: {names[0]} to {names[-1]} have other columns than "
                f"{', '.join(examples[0])}."
            )
        columns: dict[str, Any] = {}
        for column in examples[0]:
            values = [example[column] for example in examples]
            if self._encoded(column):
                columns[column] = values
                continue
            arrays = [np.asarray(value) for value in values]
            kinds = {(array.dtype, array.shape) for array in arrays}
            if len(kinds) > 1:
                told = " and ".join(sorted(f"{dtype}{list(shape)}" for dtype, shape in kinds)[:2])
                raise DataError(f"Records must be alike: '{column}' is {told} in {names[0]} to {names[-1]}.")
            columns[column] = np.stack(arrays)
        self._put(names, columns, pixels)

    def _put(self, names: Sequence[str], columns: Mapping[str, Any], pixels: Sequence[Any] = ()) -> None:
        ends = None
        rows: Columns = {}
        for column, values in columns.items():
            if self._encoded(column):
                ends = np.cumsum([len(value) for value in values])
                rows[column] = np.frombuffer(b"".join(values), np.uint8)
            else:
                rows[column] = np.ascontiguousarray(narrow(column, values))
        self._check(rows, len(names), pixels)
        if len(names):
            self._count(rows, pixels)
            self._unsaved_bytes += self._shards.put(rows, self._table(names, rows, ends), ends)

    def _encoded(self, column: str) -> bool:
        return self.store == "jpeg" and column == "image"

    def _check(self, rows: Columns, n: int, pixels: Sequence[Any]) -> None:
        """Raises `DataError` unless the block is like those before and its numbers are in range."""
        first = self._shards.written
        found: dict[str, dict[str, Any]] = {}
        for column, values in rows.items():
            found[column] = {"dtype": values.dtype.name, "shape": list(values.shape[1:])}
            if column in self.below:
                found[column]["below"] = self.below[column]
            if self._encoded(column):  # images may differ in size, and then have none in the manifest
                shapes = [list(image.shape) for image in pixels]
                if column in self._columns:
                    shapes.append(self._columns[column]["shape"])
                found[column]["shape"] = shapes[0] if all(s == shapes[0] for s in shapes) else None
        known = dict(self._columns or found)
        if self._encoded("image") and "image" in found and "image" in known:
            known["image"] = found["image"]
        wrong = [column for column in rows if column == RECORD or not column.isidentifier()]
        if wrong:
            raise DataError(f"A column cannot be named '{wrong[0]}': give it another name, such as 'x'.")
        uneven = any(len(values) != n for column, values in rows.items() if not self._encoded(column))
        if uneven or found != known or list(found) != list(known) or not {*self.below} <= {*found}:
            raise DataError(
                f"Batch of {n} with {found} after {first} examples: expected {known}, of one length"
                f"{''.join(f', with {column}' for column in self.below if column not in found)}."
            )
        check_below(rows, self.below, "Packing:", np.arange(first, first + n))
        self._columns = found

    def _table(self, names: Sequence[str], rows: Columns, ends: np.ndarray | None) -> np.ndarray:
        """The block's lines of the record table, all but where images end in their shard."""
        table = np.zeros(len(names), self._record)
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        width = self._record["name"].itemsize
        if max(map(len, encoded)) > width:
            raise DataError(f"The name {max(names, key=len)[:200]!r} is longer than name_bytes={width}.")
        table["name"] = encoded
        sums = [0] * len(names)
        for column, values in rows.items():
            data, each = values.reshape(-1).view(np.uint8).data, values[:1].nbytes
            cuts = [0, *ends.tolist()] if ends is not None and self._encoded(column) else None
            for row, before in enumerate(sums):
                begin, end = (cuts[row], cuts[row + 1]) if cuts else (row * each, row * each + each)
                sums[row] = crc32(data[begin:end], before)
        table["crc32"] = sums
        return table

    def _count(self, rows: Columns, pixels: Sequence[Any]) -> None:
        label, image = rows.get("label"), rows.get("image")
        if label is not None and label.ndim == 2 and self.names:
            counts = label.sum(axis=0, dtype=np.int64).tolist()
        elif label is not None and label.ndim == 1 and "label" in self.below:
            counts = np.bincount(label, minlength=self.below["label"]).tolist()
        else:
            counts = []
        self._counts = [a + b for a, b in zip(self._counts or [0] * len(counts), counts, strict=True)]
        if self.store == "jpeg":
            self._moments.add(np.concatenate([np.ravel(decoded) for decoded in pixels]), 3)
        elif image is not None and image.dtype == np.uint8 and image.ndim in (3, 4):
            self._moments.add(image, image.shape[3] if image.ndim == 4 else 1)

    def _manifest(self, source: Mapping[str, Any]) -> dict[str, Any]:
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "identity": self.identity,
            "splits": list(self.splits),
            "examples": self.written,
            "store": self.store,
            "columns": self._columns,
            "names": list(self.names),
            "counts": self._counts,
        }
        if self._moments.count:
            manifest |= {"mean": self._moments.mean, "std": self._moments.std}
        return manifest | {
            "source": {**source, "skipped": self.skipped},
            "settings": self.settings,
            "record": np.lib.format.dtype_to_descr(self._record),
            "shards": self._shards.done,
        }

    def _none(self) -> str:
        if not self.skipped:
            return "none"
        first = self.skipped[0]
        return f"{len(self.skipped)} skipped, the first {first['name']} ({first['reason']})"

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """The system's errors as one line that says what to do."""
        try:
            yield
        except OSError as error:
            self.close()
            done = f"{self._saved:,}" + (f" of {self.total:,}" if self.total else "") + " records"
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise DataError(
                    f"Cannot write {self.folder} after {done} ({error.strerror or error}): correct that and "
                    f"run the same command again, it goes on from there."
                ) from error
            space = "space"
            if self.total and self._shards.written:
                need = (self.total - self._saved) * self._shards.bytes / self._shards.written
                space = byte_size(max(need, _LEAST_ROOM))
            raise DataError(
                f"{self.folder}: disk full after {done}: make {space} free and run the same command again, "
                f"it goes on from there."
            ) from error


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(_damaged(path, error)) from error


def _damaged(path: Path, error: Exception) -> str:
    return f"{path} is damaged ({error}): remove {path.parent} and pack again."


def _replace(path: Path, text: str) -> None:
    """Writes a file whole or not at all, on the disk when this returns."""
    new = path.with_name(f".{path.name}.new")
    with open(new, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Names in a folder survive a power cut from here on."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
