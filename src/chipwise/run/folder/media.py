"""Texts and pictures that a user's code logs: lines of `media.jsonl` in the run folder, which are
data alone.

{"step": 40, "name": "samples/first", "text": "Once upon a time"}
{"step": 40, "name": "samples/grid", "png": "iVBORw0KGgo..."}
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from ...base import DataError, invalid
from ...data.images import decode

MOST_NAME, MOST_TEXT = 100, 1 << 16  # characters
MOST_PIXELS = 1 << 22
RESERVED = ("train/", "eval/", "feed/", "noise/")
"""The prefixes of the names of the run's own numbers."""

Medium = str | np.ndarray
"""A text, or pixels `(height, width, 3)` uint8."""


def check_name(name: Any) -> str:
    """Returns `name`, if a user's number, text or picture may have it. Raises `RecipeError`
    otherwise."""
    sound = isinstance(name, str) and "/" in name and name.isprintable() and len(name) <= MOST_NAME
    if not sound or name.startswith(RESERVED):
        raise invalid(
            "row-name", "the name of a number, text or picture", name, 'one such as "mine/bleu"'
        )
    return name


def check_text(text: Any) -> str:
    """Raises `RecipeError` for anything but a text of at most `MOST_TEXT` characters."""
    if not isinstance(text, str) or len(text) > MOST_TEXT:
        raise invalid(
            "media-text", "a text", str(text)[:40], f"a text of at most {MOST_TEXT:,} characters"
        )
    return text


def check_picture(pixels: Any) -> np.ndarray:
    """Raises `RecipeError` for anything but uint8 `(height, width, 3)` of at most `MOST_PIXELS`."""
    array = np.asarray(pixels)
    right = array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3
    if not right or not 0 < array.size <= 3 * MOST_PIXELS:
        expected = f"uint8 (height, width, 3), at most {MOST_PIXELS:,} pixels"
        raise invalid("media-picture", "a picture", f"{array.dtype} {array.shape}", expected)
    return array


def row_of(step: int, name: str, medium: Medium) -> dict[str, Any]:
    """The line of a text or a picture."""
    if isinstance(medium, str):
        return {"step": step, "name": name, "text": medium.encode("utf-8", "replace").decode()}
    Image.fromarray(medium).save(png := io.BytesIO(), "PNG")
    return {"step": step, "name": name, "png": base64.b64encode(png.getvalue()).decode()}


def medium_of(row: dict[str, Any]) -> Medium | None:
    """Returns the text or the picture in a line, which may come from anywhere. Returns `None` if
    the line's picture cannot be decoded."""
    if "text" in row:
        return row["text"]
    try:
        return decode(base64.b64decode(row["png"], validate=True))
    except (ValueError, DataError):
        return None
