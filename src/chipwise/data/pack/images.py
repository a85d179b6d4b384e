"""An image as it came to an image as it is stored: pixels, or JPEG bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from PIL import Image

from ...errors import DataError
from ..images import Encoded, fitted, from_pillow

# Chroma at half the resolution, as cameras store it. Photographs at 224×224 and quality 90: 15.9 kB that
# decode in 0.23 ms, where 4:4:4 takes 21.3 kB and 0.44 ms for 2.8 dB more (simplejpeg 1.9 on one AMD EPYC
# core).
_CHROMA = "420"
_JPEG_SIDE = 65_500  # libjpeg's limit


@dataclass(frozen=True)
class Form:
    """How images are stored: `size` in pixels or `None` for as they are; `crop` to `size` × `size`, or scaled
    until the shorter side has `size`; `store`, "raw" or "jpeg"; `quality` of JPEGs that must be encoded."""

    size: int | None = None
    crop: bool = True
    store: str = "raw"
    quality: int = 90


class SizesDiffer(DataError):
    """Raw packs hold images of one size: no going on with such a pack."""


class Made(NamedTuple):
    """`stored`: what is written, pixels or JPEG bytes; `pixels`: what a reader will see; `enlarged`: whether
    the image was smaller than the size it was given."""

    stored: np.ndarray | bytes
    pixels: np.ndarray
    enlarged: bool


def make(value: Any, form: Form) -> Made:
    """`value` in its stored form.

    `value`: encoded bytes, a Pillow image, or an array or tensor: `(h, w)`, `(h, w, 1 or 3)`, and for tensors
    `(1 or 3, h, w)`, of uint8, or of floats from 0 to 1, which become 0 to 255. A JPEG that needs no change
    is stored byte for byte; arrays without `size` are stored raw as they are.

    Raises `DataError`, for the caller to add the name, for what cannot be stored.
    """
    size = None if form.size is None else (form.size, form.size)
    if isinstance(value, bytes):
        image = Encoded(value)
        shape = (image.height, image.width)
        pixels = image.pixels(size, form.crop)
        if form.store == "jpeg" and image.plain and pixels.shape[:2] == shape:
            return Made(value, pixels, False)
    elif isinstance(value, Image.Image):
        pixels = _loaded(value, size, form.crop)
        shape = (value.height, value.width)
    else:
        array = _array(value)
        shape = array.shape[:2]
        pixels = array if size is None or shape == size else _resized(array, size, form.crop)
    enlarged = form.size is not None and min(shape) < form.size
    if form.store == "raw":
        return Made(pixels, pixels, enlarged)
    if max(pixels.shape[:2]) > _JPEG_SIDE:
        raise DataError(
            f"{pixels.shape[0]}×{pixels.shape[1]} (height×width), and a JPEG has at most {_JPEG_SIDE:,} "
            f"pixels a side: scale it down first"
        )
    color = np.ascontiguousarray(
        np.broadcast_to(pixels.reshape(*pixels.shape[:2], -1), (*pixels.shape[:2], 3))
    )
    stored = simplejpeg.encode_jpeg(color, form.quality, "RGB", _CHROMA)
    return Made(stored, simplejpeg.decode_jpeg(stored, "RGB"), enlarged)


def _loaded(image: Image.Image, size: tuple[int, int] | None, crop: bool) -> np.ndarray:
    try:
        return from_pillow(image, size, crop)  # Pillow reads a file when its pixels are asked for
    except (DataError, MemoryError, OSError):
        raise
    except Exception as error:  # decoders raise what they like on damaged files
        raise DataError(f"a damaged image ({type(error).__name__})") from error


def _array(value: Any) -> np.ndarray:
    array = np.asarray(value)
    if hasattr(value, "detach") and array.ndim == 3 and array.shape[0] in (1, 3):  # PyTorch's order of axes
        array = np.ascontiguousarray(array.transpose(1, 2, 0))
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3)) or not array.size:
        raise DataError(f"an image of shape {array.shape}: expected (h, w), (h, w, 1) or (h, w, 3)")
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind == "f" and array.min() >= 0 and array.max() <= 1:
        return np.rint(array * 255).astype(np.uint8)
    raise DataError(
        f"pixels of {array.dtype} from {array.min():g} to {array.max():g}: expected uint8, or floats from 0 "
        f"to 1; normalise after packing, not before"
    )


def _resized(array: np.ndarray, size: tuple[int, int], crop: bool) -> np.ndarray:
    grey = array.ndim == 3 and array.shape[2] == 1
    pixels = fitted(Image.fromarray(array[..., 0] if grey else array), size, crop)
    return pixels[..., None] if grey else pixels
