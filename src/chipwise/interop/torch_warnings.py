"""Branches that only warn and asserts, as libraries have them of the values that they are given.

A traced program has no values. So the condition of such a branch is taken for false, and what is
asserted for met, as by `python -O`. The comparison with eager PyTorch warns and asserts.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from typing import Any

from ..recipe.user_code import is_framework

_METHODS = {"warn", "warning", "warning_once", "warn_once", "info", "debug", "error"}
_LOGGERS = {"warnings", "logging", "logger", "_logger", "log", "_log", "LOGGER", "LOG"}
_READS = (
    "abs all allclose amax amin any bool detach dim eq equal float format ge get_rank gt int"
    " is_available is_compiling is_floating_point is_grad_enabled is_initialized is_scripting"
    " is_torchdynamo_compiling is_tracing isfinite isinf isinstance isnan isneginf isposinf item le"
    " len logical_and logical_not logical_or lt max mean min ne norm numel size std str sum tolist"
    " type var"
)
"""Functions and methods that change nothing."""


class Met:
    """A number whose comparisons are all `true`."""

    def __init__(self, true: bool):
        self.true = true

    def __bool__(self, *_: Any) -> bool:
        return self.true

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__


def only_warns() -> bool:
    """Whether the innermost line outside of PyTorch is the condition of such a branch."""
    return isinstance(_statement(), ast.If)


def asserted() -> Met | None:
    """What a value is to be where the innermost line outside of PyTorch asserts it."""
    one = _statement(ast.Assert)
    return one and Met(not ast.unparse(one.test).startswith("not "))


def _statement(kind: Any = ast.If) -> Any:
    """The statement of this `kind` whose condition is on that line."""
    frame = sys._getframe(1)
    while is_framework(frame.f_code.co_filename):
        if frame.f_back is None:
            return None
        frame = frame.f_back
    for one in _statements(frame.f_code.co_filename):
        last = one.test.end_lineno or one.test.lineno
        if isinstance(one, kind) and one.test.lineno <= frame.f_lineno <= last:
            return one
    return None


@functools.cache
def _statements(file: str) -> list[Any]:
    """The branches in `file` that only warn, and its asserts."""
    try:
        nodes = list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:  # of another language, which is compiled to Python
        return []
    return [
        node
        for node in nodes
        if (isinstance(node, ast.Assert) and _is_plain(node.test) and _only_reads(node.test))
        or (
            isinstance(node, ast.If)
            and not node.orelse
            and _only_reads(node.test)
            and all(map(_warns, node.body))
        )
    ]


def _is_plain(test: ast.expr) -> bool:
    """Whether an assert negates its whole condition or none of it."""
    inner = test.operand if isinstance(test, ast.UnaryOp) else test
    return not any(isinstance(node, ast.Not) for node in ast.walk(inner))


def _warns(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(ast.Call(ast.Name("print")) as call):
            pass
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), method)) as call):
            if name not in _LOGGERS or method not in _METHODS:
                return False
        case ast.Expr(ast.Call(ast.Attribute(ast.Call(maker), method)) as call):
            if ast.unparse(maker) != "logging.getLogger" or method not in _METHODS:
                return False
        case _:
            return False
    return all(map(_only_reads, (*call.args, *(word.value for word in call.keywords))))


def _only_reads(expression: ast.expr) -> bool:
    """Whether an expression surely changes nothing: it calls functions of PyTorch and Python."""
    nodes = list(ast.walk(expression))
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    return all(map(_is_known, calls)) and not any(
        isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)) for node in nodes
    )


def _is_known(function: ast.expr) -> bool:
    match function:
        case ast.Attribute(ast.Name("self")):  # the user's own
            return False
        case ast.Name(name) | ast.Attribute(_, name):
            return name in _READS.split()
    return False
