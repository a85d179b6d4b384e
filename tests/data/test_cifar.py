"""CIFAR's own files: known by their digests, and nothing in them is executed."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chipwise.base.errors import DataError
from chipwise.data.originals import batches_at, read_batch, read_cifar, unpickle
from cifar_files import archived, batch, pickled, write
from refusals import refused

NAME = Path("batch")


def check(got):
    for split, seeds in (("train", range(5)), ("test", [5])):
        made = [batch(seed + 1, seed) for seed in seeds]
        image = np.concatenate([m[0] for m in made]).transpose(0, 2, 3, 1)
        np.testing.assert_array_equal(got[split]["image"], image)
        assert got[split]["image"].dtype == np.uint8 and got[split]["image"].flags.c_contiguous
        assert got[split]["label"].tolist() == [label for m in made for label in m[1]]
        assert got[split]["label"].dtype == np.int32


def test_folder_and_archive_are_read_in_place(tmp_path, monkeypatch):
    folder = write(tmp_path / "data", monkeypatch)
    path = archived(folder, tmp_path / "cifar-10-python.tar.gz", monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    for place in (folder, folder.parent, path, tmp_path):
        check(read_cifar(batches_at(place)))
    assert sorted(tmp_path.rglob("*")) == before


def test_only_the_published_files_are_read(tmp_path, monkeypatch):
    folder = write(tmp_path / "data", monkeypatch)
    path = archived(folder, tmp_path / "cifar-10-python.tar.gz", monkeypatch)
    path.write_bytes(path.read_bytes() + b"!")
    with refused(DataError, "not-the-original", path=path):
        read_cifar(path)
    (folder / "data_batch_3").write_bytes(pickled(1, 99))
    with refused(DataError, "not-the-original", path=folder / "data_batch_3"):
        read_cifar(folder)
    (folder / "data_batch_3").unlink()
    with refused(DataError, "unreadable", path=str(folder / "data_batch_3")):
        read_cifar(folder)


@pytest.mark.parametrize("protocol", [3, 4])
def test_arrays_of_bytes_come_back(protocol):
    got = read_batch(pickled(3, 0, protocol), NAME)
    pixels, label = batch(3, 0)
    np.testing.assert_array_equal(got["image"], pixels.transpose(0, 2, 3, 1))
    assert got["label"].tolist() == label


def test_what_python_2_wrote():
    """The exact shape of CIFAR-10's files: protocol 2, byte strings, numpy.core names."""
    pixels = bytes(range(12))
    data = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85"
        b"U\x01b\x87Rq\x05(K\x01K\x02K\x06\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNN"
        b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x0c\x00\x00\x00" + pixels + b"tb"
        b"U\x06labelsq\x08]q\x09(K\x03K\x07eu."
    )
    got = unpickle(data, NAME)
    np.testing.assert_array_equal(got[b"data"], np.frombuffer(pixels, np.uint8).reshape(2, 6))
    assert got[b"labels"] == [3, 7]


class Attack:
    """Pickles to a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_call_in_the_file_is_named_and_not_made(tmp_path, protocol):
    target = tmp_path / "made"
    for attack in (
        Attack(os.system, f"touch {target}"),
        Attack(eval, f"open({str(target)!r}, 'w')"),
        {"data": Attack(os.mkdir, str(target))},
        Attack(np.load, str(target)),
    ):
        with refused(DataError, "pickle-refused", path=NAME) as caught:
            unpickle(pickle.dumps(attack, protocol), NAME)
        assert "it names " in caught.value.facts["reason"] and not target.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cnumpy\ndtype\n(U\x02O8K\x00K\x01tR.",  # object arrays would hold pointers
        b"\x80\x02cnumpy\ndtype\n(cnumpy\nndarray\ntR.",
        b"\x80\x02cnumpy\nndarray\n(J\xff\xff\xff\x7ftR.",  # an array of 2**31 - 1
        b"\x80\x02cnumpy.core.multiarray\nscalar\n.",
        b"\x80\x02c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13tR.",
        b"\x80\x02c__builtin__\nbytes\n(J\xff\xff\xff\x7ftR.",  # bytes(2**31 - 1)
        b"\x80\x02K\x01Q.",  # an object outside
        b"\x80\x02\x82\x01.",  # copyreg's extensions
        b"\x80\x02(ios\nsystem\n.",
        b"K\x01",
        b"",
    ],
)
def test_other_names_and_damage_are_refused(data):
    with refused(DataError, "pickle-refused"):
        unpickle(data, NAME)


@given(st.binary(max_size=100))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_any_bytes_are_a_data_error(data):
    with pytest.raises(DataError):
        read_batch(data, NAME)
