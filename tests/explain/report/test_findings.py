"""What stands out in a run, and what does not: each rule at its threshold."""

import pytest

import run_folders as runs
from chipwise.explain.report.run_report import report
from explain.report.stories import found, typed, whole

# ---- what was slow


def test_waiting_for_data_is_quoted_from_the_feed(tmp_path):
    verdict, words = "input-bound: decoding needs 5 cores, you have 2", "pack with --store raw (1 GB)"
    feed = {
        "data": "streamed", "waited_share": 0.6, "waited_seconds": 48.0, "code": "input-bound",
        "verdict": verdict, "advice": {"code": "feed-try-raw", "text": words},
    }  # fmt: skip
    one = found(whole(tmp_path, feed=feed), "waited-for-data")
    assert (one["waited"], one["seconds"], one["share"]) == (48.0, 80.0, 0.6)
    assert [told["verdict"] for told in one["also"]] == [verdict] and verdict in one["evidence"]
    assert [told["text"] for told in one["try"]] == [words, "chipwise bench RECIPE --feed host"]
    quiet = whole(tmp_path / "b", feed={**feed, "waited_share": 0.019})
    assert found(quiet, "waited-for-data") is None


@pytest.mark.parametrize(("waited", "says"), [(0.019, False), (0.021, True)])
def test_waiting_by_the_rows_of_an_unfinished_run(tmp_path, waited, says):
    one = found(report(runs.write(tmp_path / "run", runs.usual(120, waited=waited))), "waited-for-data")
    assert (one is not None) is says
    if one is not None:
        assert one["share"] == pytest.approx(waited)


# ---- what was learned


def evaluated(losses, accuracies):
    return [
        runs.row(40 * k, eval_loss=loss, eval_accuracy=accuracy, train_loss=1 / k, train_accuracy=0.99)
        for k, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True), 1)
    ]


@pytest.mark.parametrize(("last", "says"), [(0.549, False), (0.56, True)])
def test_an_evaluation_loss_that_rises_again(tmp_path, last, says):
    rows = evaluated([1.0, 0.5, 0.51, 0.52, last], [0.9] * 5)
    one = found(whole(tmp_path, rows), "loss-lowest-before-the-end")
    assert (one is not None) is says
    if one is not None:
        assert (one["best"], one["step"], one["end"], one["last"]) == (0.5, 80, 0.56, 200)
        assert typed(one) == ["--set duration=4ep"]


def test_a_loss_that_does_not_fall_and_one_that_jumps(tmp_path):
    flat = [runs.timed(at, train_loss=2.303) for at in range(10, 201, 10)]
    assert found(whole(tmp_path / "a", flat), "loss-did-not-fall")
    jump = [runs.timed(at, train_loss=9.0 if at == 50 else 2.0) for at in range(10, 201, 10)]
    one = found(whole(tmp_path / "b", jump), "loss-jumped")
    assert (one["value"], one["step"]) == (9.0, 50) and "--set lr=0.13" in typed(one)
