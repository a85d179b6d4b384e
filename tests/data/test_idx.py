"""IDX files: every type survives a round trip, and every damage ends in one line that says which."""

import gzip
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from chipwise.data import originals
from chipwise.data.originals import read_idx
from chipwise.errors import DataError
from chipwise.machine.limits import HostMemory
from refusals import refused

CODES = {"uint8": 8, "int8": 9, "int16": 11, "int32": 12, "float32": 13, "float64": 14}


def idx_bytes(array):
    head = struct.pack(">HBB", 0, CODES[array.dtype.name], array.ndim) + struct.pack(
        f">{array.ndim}I", *array.shape
    )
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("idx")


@given(array=hnp.arrays(st.sampled_from(list(CODES)), hnp.array_shapes(min_dims=1, max_dims=4, min_side=0)))
@settings(max_examples=30, deadline=None, derandomize=True)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_round_trip(folder, pack, array):
    path = folder / "x"
    path.write_bytes(pack(idx_bytes(array)))
    got = read_idx(path)
    assert got.dtype == array.dtype and got.dtype.isnative and got.flags.writeable
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("change", [-1, 0, 1])
def test_one_byte_more_or_less(tmp_path, pack, change):
    whole = idx_bytes(np.arange(24, dtype=np.uint8).reshape(2, 3, 4)) + b"!"
    path = tmp_path / "x"
    path.write_bytes(pack(whole[: len(whole) - 1 + change]))
    if change == 0:
        assert read_idx(path).shape == (2, 3, 4)
        return
    code = "idx-short" if change < 0 else "idx-long"
    with refused(DataError, code, bytes=24 + change, expected=24, shape=(2, 3, 4), dtype="uint8"):
        read_idx(path)


def test_a_small_file_that_unpacks_to_more_than_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(originals, "memory", lambda: HostMemory(8 << 20, 4 << 20))
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(idx_bytes(np.zeros((1 << 11, 1 << 10), np.uint8))))
    with refused(DataError, "file-too-large", path=path, bytes=2 << 20, limit=1 << 20):
        read_idx(path)


@pytest.mark.parametrize(
    ("content", "code", "facts"),
    [
        (b"", "idx-header", {"head": ""}),
        (b"PK\x03\x04rest", "idx-header", {"head": "50 4b 03 04"}),
        (b"\0\0\x0a\1" + b"\0" * 9, "idx-header", {}),
        (b"\0\0\x08\3\0\0", "idx-dimensions", {"bytes": 2, "expected": 12}),
        (b"\0\0\x0e\4" + b"\xff" * 20, "idx-short", {"bytes": 4}),
        (b"\0\0\x08\x41" + b"\0\0\0\1" * 65 + b"!", "idx-shape", {"dimensions": 65}),
        (gzip.compress(idx_bytes(np.zeros(999, np.int32)), mtime=0)[:-9], "file-damaged", {}),
        (b"\x1f\x8b" + b"junk" * 9, "file-damaged", {}),
    ],
)
def test_damage_is_told_in_one_line(tmp_path, content, code, facts):
    path = tmp_path / "x"
    path.write_bytes(content)
    with refused(DataError, code, path=path, **facts):
        read_idx(path)


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with refused(DataError, "unreadable", path=path):
            read_idx(path)


def test_checksum_of_the_uncompressed_bytes(tmp_path):
    import hashlib

    content = idx_bytes(np.arange(5, dtype=np.uint8))
    right = hashlib.sha256(content).hexdigest()
    for pack in (bytes, gzip.compress):
        (tmp_path / "x").write_bytes(pack(content))
        assert read_idx(tmp_path / "x", sha256=right).tolist() == [0, 1, 2, 3, 4]
        with refused(DataError, "not-the-original", digest=right, expected="0" * 32):
            read_idx(tmp_path / "x", sha256="0" * 32)


@given(st.binary(max_size=64), st.booleans())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_any_bytes_give_an_array_or_a_data_error(folder, content, zipped):
    path = folder / "any"
    path.write_bytes(gzip.compress(content, mtime=0) if zipped else content)
    try:
        assert isinstance(read_idx(path), np.ndarray)
    except DataError as error:
        assert "\n" not in str(error)
