"""Converts examples to stored records, with images as pixels or JPEG bytes, in threads.

Workers are threads, since both decoders release the GIL. `benchmarks/packing.md` compares them with
processes. Work in flight is bounded, and results come in the order of the listing.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from PIL import Image

from ...base import DataError
from ..images import Encoded, Size, fitted, from_pillow, room
from .folders import Split
from .pack_settings import PackSettings

# Chroma at half the resolution, as in cameras. Photographs at 224×224 and quality 90 take 15.9 kB
# and 0.23 ms to decode; 4:4:4 takes 21.3 kB and 0.44 ms for 2.8 dB more (simplejpeg 1.9 on one AMD
# EPYC core).
_CHROMA = "420"
# Work for some ms; pieces of one small image would double its cost
PIECE_ENTRIES = 64
PIECE_BYTES = 1 << 20
# Of images that are made or wait for being written; they may be small only as files
_HELD_BYTES = 1 << 27
_ENCODING = 6  # bytes a pixel, besides those of the image
_JPEG_SIDE = 65_500  # libjpeg's limit


class StoredImage(NamedTuple):
    """An image in its stored form."""

    data: np.ndarray | bytes
    """The stored pixels or JPEG bytes."""
    pixels: np.ndarray
    """The pixels, as a reader decodes them."""


class Entry(NamedTuple):
    """A stored entry, or an error."""

    name: str
    columns: Mapping[str, Any]
    """The columns, `image` first."""
    pixels: np.ndarray | None = None
    """The pixels of the image, if the entry has one."""
    error: DataError | None = None
    """The reason why the entry cannot be stored, or `None`."""


def records(
    split: Split, pieces: Iterable[Sequence[int]], settings: PackSettings, workers: int
) -> Iterator[list[Entry]]:
    """Yields the records of each of `pieces`, rows of `split`, in order, converted by `workers`
    threads.

    Pieces that would fill the memory come in parts. All but the first stop early, and continue when
    they are the first.
    """
    waiting: deque[tuple[Sequence[int], list | None, Future[list[Entry]]]] = deque()
    held = Held()

    def first() -> Iterator[list[Entry]]:
        rows, examples, future = waiting.popleft()
        while True:
            part = future.result()
            if part:
                yield part
            held.add(-sum(map(_held, part)))
            if len(part) == len(rows):
                return
            rows = rows[len(part) :]
            examples = examples and examples[len(part) :]
            future = pool.submit(piece, split, rows, examples, settings, held, True)

    with ThreadPoolExecutor(workers, "chipwise-pack") as pool:
        try:
            for rows in pieces:
                # An object's [i] may not be thread-safe: then this thread reads
                examples = None if split.threads else [_read(split, row) for row in rows]
                future = pool.submit(piece, split, rows, examples, settings, held, False)
                waiting.append((rows, examples, future))
                if len(waiting) > workers + 2:
                    yield from first()
            while waiting:
                yield from first()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _read(split: Split, row: int) -> Mapping[str, Any] | DataError:
    """An example, or the reason why it cannot be read."""
    try:
        return split.read(row)
    except DataError as error:
        return error
    except OSError as error:
        return DataError("entry-unreadable", reason=error)


class _NoRoom(Exception):
    """An image must wait until others are written."""


class Held:
    """The bytes of images that are being converted or wait to be written."""

    def __init__(self):
        self.bytes = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.bytes += nbytes

    def take(self, nbytes: int, always: bool) -> None:
        """Adds `nbytes`. Raises `_NoRoom` if the sum is too large, unless `always` is true."""
        with self._lock:
            if self.bytes + nbytes > _HELD_BYTES and not always:
                raise _NoRoom
            self.bytes += nbytes


def _held(entry: Entry) -> int:
    values = {
        id(value): value for value in (*entry.columns.values(), entry.pixels) if value is not None
    }
    return sum(len(v) if isinstance(v, bytes) else np.asarray(v).nbytes for v in values.values())


def piece(
    split: Split,
    rows: Sequence[int],
    examples: list | None,
    settings: PackSettings,
    held: Held,
    first: bool,
) -> list[Entry]:
    """The records of `rows`, from `examples`, or read here if that is `None`.

    If too many bytes are `held`, returns only the first records. These may be none, unless the
    piece is the `first` to be written.
    """
    done: list[Entry] = []
    taken = 0

    def before_pixels(nbytes: int) -> None:
        nonlocal taken
        held.take(nbytes, always=first and not done)
        taken = nbytes

    for at, row in enumerate(rows):
        if held.bytes > _HELD_BYTES and (done or not first):
            return done
        example = _read(split, row) if examples is None else examples[at]
        try:
            if isinstance(example, DataError):
                raise example
            labels = {name: column[row] for name, column in split.labels.items()}
            done.append(_record(split.names[row], labels, example, settings, before_pixels))
            held.add(_held(done[-1]))
        except _NoRoom:
            return done
        except DataError as error:
            done.append(Entry(split.names[row], {}, error=error))
        except OSError as error:  # Pillow reads some files when their pixels are asked for
            done.append(
                Entry(split.names[row], {}, error=DataError("entry-unreadable", reason=error))
            )
        finally:
            held.add(-taken)
            taken = 0
    return done


def _record(
    name: str,
    labels: Mapping[str, Any],
    example: Mapping[str, Any],
    settings: PackSettings,
    before_pixels: Callable[[int], None],
) -> Entry:
    columns = {**labels, **example}
    if "image" not in columns:
        if settings.store == "jpeg" or settings.size is not None:
            wrong = "it has no column 'image' ({columns:list}): leave out --size and --store jpeg."
            raise DataError("no-image-column", wrong, columns=list(columns))
        return Entry(name, {column: np.asarray(value) for column, value in columns.items()})
    image = stored_image(columns.pop("image"), settings, before_pixels)
    others = {column: np.asarray(value) for column, value in columns.items()}
    return Entry(name, {"image": image.data, **others}, image.pixels)


def stored_image(
    value: Any, settings: PackSettings, before_pixels: Callable[[int], None] = lambda nbytes: None
) -> StoredImage:
    """`value` in its stored form.

    `value`: encoded bytes, a Pillow image, or an array or tensor. An array is `(h, w)` or
    `(h, w, 1 or 3)`, a tensor also `(1 or 3, h, w)`, of uint8, or of other numbers in
    `settings.pixels`, which become 0 to 255. A JPEG that needs no change is stored byte for byte.
    Arrays without `size` are stored raw as they are. `before_pixels` is called with the bytes of an
    encoded image's pixels before it is decoded.

    Raises `DataError` if it cannot be stored. The caller adds the name.
    """
    size = None if settings.size is None else (settings.size, settings.size)
    if isinstance(value, bytes):
        encoded = Encoded(value)
        shape = (encoded.height, encoded.width)
        before_pixels(3 * math.prod(size or shape))
        pixels = encoded.pixels(size)
        if settings.store == "jpeg" and encoded.plain and pixels.shape[:2] == shape:
            return StoredImage(value, pixels)
    elif isinstance(value, Image.Image):
        pixels = _loaded(value, size)
    else:
        array = _array(value, settings.pixels)
        shape = array.shape[:2]
        pixels = array if size is None or shape == size else _resized(array, size)
    if settings.store == "raw":
        return StoredImage(pixels, pixels)
    height, width = pixels.shape[:2]
    if max(height, width) > _JPEG_SIDE:
        wrong = "it has {height}×{width} pixels, a JPEG at most {limit:,} on a side: scale it down."
        raise DataError("image-jpeg-side", wrong, height=height, width=width, limit=_JPEG_SIDE)
    color = np.broadcast_to(pixels.reshape(height, width, -1), (height, width, 3))
    with room(_ENCODING * height * width):
        data = simplejpeg.encode_jpeg(np.ascontiguousarray(color), settings.quality, "RGB", _CHROMA)
        return StoredImage(data, simplejpeg.decode_jpeg(data, "RGB"))


def _loaded(image: Image.Image, size: Size | None) -> np.ndarray:
    try:
        return from_pillow(image, size)  # Pillow reads a file when its pixels are asked for
    except (DataError, MemoryError, OSError):
        raise
    except Exception as error:  # decoders raise what they like on damaged files
        wrong = "a damaged image ({kind}): replace it or leave it out."
        raise DataError("image-pillow-damaged", wrong, kind=type(error).__name__) from error


def _array(value: Any, pixels: tuple[float, float] | None) -> np.ndarray:
    array = np.asarray(value)
    # PyTorch's order of axes
    if hasattr(value, "detach") and array.ndim == 3 and array.shape[0] in (1, 3):
        array = np.ascontiguousarray(array.transpose(1, 2, 0))
    if (
        array.ndim not in (2, 3)
        or (array.ndim == 3 and array.shape[2] not in (1, 3))
        or not array.size
    ):
        wrong = "its image has shape {shape}: expected (h, w), (h, w, 1) or (h, w, 3)."
        raise DataError("image-array-shape", wrong, shape=array.shape)
    if array.dtype == np.uint8:
        return array
    # An image of 0 to 1 may be one of 0 to 255 that is dark: values do not say which
    facts = {"dtype": array.dtype.name, "low": array.min().item(), "high": array.max().item()}
    if pixels is None or array.dtype.kind not in "biuf":
        raise DataError("image-array-values", **facts)
    black, white = pixels
    if not min(pixels) <= facts["low"] <= facts["high"] <= max(pixels):
        raise DataError("image-array-outside", black=black, white=white, **facts)
    shifted = array.astype(np.float64) - black  # in the array's own dtype it may wrap around
    return np.rint(shifted * (255 / (white - black))).astype(np.uint8)


def _resized(array: np.ndarray, size: Size) -> np.ndarray:
    grey = array.ndim == 3 and array.shape[2] == 1
    pixels = fitted(Image.fromarray(array[..., 0] if grey else array), size)
    return pixels[..., None] if grey else pixels


def pieces_of(sizes: np.ndarray, start: int) -> Iterator[range]:
    """Yields the rows from `start` on, in pieces with a limit of entries and bytes."""
    first = start
    held = 0
    for row in range(start, len(sizes)):
        held += int(sizes[row])
        if row + 1 - first == PIECE_ENTRIES or held >= PIECE_BYTES:
            yield range(first, row + 1)
            first = row + 1
            held = 0
    if first < len(sizes):
        yield range(first, len(sizes))
