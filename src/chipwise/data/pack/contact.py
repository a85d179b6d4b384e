"""A contact sheet: some of a pack's images with their classes, as one picture."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ...errors import DataError
from ..packed import PackedFolder

_SIDE, _GAP, _LINE = 96, 6, 14  # pixels


def sheet(source: PackedFolder, columns: int = 10, rows: int = 10) -> Image.Image:
    """`columns` × `rows` examples spread evenly over `source`, each with its class below.

    Raises `DataError` when `source` has no images.
    """
    image = source.spec.get("image")
    if image is None or len(image.shape) not in (2, 3):
        raise DataError(f"{source.path} has no images (columns {', '.join(source.spec)}): leave --sheet out.")
    indices = np.unique(np.linspace(0, len(source) - 1, min(len(source), columns * rows)).astype(np.int64))
    height = -(-len(indices) // columns)
    page = Image.new(
        "RGB", (columns * (_SIDE + _GAP) + _GAP, height * (_SIDE + _LINE + _GAP) + _GAP), "white"
    )
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(11)
    for number, index in enumerate(indices.tolist()):
        example = source[index]
        left = _GAP + number % columns * (_SIDE + _GAP)
        top = _GAP + number // columns * (_SIDE + _LINE + _GAP)
        thumbnail = _thumbnail(example["image"])
        page.paste(thumbnail, (left + (_SIDE - thumbnail.width) // 2, top + (_SIDE - thumbnail.height) // 2))
        text = _clip(_told(example.get("label"), source.names), font)
        draw.text((left + _SIDE / 2, top + _SIDE), text, "black", font, anchor="ma")
    return page


def write_sheet(source: PackedFolder, path: str | Path) -> Path:
    """Writes `sheet(source)` to `path`, in the format that its suffix names, whole or not at all."""
    path = Path(path).expanduser()
    page = sheet(source)
    partial = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        page.save(partial)
        os.replace(partial, path)
    except (OSError, ValueError) as error:  # ValueError: a suffix that Pillow does not know
        partial.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"{path}: the sheet cannot be written there ({reason}). Give --sheet FILE.png."
        ) from error
    return path


def _thumbnail(pixels: np.ndarray) -> Image.Image:
    """At most `_SIDE` pixels a side; small images are enlarged by whole pixels, to be seen as they are."""
    image = Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
    scale = _SIDE / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BOX).convert("RGB")


def _told(label: np.ndarray | None, names: tuple[str, ...]) -> str:
    if label is None:
        return ""
    label = np.asarray(label)
    if label.ndim == 1 and names:
        return " ".join(name for name, on in zip(names, label.tolist(), strict=True) if on)
    if label.ndim == 0 and label.dtype.kind in "iu":
        return names[int(label)] if names else str(int(label))
    return " ".join(f"{value:.4g}" for value in label.reshape(-1).tolist())


def _clip(text: str, font) -> str:
    text = text.encode("ascii", "replace").decode() if not _printable(text, font) else text
    if font.getlength(text) <= _SIDE:
        return text
    while text and font.getlength(text + "...") > _SIDE:
        text = text[:-1]
    return text + "..."


def _printable(text: str, font) -> bool:
    """Whether the font can set it: without FreeType, Pillow's own knows Latin letters only."""
    try:
        font.getlength(text)
    except UnicodeEncodeError:
        return False
    return True
