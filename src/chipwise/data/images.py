"""Decodes images to RGB pixels, upright and at the requested size. Refuses unsafe files.

simplejpeg decodes plain JPEGs, at 1/2, 1/4 or 1/8 of their size if that is enough, several times
faster than Pillow, which decodes everything else. Grey becomes three equal channels. Palettes and
CMYK become RGB. Transparency becomes white, since files have any colour below it, often black. The
first of several frames is used, and the camera's orientation is applied.
"""

from __future__ import annotations

import contextlib
import io
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image, ImageOps

from ..base import DataError

# Of Pillow's formats only these: others run programs (PostScript), or are rarely tested
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# Height times width; above it Pillow, too, assumes a decompression bomb: 13,377 squared.
MAX_PIXELS = 178_956_970
MAX_BYTES = 512 << 20  # of memory for all images that a process decodes or encodes at once
# Bytes a pixel at the peak: measured, without a size
_JPEG = 3
_PROGRESSIVE = 9
_TURNED = 15
_WEBP = 21
_OTHERS = 11
_SMALL_BYTES = 8 << 20  # of such an image, which waits for no other
_MOST_SCANNED = 1 << 31  # pixels in all scans of a JPEG: some seconds
_ROWS_OF = 1 << 20  # pixels that are converted at once
_WIDE_MODES = ("I", "F")  # 16 and 32 bits per channel: Pillow would clip them to 8
_ORIENTATION = 274  # the EXIF tag
_TURNS = range(2, 9)  # its values that are not upright


Size = tuple[int, int]
"""Height and width in pixels."""


class Encoded:
    """An encoded image. Only its header has been read.

    *Attributes:* `height`, `width`: in pixels, for a JPEG those of the upright image. `plain`:
    whether it is a grey or colour JPEG that is stored upright.

    Raises `DataError`, before anything is decoded, if it is not an image, or has more pixels than
    `MAX_PIXELS` or `MAX_BYTES` allow.
    """

    def __init__(self, data: bytes):
        self._data = data
        self._turn = 1
        self.plain = False
        self._cost = _JPEG
        try:
            self._jpeg = data[:3] == b"\xff\xd8\xff" and self._read_jpeg()
            if not self._jpeg:
                self._read_others()
        except Image.DecompressionBombError as error:
            raise DataError("image-too-large", limit=MAX_PIXELS) from error
        except DataError:
            raise
        except Exception as error:  # decoders raise all kinds of exceptions on damaged files
            raise _damaged(data, error) from error
        _bytes(self.height * self.width, self._cost)

    def pixels(self, size: Size | None = None) -> np.ndarray:
        """The pixels, `(height, width, 3)` uint8.

        With `size` `(height, width)`, the image is scaled to cover it and cropped at the centre.
        Raises `DataError` for damage, and for more than 8 bits per channel.
        """
        try:
            if not self._jpeg:
                with _opened(self._data) as opened:
                    return from_pillow(opened, size)
            # min_height: decoding at 1/2, 1/4 or 1/8 scale is cheaper than resizing afterwards
            height, width = covering((self.height, self.width), size)
            if self._turn >= 5:
                height, width = width, height
            cost = _TURNED if self._turn != 1 and size is None else self._cost
            with room(_bytes(self.height * self.width, cost)):
                pixels = self.decoded(
                    simplejpeg.decode_jpeg, "RGB", min_height=height, min_width=width
                )
                if self._turn == 1 and size in (None, pixels.shape[:2]):
                    return pixels
                image = Image.fromarray(pixels)
                if self._turn != 1:
                    image.getexif()[_ORIENTATION] = self._turn
                    image = ImageOps.exif_transpose(image)
                return fitted(image, size)
        except (DataError, MemoryError):
            raise
        except Exception as error:
            raise _damaged(self._data, error) from error

    def _read_jpeg(self) -> bool:
        """Reads the header of a JPEG that simplejpeg can decode. Returns false for CMYK."""
        self.height, self.width, space, _ = self.decoded(simplejpeg.decode_jpeg_header)
        if space.upper() in ("CMYK", "YCCK"):
            return False
        area = self.height * self.width
        many = area * len(self._data) > 10 * _MOST_SCANNED  # a scan takes 10 bytes or more
        if many and area * self._data.count(b"\xff\xda") > _MOST_SCANNED:
            raise DataError("image-scans", "it has too many scans for its size: save it again.")
        if area * _PROGRESSIVE > _SMALL_BYTES and b"\xff\xc2" in self._data:
            self._cost = _PROGRESSIVE
        if b"Exif\0\0" in self._data[: 1 << 16]:
            with _opened(self._data) as image:
                turn = image.getexif().get(_ORIENTATION, 1)
            self._turn = turn if turn in _TURNS else 1
        if self._turn >= 5:
            self.height, self.width = self.width, self.height
        self.plain = self._turn == 1
        return True

    def decoded(self, decode: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What a function of simplejpeg makes of the JPEG. Bytes between the segments of its header
        are left out, as viewers do: cameras and editors write them, and no pixel depends on them.
        simplejpeg refuses any other damage."""
        try:
            return decode(self._data, *arguments, **options)
        except ValueError as error:
            if "extraneous bytes" not in str(error):
                raise
            self._data = _tidied(self._data)
            return decode(self._data, *arguments, **options)

    def _read_others(self) -> None:
        with _opened(self._data) as opened:
            self._cost = _cost(opened)
            self.height = opened.height
            self.width = opened.width


def _tidied(jpeg: bytes) -> bytes:
    """A JPEG without the bytes that lie between the segments of its header, as libjpeg skips them.
    It stays as it is if its header does not end."""
    segments = [jpeg[:2]]
    at = 2
    while (start := jpeg.find(b"\xff", at)) >= 0:
        marker = jpeg[start + 1 : start + 2]
        if marker == b"\xda":  # the pixels follow
            return b"".join([*segments, jpeg[start:]])
        if marker in (b"\x00", b"\xff"):  # no marker yet
            at = start + 1
            continue
        at = start + 2 + int.from_bytes(jpeg[start + 2 : start + 4], "big")
        segments.append(jpeg[start:at])
    return jpeg


def _cost(image: Image.Image) -> int:
    if image.format == "WEBP":
        return _WEBP
    return _TURNED if _turn_before_pixels(image) in _TURNS else _OTHERS


def _turn_before_pixels(image: Image.Image) -> int:
    """The camera's orientation. Returns 1 for a PNG that may have it behind the pixels, which
    Pillow would decode."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    return image.getexif().get(_ORIENTATION, 1)


def _bytes(pixels: int, cost: int) -> int:
    """The memory for an image of `pixels` pixels at `cost` bytes each. Raises `DataError` if it is
    too much."""
    limit = min(MAX_PIXELS, MAX_BYTES // cost)
    if pixels > limit:
        raise DataError("image-too-large", limit=limit)
    return pixels * cost


_taken = 0
_given_back = threading.Condition()


@contextlib.contextmanager
def room(nbytes: int) -> Iterator[None]:
    """A context with `nbytes` of memory for an image, or `MAX_BYTES` if that is less. Threads that
    decode or encode large images share `MAX_BYTES`. One context must not be inside another."""
    global _taken
    if (nbytes := min(nbytes, MAX_BYTES)) <= _SMALL_BYTES:
        yield
        return
    with _given_back:
        _given_back.wait_for(lambda: _taken + nbytes <= MAX_BYTES)
        _taken += nbytes
    try:
        yield
    finally:
        with _given_back:
            _taken -= nbytes
            _given_back.notify_all()


def _opened(data: bytes) -> Image.Image:
    """Opens an image with Pillow. Packing, image folders, predictions and pictures all open files
    here."""
    return Image.open(io.BytesIO(data), formats=FORMATS)


def checked_size(size: int | Size | None) -> Size | None:
    """`(height, width)` from one number for both or from two. Raises `DataError` for less than a
    pixel."""
    size = (size, size) if isinstance(size, int) else size
    if size is not None and min(size) < 1:
        wrong = "size={size[0]}×{size[1]} must be at least 1 pixel in height and width."
        raise DataError("size-not-positive", wrong, size=list(size))
    return size


def decode(data: bytes, size: Size | None = None) -> np.ndarray:
    """An encoded image as `(height, width, 3)` uint8, RGB, upright. See `Encoded.pixels`."""
    return Encoded(data).pixels(size)


def decode_into(data: bytes, out: np.ndarray, size: Size | None = None) -> tuple[int, ...]:
    """Decodes an image, as `decode` does, into `out` `(height, width, 3)` uint8.

    *Returns* the image's shape. If it differs from the shape of `out`, nothing is written.
    """
    encoded = Encoded(data)
    height = encoded.height
    width = encoded.width
    if encoded.plain and (height, width) == out.shape[:2] and size in (None, (height, width)):
        try:
            # No copy: most of a small image's cost
            encoded.decoded(simplejpeg.decode_jpeg, "RGB", buffer=out)
        except Exception as error:
            raise _damaged(data, error) from error
        return out.shape
    pixels = encoded.pixels(size)
    if pixels.shape == out.shape:
        out[:] = pixels
    return pixels.shape


def from_pillow(image: Image.Image, size: Size | None = None) -> np.ndarray:
    """A Pillow image as `(height, width, 3)` uint8, as `Encoded.pixels` gives it."""
    with room(_bytes(image.width * image.height, _cost(image))):
        return _from_pillow(image, size)


def _from_pillow(image: Image.Image, size: Size | None) -> np.ndarray:
    # Pillow keeps the high byte of 16-bit colour, which only the raw mode of the file shows
    if image.mode.split(";")[0] in _WIDE_MODES or any(
        ";16" in str(t[3]) for t in getattr(image, "tile", ())
    ):
        raise DataError("image-depth", "it has more than 8 bits a channel: convert it to 8.")
    turned = image.getexif().get(_ORIENTATION, 1) in _TURNS
    upright = ImageOps.exif_transpose(image) if turned else image
    if size is None:
        return _pixels(upright)
    if upright.mode != "RGB" or "transparency" in upright.info:
        upright = Image.fromarray(_pixels(upright))
    return fitted(upright, size)


def _pixels(image: Image.Image) -> np.ndarray:
    """The pixels of `image` over white, `(height, width, 3)`. Converts some rows at a time, since
    converting takes several copies."""
    whole = np.empty((image.height, image.width, 3), np.uint8)
    rows = max(1, _ROWS_OF // image.width)
    clear = image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info
    image.load()
    for top in range(0, image.height, rows):
        part = image.crop((0, top, image.width, min(top + rows, image.height)))
        if clear:
            white = Image.new("RGBA", part.size, "white")
            white.alpha_composite(part.convert("RGBA"))
            part = white
        whole[top : top + rows] = np.asarray(part.convert("RGB"))
    return whole


def fitted(image: Image.Image, size: Size | None) -> np.ndarray:
    """The pixels of `image`, scaled to cover `size`, bilinear, and cropped at the centre."""
    if size is not None:
        image = ImageOps.fit(image, size[::-1], Image.Resampling.BILINEAR)
    return np.asarray(image)


def covering(shape: Size, size: Size | None) -> Size:
    """The height and width of an image of `shape` scaled to just cover `size`, or `shape` if `size`
    is `None`."""
    if size is None:
        return shape
    (height, width), (to_height, to_width) = shape, size
    if height * to_width <= width * to_height:  # the height decides, in whole numbers
        return to_height, max(to_width, (2 * width * to_height + height) // (2 * height))
    return max(to_height, (2 * height * to_width + width) // (2 * width)), to_width


def _damaged(data: bytes, error: Exception) -> DataError:
    if not data:
        return DataError("image-empty", "the file is empty: replace it or leave it out.")
    # Pillow's messages contain memory addresses, which vary
    reason = " ".join(re.sub(r"<[^>]*>", "", str(error)).split())[:120]
    wrong = "not an image, or damaged ({bytes:,} bytes: {reason}): replace it or leave it out."
    return DataError("image-damaged", wrong, bytes=len(data), reason=reason)
