"""The format `chipwise-packed`: its manifest, its headers, its record tables (see `docs/format.md`)."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError

FORMAT, VERSION = "chipwise-packed", 2
MANIFEST = "manifest.json"
RECORD = "record"  # the files of checksums and names, beside those of the columns


def record_dtype(store: str, name_bytes: int) -> np.dtype:
    """A line of a record table: CRC-32, name, and for jpeg where the encoded image ends."""
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
    """The manifest of a split, whole and of a version that this chipwise knows, else `DataError`."""
    path = folder / MANIFEST
    try:
        text = path.read_bytes().decode("ascii")
        manifest = json.loads(text)
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} is no packed folder (it has no {MANIFEST}): give the folder that holds "
            f"train/{MANIFEST} and eval/{MANIFEST}."
        ) from error
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}): pack the data again.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path} is not of the format {FORMAT}: pack the data with chipwise.")
    version = manifest.get("version")
    if type(version) is not int or version > VERSION:
        raise DataError(
            f"{path} is in version {version} of {FORMAT}, this chipwise reads version {VERSION}: "
            f"pip install --upgrade chipwise."
        )
    if version < VERSION:
        raise DataError(f"{path} is in version {version} of {FORMAT}, now {VERSION}: pack the data again.")
    if text != render(manifest):
        raise DataError(f"{path} is damaged (SHA-256): pack the data again or copy the file anew.")
    return manifest


def sha256(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error
