"""The built-in data sets: digits, MNIST, CIFAR-10, and a packed ImageNet of your own.

Lengths, shapes and statistics are known without files, so planning and listing need no data.
Examples are read at the first access, from a folder (`data=`, or the environment variable
CHIPWISE_DATA). Otherwise they are downloaded from their public sources, with checksums, into the
user's cache. ImageNet may not be redistributed and needs an account, so it is read from a packed
folder.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..base import DataError, fact
from ..base.annotations import as_annotated
from ..base.figures import one_line
from ..base.files import home
from ..recipe.source import Source
from . import originals
from .class_names import Renamed, joined, names_of
from .image_folder import ImageFolder
from .manifest import MANIFEST
from .packed import PackedFolder
from .remote import local
from .sources import Columns, Lazy, Spec, described, materialize
from .synthetic import Absent

_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/"
CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
# Lossy: accuracies are a little lower than on the original arrays
JPEG_NOTE = "CIFAR-10 (JPEG copy)"
_IMAGENET = {"train": 1_281_167, "eval": 50_000}


@as_annotated
@dataclass(frozen=True)
class Dataset:
    """A training and an evaluation source, with their statistics."""

    train: Source
    """A source with columns `image` uint8 and `label` int32."""
    eval: Source
    """A source with the same columns."""
    classes: int
    """The number of classes."""
    mean: tuple[float, ...]
    """The mean of the training pixels, one per channel, in pixel units (0 to 255, for digits 0 to
    16)."""
    std: tuple[float, ...]
    """The standard deviation of the training pixels, as `mean`."""
    name: str
    class_names: tuple[str, ...] = ()
    note: str = ""
    """A caution to show with every figure measured on the data, or ""."""


def digits() -> Dataset:
    """1,797 handwritten digits of 8×8 pixels, 0 to 16, included in chipwise.

    Every fifth example, starting with the first, is for evaluation: 1,437 to train and 360 to
    evaluate.

    Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository (1998), https://doi.org/10.24432/C50P49, its test set, CC BY 4.0. Values and order
    are those of scikit-learn's `load_digits`.
    """

    @functools.cache
    def read() -> Columns:
        with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
            return {"image": file["image"], "label": file["label"].astype(np.int32)}

    def part(held_out: bool) -> Columns:
        rows = (np.arange(1797) % 5 == 0) == held_out
        return {name: column[rows] for name, column in read().items()}

    train = _lazy(1437, (8, 8), lambda: part(False))
    held_out = _lazy(360, (8, 8), lambda: part(True))
    return Dataset(train, held_out, 10, (4.883,), (6.021,), "digits", tuple("0123456789"))


@as_annotated
def mnist(data: str | Path | None = None) -> Dataset:
    """MNIST: 60,000 training and 10,000 evaluation images `(28, 28)` of handwritten digits.

    `data`: a folder with the four IDX files, plain or `.gz`, directly, in `mnist/` or in
    `MNIST/raw/`, or a packed folder of MNIST. `None` means CHIPWISE_DATA if it has the files, else
    a download of 11 MB at first use.

    Raises `DataError` if `data` lacks a file, and at first use for a wrong checksum or no network.
    """
    names = tuple("0123456789")
    made = functools.partial(
        Dataset, classes=10, mean=(33.318,), std=(78.567,), name="mnist", class_names=names
    )
    if (packed := _packed(data, (28, 28), names)) is not None:
        return made(*(joined(names, _called_as_digits(source)) for source in packed))
    files = _look(data, _find_mnist, "mnist-missing", files=list(originals.MNIST_FILES))

    def read(part: str) -> Callable[[], Columns]:
        def load() -> Columns:
            paths = files
            if paths is None:
                zipped = {f"{name}.gz": sums[0] for name, sums in originals.MNIST_FILES.items()}
                paths = dict(
                    zip(originals.MNIST_FILES, published("MNIST", _MNIST_URL, zipped), strict=True)
                )
            names = [name for name in originals.MNIST_FILES if name.startswith(part)]
            image, label = (
                originals.read_idx(paths[name], originals.MNIST_FILES[name][1]) for name in names
            )
            return {"image": image, "label": label.astype(np.int32)}

        return load

    train = _lazy(60_000, (28, 28), read("train"))
    held_out = _lazy(10_000, (28, 28), read("t10k"))
    return made(train, held_out)


@as_annotated
def cifar10(data: str | Path | None = None) -> Dataset:
    """CIFAR-10: 50,000 training and 10,000 evaluation images `(32, 32, 3)` of ten kinds of things.

    `data`: the original batches (`cifar-10-batches-py` or `cifar-10-python.tar.gz`), an image
    folder with `train/` and `test/`, a tar archive of one, or a folder that contains one of these,
    or a packed folder of one. Originals are preferred. For an image folder `note` is "CIFAR-10
    (JPEG copy)". `None` means CHIPWISE_DATA if it has one of these, else a download of 170 MB at
    first use.

    Raises `DataError` if `data` has none of these, and at first use for damage or no network.
    """
    made = functools.partial(
        Dataset,
        classes=10,
        mean=(125.31, 122.95, 113.87),
        std=(62.99, 62.09, 66.70),
        name="cifar10",
        class_names=CIFAR10_CLASSES,
    )
    if (packed := _packed(data, (32, 32, 3), CIFAR10_CLASSES)) is not None:
        lossy = any(source.store == "jpeg" for source in packed)
        return made(*(joined(CIFAR10_CLASSES, source) for source in packed), note=JPEG_NOTE * lossy)
    place = _look(data, _find_cifar10, "cifar10-missing", archive=originals.CIFAR_ARCHIVE)
    kind, path = place or ("original", None)

    @functools.cache  # an archive is decompressed once for both splits
    def both() -> dict[str, Columns]:
        if kind == "jpeg":
            assert path is not None
            return {split: _images(path, split) for split in ("train", "test")}
        home = path
        if home is None:
            files = {originals.CIFAR_ARCHIVE: originals.CIFAR_SHA256}
            (home,) = published("CIFAR-10", _CIFAR10_URL, files)
        return originals.read_cifar(home)

    train = _lazy(50_000, (32, 32, 3), lambda: both()["train"])
    held_out = _lazy(10_000, (32, 32, 3), lambda: both()["test"])
    return made(train, held_out, note=JPEG_NOTE if kind == "jpeg" else "")


@as_annotated
def imagenet(data: str | Path | None = None, image: int = 224) -> Dataset:
    """ImageNet-1k for a net whose input is `image` × `image` pixels.

    `data`: a packed folder with `train/` and `eval/`, with columns `image` `(h, w, 3)` uint8, both
    sides at least `image`, and `label`. It may have any images. Its classes are those of the net.
    `None` gives only shapes, `image * 8 / 7` pixels square (256 for 224), which is enough for
    plans. `mean` and `std` are torchvision's.

    Raises `DataError` if `data` is not such a folder.
    """
    if data is None:
        side = image * 8 // 7
        spec = _image_spec((side, side, 3))
        train, held_out = (Absent(n, spec, "ImageNet", {"label": 1000}) for n in _IMAGENET.values())
        return _imagenet(train, held_out, 1000)
    packed = [PackedFolder(data, split) for split in _IMAGENET]
    for source in packed:
        shape = source.spec["image"].shape if "image" in source.spec else ()
        fits = len(shape) == 3 and min(shape[:2]) >= image
        if source.classes is None or not fits or source.spec != _image_spec((*shape[:2], 3)):
            raise DataError(
                "imagenet-pack",
                image=image,
                path=source.path,
                columns=described(source.spec),
                classes=source.classes,
            )
    classes = [source.classes for source in packed]
    named = all(source.names for source in packed)  # then labels are joined by names
    if classes[0] is None or (classes[0] != classes[1] and not named):
        raise DataError("classes-differ", data=str(data), train=classes[0], eval=classes[1])
    return _imagenet(packed[0], packed[1], classes[0])


def _imagenet(train: Source, held_out: Source, classes: int) -> Dataset:
    return Dataset(
        train=train,
        eval=held_out,
        classes=classes,
        mean=(123.675, 116.28, 103.53),
        std=(58.395, 57.12, 57.375),
        name="imagenet",
    )


def _image_spec(shape: tuple[int, ...]) -> Spec:
    return {
        "image": jax.ShapeDtypeStruct(shape, np.uint8),
        "label": jax.ShapeDtypeStruct((), np.int32),
    }


def _lazy(length: int, shape: tuple[int, ...], load: Callable[[], Columns]) -> Lazy:
    return Lazy(length, _image_spec(shape), load, classes=10)


def published(name: str, url: str, files: Mapping[str, str]) -> list[Path]:
    """The local paths of `files` (file name to SHA-256) under `url`, downloaded if not cached.

    `name` is the data set's name in errors. A file appears in the cache only if its checksum is
    right, so an interrupted download leaves no file that looks complete.

    Raises `DataError` without network, for a wrong checksum, and for a cache that cannot be
    written.
    """
    import pooch
    import requests

    logger = pooch.get_logger()
    level = logger.level
    downloader = pooch.HTTPDownloader(timeout=30)
    paths = []
    for file, sha256 in files.items():
        if not (home() / file).exists():
            print(fact("downloading", url=url + file), file=sys.stderr, flush=True)
        try:
            logger.setLevel(logging.WARNING)
            path = pooch.retrieve(
                url + file, f"sha256:{sha256}", file, home(), downloader=downloader
            )
        except (requests.RequestException, OSError, ValueError) as error:
            # ValueError is pooch's for a wrong checksum; of no connection requests writes a
            # paragraph
            why = (
                "no connection"
                if isinstance(error, requests.ConnectionError)
                else one_line(error, 200)
            )
            raise DataError(
                "download-failed", data=name, url=url + file, reason=why, files=list(files)
            ) from error
        finally:
            logger.setLevel(level)
        paths.append(Path(path))
    return paths


def _look(
    data: str | Path | None, find: Callable[[Path], Any], missing: str, **expected: Any
) -> Any:
    """The result of `find` in `data` or CHIPWISE_DATA, or `None` if the data is to be downloaded.

    Raises `DataError` with the code `missing` if `data` does not have it.
    """
    if data is not None:
        root = local(data)
        if not root.exists():
            raise DataError("data-absent", data=str(data))
        place = find(root)
        if place is None:
            raise DataError(missing, data=str(data), **expected)
        return place
    default = os.environ.get("CHIPWISE_DATA")
    # A folder for several data sets may lack this one: then it is downloaded
    return find(Path(default).expanduser()) if default else None


def _packed(
    data: str | Path | None, shape: tuple[int, ...], names: tuple[str, ...]
) -> list[PackedFolder] | None:
    """The training and the evaluation split of a packed folder `data`. `None` if `data` is none.

    Raises `DataError` for images that are not uint8 of `shape`, and for another number of classes
    than `names`.
    """
    if data is None or not (local(data) / "train" / MANIFEST).is_file():
        return None
    splits = []
    for split in ("train", "eval"):
        source = PackedFolder(data, split)
        if source.spec != _image_spec(shape) or source.classes != len(names):
            raise DataError(
                "pack-unlike",
                path=source.path,
                columns=described(source.spec),
                classes=source.classes,
                expected=described(_image_spec(shape)),
                names=names,
            )
        splits.append(source)
    return splits


MNIST_IN_TORCHVISION = (
    "0 - zero",
    "1 - one",
    "2 - two",
    "3 - three",
    "4 - four",
    "5 - five",
    "6 - six",
    "7 - seven",
    "8 - eight",
    "9 - nine",
)
"""The classes of torchvision's MNIST, by https://github.com/pytorch/vision
torchvision/datasets/mnist.py."""


def _called_as_digits(source: Source) -> Source:
    """`source`, whose classes are called `0` to `9` if it is a pack of torchvision's MNIST."""
    if names_of(source) != MNIST_IN_TORCHVISION:
        return source
    return Renamed(source, tuple("0123456789"))


def _find_mnist(root: Path) -> dict[str, Path] | None:
    for folder in (root, root / "mnist", root / "MNIST" / "raw"):
        paths = {}
        for name in originals.MNIST_FILES:
            present = [p for p in (folder / name, folder / f"{name}.gz") if p.is_file()]
            if present:
                paths[name] = present[0]
        if len(paths) == len(originals.MNIST_FILES):
            return paths
    return None


def _find_cifar10(root: Path) -> tuple[str, Path] | None:
    """("original" or "jpeg", path)."""
    if root.is_file():
        return ("original" if originals.batches_at(root) else "jpeg"), root
    folders = [root, *(root / name for name in ("cifar10", "cifar10-jpeg"))]
    for folder in folders:
        if (batches := originals.batches_at(folder)) is not None:
            return "original", batches
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
    if folder.names != CIFAR10_CLASSES:
        wrong = "{path}/{split} has the classes {names:few}, expected {expected:list}."
        raise DataError(
            "cifar10-classes",
            wrong,
            path=path,
            split=split,
            names=folder.names[:20],
            expected=CIFAR10_CLASSES,
        )
    return materialize(folder)
