"""Pages: nothing of a document runs or is fetched, all of it is text, and it fits any width."""

import dataclasses
import html
import json
import re

import pytest
from rich.text import Text

import run_folders as runs
from chipwise.compile.hlo.kernel import Kernel
from chipwise.explain import plan_parts
from chipwise.explain.compare import compare_parts
from chipwise.explain.compare.comparison import document as compared
from chipwise.explain.page import fragment, render
from chipwise.explain.report import report_parts
from chipwise.explain.report.run_report import report
from chipwise.explain.row_sources import read
from chipwise.explain.terminal import Tiles, Title, grid, table
from explain.comparisons import record, run, study
from pages import HOSTILE, Reader, browse, framed, needs_browser
from planner import documents

PARTS = {"plan": plan_parts.page, "report": report_parts.parts, "compare": compare_parts.page}


def page_of(kind, document):
    return render([*PARTS[kind](document)], document)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A document of each kind."""
    folder = tmp_path_factory.mktemp("all")
    kernel = Kernel("dot.1", "matmul", 24, 0.02, 1e6, 1e11, "compute", "replica", "bf16", (), "a/dot", "n:3")
    plans = [dataclasses.replace(one, kernels=(kernel,)) for one in documents.plans()]
    sources = [
        record(folder / "cpu.json", 4000, 0.05),
        record(folder / "gpu.json", 90e3, 0.02, kind="Tesla T4"),
        study(folder / "study"),
        run(folder / "run"),
    ]
    rows = runs.usual(waited=0.01)
    return {
        "plan": documents.wrap(plans),
        "report": report(runs.write(folder / "toy", rows, runs.finished(rows), [200])),
        "compare": compared(read([str(s) for s in sources]), target="0.95"),
    }


def hostile(value):
    """Every text of a document replaced, but those that the parts compare."""
    if isinstance(value, dict):
        kept = ("verdict", "state", "form", "code", "ranked_by", "kind", "bound", "program", "metric")
        return {k: v if k in kept and isinstance(v, str) else hostile(v) for k, v in value.items()}
    if isinstance(value, list):
        return [hostile(v) for v in value]
    return HOSTILE if isinstance(value, str) else value


def hostile_of(kind, document):
    bad = hostile(document)
    if kind == "compare":  # rows are told apart by their names
        rows = [{**row, "label": f"{HOSTILE}{k}"} for k, row in enumerate(bad["rows"])]
        return {**bad, "rows": rows, "baseline": rows[0]["label"]}
    return {**bad, "verdict": document["verdict"]} if kind == "plan" else bad


@pytest.mark.parametrize("kind", PARTS)
def test_nothing_is_fetched_and_nothing_runs(made, kind):
    page = page_of(kind, made[kind])
    for tag, attributes in Reader(page).elements:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form", "script"), tag
        assert "src" not in attributes and "style" not in attributes
        assert attributes.get("href", "data:,") == "data:,"
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"url\(|@import", re.search(r"<style>(.*?)</style>", page, re.S)[1])
    policy = next(a["content"] for _, a in Reader(page).elements if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and "script-src" not in policy


@pytest.mark.parametrize("kind", PARTS)
def test_text_of_a_document_is_never_markup(made, kind):
    page = page_of(kind, hostile_of(kind, made[kind]))
    reader = Reader(page)
    assert "<img" not in page and "<script" not in page and HOSTILE in reader.text
    usual = {a for _, attributes in Reader(page_of(kind, made[kind])).elements for a in attributes}
    assert {a for _, attributes in reader.elements for a in attributes} <= usual


@pytest.mark.parametrize("kind", PARTS)
def test_what_only_looks_like_text_is_escaped(made, kind, monkeypatch):
    odd = "\x1b[31m \ud800 \u202e \x00 é"
    monkeypatch.setitem(hostile.__globals__, "HOSTILE", odd)
    page = page_of(kind, hostile_of(kind, made[kind]))
    page.encode()  # a file takes it
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", page) and r"\x1b[31m ? \u202e \x00 é" in page


@pytest.mark.parametrize("kind", PARTS)
def test_a_document_from_a_file_is_the_same(made, kind):
    assert page_of(kind, json.loads(json.dumps(made[kind]))) == page_of(kind, made[kind])


@pytest.mark.parametrize("kind", PARTS)
def test_a_table_has_heads_and_a_picture_has_words(made, kind):
    elements = Reader(page_of(kind, made[kind])).elements
    assert [tag for tag, _ in elements].count("h1") == 1
    assert {"row", "col"} == {a["scope"] for tag, a in elements if tag == "th"}
    assert all(a["aria-label"] for tag, a in elements if tag == "svg" or a.get("role") == "region")


def test_every_kind_of_part_is_shown():
    tile = {"name": "7", "image": "data:image/png;base64,AA=="}
    parts = [
        Title("a title", level=1),
        "a line",
        Text("a note", style="yellow"),
        "",
        grid([("name", "value")]),
        table(("column", "other"), [("one", 2)]),
        Tiles([tile, {"name": "8", "image": None}]),
    ]
    reader = Reader(fragment(parts))
    words = reader.text.split("\n")
    for said in ("a title", "a line", "a note", "name", "value", "column", "one", "2", "7"):
        assert any(said in line for line in words), said
    assert "8" not in reader.text and ("p", {"class": "yellow"}) in reader.elements
    assert [tag for tag, _ in reader.elements].count("p") == 2


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


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("kind", PARTS)
def test_fits_any_width(tmp_path, made, kind):
    widths = [1280, 768, 390, 320]
    pages = (page_of(kind, made[kind]), page_of(kind, hostile_of(kind, made[kind])))
    frames = "".join(framed(page, width, 800) for page in pages for width in widths)
    seen = browse(tmp_path, f"<!DOCTYPE html><body>{frames}{MEASURE}", "--window-size=1300,900", "--dump-dom")
    found = json.loads(html.unescape(re.search("FOUND(.*)END", seen)[1]))
    assert [width for width, _, _ in found] == widths * 2
    for width, needs, lines in found:
        assert needs <= width and lines >= 1
