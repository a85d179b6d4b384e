"""Draws examples: images in a grid, each with its label."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..atomic import replace_bytes
from ..errors import DataError, RecipeError
from .packed import PackedFolder

SIDE = 96  # pixels; smaller images are magnified by an integer
GAP, LINE = 4, 14
_WHITE, _INK = (255, 255, 255), (40, 40, 40)


def sheet(source: PackedFolder, columns: int = 10, rows: int = 10) -> Image.Image:
    """`columns` × `rows` examples spread evenly over a pack, at most `SIDE` pixels large, with their classes.

    Raises `DataError` if `source` has no images.
    """
    image = source.spec.get("image")
    if image is None or len(image.shape) not in (2, 3):
        wrong = "{path} has no images (columns {columns:list}): leave --sheet out."
        raise DataError("sheet-no-images", wrong, path=source.path, columns=list(source.spec))
    indices = np.unique(np.linspace(0, len(source) - 1, min(len(source), columns * rows)).astype(np.int64))
    pictures = [picture_of(source[index]["image"]) for index in indices.tolist()]
    if max(image.shape[:2]) > SIDE:
        for picture in pictures:
            picture.thumbnail((SIDE, SIDE), Image.Resampling.BOX)
    font, width, height = ImageFont.load_default(11), pictures[0].width + GAP, pictures[0].height + LINE + GAP
    across, down = min(columns, len(pictures)), -(-len(pictures) // columns)
    page = Image.new("RGB", (GAP + across * width, GAP + down * height), _WHITE)
    draw = ImageDraw.Draw(page)
    for place, (picture, index) in enumerate(zip(pictures, indices.tolist(), strict=True)):
        left, top = GAP + place % columns * width, GAP + place // columns * height
        text = _clipped(caption(source[index].get("label"), source.names), picture.width, font)
        page.paste(picture, (left, top))
        draw.text((left, top + picture.height), text, _INK, font)
    return page


def picture_of(pixels: np.ndarray) -> Image.Image:
    """An array as a picture of at least `SIDE` pixels; floats go from 0 (black) to 1 (white)."""
    if pixels.dtype != np.uint8:
        levels = np.rint(pixels.astype(np.float32) * 255)
        pixels = np.clip(np.nan_to_num(levels), 0, 255).astype(np.uint8)
    if pixels.ndim == 3 and pixels.shape[2] not in (3, 4):
        pixels = pixels[:, :, 0]
    picture = Image.fromarray(pixels).convert("RGB")
    times = -(-SIDE // max(picture.size))
    return picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)


def caption(label: np.ndarray | None, names: Sequence[str] = ()) -> str:
    """The caption of a label: a class, several, or values."""
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
    return " ".join(f"{value:.4g}" for value in label.reshape(-1).tolist())


def write_picture(page: Image.Image, path: str | Path, option: str) -> Path:
    """Writes `page` in the format of the suffix of `path`, atomically.

    Raises `RecipeError` for another suffix, and `DataError` if it cannot be written; both name `option`.
    """
    path, buffer = Path(path).expanduser(), io.BytesIO()
    kind = Image.registered_extensions().get(path.suffix.lower(), "")
    if kind not in Image.SAVE:
        wrong = "{option} {path}: '{suffix}' is not a picture format; give a name such as {stem}.png."
        raise RecipeError(
            "picture-suffix", wrong, option=option, path=path, suffix=path.suffix, stem=path.stem
        )
    page.save(buffer, kind)
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
