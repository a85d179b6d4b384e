"""The page of a comparison: what it says, that nothing runs or is fetched, what a browser makes of it."""

import html
import json
import re

import numpy as np
import pytest
from PIL import Image

from chipwise.explain.compare import compare_page
from chipwise.explain.compare.comparison import document
from chipwise.explain.row_sources import read
from chipwise.study.goal import Goal
from chipwise.words.facts import fact, say
from explain.comparisons import LOSSES, record, run, study
from pages import HOSTILE, Reader, browse, needs_browser


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A comparison of everything: records, a study and a run."""
    folder = tmp_path_factory.mktemp("all")
    sources = [
        record(folder / "cpu.json", 4000, 0.05),
        record(folder / "gpu.json", 90e3, 0.02, kind="Tesla T4", losses=[x * (1 + 1e-7) for x in LOSSES]),
        study(folder / "study"),
        run(folder / "run"),
    ]
    rows = read([str(s) for s in sources])
    return document(rows, target=Goal.parse("0.95"))


def hostile(value):
    """Every text of a document replaced, but those that the page compares."""
    if isinstance(value, dict):
        kept = ("verdict", "status", "form", "code")
        return {k: v if k in kept else hostile(v) for k, v in value.items()}
    if isinstance(value, list):
        return [hostile(v) for v in value]
    return HOSTILE if isinstance(value, str) else value


def test_the_answer_comes_first_and_the_result_before_the_speed(made):
    text = " ".join(Reader(compare_page.render(made)).text.split())
    headline = " ".join(f["text"] for f in made["sentences"]["headline"])
    parts = (headline, "Each row", "Result", "Speed", "What differs")
    at = [text.index(s) for s in (*parts, "Where every")]
    assert at == sorted(at)
    for row in made["rows"]:
        assert row["label"] in text and row["source"]["text"] in text


def test_every_picture_is_there(made):
    text = compare_page.render(made)
    for title in ("Speed over steps", "eval/accuracy over time"):
        assert f"<b>{title}" in text or title in text


def test_nothing_is_fetched(made):
    for tag, attributes in Reader(compare_page.render(made)).elements:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form"), tag
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#") or attributes["href"] == "data:,"
        assert "style" not in attributes and not any(name.startswith("on") for name in attributes)
    style = re.search(r"<style>(.*?)</style>", compare_page.render(made), re.S)
    assert style is not None and not re.search(r"url\((?!#)|@import", style[1])


def test_text_of_a_document_is_never_markup(made):
    rows = [{**hostile(row), "label": HOSTILE + str(k)} for k, row in enumerate(made["rows"])]
    # the baseline and the keys of settings are names too
    bad = {**hostile(made), "rows": rows, "baseline": rows[0]["label"], "metric": "eval/accuracy"}
    text = compare_page.render(bad)
    assert "<img" not in text and "<script>alert" not in text
    reader = Reader(text)
    assert [tag for tag, _ in reader.elements].count("script") == 1 and HOSTILE in reader.text
    usual = {a for _, attributes in Reader(compare_page.render(made)).elements for a in attributes}
    assert {a for _, attributes in reader.elements for a in attributes} <= usual


def test_a_document_from_a_file_is_the_same(made):
    assert compare_page.render(json.loads(json.dumps(made))) == compare_page.render(made)


def test_rows_without_any_speed(tmp_path):
    paths = [run(tmp_path / f"{k}", done=False, rows='{"step": 1, "train/loss": 1.0}\n') for k in range(2)]
    found = document(read([str(p) for p in paths]))
    assert say(fact("nothing-to-compare")) in Reader(compare_page.render(found)).text


# ---- in a browser


MEASURE = """
<script>
addEventListener("load", function () {
  var found = {};
  document.querySelectorAll("iframe").forEach(function (frame) {
    var root = frame.contentDocument.documentElement;
    found[frame.clientWidth] = [root.scrollWidth, frame.contentDocument.querySelectorAll("tbody tr").length];
  });
  document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
});
</script>
"""


@needs_browser
def test_fits_its_width(made, tmp_path):
    text = html.escape(compare_page.render(made))
    frames = "".join(
        f'<iframe srcdoc="{text}" style="border:0;width:{w}px;height:800px;display:block"></iframe>'
        for w in (1280, 390, 320)
    )
    said = browse(tmp_path, f"<!DOCTYPE html><body>{frames}{MEASURE}", "--window-size=1300,900", "--dump-dom")
    found = json.loads(html.unescape(re.search("FOUND(.*)END", said)[1]))
    assert sorted(map(int, found)) == [320, 390, 1280]
    for width, (needs, rows) in found.items():
        assert needs <= int(width) and rows == len(made["rows"])


@needs_browser
@pytest.mark.slow
def test_is_drawn(made, tmp_path):
    shot = tmp_path / "page.png"
    browse(tmp_path, compare_page.render(made), "--window-size=1280,900", f"--screenshot={shot}")
    with Image.open(shot) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape == (900, 1280, 3) and len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20
