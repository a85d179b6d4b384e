"""The IDX format, in which MNIST is published: a magic number, the dimensions, the values.

    two zero bytes, type code, number of dimensions, each dimension as big-endian uint32, values

Source: "the IDX file format" in Y. LeCun, C. Cortes, C. Burges, The MNIST database (1998).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import zlib
from pathlib import Path

import numpy as np

from ..errors import DataError

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_CHUNK = 1 << 20


def read_idx(path: str | Path, md5: str | None = None) -> np.ndarray:
    """The array in an IDX file, plain or gzip-compressed, in native byte order.

    *Arguments:*

    - `path`: the file; compression is told from its first bytes, not from its name.
    - `md5`: the expected MD5 of the uncompressed bytes, in hexadecimal; not checked when `None`.

    *Returns* an array of the shape and type that the header names.

    Raises `DataError`, one line, for files that are missing, not IDX, shorter or longer than the
    header says, damaged, or of another checksum.
    """
    path = Path(path)
    try:
        with path.open("rb") as raw:
            zipped = raw.peek(2)[:2] == b"\x1f\x8b"
            with gzip.GzipFile(fileobj=raw) if zipped else raw as stream:
                return _read(stream, path, md5)
    except EOFError as error:
        raise DataError(f"{path} is a truncated gzip file: get it again.") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is a damaged gzip file ({error}): get it again.") from error
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error


def _read(stream: io.BufferedIOBase, path: Path, md5: str | None) -> np.ndarray:
    head = stream.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _DTYPES:
        raise DataError(
            f"{path} is not an IDX file: it starts with {head.hex(' ') or 'nothing'}, expected 00 00, a type "
            f"code of {', '.join(f'{code:02x}' for code in _DTYPES)}, and the number of dimensions."
        )
    dtype, dimensions = np.dtype(_DTYPES[head[2]]), head[3]
    sizes = stream.read(4 * dimensions)
    if len(sizes) < 4 * dimensions:
        raise DataError(f"{path} is truncated: {len(sizes)} bytes of dimensions, expected {4 * dimensions}.")
    shape = tuple(np.frombuffer(sizes, ">u4").tolist())
    expected = math.prod(shape) * dtype.itemsize
    # Read in pieces and stop one byte late: neither a header that promises 2^60 bytes nor a small
    # gzip file that holds them can take the machine's memory.
    values = bytearray()
    while len(values) <= expected and (piece := stream.read(min(_CHUNK, expected + 1 - len(values)))):
        values += piece
    if len(values) != expected:
        given = f"{len(values):,}" if len(values) < expected else f"more than {expected:,}"
        raise DataError(
            f"{path} has {given} bytes of values, expected {expected:,} for {shape} of {dtype.name}: "
            f"get it again."
        )
    if md5 is not None and (found := hashlib.md5(head + sizes + values).hexdigest()) != md5:
        raise DataError(
            f"{path} has MD5 {found} (uncompressed), expected {md5}: it is not the original file."
        )
    try:
        array = np.frombuffer(values, dtype).reshape(shape)
    except ValueError as error:  # more than 64 dimensions, or a zero beside sizes beyond the address space
        raise DataError(f"{path} has {dimensions} dimensions {shape[:4]}...: {error}.") from error
    return array.astype(dtype.newbyteorder("="))
