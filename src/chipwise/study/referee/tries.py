"""The book of tries: every verdict in `tries.jsonl`, and the error that the next one may have.

The level of a try is that of e-LOND. It limits the share of wrong verdicts among all verdicts that
are reached, whatever the order of the tries and however they depend on each other (Xu and Ramdas
2024, "Online multiple testing with e-values", AISTATS, PMLR 238). The level is error × weight of
the try × (1 + verdicts so far), with weights 6 / (pi t)^2 that add up to one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ...base import Fact, RunError, fact, invalid
from ...base.figures import known
from ...base.files import put_inside, read_inside
from ...base.locks import hold

FILE = "tries.jsonl"
KEY = ("base", "change", "metric", "margin")
"""The fields that identify a try: digests of both sides, and the question."""

REACHED = ("better", "worse", "equal")
"""Verdicts that are statistical statements. The others are facts about bits, or none at all."""


class Tries:
    """The book in a folder. No other process may open it until it is closed, because the level of a
    try depends on the verdicts before it.

    *Fields:* `rows`, the oldest first. `error`, the limit over all of them.
    """

    def __init__(self, folder: Path, error: float):
        if not 0 < error < 1:
            raise invalid("referee-error", "error", error, "a probability, such as 0.05")
        self.folder, self.error = folder, error
        self.rows: list[dict[str, Any]] = []
        with self._writing():
            folder.mkdir(parents=True, exist_ok=True)
            lock = hold(folder, FILE)
        self.close, self.check = lock.close, lock.check
        try:
            text = read_inside(folder / FILE).decode()
            self.rows = [json.loads(line) for line in text.splitlines()]
            for row in self.rows:
                if not isinstance(row, dict) or not isinstance(row.get("verdict"), str):
                    raise ValueError("a row without a verdict")
                pairs, level = row.get("pairs"), row.get("level")
                if pairs is not None and (type(pairs) is not int or pairs < 0):
                    raise ValueError(f"{str(pairs)[:40]} pairs")
                if (pairs or level is not None) and not (known(level) and 0 < level < 1):
                    raise ValueError(f"a level of {str(level)[:40]}")
        except FileNotFoundError:
            pass
        except OSError as error:
            self.close()
            raise RunError("file-unreadable", path=str(folder / FILE), reason=error) from error
        except ValueError as error:
            self.close()
            raise RunError(
                "tries-damaged",
                "{file} cannot be read ({reason}): move it away, and a new book begins.",
                file=folder / FILE,
                reason=error,
            ) from error

    def _writing(self) -> AbstractContextManager[None]:
        text = "Cannot write {file}: {reason}. Name another --run."
        return RunError.of_system("tries-unwritable", text, file=self.folder / FILE)

    def level(self, key: Mapping[str, Any]) -> float:
        """The error of a try, in (0, 1). A try that continues, of the same `KEY`, keeps its first
        level, if that is one that a first try may have."""
        for row in self.rows:
            if row.get("pairs") and all(row.get(name) == key[name] for name in KEY):
                return min(float(row["level"]), self.error * 6 / math.pi**2)
        # Bits alone spend no error
        counted = [row["verdict"] for row in self.rows if row.get("pairs")]
        number, reached = len(counted) + 1, sum(one in REACHED for one in counted)
        return self.error * 6 / (math.pi * number) ** 2 * (1 + reached)

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds a row. It replaces an earlier row of the same try."""
        others = [old for old in self.rows if any(old.get(name) != row.get(name) for name in KEY)]
        self.rows = [*others, dict(row)]
        text = "".join(json.dumps(one) + "\n" for one in self.rows)
        with self._writing():
            self.check()
            put_inside(self.folder / FILE, text.encode())

    def summary(self) -> Fact:
        """The number of tries, and the share of their verdicts that may be chance."""
        names = [row["verdict"] for row in self.rows]
        counts = {name: names.count(name) for name in REACHED}
        text = (
            "{better} of {tries} tries were better, {worse} worse, {equal} equal; at most "
            "{error:share} of "
            "such verdicts are expected to be chance"
        )
        return fact("tries-so-far", text, tries=len(names), **counts, error=self.error)
