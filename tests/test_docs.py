"""The documentation: its links lead somewhere, its site has every page, the tutorial does what it says."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TUTORIAL = [DOCS / "tutorial" / f"{name}.md" for name in ("train", "data", "models", "plan", "after")]


def named(page):
    return page.relative_to(DOCS).as_posix()


def anchors(page):
    """Of its headings, as MkDocs and GitHub make them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page):
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http") or target == "commands.md":  # which the site makes
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_the_site_has_every_page():
    listed = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted([*map(named, PAGES), "commands.md"])


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", TUTORIAL, ids=named)
def test_the_tutorials_python_is_python(page):
    for language in ("python", "py"):
        for number, block in enumerate(blocks(page, language)):
            compile(block, f"{page.name} {number}", "exec")


RUN = """
import json, shlex, sys
import chipwise.cli
names = {}
for kind, text in json.load(sys.stdin):
    if kind == "python":
        exec(compile(text, "tutorial", "exec"), names)
    elif code := chipwise.cli.main(shlex.split(text)):
        sys.exit(f"{text}: {code}")
"""
ELSEWHERE = ("launch", "plan", "find-batch", "sweep", "bench", "compare", "export")
"""Commands that want compilers, minutes or what other commands made: their own tests run them."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", [p for p in TUTORIAL if p.stem != "plan"], ids=named)
def test_the_tutorial_runs(page, tmp_path):
    """Its Python and its commands, one after another in one folder; short where it trains."""
    steps = []
    if page.stem in ("models", "train"):
        (tmp_path / "my_task.py").write_text(blocks(TUTORIAL[0], "python")[0])
    if page.stem == "models":
        steps.append(("command", "train my_task.py:recipe --run runs/mine"))
    for language, block in re.findall(
        r"^```(python|sh)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
    ):
        if language == "python":
            steps.append((language, block))
            continue
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] != ["chipwise"] or words[1] in ELSEWHERE:
                continue
            steps.append(("command", shlex.join(words[1:])))
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps(steps), cwd=tmp_path, text=True, capture_output=True,
        env=environment | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_NUM_CPU_DEVICES": "8"},
    )  # fmt: skip
    assert len(steps) > 2 and done.returncode == 0, done.stderr[-3000:]
