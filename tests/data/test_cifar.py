"""CIFAR's own files, made small: pickled and binary, in folders and archives."""

import io
import os
import pickle
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chipwise.data.originals import read_batch, read_cifar
from chipwise.errors import DataError
from refusals import refused

NAMES = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


def batch(n, seed, classes=10):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8), rng.integers(0, classes, n).tolist()


def pickled(n, seed, protocol=4, keys=bytes):
    pixels, labels = batch(n, seed)
    whole = {"batch_label": "batch", "labels": labels, "data": pixels.reshape(n, -1), "filenames": ["a"] * n}
    return pickle.dumps({k.encode() if keys is bytes else k: v for k, v in whole.items()}, protocol)


def binary(n, seed):
    pixels, labels = batch(n, seed)
    return b"".join(bytes([label]) + p.tobytes() for p, label in zip(pixels, labels, strict=True))


def write(folder, make=pickled, suffix=""):
    folder.mkdir(parents=True)
    for seed, name in enumerate(NAMES):
        (folder / (name + suffix)).write_bytes(make(seed + 1, seed))
    return folder


def expected(seeds):
    made = [batch(seed + 1, seed) for seed in seeds]
    return np.concatenate([m[0] for m in made]).transpose(0, 2, 3, 1), [label for m in made for label in m[1]]


def check(got):
    for split, seeds in (("train", range(5)), ("test", [5])):
        image, label = expected(seeds)
        np.testing.assert_array_equal(got[split]["image"], image)
        assert got[split]["image"].dtype == np.uint8 and got[split]["image"].flags.c_contiguous
        assert got[split]["label"].tolist() == label and got[split]["label"].dtype == np.int32


@pytest.mark.parametrize("protocol", [3, 4])
@pytest.mark.parametrize("keys", [bytes, str])
def test_a_pickled_batch_of_any_protocol(protocol, keys):
    got = read_batch(pickled(3, 0, protocol, keys), "data_batch_1")
    pixels, label = batch(3, 0)
    np.testing.assert_array_equal(got["image"], pixels.transpose(0, 2, 3, 1))
    assert got["label"].tolist() == label


@pytest.mark.parametrize(("make", "suffix"), [(pickled, ""), (binary, ".bin")])
@pytest.mark.parametrize("where", ["", "cifar-10-batches-py", "cifar-10-batches-bin"])
def test_folders(tmp_path, make, suffix, where):
    write(tmp_path / "data" / where, make, suffix)
    check(read_cifar(tmp_path / "data"))
    assert read_cifar(tmp_path / "data", splits=("test",)).keys() == {"test"}


def test_binary_batches_are_read_where_pickles_stand_beside_them(tmp_path):
    folder = write(tmp_path / "cifar-10-batches-py")
    write(tmp_path / "cifar-10-batches-bin", binary, ".bin")
    for name in NAMES:
        (folder / name).write_bytes(b"not read")
    check(read_cifar(tmp_path))


@pytest.mark.parametrize(("make", "suffix"), [(pickled, ""), (binary, ".bin")])
def test_archives_are_read_in_place(tmp_path, make, suffix):
    folder = write(tmp_path / "cifar-10-batches", make, suffix)
    path = tmp_path / "cifar-10.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, folder.name)
    before = sorted(tmp_path.rglob("*"))
    check(read_cifar(path))
    assert sorted(tmp_path.rglob("*")) == before
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"not a tar", b""):
        path.write_bytes(damaged)
        with pytest.raises(DataError) as caught:
            read_cifar(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("count", "size", "reason"),
    [(3000, 0, "chained headers"), (1, 2 << 20, "an extended header of 2097152 bytes")],
)
def test_an_archive_of_endless_headers(tmp_path, count, size, reason):
    path = tmp_path / "cifar-10.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for _ in range(count):
            header = tarfile.TarInfo("long")
            header.type, header.size = tarfile.GNUTYPE_LONGNAME, size
            archive.addfile(header, io.BytesIO(bytes(size)))
    with refused(DataError, "file-damaged", path=path, reason=reason):
        read_cifar(path)


def test_cifar_100_takes_the_fine_labels(tmp_path):
    pixels, labels = batch(4, 0, classes=100)
    whole = {b"data": pixels.reshape(4, -1), b"fine_labels": labels, b"coarse_labels": [0] * 4}
    for name in ("train", "test"):
        (tmp_path / name).write_bytes(pickle.dumps(whole, 4))
    assert read_cifar(tmp_path, classes=100)["test"]["label"].tolist() == labels
    rows = [bytes([7, label]) + p.tobytes() for p, label in zip(pixels, labels, strict=True)]
    got = read_batch(b"".join(rows), "train.bin", classes=100)
    assert got["label"].tolist() == labels
    np.testing.assert_array_equal(got["image"], pixels.transpose(0, 2, 3, 1))


def test_missing_files_are_named(tmp_path):
    folder = write(tmp_path / "cifar-10-batches-py")
    (folder / "data_batch_3").unlink()
    with refused(DataError, "cifar-incomplete", path=folder, missing=["data_batch_3"], classes=10):
        read_cifar(folder)
    assert read_cifar(folder, splits=("test",))
    with refused(DataError, "cifar-absent", path=tmp_path / "none"):
        read_cifar(tmp_path / "none")
    with refused(DataError, "cifar-unknown", classes=20):
        read_cifar(folder, classes=20)


class Attack:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_malicious_batch_executes_nothing(tmp_path):
    folder = write(tmp_path / "cifar-10-batches-py")
    target = tmp_path / "made"
    whole = {b"labels": [0], b"data": Attack(f"touch {target}")}
    (folder / "data_batch_2").write_bytes(pickle.dumps(whole, 4))
    with refused(DataError, "pickle-refused", name=f"{os.system.__module__}.system"):
        read_cifar(folder)
    assert not target.exists()


@pytest.mark.parametrize(
    ("value", "code", "facts"),
    [
        ([1], "cifar-not-dict", {"kind": "list"}),
        ({"labels": [1]}, "cifar-no-pixels", {"pixels": 3072}),
        ({"a\nb\x1b[31m": [1]}, "cifar-no-pixels", {"keys": ["a\nb\x1b[31m"]}),
        ({"data": np.zeros((2, 3072), np.int32), "labels": [0, 0]}, "pickle-refused", {}),
        ({"data": np.zeros((2, 3071), np.uint8), "labels": [0, 0]}, "cifar-no-pixels", {"pixels": 3072}),
        ({"data": np.zeros((2, 3072), np.uint8)}, "cifar-no-labels", {"column": "labels", "examples": 2}),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, "cifar-no-labels", {"column": "labels"}),
        (
            {"data": np.zeros((2, 3072), np.uint8), "labels": [0, "1"]},
            "cifar-no-labels",
            {"column": "labels"},
        ),
        (
            {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 2**80]},
            "cifar-no-labels",
            {"column": "labels"},
        ),
        (
            {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 10]},
            "label-out-of-range",
            {"example": 1, "label": 10},
        ),
    ],
)
def test_batches_of_another_content(value, code, facts):
    with refused(DataError, code, **facts):
        read_batch(pickle.dumps(value, 4), "b")


@pytest.mark.parametrize("change", [-1, 1])
def test_binary_records_are_whole(change):
    whole = binary(3, 0)
    with refused(DataError, "cifar-records", bytes=len(whole) + change, record=3073):
        read_batch(whole[:-1] if change < 0 else whole + b"!", "b.bin")


@given(st.binary(max_size=100))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_any_bytes_are_a_data_error(data):
    for name in ("b", "b.bin"):
        with pytest.raises(DataError):
            read_batch(data, name)
