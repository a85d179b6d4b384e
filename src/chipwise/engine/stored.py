"""What a run folder holds, read and nothing more: no lock is taken, nothing is written, no code is run.

A folder may come from anywhere, and from a process that was killed: every part may be missing or damaged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import RunError


def read_rows(run: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows of metrics.jsonl by step, and the numbers of the lines that are damaged.

    The last line of a killed process has no end and is none of these. Raises `RunError` for a file that
    cannot be read; a missing one has no rows.
    """
    file = run / "metrics.jsonl"
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise RunError(f"Cannot read {file}: {error.strerror or error}.") from error
    found, damaged = [], []
    *lines, rest = text.split("\n")
    for at, line in enumerate([*lines, rest], 1):
        row = parsed_row(line)
        if row is not None:
            found.append(row)
        elif line.strip() and at <= len(lines):
            damaged.append(at)
    found.sort(key=lambda row: row["step"])  # stable: training and evaluation of one step keep their order
    return found, damaged


def read_result(run: Path) -> tuple[dict[str, Any] | None, str]:
    """What result.json says, `None` before the run is complete; and what is wrong with the file, or ""."""
    try:
        made = json.loads((run / "result.json").read_bytes())
        if not isinstance(made, dict):
            raise ValueError(f"it holds a {type(made).__name__}")
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except (OSError, ValueError, RecursionError) as error:
        return None, " ".join(str(getattr(error, "strerror", None) or error).split())[:120]
    return made, ""


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row that are metrics: `train/...` and `eval/...`, finite."""
    return {
        name: value
        for name in row
        if name.startswith(("train/", "eval/")) and (value := number(row[name])) is not None
    }


def number(value: Any) -> float | None:
    """A finite JSON number, of which sums stay finite, or `None` for anything else."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return value if known else None  # NaN is not below either


def parsed_row(line: str) -> dict[str, Any] | None:
    """A line of metrics.jsonl, or `None` for a damaged one, or one that a killed process did not finish."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    sound = isinstance(row, dict) and type(row.get("step")) is int and 0 <= row["step"] < 2**53
    return row if sound else None
