"""Computes a digest of a step from its programs' operations, without names, places in files, and
addresses.

The examples of a replica are picked before `mark`, in a way that depends on the devices, and on
whether data is resident. Only the equations after the mark are digested, so the digest is the same
on any number of devices and hosts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from ..models.remat import inside
from .inline import Atom

MARK = "chipwise-replica"
_NAMES = {"name", "debug", "debug_info", "name_and_src_info", "metadata"}
_PLACES = re.compile(r"(\bat )?0x[0-9a-f]+|[^\s'\"(]*\.py(:\d+)*")


def mark(number: jax.Array) -> jax.Array:
    """Returns `number` itself, and marks it in the jaxpr. Only the equations after the mark are
    digested. It compiles to nothing."""
    return checkpoint_name(number, MARK)


def digest(programs: Iterable[ClosedJaxpr]) -> str:
    """The SHA-256 of closed jaxprs in their order, in hexadecimal. Of a jaxpr with a `mark` it
    includes only the part after the mark."""
    parts = []
    for program in programs:
        digests: dict[int, str] = {}
        part = _marked(program.jaxpr)
        parts.append(_text(program, digests) if part is None else _operations(part, digests))
        parts.append(_text(list(program.consts), digests))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _marked(whole: Jaxpr) -> Jaxpr | None:
    """The part after the mark of the jaxpr `whole`, or of a jaxpr inside of it. `None` if there is
    no mark."""
    for jaxpr in inside(whole):
        for i, equation in enumerate(jaxpr.eqns):
            if equation.params.get("name") == MARK:
                return jaxpr.replace(eqns=jaxpr.eqns[i + 1 :], constvars=[], invars=[])
    return None


def _text(value: Any, digests: dict[int, str]) -> str:
    """Converts a `value` of an equation to text that is equal in all processes.

    *Arguments:* `digests` has those of jaxprs by their identity, since a jaxpr may be called many
    times."""
    if isinstance(value, ClosedJaxpr | Jaxpr):
        if id(value) not in digests:
            digests[id(value)] = hashlib.sha256(_operations(value, digests).encode()).hexdigest()
        return digests[id(value)]
    if isinstance(value, np.ndarray | np.generic | jax.Array) and not isinstance(
        value, jax.core.Tracer
    ):
        is_key = isinstance(value, jax.Array) and jax.dtypes.issubdtype(
            value.dtype, jax.dtypes.prng_key
        )
        array = np.asarray(
            jax.random.key_data(value) if is_key else value  # type: ignore[arg-type]
        )
        return f"{array.dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()}"
    if isinstance(value, dict):
        return _text([(k, v) for k, v in value.items() if k not in _NAMES], digests)
    if isinstance(value, set | frozenset):
        return str(sorted(_text(v, digests) for v in value))
    if isinstance(value, list | tuple):
        return f"({','.join(_text(v, digests) for v in value)})"
    if callable(value) and not isinstance(value, type):  # its jaxprs are beside it
        return "function"
    return _PLACES.sub("", repr(value))


def _operations(value: ClosedJaxpr | Jaxpr, digests: dict[int, str]) -> str:
    jaxpr, consts = (value, ()) if isinstance(value, Jaxpr) else (value.jaxpr, list(value.consts))
    numbers: dict[Var, int] = {}

    def of(variable: Atom) -> str:
        if isinstance(variable, Literal):
            return f"{variable.aval}={_text(variable.val, digests)}"
        return f"{numbers.setdefault(variable, len(numbers))}:{variable.aval}"

    lines = [_text(list(consts), digests), " ".join(map(of, [*jaxpr.constvars, *jaxpr.invars]))]
    for equation in _used(jaxpr):
        inputs, outputs = (" ".join(map(of, each)) for each in (equation.invars, equation.outvars))
        hidden = {
            "in_shardings",
            "out_shardings",
            "in_layouts",
            "out_layouts",
            "donated_invars",
            "ctx_mesh",
        }
        skipped = hidden if equation.primitive.name in ("jit", "pjit") else set()
        params = {k: v for k, v in equation.params.items() if k not in skipped}
        lines.append(f"{equation.primitive.name} {inputs} -> {outputs} {_text(params, digests)}")
    return "\n".join([*lines, " ".join(map(of, jaxpr.outvars))])


def _used(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The equations of `jaxpr` that its outputs need or that have an effect. Compilers drop the
    others."""
    needed, used = set(vars_of(jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            used.append(equation)
            needed.update(vars_of(equation.invars))
    return used[::-1]


def vars_of(given: Iterable[Atom]) -> Iterator[Var]:
    """Yields the variables among an equation's inputs or a jaxpr's outputs, without the
    literals."""
    return (v for v in given if not isinstance(v, Literal))
