"""Finding every damaged record of a pack: SHA-256 tells which files, CRC-32 which records in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from ..errors import DataError
from ..words.figures import printable
from .files import few
from .manifest import RECORD, header, sha256

_SHOWN = 8


def verify(folder: Path, manifest: dict[str, Any]) -> None:
    """Reads every file of a split once, those of damaged shards twice.

    Raises one `DataError` with the number of damaged records, the first of them by number and name, and
    the files. A file may be damaged where no record is: in its header, or in a record's name.
    """
    records: list[str] = []
    files: list[str] = []
    first = count = 0
    for shard in manifest["shards"]:
        bad = [f["name"] for f in shard["files"].values() if sha256(folder / f["name"]) != f["sha256"]]
        if bad:
            for row, name in _damaged(folder, manifest, shard):
                count += 1
                if len(records) < _SHOWN:
                    records.append(
                        f"record {first + row} ({printable(name)})" if name else f"record {first + row}"
                    )
        files += bad
        first += shard["examples"]
    if not files:
        return
    more = f" and {count - len(records)} more" if count > len(records) else ""
    where = few(files, _SHOWN)
    what = (
        f"{folder} is damaged in {count} of {first:,} records: {', '.join(records)}{more} (in {where})"
        if count
        else f"{folder}: every record's data is whole; a header or a name is damaged in {where}"
    )
    raise DataError(f"{what}: pack the data again or copy these files anew.")


def text(name: bytes) -> str:
    """A record's name."""
    return name.decode("utf-8", "replace")


def _damaged(folder: Path, manifest: dict[str, Any], shard: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Row and name of the shard's records whose bytes are not those of their checksum."""
    columns = manifest["columns"]
    record = np.dtype([tuple(field) for field in manifest["record"]])
    with ExitStack() as stack:
        data = {
            name: stack.enter_context(open(folder / file["name"], "rb"))
            for name, file in shard["files"].items()
        }
        # What follows the header is as long as it was, whatever the header says now
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
            found = 0
            for name in columns:
                size = shard["files"][name]["bytes"]
                if name in fixed:
                    length = fixed[name]
                    offset = size - (shard["examples"] - row) * length
                else:
                    begin, end = end, min(max(int(table["end"][row]), 0), size - start)
                    offset, length = start + begin, max(0, end - begin)
                found = crc32(os.pread(data[name].fileno(), length, offset), found)
            if found != table["crc32"][row]:
                yield row, text(table["name"][row])
