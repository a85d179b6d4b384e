"""The page of a report: what it says, that nothing in a run folder runs or is fetched, what a browser makes
of it; and the arithmetic of its pictures."""

import html
import itertools
import json
import re

import pytest

import run_folders as runs
from chipwise.explain.report import report_page, report_text
from chipwise.explain.report.run_report import report
from chipwise.words.facts import fact
from pages import Reader, browse, framed, needs_browser


def read(document):
    reader = Reader(report_page.render(document))
    return reader


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A finished run with a resume and waits, as a document."""
    rows = runs.usual(waited=0.01)
    source = {"recipe": "mine.py:recipe", "set": [], "data": None}
    run = tmp_path_factory.mktemp("page") / "run"
    folder = runs.write(run, rows, runs.finished(rows), [200], source=source)
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
    parts = ["toy: the run", "1,234 parameters", "250 examples/s", "Settings", "5 replicas × 10",
             "Curves", "loss over steps", "resumed", "loss over time", "waiting for data over steps",
             "Where the time went", "What stood out", "Starting took", "Where the figures"]  # fmt: skip
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
    assert "eval/accuracy 0 · eval/loss NaN (step 84)" in words and "(step 80)" in words


def test_a_document_from_a_file_is_the_same(plain):
    assert report_page.render(json.loads(json.dumps(plain))) == report_page.render(plain)


# ---- safety


def test_nothing_is_fetched(plain):
    made = report_page.render(plain)
    for tag, attributes in Reader(made).elements:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form"), tag
        assert "src" not in attributes and "style" not in attributes
        assert attributes.get("href", "data:,") == "data:,"
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"url\(|@import", re.search(r"<style>(.*?)</style>", made, re.S)[1])
    policy = next(a["content"] for tag, a in Reader(made).elements if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and "unsafe-inline'; script-src 'sha256-" in policy


def test_text_of_a_run_is_never_markup(plain, hostile):
    made = report_page.render(hostile)
    assert "<img" not in made and "<script>alert" not in made and "\x1b" not in made
    reader = Reader(made)
    assert [tag for tag, _ in reader.elements].count("script") == 1
    assert "<script>alert('x')</script>" in reader.text
    usual = {a for _, attributes in read(plain).elements for a in attributes}
    assert {a for _, attributes in reader.elements for a in attributes} <= usual


# ---- pictures


def test_the_bar_is_full(plain):
    bar = report_text.time_bar(plain["seconds"])
    assert sum(p.share for p in bar) == pytest.approx(1)
    assert bar[-1].x + bar[-1].width == pytest.approx(100)


@pytest.mark.parametrize(
    "values", [[], [1.0], [1.0, 1.0], list(range(23)), list(range(25)), [1e-9, 1.0, 1e9]]
)
def test_sparks(values):
    made = report_text.spark(values)
    assert len(made) <= 24 and set(made) <= set("▁▂▃▄▅▆▇█") and bool(made) is bool(values)
    assert len(set(values)) < 2 or (made[0], made[-1]) == ("▁", "█")


# ---- in a browser

MEASURE = """
<script>
addEventListener("load", function () {
  var found = [];
  document.querySelectorAll("iframe").forEach(function (frame) {
    var root = frame.contentDocument.documentElement;
    found.push([frame.clientWidth, root.scrollWidth, root.querySelectorAll("path.line").length]);
  });
  document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
});
</script>
"""


@needs_browser
def test_fits_any_width(tmp_path, plain, hostile):
    frames = ""
    for document, width in itertools.product((plain, hostile), (1280, 768, 390, 320)):
        frames += framed(report_page.render(document), width, 800)
    seen = browse(tmp_path, f"<!DOCTYPE html><body>{frames}{MEASURE}", "--window-size=1300,900", "--dump-dom")
    found = json.loads(html.unescape(re.search("FOUND(.*)END", seen)[1]))
    assert [width for width, _, _ in found] == [1280, 768, 390, 320] * 2
    for width, needs, lines in found:
        assert needs <= width and lines >= 12
