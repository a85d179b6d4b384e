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
    try:
        nodes = list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:  # of another language, which is compiled to Python
        return []
    return [
        (node.test.lineno, node.test.end_lineno or node.test.lineno)
        for node in nodes
        if isinstance(node, ast.If)
        and not node.orelse
        and _only_reads(node.test)
        and all(map(_warns, node.body))
    ]


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
