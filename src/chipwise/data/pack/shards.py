"""The `.npy` files of one split, appended to: blocks of records go in, shards of a bounded size come out."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError
from ..manifest import RECORD, header, sha256
from ..sources import Columns

SHARD_FILE = re.compile(r".+-\d{5,}\.npy")


class Shards:
    """The shards in `folder`, of at most `shard_bytes` bytes of records each, one at least.

    *Attributes:* `done`, the complete ones as the manifest lists them; `rows`, records in the open one;
    `written`, records in all.
    """

    def __init__(self, folder: Path, shard_bytes: int):
        self.folder, self.shard_bytes = folder, shard_bytes
        self.done: list[dict[str, Any]] = []
        self.rows = self._open_bytes = 0
        self._files: dict[str, _File] = {}

    @property
    def written(self) -> int:
        return self.rows + sum(shard["examples"] for shard in self.done)

    @property
    def bytes(self) -> int:
        """On the disk, about: the open shard's headers and record table are left out."""
        return self._open_bytes + sum(f["bytes"] for shard in self.done for f in shard["files"].values())

    def put(self, columns: Columns, table: np.ndarray, ends: np.ndarray | None) -> int:
        """Appends records and returns their bytes.

        *Arguments:* `columns`: column to contiguous `(n, ...)`; `table` `(n,)`: their lines of the record
        table; `ends` `(n,)`: where the encoded images end in the column `image`, which is then `(bytes,)`.
        """
        fixed = sum(a[:1].nbytes for name, a in columns.items() if ends is None or name != "image")
        upto = np.arange(1, len(table) + 1) * fixed + (0 if ends is None else ends)
        start, before = 0, 0
        while start < len(table):
            room = self.shard_bytes - self._open_bytes
            stop = int(np.searchsorted(upto, before + room, side="right"))
            if not self.rows:
                stop = max(stop, start + 1)  # a record larger than a shard has one to itself
            if stop == start:
                self.close_shard()
                continue
            self._append(columns, table, ends, start, stop)
            self._open_bytes += int(upto[stop - 1]) - before
            start, before = stop, int(upto[stop - 1])
        return before

    def _append(self, columns: Columns, table: np.ndarray, ends, start: int, stop: int) -> None:
        lines = table[start:stop]
        blocks = {name: values[start:stop] for name, values in columns.items()}
        kinds = {name: (values.dtype, values.shape[1:]) for name, values in columns.items()}
        if ends is not None:
            begin = int(ends[start - 1]) if start else 0
            blocks["image"] = columns["image"][begin : int(ends[stop - 1])]
        for name in (*blocks, RECORD):
            if name not in self._files:
                dtype, shape = kinds.get(name, (table.dtype, ()))
                path = self.folder / f"{name}-{len(self.done):05}.npy"
                self._files[name] = _File(path, dtype, shape)
        if ends is not None:
            lines["end"] = ends[start:stop] - begin + self._files["image"].items
        for name, block in blocks.items():
            self._files[name].write(block)
        self._files[RECORD].write(lines)
        self.rows += stop - start

    def close_shard(self) -> None:
        """Completes the open shard, if there is one: headers, and SHA-256 of what is on the disk."""
        if not self._files:
            return
        files = {name: file.finish() for name, file in self._files.items()}
        self.done.append({"examples": self.rows, "files": files})
        self._files.clear()
        self.rows = self._open_bytes = 0

    def sync(self) -> None:
        for file in self._files.values():
            os.fsync(file.handle)

    def close(self) -> None:
        """Lets go of the files as they are."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    @property
    def state(self) -> dict[str, Any]:
        """How far every file is good, for `restore`."""
        files = {
            name: {"descr": np.lib.format.dtype_to_descr(f.dtype), "shape": list(f.shape), "items": f.items}
            for name, f in self._files.items()
        }
        return {"done": self.done, "rows": self.rows, "bytes": self._open_bytes, "open": files}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes back to `state`: what was written after it is cut off or removed."""
        self.done, self.rows, self._open_bytes = list(state["done"]), state["rows"], state["bytes"]
        complete = {file["name"] for shard in self.done for file in shard["files"].values()}
        still_open = {f"{name}-{len(self.done):05}.npy" for name in state["open"]}
        for path in self.folder.iterdir():
            if SHARD_FILE.fullmatch(path.name) and path.name not in complete | still_open:
                path.unlink()
        for name, file in state["open"].items():
            fields = file["descr"]
            dtype = np.dtype(fields if isinstance(fields, str) else [tuple(field) for field in fields])
            path = self.folder / f"{name}-{len(self.done):05}.npy"
            self._files[name] = _File(path, dtype, tuple(file["shape"]), file["items"])


class _File:
    """One `.npy` file of `items` entries, each `shape` of `dtype`; its header counts them in the end."""

    def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, ...], items: int | None = None):
        self.path, self.dtype, self.shape = path, dtype, shape
        self.items = items or 0
        self.handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        begin = self._header()
        size = len(begin) + self.items * np.dtype((dtype, shape)).itemsize
        if items is None:
            os.ftruncate(self.handle, 0)
            _write(self.handle, begin)
        elif os.fstat(self.handle).st_size < size:
            raise DataError(
                f"{path} is shorter than its journal says: remove {path.parent} and run the same command "
                f"again."
            )
        os.ftruncate(self.handle, size)
        os.lseek(self.handle, size, os.SEEK_SET)

    def _header(self) -> bytes:
        return header(self.dtype, (self.items, *self.shape))

    def write(self, block: np.ndarray) -> None:
        _write(self.handle, block.reshape(-1).view(np.uint8).data)
        self.items += len(block)

    def finish(self) -> dict[str, Any]:
        os.lseek(self.handle, 0, os.SEEK_SET)
        _write(self.handle, self._header())
        os.fsync(self.handle)
        size = os.fstat(self.handle).st_size
        self.close()
        return {"name": self.path.name, "bytes": size, "sha256": sha256(self.path)}

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1


def _write(handle: int, data) -> None:
    view = memoryview(data)
    while view:  # a write may take less than all, before the disk is full or beyond 2 GiB
        view = view[os.write(handle, view) :]
