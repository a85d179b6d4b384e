"""What a reader sees: the pages that commands write and the documentation's site, in Chromium at two widths,
light and dark. Nothing sticks out, and axe-core finds nothing against WCAG 2 AA: contrast, names, roles.

`CHIPWISE_SCREENSHOTS=DIR` keeps the pictures."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import chromium
from chipwise import cli
from pages import needs_browser

ROOT = Path(__file__).parents[1]
SITE = (
    "index",
    "tutorial/train",
    "tutorial/data",
    "tutorial/plan",
    "plan",
    "commands",
    "reference/train",
    "reference/optimizers",
    "reference/models",
    "examples/own_task.py",
)
needs_axe = pytest.mark.skipif(chromium.axe() is None, reason="no axe-core: npm install --no-save axe-core")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_browser, needs_axe]


def assert_fine(pages, tmp_path):
    folder = Path(os.environ.get("CHIPWISE_SCREENSHOTS", tmp_path)) / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    seen = chromium.look(pages, chromium.axe(), folder)
    assert len(seen) == len(pages) * len(chromium.LOOKS)
    assert [one for one in seen if one.wider or one.faults] == []


def test_pages_that_commands_write(tmp_path):
    runs = [tmp_path / "one", tmp_path / "two"]
    for number, run in enumerate(runs):
        settings = ["--set", "duration=60st", "--set", f"seed={number}", "--devices", "1", "--quiet"]
        assert cli.main(["train", "digits", "--run", str(run), *settings]) == 0
    made = {name: tmp_path / f"{name}.html" for name in ("report", "compare", "plan")}
    assert cli.main(["report", str(runs[0]), "--html", str(made["report"])]) == 0
    assert cli.main(["compare", *map(str, runs), "--html", str(made["compare"])]) == 0
    assert cli.main(["plan", "digits", "--on", "t4,v5e-8", "--html", str(made["plan"])]) == 0
    assert_fine({name: file.as_uri() for name, file in made.items()}, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("mkdocstrings") is None, reason="pip install -e '.[docs]'")
def test_the_site(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {name.replace("/", "-"): (tmp_path / "site" / f"{name}.html").as_uri() for name in SITE}
    assert_fine(pages, tmp_path)
