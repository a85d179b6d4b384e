"""The committed pictures of the docs are what `tools/docs_pictures.py` draws from their records."""

import importlib.util
import math
import re
import sys
from pathlib import Path

import pytest

from pages import needs_browser

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "docs_pictures.py"
spec = importlib.util.spec_from_file_location("docs_pictures", TOOL)
tool = sys.modules["docs_pictures"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

MEASURED = [name for name, picture in tool.PICTURES.items() if picture.measure]
VOLATILE = {
    *("created", "chipwise", "machine", "versions", "fingerprint", "run"),
    *("advice", "findings", "curves", "intervals", "seconds", "speed"),
}
"""Fields of documents that differ with the machine and the day, their sentences included."""


def test_every_picture_of_the_docs_has_a_program():
    made = {picture.file for picture in tool.PICTURES.values()}
    kinds = ("*.svg", "*.png")
    there = {
        str(file.relative_to(ROOT))
        for folder in ("docs", "benchmarks")
        for kind in kinds
        for file in (ROOT / folder).rglob(kind)
    }
    assert there == made
    records = {file.name for file in tool.RECORDS.iterdir()}
    assert records == {tool.PICTURES[name].record_path.name for name in MEASURED}


@pytest.mark.slow
@pytest.mark.parametrize("name", tool.PICTURES)
def test_a_picture_is_what_its_record_gives(name, monkeypatch):
    """`python tools/docs_pictures.py --draw NAME` draws it again."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    picture = tool.PICTURES[name]
    drawn = picture.drawn()
    if picture.path.suffix == ".png":
        assert picture.record()["page"] == tool.digest(drawn), f"{picture.file} shows an older page"
        assert png_size(picture.path) == picture.size
    else:
        assert picture.path.read_text() == drawn, f"{picture.file} is older than what it shows"


def png_size(file):
    """Width and height, from the header."""
    header = file.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """One folder for all measurements, which share runs."""
    return tmp_path_factory.mktemp("measured")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in MEASURED if name != "plan"])
def test_a_record_is_what_its_commands_answer(name, scratch):
    """But for times: the same fields, sentences and codes, and numbers that are close.

    A plan takes minutes, so tests/test_docs.py compares that of the tutorial's page, which it runs.
    """
    picture = tool.PICTURES[name]
    assert alike(picture.record()["shown"], picture.measure(scratch)) == []


@pytest.mark.slow
@needs_browser
def test_a_page_is_photographed(tmp_path):
    tool.photograph("<h1>A page</h1>", tmp_path / "page.png", (300, 200))
    assert png_size(tmp_path / "page.png") == (300, 200)


def alike(old, new, at=""):
    """Where two documents differ in more than times and the last digits of numbers."""
    if isinstance(old, dict) and isinstance(new, dict):
        if old.keys() != new.keys():
            return [f"{at}: {sorted(old.keys() ^ new.keys())}"]
        parts = [alike(old[k], new[k], f"{at}.{k}") for k in old if k not in VOLATILE]
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return [f"{at}: {len(old)} and {len(new)} items"]
        parts = [alike(a, b, f"{at}[{k}]") for k, (a, b) in enumerate(zip(old, new, strict=True))]
    elif isinstance(old, str) and isinstance(new, str):
        numbers = re.compile(r"[\d.,]+")
        return [] if numbers.sub("#", old) == numbers.sub("#", new) else [f"{at}: {old!r} and {new!r}"]
    elif isinstance(old, float) and isinstance(new, int | float):
        return [] if math.isclose(old, new, rel_tol=0.05) else [f"{at}: {old} and {new}"]
    else:
        return [] if old == new else [f"{at}: {old!r} and {new!r}"]
    return [fault for part in parts for fault in part]
