"""Every file, name, option and `make` target that docs, docstrings and comments cite exists.

What is cited is found by its form, and looked up in the source. `USERS`, `FOREIGN` and `OTHERS`
list what has such a form and belongs to others.
"""

import ast
import functools
import pkgutil
import re
from pathlib import Path
from typing import NamedTuple

import typer

from chipwise.cli import app
from imports import PACKAGE

ROOT = PACKAGE.parents[1]
FOLDERS = ("benchmarks", "docs", "examples", "src", "tests", "tools")
PAGES = [
    *(page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"),  # which tells what was
    ROOT / "llms.txt",
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "benchmarks").rglob("*.md"),
]
CODE = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]

USERS = {
    "my_task.py": "the recipe of a reader of the tutorial",
    "path.py": "a recipe's file, in messages",
    "helper.py": "a module beside a user's recipe",
    "dawn.py": "of cifar10-fast",
    "pp/autoaugment.py": "of big_vision",
}
"""Modules that docs and docstrings cite and that are not of this repository."""

FOREIGN = {
    *("jax", "jnp", "nnx", "optax", "torch", "tf", "os", "time", "Device", "Generator"),
    *("params", "attention", "blocks", "Net", "net", "backend_config"),
}
"""How dotted names begin that are of other libraries, or that stand for a user's network and its leaves."""


class Cited(NamedTuple):
    """Something that a text cites."""

    where: str
    """The file and the line that cite it."""
    what: str


class Prose(NamedTuple):
    """A page, a docstring or a comment."""

    file: Path
    line: int
    text: str

    def cited(self, pattern):
        """What matches, the first group if there is one."""
        for found in re.finditer(pattern, self.text):
            line = self.line + self.text[: found.start()].count("\n")
            yield Cited(f"{self.file.relative_to(ROOT)}:{line}", found[found.lastindex or 0])


def docstrings_and_comments(file):
    """Found by their marks alone: a tokenizer takes ten times as long."""
    text = file.read_text()
    for found in re.finditer(r'(?s:""".*?""")|#.*', text):
        yield Prose(file, text.count("\n", 0, found.start()) + 1, found[0])


@functools.cache
def pages():
    return [Prose(page, 1, page.read_text()) for page in PAGES]


@functools.cache
def prose():
    return [*pages(), *(one for file in CODE for one in docstrings_and_comments(file))]


def assert_none(faults):
    assert not faults, "\n".join(f"{one.where}: {one.what}" for one in faults)


# ---- files

PATH = re.compile(rf"(?<![\w/.@-])((?:{'|'.join(FOLDERS)})/[\w./*-]*\.[a-z]+)\b")


def test_files_of_the_repository_exist():
    faults = [
        one
        for text in prose()
        for one in text.cited(PATH)
        if not list(ROOT.glob(one.what)) and not list(PACKAGE.glob(one.what))
    ]
    assert_none(faults)


MODULE = re.compile(r"`((?:\w+/)*\w+\.py)\b")


def test_modules_of_the_package_exist():
    """`run/fit.py`, or a file beside the one that cites it."""
    faults = []
    for text in prose():
        if text.file.is_relative_to(PACKAGE) or text.file.name == "design.md":
            beside = text.file.parent
            homes = (PACKAGE, PACKAGE.parent, ROOT, beside, beside.parent)
            faults += [
                one
                for one in text.cited(MODULE)
                if one.what not in USERS and not any((home / one.what).exists() for home in homes)
            ]
    assert_none(faults)


CITED_PAGE = re.compile(r"\b(benchmarks/[\w/]+\.md)\b")
FIGURE = re.compile(r"(\d[\d,.]*) (?:ms|GB)\b")


def test_figures_of_an_example_stand_on_the_page_that_it_cites():
    citing = [(text, [*text.cited(CITED_PAGE)]) for text in prose() if text.file.parent.name == "examples"]
    assert any(cited for _, cited in citing)
    faults = []
    for text, cited in citing:
        page = " ".join((ROOT / one.what).read_text() for one in cited)
        figures = text.cited(FIGURE) if cited else ()
        faults += [one for one in figures if not re.search(rf"\b{re.escape(one.what)}\b", page)]
    assert_none(faults)


# ---- names


class Names(NamedTuple):
    """What the source of the package defines."""

    modules: dict[str, set[str]]
    """By the file's name: what stands in it, as names of its code. No two files have one name."""
    packages: set[str]
    classes: dict[str, set[str]]
    """By the class: its fields, methods and what `self` gets, those of its bases too."""


@functools.cache
def names():
    modules, bodies, bases = {}, {}, {}
    for file in PACKAGE.rglob("*.py"):
        modules.setdefault(file.stem, set()).update(in_file(file))
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                bodies.setdefault(node.name, set()).update(identifiers(node))
                bases[node.name] = [ast.unparse(base).split(".")[-1] for base in node.bases]

    def whole(name, seen=()):
        above = (whole(base, (*seen, name)) for base in bases.get(name, ()) if base not in (*seen, name))
        return bodies.get(name, set()).union(*above)

    packages = {folder.parent.name for folder in PACKAGE.rglob("__init__.py")} - {"chipwise"}
    return Names(modules, packages, {name: whole(name) for name in bodies})


def identifiers(tree):
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword):
            found.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
    return found


@functools.cache
def in_file(file):
    return frozenset(identifiers(ast.parse(file.read_text())))


DOTTED = re.compile(r"`([A-Za-z]\w*(?:\.[A-Za-z_]\w*)+)(?=[`(\[, ])")
ENDINGS = re.compile(
    r"\.(json|jsonl|csv|toml|textproto|py|pyi|md|txt|jinja|css|safetensors|npz|npy|html|svg|png)$"
)


def is_there(path, here):
    """Whether a dotted name leads to something, seen from a file whose identifiers are `here`."""
    head, *rest = path
    known = names()
    if head in FOREIGN or not rest:
        return head in FOREIGN | known.packages | known.classes.keys() | known.modules.keys()
    if head == "cw":  # below
        return True
    if head == "chipwise":
        return is_there(rest, here)
    if head in known.packages and (rest[0] in known.modules or rest[0] in known.packages):
        return is_there(rest, here)
    if head in known.classes:
        return rest[0] in known.classes[head]
    if rest[0] in known.modules.get(head, ()):
        return True
    return head in here and not rest[0].isupper()  # a variable's attribute; a constant is a module's


def test_dotted_names_exist():
    faults = []
    for text in prose():
        if text.file.is_relative_to(PACKAGE):
            faults += [
                one
                for one in text.cited(DOTTED)
                if not ENDINGS.search(one.what) and not is_there(one.what.split("."), in_file(text.file))
            ]
    assert_none(faults)


PUBLIC = re.compile(r"`(?:cw|chipwise)\.([A-Za-z_][\w.]*\w)(?=[`(\[,])")


def test_public_names_exist():
    """`cw.fit`, and modules that stand in a page as `chipwise.data.pack`."""
    faults = []
    for text in prose():
        if not text.file.is_relative_to(ROOT / "tests"):
            for one in text.cited(PUBLIC):
                try:
                    pkgutil.resolve_name(f"chipwise.{one.what}")
                except (AttributeError, ImportError):
                    faults.append(one)
    assert_none(faults)


def test_every_page_of_measurements_is_listed():
    listed = (ROOT / "docs" / "measured.md").read_text()
    pages = [page.relative_to(ROOT) for page in (ROOT / "benchmarks").rglob("*.md")]
    assert [page for page in pages if f"(../{page.as_posix()})" not in listed] == []


# ---- options, targets, tests


OTHERS = {"--no-kill", "--yes"}
"""Options of SLURM and SkyPilot."""


def test_options_of_commands_exist():
    group = typer.main.get_command(app())
    every = [*group.params, *(param for command in group.commands.values() for param in command.params)]
    known = {name for param in every for name in (*param.opts, *param.secondary_opts)} | {"--help"}
    programs = [file.read_text() for file in CODE if file.parent.name in ("examples", "benchmarks")]
    known |= {name for program in programs for name in re.findall('"(--[a-z-]+)"', program)}
    cited = re.compile(r"(?<!`)`(?:chipwise [^`]*)?(--[a-z][a-z-]+\b)(?!_)[^`]*`")
    faults = [one for text in pages() for one in text.cited(cited) if one.what not in known | OTHERS]
    assert_none(faults)


def test_targets_of_make_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    faults = [one for text in prose() for one in text.cited(r"`make ([\w-]+)") if one.what not in targets]
    assert_none(faults)


def test_tests_exist():
    tests = {
        node.name
        for file in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    stems = {file.stem for file in (ROOT / "tests").rglob("test_*.py")}
    faults = [
        one
        for text in prose()
        for one in text.cited(r"\b(test_[a-z0-9_]+)\b(?!\.jsonl?|\*)")
        if one.what not in tests | stems
    ]
    assert_none(faults)
