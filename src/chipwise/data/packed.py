"""Packed folders: examples in memory-mapped `.npy` shards, as pixels or as encoded images.

    DIR/train/manifest.json, image-00000.npy, label-00000.npy, record-00000.npy, ...
    DIR/eval/...

Random batches are read 15 to 40 times faster than from record files, since an example is one copy
from the page cache. `docs/format.md` has the format, how to read it without chipwise, and the
measurements. `chipwise.data.pack` writes it. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..base import DataError
from ..base.annotations import as_annotated
from ..base.errors import unreadable
from ..base.files import may_be_whole
from . import remote
from .compared import Compared, sha_of_all
from .images import MAX_PIXELS, Size, checked_size, decode_into
from .manifest import MANIFEST, RECORD, read_manifest, verify as verify_files
from .sources import ByBatch, Columns, Spec, first_outside
from .stages import stage

_LARGE = 1 << 13  # bytes of a row above which copying single rows beats copying a block twice
_PREFETCHED = 1 << 14


@dataclass(frozen=True)
class _Shard:
    """The arrays of a shard."""

    columns: Columns
    """Column to `(n, ...)`."""
    record: np.ndarray
    """The record table, `(n,)`."""
    image: np.ndarray
    """For jpeg the bytes of all images, else empty."""
    ends: np.ndarray
    """For jpeg the end of each image in these bytes, `(n,)`, else empty."""

    def encoded(self, at: int) -> bytes:
        """The encoded image of record `at`, from the end of the previous one."""
        begin = self.ends.item(at - 1) if at else 0
        end = self.ends.item(at)
        if not 0 <= begin <= end <= len(self.image):
            wrong = "its bytes {begin} to {end} are not in a file of {bytes}."
            raise DataError("record-bytes", wrong, begin=begin, end=end, bytes=len(self.image))
        return self.image[begin:end].tobytes()


@as_annotated
class PackedFolder(ByBatch):
    """The examples of one split of a packed folder.

    *Arguments:*

    - `path`: the packed folder, or its URL.
    - `split`: the folder inside it, or `None` if `path` itself has the manifest.
    - `size`: `(height, width)` or one number for both, for encoded images. Each is scaled to cover
      it and cropped at the centre. `None` leaves their sizes as they are, which must then be equal.

    *Attributes:*

    - `store`: `"raw"` or `"jpeg"`.
    - `below`: column to the exclusive upper bound of its integers.
    - `names`: the names of the classes or `()`.
    - `classes`: their number or `None`.
    - `mean` and `std`: of the stored pixels, one per channel, in pixel units, or `()`.
    - `document_ends`: of a tokenizer's tokens, those before and after a document: `begin` and
      `end`.
    - `readings`: the sentences that say how the source was read when it was packed.
    - `manifest`: the manifest of the split, as a dict.

    The constructor reads the manifest and the sizes of the files, but no data. It raises
    `DataError` if a file is missing or has another size, or if the format is newer. Access raises
    it for damage and values out of range. Thread-safe, and can be pickled for other processes.
    """

    def __init__(
        self,
        path: str | Path,
        split: str | None = "train",
        size: int | Size | None = None,
    ):
        self.path = remote.local(path) / (split or "")
        self.size = checked_size(size)
        self.manifest = read_manifest(self.path)
        try:
            self._understand(self.manifest)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DataError(
                "manifest-damaged",
                path=self.path / MANIFEST,
                reason=f"{type(error).__name__}: {error}",
            ) from error
        self._maps: list[_Shard | None] = [None] * len(self._ends)

    def _understand(self, manifest: dict[str, Any]) -> None:
        self.store = manifest["store"]
        columns = manifest["columns"]
        if self.store not in ("raw", "jpeg") or (self.store == "jpeg" and "image" not in columns):
            raise ValueError(f"store '{self.store}' with columns {', '.join(columns)}")
        self._spec: dict[str, jax.ShapeDtypeStruct | None] = {}
        for name, column in columns.items():
            dtype = np.dtype(column["dtype"])
            shape = column["shape"]
            if dtype.kind not in "biuf" or dtype.itemsize > 4:
                raise ValueError(f"column '{name}' is {dtype}")
            if name == "image" and self.store == "jpeg" and self.size is not None:
                shape = [*self.size, 3]
            self._spec[name] = (
                None if shape is None else jax.ShapeDtypeStruct(tuple(map(int, shape)), dtype)
            )
        if self.store == "raw" and self.size is not None:
            image = self._spec.get("image")
            if image is None or image.shape[:2] != self.size:
                pixels = None if image is None else list(image.shape)
                wrong = "{path} holds pixels {pixels}: leave out size={size}, or pack at that size."
                raise DataError(
                    "pack-size-fixed", wrong, path=self.path, pixels=pixels, size=list(self.size)
                )
        self.below = {
            name: int(c["below"]) for name, c in columns.items() if c.get("below") is not None
        }
        self.names = tuple(manifest["names"])
        if manifest["counts"] is not None:
            per_class = [int(count) for count in manifest["counts"]]
            if self.names and per_class and len(per_class) != len(self.names):
                raise ValueError(f"{len(per_class)} counts of {len(self.names)} classes")
        self.mean, self.std = (
            tuple(map(float, manifest.get(name, ()))) for name in ("mean", "std")
        )
        skipped = manifest["source"].get("skipped", [])
        texts = [
            *manifest.get("splits", ()),
            *(e[k] for e in skipped[:] for k in ("name", "reason")),
        ]
        if not isinstance(manifest["settings"], dict) or not all(
            isinstance(text, str) for text in texts
        ):
            raise ValueError("settings, splits or skipped entries")
        has_read = manifest if "read" in manifest else manifest["settings"]  # of an older pack
        self.readings = tuple(str(one["text"]) for one in has_read.get("read", ()))
        text = manifest["settings"].get("text") or {}
        self.document_ends: dict[str, Any] = {}
        if text.get("tokenizer") is not None:  # an older pack does not name its begin: none
            begin = list(map(str, text.get("begin", ())))
            self.document_ends = {"begin": begin, "end": text.get("end")}
        record = [tuple(field) for field in manifest["record"]]
        self._record = np.dtype(record)
        self._shards = manifest["shards"]
        counts = [int(shard["examples"]) for shard in self._shards]
        if manifest.get("described") and not counts:  # a `description`
            counts = [int(manifest["examples"])]
        if not columns or min(counts) < 1 or sum(counts) != manifest["examples"]:
            raise ValueError(f"{manifest['examples']} examples in shards of {counts[:8]}")
        self._ends = np.cumsum(counts).tolist()
        self._begins = [0, *self._ends[:-1]]
        for shard in self._shards:
            unknown = set(shard["files"]) ^ {*columns, RECORD}
            if unknown:
                raise DataError(
                    "shard-columns",
                    path=self.path,
                    columns=sorted(unknown),
                    declared=list(columns),
                )
            for file in shard["files"].values():
                if Path(file["name"]).name != file["name"]:
                    raise DataError("file-outside", path=self.path, name=file["name"])
                _check_size(self.path / file["name"], int(file["bytes"]))
                str(file["sha256"])
            for name, struct in self._spec.items():
                self._check_declared(name, struct, shard["examples"], shard["files"][name]["bytes"])

    def _check_declared(self, name: str, struct: Any, examples: int, nbytes: int) -> None:
        """Raises `ValueError`, before memory is allocated, if a file cannot contain what the
        manifest states."""
        if struct is None:
            return
        encoded = name == "image" and self.store == "jpeg"
        values = math.prod(struct.shape)
        most = 3 * MAX_PIXELS
        fits = values <= most if encoded else examples * values * struct.dtype.itemsize <= nbytes
        if min(struct.shape, default=0) < 0 or not fits:
            raise ValueError(f"{examples} × {name} {list(struct.shape)} in {nbytes} bytes")

    @property
    def spec(self) -> Spec:
        """Column to the shape and type of an example. Raises `DataError` if images differ in
        size."""
        spec = {name: struct for name, struct in self._spec.items() if struct is not None}
        if len(spec) < len(self._spec):
            raise DataError(
                "pack-sizes-differ",
                path=self.path,
                folder=str(self.path.parent),
                split=self.path.name,
            )
        return spec

    @property
    def description(self) -> dict[str, Any]:
        """The manifest without shards. It is enough to make a model where the examples are not."""
        return {**self.manifest, "source": {}, "shards": [], "described": True}

    @property
    def classes(self) -> int | None:
        label = self._spec.get("label")
        # Several labels for an example, 0 or 1 each
        if label is not None and label.ndim == 1 and self.names:
            return len(self.names)
        return self.below.get("label")

    def __len__(self) -> int:
        return self._ends[-1]

    def fill(self, indices: np.ndarray, out: Columns) -> None:
        """Writes the examples at `indices` `(n,)` to `out`, column to `(n, ...)`, contiguous, as in
        `spec`.

        Raises `IndexError` outside `len()`. Raises `DataError` with the name of the record for
        values out of range and for images that cannot be decoded.
        """
        indices = np.asarray(indices, np.intp)
        for number, rows, local in self._places(indices):
            shard = self._shard(number)
            for name, column in shard.columns.items():
                if rows is None:
                    # Bounds were checked; NumPy's own check ("raise") would copy through a buffer
                    np.take(column, local, axis=0, out=out[name], mode="clip")
                elif out[name][:1].nbytes < _LARGE:
                    out[name][rows] = column[local]
                else:
                    for row, at in zip(rows.tolist(), local.tolist(), strict=True):
                        out[name][row] = column[at]
            if self.store == "jpeg":
                self._decode(shard, indices, rows, local, out["image"])
        check_below(out, self.below, str(self.path), indices)

    def prefetch(self, indices: np.ndarray) -> None:
        """Asks the kernel to read the examples at `indices` `(n,)` from disk, without waiting.

        It costs 2 µs for each example. If they were not in memory, `fill` of 224×224 pixels ran 2
        times as fast. Does nothing for examples below 16 KiB, for which the kernel's readahead is
        better.
        """
        for number, _, local in self._places(indices):
            shard = self._shard(number)
            if self.store == "jpeg":
                begins = np.where(local, shard.ends[local - 1], 0)
                _ask(shard.image, len(shard.ends), begins, shard.ends[local])
            for column in shard.columns.values():
                size = column[:1].nbytes
                _ask(column, len(column), local * size, (local + 1) * size)

    def encoded(self, index: int) -> bytes:
        """The encoded image of example `index`, as packed. Raises `DataError` for a raw pack."""
        if self.store != "jpeg":
            wrong = "{path} holds pixels, not encoded images: use source[{example}]['image']."
            raise DataError("pack-not-encoded", wrong, path=self.path, example=index)
        shard, at = self._place(index)
        return shard.encoded(at)

    def stored(self, index: int) -> bytes:
        """The bytes of example `index` as they are stored: of its image, or of all columns if it
        has none."""
        if self.store == "jpeg":
            return self.encoded(index)
        shard, at = self._place(index)
        names = ["image"] if "image" in shard.columns else list(shard.columns)
        return b"".join(shard.columns[name][at].tobytes() for name in names)

    def record_name(self, index: int) -> str:
        """The origin of example `index`, such as "cat/0123.jpg", or "" if unknown."""
        shard, at = self._place(index)
        return shard.record["name"][at].decode("utf-8", "replace")

    def compared(self) -> Compared:
        """Compares all of it, without reading images. The first digest is of the names of records
        and the numbers or vectors of labels. These are the same however images are stored and
        shards are cut. The second is of the checksums of the records, which are not. Without images
        or names, compares the checksums of all files."""
        shards = self.opened()
        n = len(self)
        if "image" not in self._spec or not shards[0].record["name"][0]:
            digest = hashlib.sha256(json.dumps(self._shards, sort_keys=True).encode())
            return Compared({"pack": digest.hexdigest()}, n, n)
        digest = hashlib.sha256(json.dumps([n, self.names]).encode())
        columns = sorted(
            name for name, kind in self._spec.items() if kind is not None and kind.ndim <= 1
        )
        arrays = [shard.columns[name] for name in columns for shard in shards]
        for array in [*arrays, *(shard.record["name"] for shard in shards)]:
            digest.update(np.ascontiguousarray(array).tobytes())
        sums = sha_of_all([b"".join(shard.record["crc32"].tobytes() for shard in shards)])
        return Compared({"pack": digest.hexdigest(), f"records/{self.store}": sums}, n, n)

    def verify(self) -> None:
        """Reads everything, in bounded memory. Raises `DataError` with the damaged records."""
        verify_files(self.path, read_manifest(self.path))

    def opened(self) -> list[_Shard]:
        """The arrays of all shards, memory-mapped."""
        return list(map(self._shard, range(len(self._ends))))

    def _place(self, index: int) -> tuple[_Shard, int]:
        """The shard of an example, and its row in it."""
        ends = self._ends
        if not 0 <= index < ends[-1]:
            raise IndexError(f"{self.path} has {len(self)} examples, asked for {index}")
        number = bisect_right(ends, index)
        return self._shard(number), index - self._begins[number]

    def _places(self, indices: np.ndarray) -> list[tuple[int, np.ndarray | None, np.ndarray]]:
        """The number, the positions in `indices` (`None` means all), and the rows of each shard
        needed."""
        if not len(indices):
            return []
        low = int(indices.min())
        high = int(indices.max())
        if not 0 <= low <= high < len(self):
            raise IndexError(f"{self.path} has {len(self)} examples, asked for {low} to {high}")
        first = bisect_right(self._ends, low)
        last = bisect_right(self._ends, high)
        if first == last:
            return [(first, None, indices - self._begins[first] if first else indices)]
        shards = np.searchsorted(self._ends, indices, side="right")
        places = [(int(number), np.flatnonzero(shards == number)) for number in np.unique(shards)]
        return [(number, rows, indices[rows] - self._begins[number]) for number, rows in places]

    def _shard(self, number: int) -> _Shard:
        opened = self._maps[number]
        if opened is None:  # if two threads open it, one's maps are dropped
            if not self._shards:
                raise DataError("pack-without-examples", path=self.path)
            shard = self._shards[number]
            n = shard["examples"]
            paths = {name: self.path / file["name"] for name, file in shard["files"].items()}
            record = _open(paths.pop(RECORD), self._record, (n,))
            image = ends = np.zeros(0, np.uint8)
            if self.store == "jpeg":
                image = _open(paths.pop("image"), np.dtype(np.uint8), (None,))
                ends = record["end"]
            kinds = {name: self._spec[name] for name in paths}
            columns = {
                name: _open(paths[name], kind.dtype, (n, *kind.shape))
                for name, kind in kinds.items()
                if kind is not None
            }
            opened = self._maps[number] = _Shard(columns, record, image, ends)
        return opened

    def _decode(self, shard: _Shard, indices, rows, local, out: np.ndarray) -> None:
        for number, at in enumerate(local.tolist()):
            row = number if rows is None else int(rows[number])
            try:
                with stage("read"):
                    data = shard.encoded(at)
                with stage("decode"):
                    shape = decode_into(data, out[row], self.size)
                if shape != out[row].shape:
                    wrong = "it has {size} pixels (height, width), expected {expected}."
                    raise DataError(
                        "image-size", wrong, size=list(shape[:2]), expected=list(out.shape[1:3])
                    )
            except DataError as error:
                index = int(indices[row])
                name = self.record_name(index)
                problem = error.fact
                wrong = "{path} record {record} ({name:plain}): {problem} Or pack the data again."
                raise DataError(
                    "packed-record-unreadable",
                    wrong,
                    path=self.path,
                    record=index,
                    name=name,
                    problem=problem,
                ) from error

    def __getstate__(self) -> dict[str, Any]:
        # Another process opens its own
        return {**self.__dict__, "_maps": [None] * len(self._ends)}


def check_below(
    columns: Columns, below: Mapping[str, int], data: str, indices: np.ndarray | None = None
) -> None:
    """Raises `DataError` with the example for integers outside `[0, below[column])`."""
    for name, limit in below.items():
        bad = first_outside(columns[name], limit, indices)
        if bad is not None:
            raise DataError(
                "value-out-of-range",
                data=data,
                example=bad[0],
                column=name,
                value=bad[1],
                last=limit - 1,
            )


def _ask(array: np.ndarray, examples: int, begins: np.ndarray, ends: np.ndarray) -> None:
    """Asks the kernel for these bytes of a mapped array, unless its examples are small."""
    if array.nbytes < _PREFETCHED * examples:
        return
    pages: Any = array
    while not isinstance(pages, mmap.mmap):
        pages = pages.base
    header = len(pages) - array.nbytes
    first = np.clip(begins + header, 0, len(pages)) // mmap.PAGESIZE * mmap.PAGESIZE
    length = np.clip(ends + header, 0, len(pages)) - first
    for start, size in zip(first.tolist(), length.tolist(), strict=True):
        if size > 0:
            pages.madvise(mmap.MADV_WILLNEED, start, size)


def _check_size(path: Path, expected: int) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        wrong = "{path} is missing, though the manifest names it: copy the folder again."
        raise DataError("file-missing", wrong, path=path) from error
    except OSError as error:
        raise unreadable(path, error) from error
    if size != expected:
        wrong = "{path} has {bytes:,} bytes, expected {expected:,}: copy the folder again."
        raise DataError("file-size", wrong, path=path, bytes=size, expected=expected)


def _open(path: Path, dtype: np.dtype, shape: tuple[int | None, ...]) -> np.ndarray:
    try:
        # asarray drops numpy.memmap, whose slices cost more than those of a plain array
        array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        if may_be_whole(error):
            raise unreadable(path, error) from error
        raise DataError("npy-damaged", path=path, reason=str(error)) from error
    own = (*array.shape, *(0,) * len(shape))  # of as many dimensions at least
    expected = tuple(here if n is None else n for n, here in zip(shape, own, strict=False))
    if array.dtype != dtype or array.shape != expected:
        raise DataError(
            "npy-unlike",
            path=path,
            dtype=str(array.dtype),
            shape=list(array.shape),
            expected_dtype=str(dtype),
            expected_shape=list(expected),
        )
    return array
