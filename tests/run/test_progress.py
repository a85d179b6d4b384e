"""Lines of progress."""

import io
import re
import time

import pytest
from rich.console import Console

from chipwise.run import progress
from chipwise.run.progress import Reporter


def test_a_line_an_epoch_has_every_metric_and_evaluations_their_step(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("chipwise.run.progress.time.perf_counter", lambda: now[0])
    reporter = Reporter("lines")
    reporter.start(0, 40)
    for seconds, row in (
        (1, {"step": 5, "epoch": 0.5, "train/loss": 0.5, "train/f1": 0.25, "examples_per_second": 7.0}),
        (2, {"step": 10, "epoch": 1.0, "train/loss": 0.25}),
        (2, {"step": 10, "epoch": 1.0, "eval/loss": 0.75, "eval/dice": 0.125}),
        (3, {"step": 20, "epoch": 1.98, "train/loss": 0.125}),
        (4, {"step": 20, "epoch": 1.98, "eval/loss": 0.625, "eval/dice": 0.5}),
        (5, {"step": 21, "epoch": 2.08, "train/loss": 0.25}),
        (64, {"step": 25, "epoch": 2.5, "train/loss": 0.0625}),
        (65, {"step": 40, "epoch": 4.0, "eval/loss": 0.5, "eval/dice": 0.75}),
    ):
        now[0] = 100.0 + seconds
        reporter.update(row)
    reporter.stop()
    first, second, long, last = capsys.readouterr().err.splitlines()
    assert first.startswith("epoch 1  step 10/40  eval/loss 0.7500  train/loss 0.2500  ")
    assert "train/f1 0.2500" in first and "eval/dice 0.1250" in first and "7 examples/s" in first
    assert "step 20/40" in second and "eval/dice 0.5000" in second
    assert "epoch 2.5" in long and "eval/loss 0.6250 @20" in long
    assert last.startswith("epoch 4  step 40/40  eval/loss 0.5000  train/loss 0.0625")


def test_without_evaluation_there_is_a_line_an_epoch(capsys):
    reporter = Reporter("lines")
    reporter.start(0, 300)
    for step in range(20, 301, 20):
        reporter.update({"step": step, "epoch": step / 100, "train/loss": 0.5})
    reporter.stop()
    assert [line.split()[3] for line in capsys.readouterr().err.splitlines()] == [
        "100/300", "200/300", "300/300",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_bar_keeps_the_metric_that_matters_and_the_step_of_its_evaluation(width):
    reporter = Reporter("bar")
    screen = io.StringIO()
    reporter.console = Console(file=screen, width=width, force_terminal=True, color_system=None)
    reporter.start(0, 10_000, "eval/dice")
    row = {"train/loss": 0.5, "train/accuracy": 0.5, "eval/loss": 0.25, "eval/dice": 0.75}
    reporter.update({"step": 2000, **row, "examples_per_second": 12345.0})
    reporter.update({"step": 2500, "train/loss": 0.25})
    reporter.stop()
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).strip().splitlines()[-1]
    assert "2500/10000" in last and re.search(r"\d+:\d\d|--:--", last)
    assert "eval/dice 0.7500 @2000" in last or width == 60
    assert "eval/dice 0.75" in last
    assert len(last) <= width


def test_what_takes_long_says_so_until_it_ends(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_OF_WAITING", 0.01)
    reporter = Reporter("lines")
    with reporter.waiting("compiling"):
        while "so far" not in (said := capsys.readouterr().err):
            time.sleep(0.005)
    assert re.search(r"compiling the step: \d", said)
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""
