"""Tests that compare bits compile as users do: `as_users_compile` says so, and does so."""

import ast
import os
from pathlib import Path

import jax
import pytest

TESTS = Path(__file__).parent
MARKS = ("as_users_compile", "slow")
OTHERS = {
    "data/test_tars.py::test_an_archive_has_the_entries_of_its_folder": "a fingerprint of data",
}
"""Tests that compare fingerprints of something else than programs, and of what."""


def how():
    return jax.config.read("jax_disable_most_optimizations"), os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"]


@pytest.fixture(scope="module")
def first():
    """How the test compiles that came first in this file."""
    return how()


def test_others_compile_quickly(first):
    assert how() == (True, "1")


@pytest.mark.as_users_compile
def test_marked_ones_come_first_and_compile_as_users(first):
    assert first == how() == (False, "0")


def marked(node):
    """Whether a list of decorators, or the value of `pytestmark`, has one of the marks."""
    return any(isinstance(part, ast.Attribute) and part.attr in MARKS for part in ast.walk(node))


def compares_fingerprints(function):
    """Whether two values named after fingerprints are compared."""
    for node in ast.walk(function):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            if sum("fingerprint" in side for side in sides) > 1:
                return True
    return False


def test_no_test_compares_fingerprints_of_programs_that_no_user_has():
    unmarked = []
    for path in sorted(TESTS.rglob("test_*.py")):
        body = ast.parse(path.read_text()).body
        if any(
            isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "pytestmark" and marked(one.value)
            for one in body
        ):
            continue
        unmarked += [
            f"{path.relative_to(TESTS)}::{one.name}"
            for one in body
            if isinstance(one, ast.FunctionDef)
            and one.name.startswith("test_")
            and compares_fingerprints(one)
            and not any(map(marked, one.decorator_list))
        ]
    assert set(unmarked) == set(OTHERS)
