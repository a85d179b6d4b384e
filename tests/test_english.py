"""How docstrings are written: as an engineer speaks. One clause a sentence, and the usual word."""

import ast
import re

import pytest

from imports import PACKAGE, files

BEGINNINGS = re.compile(r"\s*(Of|As|That|Which)\b")
BANNED = re.compile(r"\b(so many|anew|goes on|told|of which|what it|lies|stands)\b")


def prose(docstring, indent):
    """The sentences of a docstring, without tables, indented blocks and code."""
    lines = docstring.split("\n")
    block = re.compile(rf"\s{{{indent + 4},}}(?![-*] )")
    kept = [line for i, line in enumerate(lines) if not (i and block.match(line)) and line.strip()[:1] != "|"]
    return re.sub(r"`[^`]*`", "x", " ".join(kept))


def faults(docstring, indent=0):
    text = prose(docstring, indent)
    found = [match.group(0).strip() for match in (BEGINNINGS.match(text), BANNED.search(text)) if match]
    return found + [";"] * (";" in text)


@pytest.mark.parametrize(
    "docstring, found",
    [
        ("Returns the rows.", []),
        ("Of a step, what is told.", ["Of", "told"]),
        ("The rows; the columns.", [";"]),
        ("The rows: `a; b`.\n\n    x = 1; told\n\n| a; b |", []),
        ("The rows.\n\n    - `a`: anew", ["anew"]),
        ("Often so few.", []),
    ],
)
def test_faults_are_found(docstring, found):
    assert faults(docstring) == found


def docstrings(path):
    """The docstrings of a file, with those below fields: line, column and text."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            yield node.lineno, node.col_offset, node.value.value


def test_docstrings_are_plain_english():
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {', '.join(found)}"
        for path in files()
        for line, column, text in docstrings(path)
        if (found := faults(text, column))
    ]
    assert not wrong
