"""The book of tries: every verdict in `tries.jsonl`, and the error that the next one may have.

The level of a try is that of e-LOND, which holds the share of wrong ones among all verdicts that are reached,
whatever the order of the tries and however they depend on each other (Xu and Ramdas 2024, "Online multiple
testing with e-values", AISTATS, PMLR 238): error × weight of the try × (1 + verdicts so far), with weights
6 / (pi t)^2 that add up to one.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..atomic import hold, put_inside, read_inside
from ..errors import RunError
from ..words.facts import Fact, fact

FILE = "tries.jsonl"
KEY = ("base", "change", "metric", "margin")
"""What makes two rows one try: digests of both sides, and the question."""

REACHED = ("better", "worse", "equal")
"""Verdicts that are statistical statements; the others are facts about bits, or none at all."""


class Tries:
    """The book in a folder, which no other process may open until it is closed: the level of a try depends on
    the verdicts before it. *Fields:* `rows`, the oldest first; `error` that is held over all of them."""

    def __init__(self, folder: Path, error: float):
        self.folder, self.error = folder, error
        self.rows: list[dict[str, Any]] = []
        with self._telling():
            folder.mkdir(parents=True, exist_ok=True)
            self.close = hold(folder, FILE).close
        try:
            text = read_inside(folder / FILE).decode()
            self.rows = [json.loads(line) for line in text.splitlines()]
            if not all(isinstance(row, dict) and isinstance(row.get("verdict"), str) for row in self.rows):
                raise ValueError("a row without a verdict")
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            self.close()
            raise RunError(
                "tries-damaged", "{file} cannot be read ({reason}): move it away, and a new book begins.",
                file=folder / FILE, reason=error,
            ) from error  # fmt: skip

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """A folder that cannot be written, as a `RunError`."""
        try:
            yield
        except OSError as error:
            raise RunError("tries-unwritable", "Cannot write {file}: {reason}. Name another --run.",
                           file=self.folder / FILE, reason=error) from error  # fmt: skip

    def level(self, key: Mapping[str, Any]) -> float:
        """The error of a try, in (0, 1). One that goes on, of the same `KEY`, keeps the one it began with."""
        for row in self.rows:
            if row.get("pairs") and all(row.get(name) == key[name] for name in KEY):
                return float(row["level"])
        counted = [row["verdict"] for row in self.rows if row.get("pairs")]  # bits alone spend no error
        number, reached = len(counted) + 1, sum(one in REACHED for one in counted)
        return self.error * 6 / (math.pi * number) ** 2 * (1 + reached)

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds a row; one of the same try, which went on, is replaced."""
        others = [old for old in self.rows if any(old.get(name) != row.get(name) for name in KEY)]
        self.rows = [*others, dict(row)]
        text = "".join(json.dumps(one) + "\n" for one in self.rows)
        with self._telling():
            put_inside(self.folder / FILE, text.encode())

    def summary(self) -> Fact:
        """How many tries there were, and how many of their verdicts chance may have made."""
        names = [row["verdict"] for row in self.rows]
        counts = {name: names.count(name) for name in REACHED}
        text = (
            "{better} of {tries} tries were better, {worse} worse, {equal} equal; at most {error:share} of "
            "such verdicts are expected to be chance"
        )
        return fact("tries-so-far", text, tries=len(names), **counts, error=self.error)
