"""The format `chipwise-packed`: its manifest, headers and record tables (see `docs/format.md`).

It also finds damage: SHA-256 finds damaged files, CRC-32 the damaged records in them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from ..atomic import read_regular
from ..errors import DataError, unreadable
from ..words.figures import printable

FORMAT, VERSION = "chipwise-packed", 2
MANIFEST = "manifest.json"
RECORD = "record"  # the files of checksums and names, beside those of the columns
_SHOWN = 8  # damaged records that an error names


def record_dtype(store: str, name_bytes: int) -> np.dtype:
    """The dtype of a record table: CRC-32, name, and for jpeg the end of the encoded image."""
    fields = [("crc32", "<u4"), ("name", f"S{max(1, name_bytes)}")]
    return np.dtype([*fields, ("end", "<i8")] if store == "jpeg" else fields)


def header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """A `.npy` header. Its length does not depend on `shape[0]`: NumPy leaves room for it to grow."""
    stream = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": shape})
    return stream.getvalue()


def render(manifest: dict[str, Any]) -> str:
    """The manifest's text, with `sha256` over its canonical JSON: no spaces, in the order written."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(rest, separators=(",", ":")).encode()).hexdigest()
    return json.dumps({**rest, "sha256": digest}, indent=1) + "\n"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a split. Raises `DataError` if it is damaged or of an unknown version."""
    path = folder / MANIFEST
    try:
        text = read_regular(path).decode("ascii")
        manifest = json.loads(text)
    except FileNotFoundError as error:
        wrong = "{path} has no manifest.json: give the folder that holds train/manifest.json."
        raise DataError("not-packed", wrong, path=folder) from error
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise DataError("manifest-damaged", path=path, reason=str(error)) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        wrong = "{path} is not of the format {expected}: pack the data with chipwise."
        raise DataError("manifest-format", wrong, path=path, expected=FORMAT)
    version = manifest.get("version")
    if type(version) is not int or version > VERSION:
        wrong = "{path} has version {version}, this chipwise reads {known}: pip install --upgrade chipwise."
        raise DataError("manifest-newer", wrong, path=path, version=version, known=VERSION)
    if version < VERSION:
        wrong = "{path} has version {version} of the format, which is now {known}: pack the data again."
        raise DataError("manifest-older", wrong, path=path, version=version, known=VERSION)
    if text != render(manifest):
        raise DataError("manifest-damaged", path=path, reason="SHA-256")
    return manifest


def manifest_in(text: bytes) -> dict[str, Any]:
    """The manifest of a packed folder; empty for other files with that name."""
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return manifest if isinstance(manifest, dict) and manifest.get("format") == FORMAT else {}


def sha256(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def verify(folder: Path, manifest: dict[str, Any]) -> None:
    """Reads every file of a split once, those of damaged shards twice.

    Raises a `DataError` with the number of damaged records, the first ones by number and name, and the files.
    A file may also be damaged in its header, or in a record's name.
    """
    damaged: list[tuple[int, str]] = []
    files: list[str] = []
    first = count = 0
    for shard in manifest["shards"]:
        bad = [f["name"] for f in shard["files"].values() if sha256(folder / f["name"]) != f["sha256"]]
        if bad:
            for row, name in _damaged(folder, manifest, shard):
                count += 1
                if len(damaged) < _SHOWN:
                    damaged.append((first + row, printable(name)))
        files += bad
        first += shard["examples"]
    if count:
        numbers, names = [number for number, _ in damaged], [name for _, name in damaged]
        wrong = (
            "{path}: {damaged:,} of {examples:,} records are damaged, first {records:list} ({names:list}): "
            "copy {files:few} again."
        )
        facts = {"path": folder, "damaged": count, "examples": first, "records": numbers, "names": names}
        raise DataError("pack-damaged", wrong, files=files, **facts)
    if files:
        wrong = "{path}: all records are whole, but {files:few} have damaged headers: copy them again."
        raise DataError("pack-headers-damaged", wrong, path=folder, files=files)


def record_text(name: bytes) -> str:
    """A record's name."""
    return name.decode("utf-8", "replace")


def _damaged(folder: Path, manifest: dict[str, Any], shard: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Row and name of the shard's records whose checksum is wrong."""
    columns = manifest["columns"]
    record = np.dtype([tuple(field) for field in manifest["record"]])
    with ExitStack() as stack:
        data = {
            name: stack.enter_context(open(folder / file["name"], "rb"))
            for name, file in shard["files"].items()
        }
        # The data after the header has its known length, even if the header is damaged
        size = shard["examples"] * record.itemsize
        lines = data[RECORD].read()[-size:].ljust(size, b"\0")
        table = np.frombuffer(lines, record)
        fixed = {
            name: int(np.prod(column["shape"], dtype=np.int64)) * np.dtype(column["dtype"]).itemsize
            for name, column in columns.items()
            if not (name == "image" and manifest["store"] == "jpeg")
        }
        start = len(header(np.dtype(np.uint8), (0,)))
        end = 0
        for row in range(shard["examples"]):
            crc = 0
            for name in columns:
                size = shard["files"][name]["bytes"]
                if name in fixed:
                    length = fixed[name]
                    offset = size - (shard["examples"] - row) * length
                else:
                    begin, end = end, min(max(int(table["end"][row]), 0), size - start)
                    offset, length = start + begin, max(0, end - begin)
                crc = crc32(os.pread(data[name].fileno(), length, offset), crc)
            if crc != table["crc32"][row]:
                yield row, record_text(table["name"][row])
