"""Draws examples: images in a grid, each with its label."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..atomic import replace_bytes
from ..errors import DataError, RecipeError
from .packed import PackedFolder

SIDE = 96  # pixels; smaller images are magnified by an integer
GAP, LINE = 4, 14
_WHITE, _INK = (255, 255, 255), (40, 40, 40)


class Tile(NamedTuple):
    """An image and its caption."""

    image: Image.Image
    caption: str = ""


def sheet(source: PackedFolder, columns: int = 10, rows: int = 10) -> Image.Image:
    """`columns` × `rows` examples spread evenly over a pack, at most `SIDE` pixels large, with their classes.

    Raises `DataError` if `source` has no images.
    """
    image = source.spec.get("image")
    if image is None or len(image.shape) not in (2, 3):
        wrong = "{path} has no images (columns {columns:list}): leave --sheet out."
        raise DataError("sheet-no-images", wrong, path=source.path, columns=list(source.spec))
    indices = np.unique(np.linspace(0, len(source) - 1, min(len(source), columns * rows)).astype(np.int64))
    tiles = []
    for index in indices.tolist():
        example = source[index]
        picture = picture_of(example["image"])
        if max(image.shape[:2]) > SIDE:
            picture.thumbnail((SIDE, SIDE), Image.Resampling.BOX)
        tiles.append(Tile(picture, caption(example.get("label"), source.names)))
    return grid([tiles[column::columns] for column in range(min(columns, len(tiles)))])


def grid(columns: Sequence[Sequence[Tile]], titles: Sequence[str] = ()) -> Image.Image:
    """A page of `columns`, the longest first; with `titles` above, the first column is set apart."""
    font = ImageFont.load_default(11)
    widths = [max(tile.image.width for tile in column) + GAP for column in columns]
    heights = [
        max(column[row].image.height for column in columns if row < len(column)) + LINE + GAP
        for row in range(len(columns[0]))
    ]
    head, apart = (GAP + LINE, 2 * GAP) if titles else (GAP, 0)
    page = Image.new("RGB", (GAP + sum(widths) + apart, head + sum(heights)), _WHITE)
    draw, left = ImageDraw.Draw(page), GAP
    for number, (column, width) in enumerate(zip(columns, widths, strict=True)):
        if titles:
            draw.text((left, GAP), titles[number], _INK, font)
        top = head
        for tile, height in zip(column, heights, strict=False):
            page.paste(tile.image, (left, top))
            draw.text((left, top + tile.image.height), _clipped(tile.caption, width - GAP, font), _INK, font)
            top += height
        left += width + (apart if number == 0 else 0)
    return page


def picture_of(pixels: np.ndarray, low: float = 0.0, high: float = 1.0) -> Image.Image:
    """An array as a picture of at least `SIDE` pixels; floats go from `low` (black) to `high` (white)."""
    if pixels.dtype != np.uint8:
        levels = np.rint((pixels.astype(np.float32) - low) / max(high - low, 1e-9) * 255)
        pixels = np.clip(np.nan_to_num(levels), 0, 255).astype(np.uint8)
    if pixels.ndim == 3 and pixels.shape[2] not in (3, 4):
        pixels = pixels[:, :, 0]
    picture = Image.fromarray(pixels).convert("RGB")
    times = -(-SIDE // max(picture.size))
    return picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)


def caption(label: np.ndarray | None, names: Sequence[str] = ()) -> str:
    """The caption of a label: a class, several, the two largest shares of classes, or values."""
    if label is None:
        return ""
    label = np.asarray(label)
    whole = label.dtype.kind in "iub"

    def name(number: int) -> str:
        return names[number] if names else str(number)

    if whole and label.ndim == 0:
        return name(int(label))
    if whole and label.ndim == 1:
        return " ".join(name(number) for number in np.flatnonzero(label).tolist())
    if label.ndim == 1 and label.min() >= 0 and abs(label.sum() - 1) < 1e-3:
        largest = np.argsort(-label, kind="stable")[:2].tolist()
        shares = [(float(label[number]), name(number)) for number in largest if label[number] > 0.005]
        return " + ".join(f"{share:.2f} × {of}" if share < 0.995 else of for share, of in shares)
    return " ".join(f"{value:.4g}" for value in label.reshape(-1).tolist())


def picture_format(path: Path, option: str) -> str:
    """Pillow's format for the suffix of `path`, the value of `option`. Raises `RecipeError` if there is
    none."""
    kind = Image.registered_extensions().get(path.suffix.lower(), "")
    if kind not in Image.SAVE:
        wrong = "{option} {path}: '{suffix}' is not a picture format; give a name such as {stem}.png."
        raise RecipeError(
            "picture-suffix", wrong, option=option, path=path, suffix=path.suffix, stem=path.stem
        )
    return kind


def write_picture(page: Image.Image, path: str | Path, option: str) -> Path:
    """Writes `page` in the format of the suffix of `path`, atomically.

    Raises `RecipeError` for another suffix, and `DataError` if it cannot be written; both name `option`.
    """
    path = Path(path).expanduser()
    buffer = io.BytesIO()
    page.save(buffer, picture_format(path, option))
    return replace_bytes(path, buffer.getvalue(), "picture-unwritable", option=option)


def _clipped(text: str, width: int, font) -> str:
    try:
        font.getlength(text)
    except UnicodeEncodeError:  # without FreeType, Pillow's font has only Latin letters
        text = text.encode("ascii", "replace").decode()
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."
