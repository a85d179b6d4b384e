"""The progress display of a run: a bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from ..words.facts import Fact

SECONDS_BETWEEN_LINES = 10.0  # between plain lines, so that a log file stays readable


class Reporter:
    """Writes to standard error, so that standard output stays free for `--json`.

    *Arguments:* `kind`: `"bar"`, `"live"` (one line that is overwritten), `"lines"`, `"none"` (only
    warnings), `"silent"` or `"auto"` (a bar on a terminal, a live line in a notebook, lines elsewhere).
    """

    def __init__(self, kind: str = "auto"):
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        if kind == "auto":
            kind = "bar" if self.console.is_terminal and sys.stderr.isatty() else "lines"
            if type(sys.stderr).__module__.startswith("ipykernel"):
                kind = "live"
        self.kind = kind
        self._bar: Progress | None = None
        self._task: Any = None
        self._last = -SECONDS_BETWEEN_LINES
        self._unsaid: dict[str, Any] = {}
        self._live: Any = None  # the line that is overwritten
        self._began = time.perf_counter()

    def introduce(self, start: Fact, warnings: Iterable[Any]) -> None:
        """Prints a session's first line and its warnings."""
        self.say(start)
        for warning in warnings:
            self.warn(warning)

    def say(self, text: str | Fact | None, style: str | None = None) -> None:
        """Prints one line, above the bar if there is one; nothing for `None`."""
        if text is not None and self.kind not in ("none", "silent"):
            self.console.print(str(text), style=style, markup=False)

    def warn(self, text: str | Fact) -> None:
        """Prints one line for every kind but `silent`: warnings matter even without progress."""
        if self.kind != "silent":
            self.console.print(f"warning: {text}", style="yellow", markup=False)

    def start(self, step: int, total: int) -> None:
        self._began, self._from, self._total = time.perf_counter(), step, total
        if self.kind == "bar":
            # On a narrow terminal, the metrics are shortened, not step, total and remaining time.
            self._bar = Progress(
                TextColumn("[bold]train"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeRemainingColumn(compact=True),
                TextColumn(
                    "{task.fields[text]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
                ),
                expand=True,
                console=self.console,
                refresh_per_second=4,
            )
            self._bar.start()
            self._task = self._bar.add_task("train", total=total, completed=step, text="")

    def update(self, row: dict[str, Any]) -> None:
        """Shows a row of metrics: a dict with `step` and numbers by name.

        A bar shows the last value of each number, a line those that are new since the last line.
        """
        self._unsaid |= row
        text = _numbers(self._unsaid)
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"], text=text)
        elif self.kind == "live":
            self._write_over(
                f"step {row['step']}/{self._total}  {text}{self._eta(row['step'], time.perf_counter())}"
            )
        elif self.kind == "lines":
            now = time.perf_counter()
            last = row["step"] >= self._total
            if last or now - self._last >= SECONDS_BETWEEN_LINES:
                self._last, self._unsaid = now, {}
                self.say(f"step {row['step']}/{self._total}  {text}{self._eta(row['step'], now)}")

    def _write_over(self, line: str) -> None:
        """Overwrites the line in a notebook's cell."""
        from IPython.display import display

        shown = {"text/plain": line}
        if self._live is None:
            self._live = display(shown, raw=True, display_id=True)
        else:
            self._live.update(shown, raw=True)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _eta(self, step: int, now: float) -> str:
        done = step - self._from
        if done <= 0 or step >= self._total:
            return ""
        left = (now - self._began) / done * (self._total - step)
        return f"  eta {int(left) // 60}:{int(left) % 60:02d}"


def _numbers(row: dict[str, Any]) -> str:
    shown = []
    for name in ("train/loss", "train/accuracy", "eval/loss", "eval/accuracy"):
        if isinstance(row.get(name), float):
            shown.append(f"{name} {row[name]:.4f}")
    if row.get("examples_per_second"):
        shown.append(f"{row['examples_per_second']:,.0f} examples/s")
    return "  ".join(shown)
