"""The house: who may import whom, how long a file and a function may be. All read from the source."""

import ast
import re
import runpy

import pytest

from imports import PACKAGE, files, imports

ORDER = """
words errors atomic chips machine models recipe data interop recipes engine deploy planner study measure
launch explain cli
""".split()  # noqa: SIM905
"""A module imports from its own package and from those to the left of it."""

DOORS = {
    ("recipe/settings.py", "recipes"): "recipes by name",
    ("recipe/settings.py", "data"): "made-up examples",
    ("recipe/recipe.py", "study"): "Recipe.transfer",
    ("engine/result.py", "explain"): "a result in a notebook",
    ("planner/plans.py", "explain"): "plans in a notebook",
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


@pytest.mark.parametrize("file", ["engine/fit.py", "engine/stepper.py", "study/sweep.py", "measure/bench.py"])
def test_a_program_over_the_session_is_a_page(file):
    assert len((PACKAGE / file).read_text().splitlines()) < 120


def test_a_file_can_be_read_at_once():
    """40 to 400 lines, no function above 80."""
    wrong, long = [], []
    for path in files():
        file, text = str(path.relative_to(PACKAGE)), path.read_text()
        if path.stem not in ("__init__", "__main__") and not 40 <= len(text.splitlines()) <= 400:
            wrong.append(file)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 80:
                long.append(f"{file}:{node.name}")
    assert not wrong
    assert not long
