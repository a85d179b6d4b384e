"""What a report shows, and its pictures."""

import re

import pytest

import run_folders as runs
from chipwise.base.facts import fact
from chipwise.explain.charts import Panel
from chipwise.explain.page import render
from chipwise.explain.report import report_parts
from chipwise.explain.report.run_report import report
from pages import Reader


def page_of(document):
    return render([*report_parts.parts(document)], document)


def read(document):
    return Reader(page_of(document))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A finished run with a resume and waits, as a document."""
    rows = runs.usual(waited=0.01)
    source = {"recipe": "mine.py:recipe", "set": [], "data": None}
    run = tmp_path_factory.mktemp("page") / "run"
    result = runs.finished(rows) | {"feed": {"waited_share": 0.03, "waited_seconds": 2.4}}
    folder = runs.write(run, rows, result, [200], source=source)
    return report(folder) | {"resumes": [{"when": "2026-01-15T12:00:00+00:00", "step": 100}]}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A run in whose files every free text is an attack, as a document."""
    rows = [row | {f"train/{runs.HOSTILE}": 1.0} for row in runs.usual()]
    result = runs.finished(rows) | runs.hostile({"fingerprint": "", "devices": {"kind": "", "platform": ""}})
    result["feed"]["verdict"] = f"input-bound: {runs.HOSTILE}; {runs.HOSTILE}"
    optimizer = {"optimizer": runs.HOSTILE, "lr": runs.HOSTILE, runs.HOSTILE: 1}
    source = {"recipe": runs.HOSTILE, "set": [runs.HOSTILE], "data": runs.HOSTILE}
    folder = runs.write(
        tmp_path_factory.mktemp("page") / "run", rows, result,
        name=runs.HOSTILE, optimizer=optimizer, source=source, precision=runs.HOSTILE, seed=runs.HOSTILE,
    )  # fmt: skip
    return report(folder)


# ---- what it says


def test_the_story_is_told_in_order(plain):
    words = read(plain).text
    parts = ["toy: the run", "1,234 parameters", "250 examples/s", "Curves", "loss over steps",
             "resumed", "loss over time", "examples/s over steps", "waiting for data", "Settings",
             "5 replicas × 10", "lr over steps", "Where the time went", "What stood out",
             "The device waited", "Where the figures"]  # fmt: skip
    at = [words.index(part) for part in parts]
    assert at == sorted(at)
    assert "batch 50, 5 replicas" in words and "ab" * 32 in words and "chipwise eval" in words
    for one in plain["advice"]:
        assert one["text"] in words and one["evidence"] in words
    for told in plain["sources"]:
        assert told["about"] in words and told["text"] in words


@pytest.mark.parametrize("rows", [[], [runs.row(40, eval_loss=1.0)], [runs.timed(10, train_loss=1.0)]])
def test_a_run_that_tells_little(tmp_path, rows):
    words = read(report(runs.write(tmp_path / "run", rows))).text
    assert str(fact("source-machine-unknown")) in words and not re.search(r"\bNone\b|\bnan\b", words)


def test_a_metric_that_is_not_finite_is_called_so_beside_its_step(tmp_path):
    rows = [*runs.usual(80), runs.row(84, eval_accuracy=0.0, eval_loss=None)]
    how = {"code": "loss-not-finite", "first": 81, "last": 90, "value": "nan"}
    words = read(report(runs.write(tmp_path / "run", [*rows, runs.row(90, diverged=how)]))).text
    assert "NaN at step 84" in words and "at step 80" in words


def test_the_speed_has_its_median_and_the_resumes(plain):
    panels = {one.title: one for one in report_parts.parts(plain) if isinstance(one, Panel)}
    speed = panels["examples/s over steps"]
    assert (speed.level, list(speed.marks)) == (250, [100]) and speed.second[0] == "epoch"
    assert panels["loss over time"].x_unit == "s" and not panels["loss over time"].marks


# ---- safety


def test_text_of_a_run_is_never_markup(plain, hostile):
    made = page_of(hostile)
    assert "<img" not in made and "<script" not in made and "\x1b" not in made
    reader = Reader(made)
    assert "<script>alert('x')</script>" in reader.text
    usual = {a for _, attributes in read(plain).elements for a in attributes}
    assert {a for _, attributes in reader.elements for a in attributes} <= usual


# ---- pictures


@pytest.mark.parametrize(
    "values", [[], [1.0], [1.0, 1.0], list(range(23)), list(range(25)), [1e-9, 1.0, 1e9]]
)
def test_sparks(values):
    made = report_parts.spark(values)
    assert len(made) <= 24 and set(made) <= set("▁▂▃▄▅▆▇█") and bool(made) is bool(values)
    assert len(set(values)) < 2 or (made[0], made[-1]) == ("▁", "█")
