"""Branches that only warn and asserts, as libraries have them of the values that they are given.

A traced program has no values. So the condition of such a branch is taken for false, and what is
asserted for met, as by `python -O`. The comparison with eager PyTorch warns and asserts.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import sys
from typing import Any

from ..recipe.user_code import is_framework

_METHODS = {"warn", "warning", "warning_once", "warn_once", "info", "debug", "error"}
_LOGGERS = {"warnings", "logging", "logger", "_logger", "log", "_log", "LOGGER", "LOG"}
_CAUGHT = ("AssertionError", "Exception")  # also BaseException
_READS = (
    "abs all allclose amax amin any bool detach dim eq equal float format ge get_rank gt int"
    " is_available is_compiling is_floating_point is_grad_enabled is_initialized is_scripting"
    " is_torchdynamo_compiling is_tracing isfinite isinf isinstance isnan isneginf isposinf item le"
    " len logical_and logical_not logical_or lt max mean min ne norm numel size std str sum tolist"
    " type var"
)
"""Functions and methods that change nothing."""


_COMPARED = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


class Met:
    """A number whose comparisons are all `true`, also after arithmetic."""

    def __init__(self, true: bool):
        self.true = true

    def __bool__(self, *_: Any) -> bool:
        return self.true

    def __abs__(self, *_: Any) -> Met:
        return self

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__
    __neg__ = __add__ = __radd__ = __sub__ = __rsub__ = __abs__
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __abs__


def only_warns() -> bool:
    """Whether the innermost line outside of PyTorch is the condition of such a branch."""
    return isinstance(_statement(), ast.If)


def asserted() -> Met | None:
    """What a value is to be where the innermost line outside of PyTorch asserts it."""
    one = _statement(ast.Assert)
    return one and Met(not ast.unparse(one.test).startswith("not "))


def _statement(kind: Any = ast.If) -> Any:
    """The statement of this `kind` whose condition is being run. An assert that is caught is a
    branch."""
    frame: Any = sys._getframe(1)
    while is_framework(frame.f_code.co_filename):
        frame = frame.f_back
        if frame is None:
            return None
    positions = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    line, _, column, _ = next(positions)
    for one in _statements(frame.f_code.co_filename):
        first, last = (one.lineno, one.col_offset), (one.test.end_lineno, one.test.end_col_offset)
        if isinstance(one, kind) and first <= (line, column or 0) < last:
            return None if kind is ast.Assert and _is_caught(frame) else one
    return None


def _is_caught(frame: Any) -> bool:
    """Whether code of the module, from `frame` outwards, continues after an `AssertionError`."""
    while frame is not None and frame.f_globals.get("__name__") != f"{__package__}.torch_trace":
        file, line = frame.f_code.co_filename, frame.f_lineno
        if not is_framework(file) and any(a <= line <= b for a, b in _catching(file)):
            return True
        frame = frame.f_back
    return False


@functools.cache
def _catching(file: str) -> list[tuple[int, int]]:
    """The first and the last lines of what is caught in `file` without being raised again."""

    def goes_on(one: ast.AST) -> bool:
        if isinstance(one, ast.With):
            return any("suppress" in ast.unparse(item.context_expr) for item in one.items)
        return isinstance(one, ast.Try) and any(
            (caught.type is None or any(name in ast.unparse(caught.type) for name in _CAUGHT))
            and not isinstance(caught.body[-1], ast.Raise)
            for caught in one.handlers
        )

    found: list[Any] = [one for one in _nodes(file) if goes_on(one)]
    return [(one.body[0].lineno, one.body[-1].end_lineno) for one in found]


@functools.cache
def _nodes(file: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:  # of another language, which is compiled to Python
        return []


@functools.cache
def _statements(file: str) -> list[Any]:
    """The branches in `file` that only warn, and its asserts."""
    return [
        node
        for node in _nodes(file)
        if (isinstance(node, ast.Assert) and _is_plain(node.test) and _only_reads(node.test))
        or (
            isinstance(node, ast.If)
            and not node.orelse
            and _only_reads(node.test)
            and all(map(_warns, node.body))
        )
    ]


def _is_plain(test: ast.expr) -> bool:
    """Whether an assert negates its whole condition or none of it, and only compares numbers."""
    inner = test.operand if isinstance(test, ast.UnaryOp) else test
    negates = any(isinstance(node, ast.Not) for node in ast.walk(inner))
    return not negates and _is_computed(inner)


def _is_computed(node: ast.AST) -> bool:
    """Whether the numbers that `item` reads in an expression are added and compared alone."""
    match node:
        case ast.Call(ast.Attribute(inner, "item")):
            return not _reads_number(inner)
        case ast.BoolOp() | ast.UnaryOp() | ast.Call(ast.Name("abs")):
            pass
        case ast.BinOp(_, ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), _):
            pass
        case ast.Compare(_, comparisons) if all(isinstance(one, _COMPARED) for one in comparisons):
            pass
        case _:
            return not _reads_number(node)
    return all(_is_computed(one) for one in ast.iter_child_nodes(node))


def _reads_number(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "item" for one in ast.walk(node))


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
