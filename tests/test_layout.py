"""The house: its size, who may import whom, that no name stands for two things. All read from the source."""

import ast
import collections
import re
import runpy

import pytest

from imports import PACKAGE, cycle, files, imports, package_of

BUDGET = 46_000
"""Lines of Python in the package: what comes in pays with what leaves. It goes down to 41,500."""

MOST = 46_000
"""What `BUDGET` may ever be."""

ORDER = """
words errors atomic chips machine models hlo recipe data interop recipes engine deploy proof study
referee measure launch planner explain track cli
""".split()  # noqa: SIM905
"""A module imports from its own package and from those to the left of it."""

DOORS = {
    ("recipe/settings.py", "recipes"): "recipes by name",
    ("recipe/settings.py", "data"): "made-up examples",
    ("recipe/recipe.py", "study"): "Recipe.transfer",
    ("words/displayed.py", "explain"): "an answer printed, or in a notebook",
}
"""Imports to the right that stand inside a function: a convenience of the object that one has in hand."""


def test_every_package_has_its_place():
    here = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    assert here - {"__init__", "__main__", "__pycache__"} == set(ORDER)


def test_the_picture_shows_every_package():
    """`python tools/draw_layout.py` draws it again."""
    root = PACKAGE.parents[1]
    tool = runpy.run_path(str(root / "tools" / "draw_layout.py"))
    columns = {name for column in tool["COLUMNS"] for name in column}
    assert columns | set(tool["BELOW"]) == set(ORDER) == set(tool["IDEAS"])
    assert all(ORDER.index(used) < ORDER.index(user) for user, used in tool["reduced"](tool["imports"]()))
    picture = (root / "docs" / "design.svg").read_text()
    assert all(f">{name}</text>" in picture for name in ORDER)


def test_the_page_names_files_that_are_there():
    root = PACKAGE.parents[1]
    named = re.findall(r"`((?:\w+/)*\w+\.(?:py|toml))`", (root / "docs" / "design.md").read_text())
    assert len(named) > 10
    gone = [
        name for name in named if not any((top / name).exists() for top in (PACKAGE, PACKAGE.parent, root))
    ]
    assert not gone


def test_imports_point_one_way():
    order = [*ORDER, "__main__"]
    wrong = [
        f"{one.file}>{one.arrow[1]}"
        for one in imports()
        if order.index(one.arrow[0]) < order.index(one.arrow[1]) and (one.file, one.arrow[1]) not in DOORS
    ]
    assert not wrong


def test_doors_stand_in_functions():
    for file, package in DOORS:
        tree = ast.parse((PACKAGE / file).read_text())
        top = {node.lineno for node in tree.body if isinstance(node, ast.ImportFrom)}
        through = [one for one in imports() if one.file == file and one.arrow[1] == package]
        assert through and not top & {one.line for one in through}, file


def test_private_modules_stay_in_their_package():
    wrong = [
        f"{one.file}>{one.module}"
        for one in imports()
        if one.module.split("/")[-1].startswith("_")
        and not one.module.endswith("/__init__.py")
        and one.file.rpartition("/")[0] != one.module.rpartition("/")[0]
    ]
    assert not wrong


@pytest.mark.parametrize(
    "file", ["engine/fit.py", "engine/moment.py", "engine/stepper.py", "study/sweep.py", "measure/bench.py"]
)
def test_a_program_over_the_session_is_a_page(file):
    assert len((PACKAGE / file).read_text().splitlines()) < 120


def test_the_session_does_not_ask_how_its_state_is_held():
    session = (PACKAGE / "engine" / "session.py").read_text()
    assert len(session.splitlines()) < 280 and not re.search("_groups|_sharding", session)


def test_the_package_stays_within_its_budget():
    """With `-s`, or when it fails, it prints the lines of each package, largest first."""
    lines = collections.Counter()
    for path in files():
        lines[package_of(str(path.relative_to(PACKAGE)))] += len(path.read_text().splitlines())
    for package, count in lines.most_common():
        print(f"{count:7,}  {package}")
    print(f"{lines.total():7,}  of {BUDGET:,}")
    assert lines.total() <= BUDGET <= MOST


def test_files_and_functions_can_be_read_in_one_sitting():
    """A file above 500 lines says why, in its docstring: "Long because ..."; no function is above 80."""
    unexplained, long = [], []
    for path in files():
        file, text = str(path.relative_to(PACKAGE)), path.read_text()
        tree = ast.parse(text)
        if len(text.splitlines()) > 500 and "Long because " not in (ast.get_docstring(tree) or ""):
            unexplained.append(file)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 80:
                long.append(f"{file}:{node.name}")
    assert not unexplained
    assert not long


def test_no_two_files_import_each_other():
    assert not cycle()


def test_only_the_command_line_and_what_explains_know_the_planner():
    below = [name for name in ORDER if name not in ("planner", "explain", "cli")]
    users = {one.file for one in imports() if one.arrow[1] == "planner" and one.arrow[0] in below}
    assert not users


def test_a_name_stands_for_one_thing():
    """No class, at the top of a module, and no file is called like another one in the package."""
    classes, names = collections.Counter(), collections.Counter()
    for path in files():
        if path.stem not in ("__init__", "__main__"):
            names[path.stem] += 1
        body = ast.parse(path.read_text()).body
        classes.update(node.name for node in body if isinstance(node, ast.ClassDef))
    assert {name for name, count in classes.items() if count > 1} == set()
    assert {name for name, count in names.items() if count > 1} == set()
