"""Prepares the benchmark's data once in a scratch folder: the same images in every format.

small: CIFAR-10, 60,000 images of 32 × 32       large: 4,096 crops of 224 × 224 from two photographs

Record formats that are not installed are left out. All files are in the page cache afterwards.
"""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from chipwise.data import ImageFolder
from chipwise.data.sources import take

SMALL, LARGE, QUALITY = 32, 224, 90
TAR_SHARDS = 8
_CHUNK = 1024


@dataclass(frozen=True)
class Images:
    """A set of images in every format. `batch`: examples per batch."""

    folder: Path
    side: int
    batch: int

    @property
    def loose(self) -> Path:
        """Loose files `<class>/<name>.jpg`."""
        return self.folder / "loose"

    @property
    def classes(self) -> list[str]:
        return sorted(p.name for p in self.loose.iterdir())

    def files(self) -> list[tuple[str, int]]:
        """Path and label of every JPEG, sorted by class and name."""
        return [
            (entry.path, label)
            for label, name in enumerate(self.classes)
            for entry in sorted(os.scandir(self.loose / name), key=lambda e: e.name)
        ]

    def pack(self, store: str) -> Path:
        return self.folder / f"pack-{store}"

    def records(self, store: str) -> Path:
        """array-record with a group size of 1: the label in 4 bytes, then pixels or a JPEG."""
        return self.folder / f"{store}.array_record"

    def bagz(self, store: str) -> Path:
        """The same records as bagz; the suffix means uncompressed."""
        return self.folder / f"{store}.bag"

    def tars(self, store: str) -> list[Path]:
        """WebDataset's shards."""
        ending = {"jpeg": "jpg", "raw": "bin"}[store]
        return [self.folder / f"{ending}-{n:03}.tar" for n in range(TAR_SHARDS)]


def sets(work: Path, photographs: int) -> dict[str, Images]:
    """Both sets by name."""
    return {
        "small": Images(work / "small", SMALL, 512),
        "large": Images(work / f"large-{photographs}", LARGE, 256),
    }


def prepare(work: Path, cifar: Path, photographs: int, records: bool = True) -> None:
    """Creates what is missing in `work`, and reads everything once. `records`: also in other formats."""
    from chipwise.data.pack import pack

    small, large = sets(work, photographs).values()
    _once(small.loose, lambda to: _copy_cifar(cifar, to))
    _once(large.loose, lambda to: _crops(to, photographs))
    for images, store in ((small, "raw"), (large, "jpeg"), (large, "raw")):
        _once(images.pack(store), lambda to, i=images, s=store: pack(i.loose, to, store=s))
        if records:
            _write_records(images, store)
    for images in (small, large):
        for path in images.folder.rglob("*"):
            if path.is_file():
                path.read_bytes()


def _once(path: Path, make) -> None:
    """Calls `make(to)` with a temporary name, so that an interrupted run leaves no incomplete `path`."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f"partial-{path.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.unlink(missing_ok=True)
    make(partial)
    partial.rename(path)


def _copy_cifar(cifar: Path, to: Path) -> None:
    """Copies all 60,000 of CIFAR-10's JPEGs into one set of class folders."""
    for split in ("train", "test"):
        for folder in sorted((cifar / split).iterdir()):
            (to / folder.name).mkdir(parents=True, exist_ok=True)
            for file in folder.iterdir():
                shutil.copyfile(file, to / folder.name / f"{split}-{file.name}")


def _crops(to: Path, count: int) -> None:
    """`count` random crops of scikit-learn's two photographs, of 160 to 427 pixels, scaled, half of them
    mirrored, and stored as JPEG as Pillow does."""
    from sklearn.datasets import load_sample_images

    sample = load_sample_images()
    photos = [Image.fromarray(image) for image in sample.images]
    names = [Path(name).stem for name in sample.filenames]
    rng = np.random.default_rng(0)
    for name in names:
        (to / name).mkdir(parents=True)
    for number in range(count):
        which = number % len(photos)
        photo = photos[which]
        side = int(rng.integers(160, min(photo.size) + 1))
        left, top = (int(rng.integers(0, length - side + 1)) for length in photo.size)
        crop = photo.resize((LARGE, LARGE), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
        if rng.random() < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        crop.save(to / names[which] / f"{number:05}.jpg", quality=QUALITY)


def _write_records(images: Images, store: str) -> None:
    if importlib.util.find_spec("array_record"):
        from array_record.python.array_record_module import ArrayRecordWriter

        options = "group_size:1,uncompressed"  # pixels and JPEGs gain little from compression
        _once(images.records(store), lambda to: _write(ArrayRecordWriter(str(to), options), images, store))
    if importlib.util.find_spec("bagz"):
        import bagz

        _once(images.bagz(store), lambda to: _write(bagz.Writer(str(to)), images, store))
    if importlib.util.find_spec("webdataset"):
        _write_tars(images, store)


def _write(writer, images: Images, store: str) -> None:
    for label, data in _stored(images, store):
        writer.write(np.int32(label).tobytes() + data)
    writer.close()


def _write_tars(images: Images, store: str) -> None:
    import webdataset

    paths = images.tars(store)
    if all(path.exists() for path in paths):
        return
    # Shards are read sequentially and shuffled only within a buffer, so images are shuffled when written
    order = np.random.default_rng(0).permutation(len(images.files()))
    every = list(_stored(images, store))
    key = "jpg" if store == "jpeg" else "bin"
    for number, path in enumerate(paths):
        with webdataset.TarWriter(str(path)) as tar:
            for at in order[number :: len(paths)]:
                label, data = every[at]
                tar.write({"__key__": f"{at:06}", key: data, "cls": str(label).encode()})


def _stored(images: Images, store: str) -> Iterator[tuple[int, bytes]]:
    """Label and bytes, JPEG or pixels, of every image in order."""
    files = images.files()
    if store == "jpeg":
        for path, label in files:
            yield label, Path(path).read_bytes()
        return
    source = ImageFolder(images.loose)
    for start in range(0, len(files), _CHUNK):
        columns = take(source, np.arange(start, min(start + _CHUNK, len(files))))
        for image, label in zip(columns["image"], columns["label"], strict=True):
            yield int(label), image.tobytes()


def decode_pillow(data: bytes) -> np.ndarray:
    """Decodes like torchvision's ImageFolder by default."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))
