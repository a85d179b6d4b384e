"""The format `chipwise-packed`: its manifest, headers and record tables (see `docs/format.md`).

It also finds damaged files, by their SHA-256.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from ..base import DataError, unreadable
from ..base.files import read_regular

FORMAT = "chipwise-packed"
VERSION = 2
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"  # beside the splits of a pack: what packed it
TOKENIZER_CONFIG = "tokenizer_config.json"  # beside a tokenizer: its begin and end
RECORD = "record"  # the files of checksums and names, beside those of the columns


def record_dtype(store: str, name_bytes: int) -> np.dtype:
    """The dtype of a record table: CRC-32, name, and for jpeg the end of the encoded image."""
    fields = [("crc32", "<u4"), ("name", f"S{max(1, name_bytes)}")]
    return np.dtype([*fields, ("end", "<i8")] if store == "jpeg" else fields)


def header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """A `.npy` header. Its length does not depend on `shape[0]`: NumPy leaves room for it to
    grow."""
    stream = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(
        stream, {"descr": descr, "fortran_order": False, "shape": shape}
    )
    return stream.getvalue()


def render(manifest: dict[str, Any]) -> str:
    """The manifest's text, with `sha256` over its canonical JSON: no spaces, in the order
    written."""
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
        raise DataError("manifest-newer", path=path, version=version, known=VERSION)
    if version < VERSION:
        raise DataError("manifest-older", path=path, version=version, known=VERSION)
    if text != render(manifest):
        raise DataError("manifest-damaged", path=path, reason="SHA-256")
    return manifest


def manifest_in(text: bytes) -> dict[str, Any]:
    """The manifest of a packed folder, or an empty dict for other files with that name."""
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return manifest if isinstance(manifest, dict) and manifest.get("format") == FORMAT else {}


def sha256(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    with DataError.of_system("unreadable", path=path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path, manifest: dict[str, Any]) -> None:
    """Reads every file of a split. Raises a `DataError` that names the files that differ from when
    they were packed."""
    files = [file for shard in manifest["shards"] for file in shard["files"].values()]
    damaged = [file["name"] for file in files if sha256(folder / file["name"]) != file["sha256"]]
    if damaged:
        wrong = "{path}: {files:few} are not as they were packed: copy them again."
        raise DataError("pack-damaged", wrong, path=folder, files=damaged)
