"""Files of rows for tests: records of TFRecord, without the library, and tables of Parquet."""

import struct

import numpy as np
import pytest

from chipwise.data.pack import tfrecord
from pictures import encoded, smooth

IMAGES = [encoded(smooth(seed, (12, 10))) for seed in range(5)]


def varint(n):
    n &= (1 << 64) - 1
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def field(number, data):
    return varint(number << 3 | 2) + varint(len(data)) + data


def example(**features):
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            listed = field(1, field(1, value))
        elif isinstance(value, np.ndarray):
            listed = field(2, field(1, value.astype("<f4").tobytes()))
        else:
            listed = field(3, field(1, b"".join(map(varint, np.atleast_1d(value).tolist()))))
        entries += field(1, field(1, name.encode()) + field(2, listed))
    return field(1, entries)


def framed(data):
    def crc(part):
        return struct.pack("<I", tfrecord._masked(part))

    head = struct.pack("<Q", len(data))
    return head + crc(head) + data + crc(data)


def parquet(path, images, labels, **more):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    pq.write_table(pa.table({"image": images, "label": labels, **more}), path, row_group_size=2)
    return path
