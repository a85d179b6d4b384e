"""The progress display of a run: a bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from ..base import Fact, fact

# Within an epoch, so that a log file stays readable and a long epoch is seen
SECONDS_BETWEEN_LINES = 60.0
SECONDS_OF_WAITING = 10.0  # between lines that say for how long a step is being compiled
FIRST = ("eval/accuracy", "eval/loss", "train/accuracy", "train/loss")
"""The metrics that a reader looks for first, in this order."""


class _Console(Console):
    """A console whose reader may leave: `head`, or a terminal that is closed. It is `gone` then,
    and drops what is printed."""

    gone = False

    def on_broken_pipe(self) -> None:  # rich would end the process
        raise BrokenPipeError

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:
            self.gone = self.quiet = True


class Reporter:
    """Writes to standard error, so that standard output stays free for `--json`.

    *Arguments:* `kind`: `"bar"`, `"live"` (one line that is overwritten), `"lines"`, `"none"` (only
    warnings), `"silent"` or `"auto"` (a bar on a terminal, a live line in a notebook, lines
    elsewhere).
    """

    def __init__(self, kind: str = "auto"):
        self.console = _Console(stderr=True, highlight=False, soft_wrap=True)
        if kind == "auto":
            kind = "bar" if self.console.is_terminal and sys.stderr.isatty() else "lines"
            if type(sys.stderr).__module__.startswith("ipykernel"):
                kind = "live"
        self.kind = kind
        self._bar: Progress | None = None
        self._task: Any = None
        self._values: dict[str, tuple[float, int]] = {}  # the last of each metric, and its step
        self._speed: float | None = None
        self._epoch, self._last = 0, time.perf_counter()
        self._line: tuple[int, str] | None = None  # to be printed, and its step
        self._order: tuple[str, ...] = FIRST
        self._live: Any = None  # the line that is overwritten

    def introduce(self, start: Fact, warnings: Iterable[Any]) -> None:
        """Prints a session's first line and its warnings."""
        self.say(start)
        for warning in warnings:
            self.warn(warning)

    def say(self, text: str | Fact | None, style: str | None = None) -> None:
        """Prints one line, above the bar if there is one. Prints nothing for `None`."""
        if text is not None and self.kind not in ("none", "silent"):
            self.console.print(str(text), style=style, markup=False)

    def warn(self, text: str | Fact) -> None:
        """Prints one line for every kind but `silent`: warnings matter even without progress."""
        if self.kind != "silent":
            self.console.print(f"warning: {text}", style="yellow", markup=False)

    @contextlib.contextmanager
    def waiting(self, code: str) -> Iterator[None]:
        """A context of something that takes long: prints a fact `code` with the `seconds` so
        far."""
        began, done = time.perf_counter(), threading.Event()

        def tell() -> None:
            while not done.wait(SECONDS_OF_WAITING):
                self.say(fact(code, seconds=time.perf_counter() - began))

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield
        finally:
            done.set()
            teller.join()

    def start(self, step: int, total: int, metric: str = "") -> None:
        """Begins after `step` of `total` steps. *Arguments:* `metric`, the one that matters, if one
        is."""
        self._began, self._from, self._total = time.perf_counter(), step, total
        self._order = (metric, *FIRST)
        if self.kind == "bar":
            # On a narrow terminal the last metrics are cut off: not the one that matters, nor step
            # and time.
            self._bar = Progress(
                BarColumn(bar_width=min(20, max(4, self.console.width // 8))),
                MofNCompleteColumn(),
                TimeRemainingColumn(compact=True),
                TextColumn(
                    "{task.fields[text]}",
                    table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
                ),
                expand=True,
                console=self.console,
                refresh_per_second=4,
            )
            self._bar.start()
            self._task = self._bar.add_task("train", total=total, completed=step, text="")

    def update(self, row: dict[str, Any]) -> None:
        """Shows a row of metrics: a dict with `step`, `epoch` and numbers by name.

        A bar shows the last value of each metric, an older evaluation with its step. Lines are
        printed for evaluations and at the ends of epochs, and in a long epoch once a minute.
        """
        step = row["step"]
        for name, value in row.items():
            if name.startswith(("train/", "eval/")) and isinstance(value, float):
                self._values[name] = value, step
        self._speed = row.get("examples_per_second") or self._speed
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=self._text(step))
        elif self.kind == "live":
            self._write_over(self._written(row))
        elif self.kind == "lines":
            if self._line is not None and self._line[0] != step:
                self._flush()
            # Kept for a moment: the evaluation of the same step comes as a row of its own
            if self._due(row):
                self._line = step, self._written(row)

    def _flush(self) -> None:
        if self._line is not None:
            (_, text), self._line = self._line, None
            self.say(text)

    def _due(self, row: dict[str, Any]) -> bool:
        """Whether the row ends an epoch or the run, is an evaluation, or the last line is long
        ago."""
        now, evaluated = time.perf_counter(), any(name.startswith("eval/") for name in row)
        # The evaluation of an epoch may be made a part of a step before its end
        epoch = int(row.get("epoch", 0.0) + (0.5 if evaluated else 1e-9))
        ended = row["step"] >= self._total or epoch > self._epoch
        if not (ended or evaluated or now - self._last >= SECONDS_BETWEEN_LINES):
            return False
        self._last, self._epoch = now, max(epoch, self._epoch)
        return True

    def _written(self, row: dict[str, Any]) -> str:
        epoch = f"epoch {row['epoch']:.4g}  " if row.get("epoch") else ""
        left = self._eta(row["step"], time.perf_counter())
        return f"{epoch}step {row['step']}/{self._total}  {self._text(row['step'])}{left}"

    def _text(self, step: int) -> str:
        """Every metric, the most important first, and the speed."""
        names = sorted(self._values, key=lambda n: self._order.index(n) if n in self._order else 9)
        shown = []
        for name in names:
            value, at = self._values[name]
            made = f" @{at}" if name.startswith("eval/") and at != step else ""
            shown.append(f"{name} {value:.4f}{made}")
        if self._speed:
            shown.append(f"{self._speed:,.0f} examples/s")
        return "  ".join(shown)

    def _write_over(self, line: str) -> None:
        """Overwrites the line in a notebook's cell."""
        from IPython.display import display

        shown = {"text/plain": line}
        if self._live is None:
            self._live = display(shown, raw=True, display_id=True)
        else:
            self._live.update(shown, raw=True)

    def stop(self) -> None:
        self._flush()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _eta(self, step: int, now: float) -> str:
        done = step - self._from
        if done <= 0 or step >= self._total:
            return ""
        left = (now - self._began) / done * (self._total - step)
        return f"  eta {int(left) // 60}:{int(left) % 60:02d}"
