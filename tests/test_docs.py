"""The documentation: its links lead somewhere, its site and its reference are whole, its pages run."""

import inspect
import os
import pkgutil
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import chipwise as cw
import doc_pages
from chipwise.base.errors import DeviceError
from chipwise.chips.targets import parse
from pages import Reader

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
MADE = ("commands.md", "json.md")
"""Pages that the site makes of the code: tests/tools/test_docs_site.py."""
WITH_LINKS = [*PAGES, ROOT / "llms.txt"]


def named(page):
    return page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT).as_posix()


def anchors(page):
    """Of its headings, as MkDocs and GitHub make them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    names = re.findall(r"^::: cw\.(\S+)$", page.read_text(), re.MULTILINE)  # of the reference
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | {f"chipwise.{name}" for name in names}


@pytest.mark.parametrize("page", WITH_LINKS, ids=named)
def test_every_link_leads_somewhere(page):
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http") or target in MADE:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_the_site_has_every_page():
    listed = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted([*map(named, PAGES), *MADE])


@pytest.mark.parametrize("page", doc_pages.PAGES, ids=doc_pages.name)
def test_every_step_is_known(page):
    """Python compiles, and a shell's line is a command of ours or sets a machine up. Below they are run."""
    for kind, text in doc_pages.steps(page):
        assert kind != "python" or compile(text, page.name, "exec")


def test_every_target_is_one():
    """Also inside sentences. A page runs at some merges; a chip that plans refuse is found at each."""
    asked = [
        (page.name, name)
        for page in [*doc_pages.PAGES, ROOT / "llms.txt", *(ROOT / "examples").glob("*.py")]
        for names in re.findall(r"--on[ =]([\w:,.-]+\w)", page.read_text())
        for name in names.split(",")
    ]
    assert len(asked) > 40
    wrong = []
    for page, name in asked:
        try:
            parse(name)
        except DeviceError as error:
            wrong.append(f"{page}: {error}")
    assert not wrong


def test_every_small_and_foreign_step_is_on_a_page():
    texts = [text for page in doc_pages.PAGES for _, text in doc_pages.steps(page)]
    for begin in (*doc_pages.SMALL, *map(re.escape, doc_pages.NOT_HERE)):
        assert any(re.match(begin, text) for text in texts), begin
    assert set(doc_pages.BEFORE) <= {doc_pages.name(page) for page in doc_pages.PAGES}


QUICK = ("reference/optimizers", "reference/data")


def ran(page, folder):
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "CHIPWISE_DATA")}
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT / "tests")}
    environment |= {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, "-c", "import sys, doc_pages; doc_pages.run(sys.argv[1])", str(page)]
    return subprocess.run(program, cwd=folder, text=True, capture_output=True, env=environment)


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [p for p in doc_pages.PAGES if list(doc_pages.steps(p))], ids=doc_pages.name)
def test_every_page_runs_as_written(page, tmp_path):
    done = ran(page, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    if doc_pages.name(page) == "tutorial/plan":  # whose plan docs/plan.png shows
        shown = runpy.run_path(str(ROOT / "tools" / "docs_pictures.py"))["PICTURES"]["plan"].drawn()
        assert without_numbers((tmp_path / "plan.html").read_text()) == without_numbers(shown)


def without_numbers(page):
    """What a page says, with a mark for each number, and without the place of the checkout."""
    return re.sub(r"[\d.,]+", "#", Reader(page).text.replace(f"{ROOT}/", ""))


def test_quick_pages_run(tmp_path):
    """Names and schedules of the reference; all pages are slow."""
    for page in QUICK:
        folder = tmp_path / page
        folder.mkdir(parents=True)
        done = ran(DOCS / f"{page}.md", folder)
        assert done.returncode == 0, done.stderr[-3000:]


def test_the_complete_recipe_predicts():
    names = {}
    exec(doc_pages.complete_recipe(), names)
    task = names["recipe"]().task
    outputs = jax.eval_shape(
        lambda: task.predict(*task.init(jax.random.key(0)), {"image": np.zeros((3, 8, 8))})
    )
    assert outputs.shape == (3, task.classes)


# ---- the reference

DESCRIBED = {
    path
    for p in (DOCS / "reference").glob("*.md")
    for path in re.findall(r"^::: cw\.(\S+)$", p.read_text(), re.M)
}


def test_the_reference_has_every_public_name():
    there = {id(pkgutil.resolve_name(f"chipwise:{path}")) for path in DESCRIBED}
    homes = {"": cw, **{f"{name}.": getattr(cw, name) for name in cw._PACKAGES.split()}}
    public = {f"{at}{name}": getattr(home, name) for at, home in homes.items() for name in home.__all__}
    public |= {f"schedules.{name}": one for name, one in cw.schedules.SCHEDULES.items()}
    sums = vars(cw.metrics).items()
    public |= {
        n: f for n, f in sums if getattr(f, "__annotations__", {}).get("return") == "Sum" and n[0] != "_"
    }
    assert [
        n for n, one in public.items() if not isinstance(one, types.ModuleType) and id(one) not in there
    ] == []


@pytest.mark.parametrize("door", ["equinox", "keras", "linen", "nnx", "torch"])
def test_a_door_names_its_arguments(door):
    given = inspect.signature(getattr(cw, door).task).parameters
    assert {"train", "eval", "inputs", "target", "metrics", "augment", "mix", "classes"} <= given.keys()
    assert all(one.kind is not one.VAR_KEYWORD for one in given.values())
