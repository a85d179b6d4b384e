"""ImageNet-1k as a packed folder: 1,281,167 training and 50,000 evaluation images of 1,000 classes.

Its pictures are not ours to pass on and may not be downloaded without an account, so there is no
download: `data=` is a packed folder (`chipwise.data.packed`) with square images somewhat larger than
the net's input. Any packed folder of images and labels will do; its classes are the net's.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from ..errors import DataError
from .datasets import Dataset
from .packed import PackedFolder
from .sources import Spec
from .synthetic import Absent

EXAMPLES = {"train": 1_281_167, "eval": 50_000}
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # torchvision's, in pixel units


def imagenet(data: str | Path | None = None, image: int = 224) -> Dataset:
    """ImageNet for a net whose input is `image` × `image` pixels.

    `data`: a packed folder with `train/` and `eval/`, columns `image` `(h, w, 3)` uint8 with both sides
    at least `image`, and `label`; `None`: known by its shapes only, `image * 8 / 7` pixels square (256 for
    224), enough to plan with.

    Raises `DataError` when `data` is no such folder.
    """
    if data is None:
        side = image * 8 // 7
        spec = _spec(side, side)
        absent = {split: Absent(n, spec, "ImageNet", {"label": 1000}) for split, n in EXAMPLES.items()}
        return _dataset(absent["train"], absent["eval"], 1000)
    train, held_out = (PackedFolder(data, split) for split in EXAMPLES)
    for source in (train, held_out):
        shape = source.spec["image"].shape if "image" in source.spec else ()
        fits = len(shape) == 3 and min(shape[:2]) >= image
        if source.classes is None or not fits or source.spec != _spec(*shape[:2]):
            found = ", ".join(f"{name} {s.dtype}{list(s.shape)}" for name, s in source.spec.items())
            raise DataError(
                f"{source.path} has {found} and {source.classes or 'no'} classes: expected "
                f"image uint8[h, w, 3] of at least {image}, label int32[], and the number of classes."
            )
    if train.classes is None or train.classes != held_out.classes:
        raise DataError(
            f"{data} has {train.classes} classes to train, {held_out.classes} to evaluate: pack them alike."
        )
    return _dataset(train, held_out, train.classes)


def _spec(height: int, width: int) -> Spec:
    return {
        "image": jax.ShapeDtypeStruct((height, width, 3), np.uint8),
        "label": jax.ShapeDtypeStruct((), np.int32),
    }


def _dataset(train, held_out, classes: int) -> Dataset:
    return Dataset(train=train, eval=held_out, classes=classes, mean=MEAN, std=STD, name="imagenet")
