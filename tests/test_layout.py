"""The house: its size, who may import whom, that no name stands for two things. All read from the source."""

import ast
import collections
import io
import itertools
import re
import runpy
import tokenize

import pytest

from imports import PACKAGE, cycle, files, imports, package_of

BUDGET = 444_000
"""Tokens of code in the package: what comes in pays with what leaves. Comments, docstrings, line breaks and
indentation cost nothing, so code is as long as it reads best."""

ORDER = """
base chips machine models compile augment recipe data interop recipes step run deploy proof
study launch planner explain cli
""".split()  # noqa: SIM905
"""A module imports from its own package and from those to the left of it."""

DOORS = {("recipe/task.py", "data"): "labels joined by name"}
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


def test_a_step_knows_no_host():
    """No disk, no thread and no clock: `step` is functions of arrays and shapes."""
    host = {"os", "pathlib", "signal", "socket", "subprocess", "tempfile", "threading", "time"}
    for path in (PACKAGE / "step").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not host & {name.split(".")[0] for name in names}, path


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
    "file", ["run/fit.py", "run/event.py", "run/stepper.py", "study/sweep.py", "study/bench.py"]
)
def test_a_program_over_the_session_is_a_page(file):
    assert len((PACKAGE / file).read_text().splitlines()) < 130


def test_the_session_does_not_ask_how_its_state_is_held():
    session = (PACKAGE / "run" / "session.py").read_text()
    assert len(session.splitlines()) < 310 and not re.search("_groups|_sharding", session)


def test_the_package_stays_within_its_budget():
    """With `-s`, or when it fails, it prints the tokens of each package, largest first."""
    tokens = collections.Counter()
    for path in files():
        tokens[package_of(str(path.relative_to(PACKAGE)))] += tokens_of_code(path.read_text())
    for package, count in tokens.most_common():
        print(f"{count:7,}  {package}")
    print(f"{tokens.total():7,}  of {BUDGET:,}")
    assert tokens.total() <= BUDGET


def tokens_of_code(text):
    """The number of names, numbers, operators and strings of a module, without its docstrings and those
    below fields. An f-string is one token, as it was before Python 3.12 took them apart. What a formatter
    adds counts nothing: a comma before a closing bracket, a string that is cut into several."""
    docstrings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
    }
    kept, inside = [], 0
    for part in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[part.type]
        inside -= kind == "FSTRING_END"
        if not inside and kind in ("NAME", "NUMBER", "OP", "STRING", "FSTRING_START"):
            kept += [] if part.start in docstrings else [kind if "STR" in kind else part.string]
        inside += kind == "FSTRING_START"
    strings = ("STRING", "FSTRING_START")
    cut = sum(one in strings and other in strings for one, other in itertools.pairwise(kept))
    return len(kept) - cut - sum(one == "," and other in ")]}" for one, other in itertools.pairwise(kept))


def test_only_code_counts():
    text = '''"""A module."""
x = f(
    1,
    "tw" "o",
    f"{3}",
)  # a comment
"""What x is."""


def f(number, text):
    """
    Returns the text.
    """
    return text
'''
    code = "x = f ( 1 , 'two' , f'{3}' ) def f ( number , text ) : return text"
    assert tokens_of_code(text) == len(code.split())


def test_files_and_functions_can_be_read_in_one_sitting():
    """A file above 550 lines says why, in its docstring: "Long because ..."; no function is above 90."""
    unexplained, long = [], []
    for path in files():
        file, text = str(path.relative_to(PACKAGE)), path.read_text()
        tree = ast.parse(text)
        if len(text.splitlines()) > 550 and "Long because " not in (ast.get_docstring(tree) or ""):
            unexplained.append(file)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 90:
                long.append(f"{file}:{node.name}")
    assert not unexplained
    assert not long


def test_the_formatter_decides_everywhere():
    """Ruff holds lines to 100 columns, docstrings and comments too: `src/ruff.toml`."""
    assert not [path for path in files() if re.search("# fmt: (skip|off)", path.read_text())]


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
