"""A digest of what a step computes: its programs' operations, without names, places in files, and addresses.

The examples of a replica are picked before `mark`, in a way that depends on the devices, and on whether data
is resident. Only what follows is digested, so the digest is the same on any number of devices and hosts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ..models.remat import inside

MARK = "chipwise-replica"
_NAMES = {"name", "debug", "debug_info", "name_and_src_info", "metadata"}
_PLACES = re.compile(r"(\bat )?0x[0-9a-f]+|[^\s'\"(]*\.py(:\d+)*")


def mark(number: jax.Array) -> jax.Array:
    """`number` itself; the equations of a jaxpr that follow are digested. It compiles to nothing."""
    return checkpoint_name(number, MARK)


def digest(programs: Iterable[Any]) -> str:
    """The SHA-256 of closed jaxprs in their order, in hexadecimal; of those with a `mark`, what follows."""
    parts = []
    for program in programs:
        known: dict[int, str] = {}
        part = _marked(program.jaxpr)
        parts.append(_text(program, known) if part is None else _operations(part, known))
        parts.append(_text(list(program.consts), known))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _marked(whole: Any) -> Any:
    """The part of the jaxpr `whole`, or of one inside of it, that follows the mark; `None` without one."""
    for jaxpr in inside(whole):
        for i, equation in enumerate(jaxpr.eqns):
            if equation.params.get("name") == MARK:
                return jaxpr.replace(eqns=jaxpr.eqns[i + 1 :], constvars=[], invars=[])
    return None


def _text(value: Any, known: dict[int, str]) -> str:
    """`value` of an equation as text that is equal in all processes. *Arguments:* `known`, by the identity of
    a jaxpr, which may be called many times."""
    if isinstance(value, ClosedJaxpr | Jaxpr):
        if id(value) not in known:
            known[id(value)] = hashlib.sha256(_operations(value, known).encode()).hexdigest()
        return known[id(value)]
    if isinstance(value, np.ndarray | np.generic | jax.Array) and not isinstance(value, jax.core.Tracer):
        is_key = isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(value) if is_key else value)  # type: ignore[arg-type]
        return f"{array.dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()}"
    if isinstance(value, dict):
        return _text([(k, v) for k, v in value.items() if k not in _NAMES], known)
    if isinstance(value, set | frozenset):
        return str(sorted(_text(v, known) for v in value))
    if isinstance(value, list | tuple):
        return f"({','.join(_text(v, known) for v in value)})"
    if callable(value) and not isinstance(value, type):  # what it computes is in jaxprs beside it
        return "function"
    return _PLACES.sub("", repr(value))


def _operations(value: Any, known: dict[int, str]) -> str:
    jaxpr, consts = getattr(value, "jaxpr", value), getattr(value, "consts", ())
    numbers: dict[Any, int] = {}

    def of(variable: Any) -> str:
        if isinstance(variable, Literal):
            return f"{variable.aval}={_text(variable.val, known)}"
        return f"{numbers.setdefault(variable, len(numbers))}:{variable.aval}"

    lines = [_text(list(consts), known), " ".join(map(of, [*jaxpr.constvars, *jaxpr.invars]))]
    for equation in _used(jaxpr):
        given, made = (" ".join(map(of, each)) for each in (equation.invars, equation.outvars))
        hidden = {"in_shardings", "out_shardings", "in_layouts", "out_layouts", "donated_invars", "ctx_mesh"}
        skipped = hidden if equation.primitive.name in ("jit", "pjit") else set()
        params = {k: v for k, v in equation.params.items() if k not in skipped}
        lines.append(f"{equation.primitive.name} {given} -> {made} {_text(params, known)}")
    return "\n".join([*lines, " ".join(map(of, jaxpr.outvars))])


def _used(jaxpr: Any) -> list[Any]:
    """The equations of `jaxpr` that its outputs need or that have an effect: compilers drop the others."""
    needed, used = set(vars_of(jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            used.append(equation)
            needed.update(vars_of(equation.invars))
    return used[::-1]


def vars_of(given: Iterable[Any]) -> Iterator[Any]:
    """Those of an equation's inputs, or a jaxpr's outputs, that are no numbers."""
    return (v for v in given if not isinstance(v, Literal))
