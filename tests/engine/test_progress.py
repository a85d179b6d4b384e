"""Lines of progress."""

from chipwise.engine.progress import Reporter


def test_a_line_says_what_no_line_said_before(capsys):
    reporter = Reporter("lines")
    reporter.start(0, 100)
    reporter.update({"step": 10, "train/loss": 0.5, "examples_per_second": 7.0})
    reporter.update({"step": 20, "train/loss": 0.25})  # too soon for a line of its own
    reporter.update({"step": 22, "eval/loss": 0.75})
    reporter.update({"step": 33, "eval/loss": 0.625})
    reporter.update({"step": 100, "train/loss": 0.125})
    first, evaluated, again, last = capsys.readouterr().err.splitlines()
    assert "step 10/100  train/loss 0.5000  7 examples/s" in first
    assert "step 22/100  train/loss 0.2500  eval/loss 0.7500" in evaluated and "examples/s" not in evaluated
    assert "step 33/100  eval/loss 0.6250" in again and "train" not in again
    assert last == "step 100/100  train/loss 0.1250"
