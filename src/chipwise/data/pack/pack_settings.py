"""How to pack: the settings of `chipwise pack`, which every reader of a source takes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base import RecipeError
from ..images import MAX_PIXELS

_MOST = 1 << 22  # tokens of an example
LABELS = ("classes", "several", "numbers")
"""What the labels of a table may be."""


@dataclass(frozen=True)
class TextForm:
    """How text becomes examples. Each document begins as the tokenizer says, documents are joined
    with `end`, and an example begins with the last token of the previous one. A token that is both
    begin and end is written once between two documents."""

    tokens: int = 1025
    """The number of tokens of an example."""
    tokenizer: str | Path | None = None
    """A JSON file of the `tokenizers` library, or `None` for bytes."""
    end: str | None = None
    """The tokenizer's token after a document, by default the `eos_token` of the
    `tokenizer_config.json` beside it, else the one that its template puts there, else one of the
    usual ones. With bytes it is 256."""

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int) or not 2 <= self.tokens <= _MOST:
            wrong = "{tokens} tokens an example: expected 2 to {most}."
            raise RecipeError("pack-tokens", wrong, tokens=self.tokens, most=_MOST)


@dataclass(frozen=True)
class PackSettings:
    """How to pack. Raises `RecipeError` for invalid values."""

    size: int | None = None
    """In pixels: images are scaled to cover `size` × `size`, and the centre is cropped. `None`
    leaves their sizes as they are."""
    store: str = "raw"
    """`"raw"`: pixels, all of one size. `"jpeg"`: JPEGs. Those that need no change are stored byte
    for byte."""
    quality: int = 90
    """The quality of JPEGs that must be encoded."""
    split: float | None = None
    """The share of each class for `eval`."""
    shards: int | str = "auto"
    """The approximate number of files per column, or `"auto"`: 1 GiB each."""
    max_skipped: int | None = None
    """How many entries that cannot be packed are skipped, by default 1 % and at least 10. The
    manifest lists them."""
    workers: int | None = None
    """The number of threads, by default one per core."""
    names: Sequence[str] = ()
    """The classes, for objects without them."""
    text: TextForm | None = None
    """How text becomes tokens. `.txt`, `.md` and `.jsonl` files are text also without it."""
    columns: Mapping[str, str] | None = None
    """The names of "image", "label", "text" or the "prompt" that the text answers, in a table,
    Parquet or TFRecord."""
    labels: str | None = None
    """What the labels of a table are: `"classes"`, `"several"` classes each or `"numbers"`. `None`
    takes what all cells say. Of Parquet and TFRecord, whole numbers are classes then."""
    heading: str | None = None
    """The names of the columns of a table without a heading, such as `"file,label"`."""
    pixels: tuple[float, float] | None = None
    """The values that are black and white in images of floats, such as `(0, 1)`, or of whole
    numbers other than uint8. They become 0 to 255."""
    eval_split: str | None = None
    """The split to evaluate on, such as "validation", of a source with several."""

    def __post_init__(self):
        def whole(value: Any, least: int, most: float = math.inf) -> bool:
            return value is None or (isinstance(value, int) and least <= value <= most)

        share = self.split is None or (isinstance(self.split, (int, float)) and 0 < self.split < 1)
        ends = (0, 1) if self.pixels is None else self.pixels
        pixels = len(ends) == 2 and all(map(math.isfinite, ends)) and ends[0] != ends[1]
        largest = math.isqrt(MAX_PIXELS)
        shards = re.fullmatch("auto|0*[1-9][0-9]*", str(self.shards))
        checks = (
            (f"--store {self.store}", self.store in ("raw", "jpeg"), "raw or jpeg"),
            (
                f"--size {self.size!r}",
                whole(self.size, 1, largest),
                f"a whole number from 1 to {largest:,}",
            ),
            (
                f"--quality {self.quality!r}",
                whole(self.quality, 1, 100),
                "a whole number from 1 to 100",
            ),
            (
                f"--max-skipped {self.max_skipped!r}",
                whole(self.max_skipped, 0),
                "a whole number from 0",
            ),
            (f"--workers {self.workers!r}", whole(self.workers, 1), "a whole number from 1"),
            (f"--split {self.split!r}", share, "the share for eval, between 0 and 1, such as 0.1"),
            (f"--shards {self.shards}", shards, "auto or a number from 1"),
            (f"--pixels {self.pixels}", pixels, "the values of black and white, such as 0,1"),
            (f"--labels {self.labels}", self.labels in (None, *LABELS), " or ".join(LABELS)),
        )
        for given, right, expected in checks:
            if not right:
                wrong = "{given}: expected {expected}."
                raise RecipeError("pack-option", wrong, given=given, expected=expected)


USUAL = PackSettings()
