"""The page of a report: what it says, that nothing in a run folder runs or is fetched, what a browser makes
of it; and the arithmetic of its pictures."""

import html
import itertools
import json
import math
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import run_folders as runs
from chipwise.errors import DataError
from chipwise.explain.report import page, pictures
from chipwise.explain.report.document import report
from pages import Reader, browse, framed, needs_browser


def read(document):
    reader = Reader(page.render(document))
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
    text = read(plain).text
    parts = ["toy: the run", "1,234 parameters", "250 examples/s", "Settings", "0.4 × 0.001 × 20 = 0.008",
             "Curves", "loss over steps", "resumed", "loss over time", "waiting for data over steps",
             "Where the time went", "What stood out", "Starting took", "Where the figures"]  # fmt: skip
    at = [text.index(part) for part in parts]
    assert at == sorted(at)
    assert "batch 50, 5 replicas" in text and "ab" * 32 in text and "chipwise eval" in text
    for one in plain["advice"]:
        assert one["evidence"] in text
    for what, how in plain["sources"]:
        assert what in text and how in text


@pytest.mark.parametrize("rows", [[], [runs.row(40, eval_loss=1.0)], [runs.timed(10, train_loss=1.0)]])
def test_a_run_that_tells_little(tmp_path, rows):
    text = read(report(runs.write(tmp_path / "run", rows))).text
    assert "not known" in text and not re.search(r"\bNone\b|\bnan\b", text)


def test_a_metric_that_is_not_finite_is_called_so_beside_its_step(tmp_path):
    rows = [*runs.usual(80), runs.row(84, eval_accuracy=0.0, eval_loss=None)]
    text = read(report(runs.write(tmp_path / "run", [*rows, runs.row(90, diverged="nan")]))).text
    assert "eval/accuracy 0 · eval/loss NaN (step 84)" in text and "(step 80)" in text


def test_a_document_from_a_file_is_the_same(plain):
    assert page.render(json.loads(json.dumps(plain))) == page.render(plain)


@pytest.mark.parametrize("document", [{}, [], {"kind": "plan"}, None])
def test_no_document(document):
    with pytest.raises(DataError, match="chipwise report --json"):
        page.render(document)


def test_write_where_it_cannot(tmp_path, plain):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="--html"):
        page.write(plain, tmp_path / "file" / "report.html")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# ---- safety


def test_nothing_is_fetched(plain):
    made = page.render(plain)
    for tag, attributes in Reader(made).elements:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form"), tag
        assert "src" not in attributes and "style" not in attributes
        assert attributes.get("href", "data:,") == "data:,"
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"url\(|@import", re.search(r"<style>(.*?)</style>", made, re.S)[1])
    policy = next(a["content"] for tag, a in Reader(made).elements if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and "unsafe-inline'; script-src 'sha256-" in policy


def test_text_of_a_run_is_never_markup(plain, hostile):
    made = page.render(hostile)
    assert "<img" not in made and "<script>alert" not in made and "\x1b" not in made
    reader = Reader(made)
    assert [tag for tag, _ in reader.elements].count("script") == 1
    assert "<script>alert('x')</script>" in reader.text
    usual = {a for _, attributes in read(plain).elements for a in attributes}
    assert {a for _, attributes in reader.elements for a in attributes} <= usual


# ---- pictures

NUMBERS = st.floats(-1e30, 1e30, allow_subnormal=False)
POINTS = st.lists(st.tuples(st.integers(0, 10**9), NUMBERS), max_size=30)


@example(points=[(0, 1.0), (0, 4e-305)], zero=False, log=True, epochs=None)
@given(points=POINTS, zero=st.booleans(), log=st.booleans(), epochs=st.none() | st.just(0.01))
def test_every_point_lies_in_the_frame(points, zero, log, epochs):
    points.sort()
    made = pictures.chart([("a", "train", points)], page.WIDE, zero=zero, log=log, epochs_a_step=epochs)
    assert (made is None) is (not points)
    if made is not None:
        (line,) = made.lines
        numbers = [float(x) for x in re.findall(r"-?[\d.]+", line.path)]
        for x, y in [*zip(numbers[::2], numbers[1::2], strict=True), *line.dots]:
            assert made.left - 0.1 <= x <= made.right + 0.1 and made.top - 0.1 <= y <= made.bottom + 0.1
        for tick in made.y_ticks:
            assert made.top - 0.1 <= tick.at <= made.bottom + 0.1


@pytest.mark.parametrize("many", [259, 260, 261, 2600, 2601])
def test_thinning_keeps_the_ends_and_every_peak(many):
    points = [(k, math.sin(k / 50) + (k == many // 2) * 9) for k in range(many)]
    kept = pictures.thinned(points)
    assert len(kept) <= 262 and kept == sorted(kept) and set(kept) <= set(points)
    assert max(y for _, y in kept) == max(y for _, y in points) and (many > 260 or kept == points)


def test_a_loss_over_decades_is_logarithmic():
    points = [(k, 10.0**-k) for k in range(5)]
    made = pictures.chart([("a", "train", points)], page.WIDE, log=True)
    gaps = [b - a for (_, a), (_, b) in itertools.pairwise(made.lines[0].dots)]
    assert made.log and gaps == pytest.approx([gaps[0]] * 4)
    with_zero = pictures.chart([("a", "train", [*points, (5, 0.0)])], page.WIDE, log=True)
    assert not with_zero.log


def test_the_bar_is_full(plain):
    bar = pictures.bar(plain["seconds"])
    assert sum(p.share for p in bar) == pytest.approx(1) and bar[-1].x + 100 * bar[-1].share == pytest.approx(
        100
    )


@pytest.mark.parametrize(
    "values", [[], [1.0], [1.0, 1.0], list(range(23)), list(range(25)), [1e-9, 1.0, 1e9]]
)
def test_sparks(values):
    made = pictures.spark(values)
    assert len(made) <= 24 and set(made) <= set("▁▂▃▄▅▆▇█") and bool(made) is bool(values)
    assert len(set(values)) < 2 or (made[0], made[-1]) == ("▁", "█")


@pytest.mark.parametrize(("letters", "beside"), [(0, True), (48, True), (49, False), (200, False)])
def test_names_stand_beside_their_dots_where_there_is_room(letters, beside):
    rows = [("x" * letters, "seed0", [0.1, 0.2], None), ("y", "seed1", [0.3], None)]
    made = pictures.strip(rows, pictures.ACROSS)
    for row in made.rows:
        assert (row.label > row.y) is beside
        assert all(made.left <= x <= made.right for x in row.dots) and row.y + 10 < made.bottom
    assert (made.left > 7 * letters) is (beside or letters < 2)


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
        frames += framed(page.render(document), width, 800)
    seen = browse(tmp_path, f"<!DOCTYPE html><body>{frames}{MEASURE}", "--window-size=1300,900", "--dump-dom")
    found = json.loads(html.unescape(re.search("FOUND(.*)END", seen)[1]))
    assert [width for width, _, _ in found] == [1280, 768, 390, 320] * 2
    for width, needs, lines in found:
        assert needs <= width and lines >= 12
