"""The built-in data sets: known without data, found in a folder, and honest about what they are.

The real files are used when CHIPWISE_DATA, or a folder `shared/data` beside the repository, has them.
"""

import gzip
import hashlib
import io
import os
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import chipwise as cw
from chipwise.base.errors import DataError
from chipwise.data import datasets, originals
from chipwise.data.datasets import cifar10, digits, mnist
from chipwise.data.sources import materialize, nbytes, spec_of
from cifar_files import archived, batch, write
from refusals import refused

REAL = Path(os.environ.get("CHIPWISE_DATA") or Path(__file__).parents[3] / "shared" / "data")
needs_mnist = pytest.mark.skipif(datasets._find_mnist(REAL) is None, reason="the MNIST files are not here")
needs_cifar = pytest.mark.skipif(datasets._find_cifar10(REAL) is None, reason="CIFAR-10 is not here")


@pytest.fixture(autouse=True)
def no_data_no_network(monkeypatch):
    monkeypatch.delenv("CHIPWISE_DATA", raising=False)

    def refuse(*arguments):
        raise AssertionError("went to the network")

    monkeypatch.setattr(datasets, "published", refuse)


@pytest.mark.parametrize(
    ("make", "train", "evaluation", "shape"),
    [
        (digits, 1437, 360, (8, 8)),
        (mnist, 60_000, 10_000, (28, 28)),
        (cifar10, 50_000, 10_000, (32, 32, 3)),
    ],
)
def test_planning_needs_no_data(make, train, evaluation, shape):
    data = make()
    assert (len(data.train), len(data.eval), data.classes, data.note) == (train, evaluation, 10, "")
    assert len(data.class_names) == 10 and data.train.classes == 10
    for source in (data.train, data.eval):
        spec = spec_of(source)
        assert (spec["image"].shape, spec["image"].dtype) == (shape, np.uint8)
        assert (spec["label"].shape, spec["label"].dtype) == ((), np.int32)
        assert nbytes(source) == len(source) * (np.prod(shape) + 4)
    channels = shape[2] if len(shape) == 3 else 1
    assert len(data.mean) == len(data.std) == channels


def test_digits_split_and_statistics():
    from sklearn.datasets import load_digits

    data, whole = digits(), load_digits()
    train, evaluation = materialize(data.train), materialize(data.eval)
    np.testing.assert_array_equal(evaluation["image"], whole.images[::5])
    np.testing.assert_array_equal(evaluation["label"], whole.target[::5])
    assert train["image"].max() == 16
    assert train["image"].mean() == pytest.approx(data.mean[0], abs=1e-3)
    assert train["image"].std() == pytest.approx(data.std[0], abs=1e-3)
    both = np.concatenate([train["label"], evaluation["label"]])
    assert np.bincount(both).tolist() == np.bincount(whole.target).tolist()


@needs_mnist
def test_real_mnist():
    data = mnist(REAL)
    train, evaluation = materialize(data.train), materialize(data.eval)
    assert train["label"][:5].tolist() == [5, 0, 4, 1, 9] and evaluation["label"][:3].tolist() == [7, 2, 1]
    assert train["image"].mean() == pytest.approx(data.mean[0], abs=1e-3)
    assert train["image"].std() == pytest.approx(data.std[0], abs=1e-3)


@needs_cifar
@pytest.mark.slow
def test_real_cifar10_says_which_copy_it_is():
    data = cifar10(REAL)
    evaluation = materialize(data.eval)
    assert np.bincount(evaluation["label"]).tolist() == [1000] * 10
    train = materialize(data.train)
    assert np.bincount(train["label"]).tolist() == [5000] * 10
    np.testing.assert_allclose(train["image"].mean((0, 1, 2)), data.mean, atol=0.1)
    np.testing.assert_allclose(train["image"].std((0, 1, 2)), data.std, atol=0.6)
    kind, _ = datasets._find_cifar10(REAL)
    assert data.note == ("CIFAR-10 (JPEG copy)" if kind == "jpeg" else "")


def fake_mnist(monkeypatch):
    """Files of the right shape and none of the content, and the checksums that belong to them."""
    made, sums = {}, {}
    for name in originals.MNIST_FILES:
        n = 60_000 if name.startswith("train") else 10_000
        shape = (n, 28, 28) if "images" in name else (n,)
        content = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + b"\x07" * int(np.prod(shape))
        made[name] = content
        sums[name] = ("", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(originals, "MNIST_FILES", sums)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("where", ["", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("zipped", [False, True])
def test_where_mnist_is_looked_for(tmp_path, monkeypatch, where, zipped):
    (tmp_path / where).mkdir(parents=True, exist_ok=True)
    for name, content in fake_mnist(monkeypatch).items():
        path = tmp_path / where / (name + ".gz" * zipped)
        path.write_bytes(gzip.compress(content, 1) if zipped else content)
    data = mnist(tmp_path)
    assert data.eval[9_999]["label"] == 7 and data.eval[0]["image"].max() == 7
    monkeypatch.setenv("CHIPWISE_DATA", str(tmp_path))
    assert mnist().eval[0]["label"] == 7


def test_a_wrong_checksum_names_both_sums(tmp_path, monkeypatch):
    made = fake_mnist(monkeypatch)
    for name, content in made.items():
        (tmp_path / name).write_bytes(content[:-1] + b"\x08")
    data = mnist(tmp_path)
    right = originals.MNIST_FILES["train-images-idx3-ubyte"][1]
    changed = hashlib.sha256((tmp_path / "train-images-idx3-ubyte").read_bytes()).hexdigest()
    with refused(DataError, "not-the-original", digest=changed, expected=right):
        data.train[0]


@pytest.mark.parametrize("make", [mnist, cifar10])
def test_a_folder_without_the_data_is_refused_at_once(tmp_path, monkeypatch, make):
    with refused(DataError, f"{make.__name__}-missing", data=str(tmp_path)):
        make(tmp_path)
    with refused(DataError, "data-absent", data=str(tmp_path / "none")):
        make(tmp_path / "none")
    # but a default folder for many data sets may lack this one
    monkeypatch.setenv("CHIPWISE_DATA", str(tmp_path))
    with pytest.raises(AssertionError, match="went to the network"):
        make().train[0]


@pytest.mark.slow
def test_original_cifar10_from_folder_and_archive(tmp_path, monkeypatch):
    folder = write(tmp_path / "cifar10", monkeypatch, lambda seed: 10_000)
    data = cifar10(tmp_path)
    assert data.note == ""
    first, last = batch(10_000, 0), batch(10_000, 5)
    np.testing.assert_array_equal(data.train[9_999]["image"], first[0][-1].transpose(1, 2, 0))
    assert data.train[9_999]["label"] == first[1][-1] and data.eval[0]["label"] == last[1][0]
    (tmp_path / "archive").mkdir()
    path = archived(folder, tmp_path / "archive" / "cifar-10-python.tar.gz", monkeypatch)
    for place in (path, path.parent):
        data = cifar10(place)
        assert data.note == "" and data.train[0]["label"] == first[1][0]


def image_folder(root, classes=datasets.CIFAR10_CLASSES):
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32)).save(buffer, "JPEG")
    for split in ("train", "test"):
        for name in classes:
            (root / split / name).mkdir(parents=True)
            (root / split / name / "0000.jpg").write_bytes(buffer.getvalue())
    return root


def test_an_image_folder_is_a_jpeg_copy_and_must_be_whole(tmp_path):
    root = image_folder(tmp_path / "cifar10-jpeg")
    path = tmp_path / "elsewhere" / "cifar10-jpeg.tar.xz"
    path.parent.mkdir()
    with tarfile.open(path, "w:xz") as archive:
        for split in ("train", "test"):
            archive.add(root / split, split)
    for place in (tmp_path, root, path, path.parent):
        data = cifar10(place)
        assert data.note == "CIFAR-10 (JPEG copy)"
        with refused(DataError, "loaded-differs", examples=10, expected_examples=50_000):
            data.train[0]
    (root / "train" / "zebra").mkdir()
    (root / "train" / "zebra" / "0.jpg").write_bytes((root / "train" / "cat" / "0000.jpg").read_bytes())
    with refused(DataError, "cifar10-classes", split="train", expected=datasets.CIFAR10_CLASSES):
        cifar10(root).train[0]


class Packable:
    """One image of each class, whose pixels are the number of its class among `names`."""

    def __init__(self, names, shape):
        self.class_names, self.shape = tuple(names), shape

    def __len__(self):
        return len(self.class_names)

    def __getitem__(self, index):
        return {"image": np.full(self.shape, index, np.uint8), "label": np.int32(index)}


@pytest.mark.parametrize(
    ("make", "names", "shape"),
    [(cifar10, datasets.CIFAR10_CLASSES, (32, 32, 3)), (mnist, tuple("0123456789"), (28, 28))],
)
def test_a_pack_is_joined_by_the_names_of_its_classes(tmp_path, make, names, shape):
    split = Packable(reversed(names), shape)
    cw.pack({"train": split, "eval": split}, tmp_path / "pack")
    for source in (make(tmp_path / "pack").train, make(tmp_path / "pack").eval):
        columns = materialize(source)
        np.testing.assert_array_equal(columns["label"], 9 - columns["image"].reshape(10, -1)[:, 0])
    other = Packable(names, (16, 16, 3))
    cw.pack({"train": other, "eval": other}, tmp_path / "small")
    with refused(DataError, "pack-unlike", classes=10):
        make(tmp_path / "small")
    strange = Packable([*names[:9], "zebra"], shape)
    cw.pack({"train": strange, "eval": strange}, tmp_path / "strange")
    with refused(DataError, "classes-unjoined", classes=["zebra"]):
        make(tmp_path / "strange")


def test_a_pack_of_torchvisions_mnist_is_taken(tmp_path):
    split = Packable(datasets.MNIST_IN_TORCHVISION, (28, 28))
    cw.pack({"train": split, "eval": split}, tmp_path / "pack")
    data = mnist(tmp_path / "pack")
    for source in (data.train, data.eval):
        np.testing.assert_array_equal(materialize(source)["label"], np.arange(10))
    assert data.class_names == tuple("0123456789")


def test_originals_are_preferred(tmp_path, monkeypatch):
    image_folder(tmp_path / "cifar10-jpeg")
    write(tmp_path, monkeypatch)
    assert cifar10(tmp_path).note == ""
