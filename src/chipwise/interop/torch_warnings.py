"""Branches that only warn, as libraries do of the values that they are given.

A traced program has no values, so their condition is taken for false. The comparison with eager
PyTorch warns.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys

from ..recipe.user_code import is_framework

_WARNING = {"warn", "warning", "warning_once", "warn_once", "info", "debug", "error", "print"}


def only_warns() -> bool:
    """Whether the innermost line outside of PyTorch is the condition of such a branch."""
    frame = sys._getframe(1)
    while is_framework(frame.f_code.co_filename):
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return any(first <= frame.f_lineno <= last for first, last in _lines(frame.f_code.co_filename))


@functools.cache
def _lines(file: str) -> list[tuple[int, int]]:
    """The first and last lines of the conditions in `file` of branches that only warn."""
    nodes = ast.walk(ast.parse("".join(linecache.getlines(file))))
    return [
        (node.test.lineno, node.test.end_lineno or node.test.lineno)
        for node in nodes
        if isinstance(node, ast.If) and not node.orelse and all(map(_warns, node.body))
    ]


def _warns(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return False
    name = call.func
    return getattr(name, "attr", getattr(name, "id", "")) in _WARNING
