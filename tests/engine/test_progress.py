"""Lines of progress."""

import io
import re

import pytest
from rich.console import Console

from chipwise.engine.progress import Reporter


def test_a_line_every_ten_seconds_says_what_no_line_said_before(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("chipwise.engine.progress.time.perf_counter", lambda: now[0])
    reporter = Reporter("lines")
    reporter.start(0, 100)
    for seconds, row in (
        (0, {"step": 10, "train/loss": 0.5, "examples_per_second": 7.0}),
        (3, {"step": 20, "train/loss": 0.25}),
        (4, {"step": 22, "eval/loss": 0.75}),
        (10, {"step": 33, "eval/loss": 0.625}),
        (19, {"step": 40, "eval/loss": 0.5}),
        (19.5, {"step": 100, "train/loss": 0.125}),
    ):
        now[0] = 100.0 + seconds
        reporter.update(row)
    first, second, last = capsys.readouterr().err.splitlines()
    assert "step 10/100  train/loss 0.5000  7 examples/s" in first
    assert "step 33/100  train/loss 0.2500  eval/loss 0.6250" in second and "examples/s" not in second
    assert last == "step 100/100  train/loss 0.1250  eval/loss 0.5000"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_bar_drops_metrics_first(width):
    reporter = Reporter("bar")
    screen = io.StringIO()
    reporter.console = Console(file=screen, width=width, force_terminal=True, color_system=None)
    reporter.start(0, 100_000)
    row = {"train/loss": 0.5, "train/accuracy": 0.5, "eval/loss": 0.25, "eval/accuracy": 0.75}
    reporter.update({"step": 25_000, **row, "examples_per_second": 12345.0})
    reporter.stop()
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).strip().splitlines()[-1]
    assert "25000/100000" in last and re.search(r"\d+:\d\d|--:--", last)
    assert len(last) <= width
