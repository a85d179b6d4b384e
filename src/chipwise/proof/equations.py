"""The operations of a traced program, one by one, with their results and the user's line.

Each operation runs by itself, not compiled with the others. So a result may differ in the last
place from that of the compiled program. Two programs are compared as each runs here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from ..base import Fact, fact
from ..compile.hlo.proto import rank_of
from ..step.program_digest import MARK

_INLINED = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "checkpoint",
    "remat",
    "remat2",
    "custom_jvp_call",
}
_INLINED |= {"custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin"}
_NOBODYS = re.compile(r"-packages/jax(lib)?/|/lib/python[^/]*/(?!(site|dist)-packages)")
"""The files whose lines say nothing: JAX's and Python's own."""


@dataclass(frozen=True)
class Ran:
    """An operation that ran."""

    name: str
    """The name of JAX's primitive."""
    module: str
    """The module of PyTorch or Linen, such as `"encoder/0"`, or `""` outside of any."""
    place: str
    """The user's line, such as `"model.py:31 (loss)"`, or that of the library that calls JAX."""
    values: tuple[np.ndarray, ...]
    """The results as NumPy arrays."""
    digests: tuple[str, ...]
    """The digests of `values`."""

    def __str__(self) -> str:
        return f"{self.name}{' of ' * bool(self.module)}{self.module} at {self.place}"


def run(function: Callable[..., Any], *arguments: Any) -> list[Ran]:
    """The operations of `function`, in their order. For a replica's program, only those that do not
    depend on devices."""
    closed = jax.make_jaxpr(function)(*arguments)
    ran: list[Ran] = []
    _evaluated(closed.jaxpr, closed.consts, jax.tree.leaves(arguments), ran, (), "")
    return ran


def _evaluated(
    jaxpr: Any,
    consts: Sequence[Any],
    given: Sequence[Any],
    ran: list[Ran],
    around: Any,
    within: str,
) -> list:
    known: dict[Any, Any] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *given], strict=True)
    )
    for equation in jaxpr.eqns:
        values = [one.val if isinstance(one, Literal) else known[one] for one in equation.invars]
        frames = [*_frames(equation), *around]
        # "transpose(jvp(encoder))/0": the gradient of a module's operation is the module's too
        scopes = re.sub(r"\w+\(|\)", "", str(equation.source_info.name_stack))
        module = f"{within}/{scopes}".strip("/")
        name, inner = equation.primitive.name, _inner(equation)
        if name in _INLINED and inner is not None and len(inner.jaxpr.invars) == len(values):
            made = _evaluated(inner.jaxpr, inner.consts, values, ran, frames, module)
        elif name == "name":
            made = values
            if equation.params["name"] == MARK:
                ran.clear()  # before the mark, rows are picked in a way that depends on devices
        else:
            parameters = equation.primitive.get_bind_params(equation.params)
            with equation.ctx.manager:
                made = equation.primitive.bind(*values, **parameters)
            made = list(made) if equation.primitive.multiple_results else [made]
            arrays = tuple(map(_array, made))
            digests = tuple(
                hashlib.sha256(f"{a.dtype}{a.shape}".encode() + a.tobytes()).hexdigest()
                for a in arrays
            )
            ran.append(Ran(name, module, _place(frames), arrays, digests))
        known.update(zip(equation.outvars, made, strict=True))
    return [one.val if isinstance(one, Literal) else known[one] for one in jaxpr.outvars]


def _inner(equation: Any) -> Any:
    """The closed program that an equation calls, or `None` if it is an operation of its own."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = equation.params.get(name)
        if hasattr(inner, "eqns"):
            return ClosedJaxpr(inner, ()) if not hasattr(inner, "jaxpr") else inner
    return None


def _array(value: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def _frames(equation: Any) -> list[Any]:
    """The lines where an equation was written, innermost call first."""
    traceback = equation.source_info.traceback
    return [] if traceback is None else list(traceback.frames)


def _place(frames: Sequence[Any]) -> str:
    """The innermost line of the user's own code. If there is none, that of a model or a change of
    data in this package. If there is none either, that of a library other than JAX."""

    def rank(frame: Any) -> int:
        file = frame.file_name
        return 9 if not file.startswith("/") or _NOBODYS.search(file) else rank_of(file)

    if not frames:
        return "unknown"
    best = min(frames, key=rank)
    name = Path(best.file_name).name
    return f"{name}:{best.line_num} ({best.function_name})"


def parted(a: Sequence[Ran], b: Sequence[Ran]) -> Fact | None:
    """The first operation of each of two programs with a result that the other program does not
    have. `None` if both have the same results, in any order. If the results have one shape and
    type, adds the largest difference, and the error of rounding the largest value once."""
    first, second = _alone(a, b), _alone(b, a)
    if first is None and second is None:
        return None
    shown = {side: one and str(one) for side, one in (("a", first), ("b", second))}
    sizes: Any = ""
    numbers: dict[str, float | None] = {"largest": None, "rounding": None}
    if first is None or second is None:
        text = "the first operation that only one of them has: {a} in A, {b} in B"
        return fact("diff-operation", text, **shown, **numbers)
    x, y = first.values[0], second.values[0]
    if (
        x.shape == y.shape
        and x.dtype == y.dtype
        and x.size
        and jnp.issubdtype(x.dtype, jnp.floating)
    ):
        numbers["largest"] = float(np.max(np.abs(x.astype(np.float64) - y.astype(np.float64))))
        numbers["rounding"] = float(
            np.max(np.abs(x.astype(np.float64))) * float(jnp.finfo(x.dtype).eps) / 2
        )
        sizes = fact(
            "parted-size", ", by at most {largest:.3g} (rounding once: {rounding:.3g})", **numbers
        )
    text = "the first operation with another result is {a} in A, {b} in B{sizes}"
    if shown["a"] == shown["b"]:
        text = "the first operation with another result is {a}{sizes}"
    return fact("diff-operation", text, **shown, **numbers, sizes=sizes)


def _alone(ours: Sequence[Ran], theirs: Sequence[Ran]) -> Ran | None:
    """The first of our operations with a result that none of theirs has."""
    there = {digest for one in theirs for digest in one.digests}
    return next((one for one in ours if not there.issuperset(one.digests)), None)
