"""IDX files: the published ones are read, whole or zipped; any other ends in one line."""

import gzip
import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from chipwise.base.errors import DataError
from chipwise.data.originals import read_idx
from refusals import refused


def idx_bytes(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("idx")


@given(array=hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0)))
@settings(max_examples=30, deadline=None, derandomize=True)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_round_trip(folder, pack, array):
    content = idx_bytes(array)
    (folder / "x").write_bytes(pack(content))
    got = read_idx(folder / "x", hashlib.sha256(content).hexdigest())
    assert got.dtype == np.uint8 and got.flags.writeable
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("change", [-1, 1])
def test_one_byte_more_or_less_is_another_file(tmp_path, pack, change):
    whole = idx_bytes(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
    (tmp_path / "x").write_bytes(pack((whole + b"!")[: len(whole) + change]))
    right = hashlib.sha256(whole).hexdigest()
    with refused(DataError, "not-the-original", path=tmp_path / "x", expected=right):
        read_idx(tmp_path / "x", right)


@given(st.binary(max_size=64), st.sampled_from([bytes, gzip.compress, lambda data: gzip.compress(data)[:-9]]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_other_bytes_are_refused_in_one_line(folder, content, pack):
    (folder / "any").write_bytes(pack(content))
    with pytest.raises(DataError) as caught:
        read_idx(folder / "any", "0" * 64)
    assert caught.value.code in ("file-damaged", "not-the-original") and "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with refused(DataError, "unreadable", path=path):
            read_idx(path, "0" * 64)
