"""The data sets that come with chipwise: digits, MNIST and CIFAR-10.

Lengths, shapes and statistics are known without a file, so planning and listing need no data. The
examples are read when first asked for: from a folder (`data=`, or the environment variable
CHIPWISE_DATA), else downloaded from their public homes, with checksums, into the user's cache.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from ..errors import DataError
from ..recipe.task import Source
from . import cifar, download
from .folder import ImageFolder
from .idx import read_idx
from .manifest import MANIFEST
from .packed import PackedFolder
from .remote import local
from .sources import Columns, Lazy, materialize

_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/"
# file: (MD5 of the published .gz, MD5 uncompressed). The second also holds for files that someone
# unpacked, or packed again.
_MNIST = {
    "train-images-idx3-ubyte": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
    "train-labels-idx1-ubyte": ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
    "t10k-images-idx3-ubyte": ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
    "t10k-labels-idx1-ubyte": ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
}
_CIFAR10_MD5 = "c58f30108f718f92721af3b95e74349a"
_CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
JPEG_NOTE = "CIFAR-10 (JPEG copy)"  # lossy: accuracies are a little lower than on the original arrays


@dataclass(frozen=True)
class Dataset:
    """A training and an evaluation source, and what a recipe needs to know about them.

    *Fields:* `train`, `eval`: sources with columns `image` uint8 and `label` int32; `classes`: their
    number; `mean`, `std`: of the training pixels, one a channel, in pixel units (0 to 255; digits 0 to
    16); `name`; `class_names`; `note`: what must be said beside every figure measured on it, or "".
    """

    train: Source
    eval: Source
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str
    class_names: tuple[str, ...] = ()
    note: str = ""


def digits() -> Dataset:
    """1,797 handwritten digits of 8×8 pixels, 0 to 16, which come with scikit-learn: no download.

    Every fifth example, from the first, is for evaluation: 1,437 to train and 360 to evaluate.
    """

    @functools.cache
    def both() -> dict[str, Columns]:
        from sklearn.datasets import load_digits  # takes a second: only when the data are used

        bunch = load_digits()
        columns = {"image": bunch.images.astype(np.uint8), "label": bunch.target.astype(np.int32)}
        held_out = np.arange(len(columns["label"])) % 5 == 0
        return {
            "train": {name: column[~held_out] for name, column in columns.items()},
            "eval": {name: column[held_out] for name, column in columns.items()},
        }

    return Dataset(
        train=_lazy(1437, (8, 8), lambda: both()["train"]),
        eval=_lazy(360, (8, 8), lambda: both()["eval"]),
        classes=10,
        mean=(4.883,),
        std=(6.021,),
        name="digits",
        class_names=tuple("0123456789"),
    )


def mnist(data: str | Path | None = None) -> Dataset:
    """MNIST: 60,000 training and 10,000 evaluation images `(28, 28)` of handwritten digits.

    `data`: a folder with the four IDX files, plain or `.gz`, directly, in `mnist/` or in `MNIST/raw/`;
    `None`: CHIPWISE_DATA when it has them, else a download of 11 MB on first use.

    Raises `DataError` when `data` lacks a file; and on first use for a wrong checksum or no network.
    """
    found = _look(data, _find_mnist, "MNIST", f"{', '.join(_MNIST)} (plain or .gz), here or in mnist/")

    def read(part: str) -> Callable[[], Columns]:
        def load() -> Columns:
            names = [name for name in _MNIST if name.startswith(part)]
            if found is None:
                files = {f"{name}.gz": sums[0] for name, sums in _MNIST.items()}
                paths = dict(zip(_MNIST, download.fetch("MNIST", _MNIST_URL, files), strict=True))
            else:
                paths = found
            image, label = (read_idx(paths[name], md5=_MNIST[name][1]) for name in names)
            return {"image": image, "label": label.astype(np.int32)}

        return load

    return Dataset(
        train=_lazy(60_000, (28, 28), read("train")),
        eval=_lazy(10_000, (28, 28), read("t10k")),
        classes=10,
        mean=(33.318,),
        std=(78.567,),
        name="mnist",
        class_names=tuple("0123456789"),
    )


def cifar10(data: str | Path | None = None) -> Dataset:
    """CIFAR-10: 50,000 training and 10,000 evaluation images `(32, 32, 3)` of ten kinds of things.

    `data`: the original batches (`cifar-10-batches-py`, `cifar-10-batches-bin` or their `.tar.gz`),
    or an image folder with `train/` and `test/` or a tar archive of one; the path itself or a folder
    that holds it. Originals are preferred; of an image folder `note` says "CIFAR-10 (JPEG copy)". Or a
    packed folder of one of these (`chipwise pack`), read in place.
    `None`: CHIPWISE_DATA when it has one of these, else a download of 170 MB on first use.

    Raises `DataError` when `data` holds none of these; and on first use for damage or no network.
    """
    expected = (
        f"{' or '.join(cifar.ARCHIVES[10])}, their unpacked folder, or an image folder with train/ and test/"
    )
    found = _look(data, _find_cifar10, "CIFAR-10", expected)
    kind, path = found or ("original", None)
    if kind == "packed":
        assert path is not None
        return _packed_cifar10(path)

    @functools.cache  # an archive is decompressed once for both halves
    def both() -> dict[str, Columns]:
        if kind == "jpeg":
            assert path is not None
            return {split: _images(path, split) for split in ("train", "test")}
        home = path
        if home is None:
            (home,) = download.fetch("CIFAR-10", _CIFAR10_URL, {cifar.ARCHIVES[10][0]: _CIFAR10_MD5})
        return cifar.read_cifar(home)

    return _cifar10(
        _lazy(50_000, (32, 32, 3), lambda: both()["train"]),
        _lazy(10_000, (32, 32, 3), lambda: both()["test"]),
        JPEG_NOTE if kind == "jpeg" else "",
    )


def _cifar10(train: Source, held_out: Source, note: str) -> Dataset:
    return Dataset(
        train=train,
        eval=held_out,
        classes=10,
        mean=(125.31, 122.95, 113.87),
        std=(62.99, 62.09, 66.70),
        name="cifar10",
        class_names=_CIFAR10_CLASSES,
        note=note,
    )


def _packed_cifar10(path: Path) -> Dataset:
    splits = []
    for split in ("train", "eval"):
        packed = PackedFolder(path, split)
        spec = {name: (s.shape, s.dtype) for name, s in packed.spec.items()}
        if spec.get("image") != ((32, 32, 3), np.uint8) or packed.names != _CIFAR10_CLASSES:
            found = ", ".join(f"{name} {dtype}{list(shape)}" for name, (shape, dtype) in spec.items())
            raise DataError(
                f"{packed.path} holds {found} of {', '.join(packed.names[:20]) or 'no classes'}: expected "
                f"image uint8[32, 32, 3] of {', '.join(_CIFAR10_CLASSES)}."
            )
        splits.append(packed)
    # A pack does not tell whether its pixels were JPEGs before, but the original batches name no files
    lossy = splits[0].store == "jpeg" or splits[0].record_name(0).endswith((".jpg", ".jpeg"))
    return _cifar10(splits[0], splits[1], JPEG_NOTE if lossy else "")


def _lazy(length: int, shape: tuple[int, ...], load: Callable[[], Columns]) -> Lazy:
    spec = {"image": jax.ShapeDtypeStruct(shape, np.uint8), "label": jax.ShapeDtypeStruct((), np.int32)}
    return Lazy(length, spec, load, classes=10)


def _look(data, find: Callable, name: str, expected: str):
    """What `find` sees in `data`, or in CHIPWISE_DATA; `None` to download."""
    if data is not None:
        root = local(data)
        found = find(root) if root.exists() else None
        if found is None:
            state = "has no" if root.exists() else "does not exist, so it has no"
            raise DataError(f"data={data} {state} {name}: expected {expected}.")
        return found
    default = os.environ.get("CHIPWISE_DATA")
    # A default for several data sets may lack this one: then it is downloaded
    return find(Path(default).expanduser()) if default else None


def _find_mnist(root: Path) -> dict[str, Path] | None:
    for folder in (root, root / "mnist", root / "MNIST" / "raw"):
        paths = {}
        for name in _MNIST:
            present = [p for p in (folder / name, folder / f"{name}.gz") if p.is_file()]
            if present:
                paths[name] = present[0]
        if len(paths) == len(_MNIST):
            return paths
    return None


def _find_cifar10(root: Path) -> tuple[str, Path] | None:
    """("original", "jpeg" or "packed", path)."""
    if root.is_file():
        return ("original" if root.name in cifar.ARCHIVES[10] else "jpeg"), root
    folders = [root, *(root / name for name in ("cifar10", "cifar10-jpeg"))]
    for folder in folders:
        if (folder / "train" / MANIFEST).is_file():
            return "packed", folder
    for folder in folders:
        for place in (folder, *(folder / name for name in cifar.FOLDERS[10])):
            if any((place / name).is_file() for name in ("data_batch_1", "data_batch_1.bin")):
                return "original", place
        for name in cifar.ARCHIVES[10]:
            if (folder / name).is_file():
                return "original", folder / name
    for folder in folders:
        if all((folder / split / "airplane").is_dir() for split in ("train", "test")):
            return "jpeg", folder
        for name in ("cifar10", "cifar10-jpeg"):
            for suffix in (".tar", ".tar.gz", ".tar.xz"):
                if (folder / (name + suffix)).is_file():
                    return "jpeg", folder / (name + suffix)
    return None


def _images(path: Path, split: str) -> Columns:
    folder = ImageFolder(path, split=split)
    if folder.names != _CIFAR10_CLASSES:
        raise DataError(
            f"{path}/{split} has the classes {', '.join(folder.names[:20])}, "
            f"expected {', '.join(_CIFAR10_CLASSES)}."
        )
    return materialize(folder)
