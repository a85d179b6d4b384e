"""Inlines functions that are marked for inlining into the program that calls them.

JAX before 0.12 inlined a function with `jax.jit(inline=True)` while it traced. Since 0.12 such a
function stays a call until the program is lowered. One call over a whole tree of arrays, as in
optax, hides that its leaves do not need each other.
"""

from __future__ import annotations

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, gensym

Atom = Var | Literal


def inlined(jaxpr: Jaxpr) -> Jaxpr:
    """Returns `jaxpr` with each call of a function that is marked for inlining replaced by the
    function's equations."""
    if not any(map(_to_inline, jaxpr.eqns)):
        return jaxpr
    equations, known = list[JaxprEqn](), dict[Var, Atom]()

    def of(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else known.get(atom, atom)

    for call in jaxpr.eqns:
        call = call.replace(invars=[of(atom) for atom in call.invars])
        if not _to_inline(call):
            equations.append(call)
            continue
        body, results = _copied(inlined(call.params["jaxpr"].jaxpr), call.invars)
        equations += body
        known |= zip(call.outvars, results, strict=True)
    return jaxpr.replace(eqns=equations, outvars=[of(atom) for atom in jaxpr.outvars])


def _to_inline(equation: JaxprEqn) -> bool:
    mode = getattr(equation.params.get("inline"), "name", None)  # a bool before JAX 0.12
    return mode == "JAX_LATE" and not equation.params["jaxpr"].consts


def _copied(jaxpr: Jaxpr, given: list[Atom]) -> tuple[list[JaxprEqn], list[Atom]]:
    """Returns the equations of `jaxpr` for the arguments `given`, and its results. Their variables
    are new, since a program may call one function several times."""
    new, known = gensym(), dict(zip(jaxpr.invars, given, strict=True))

    def of(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else known[atom]

    equations = []
    for equation in jaxpr.eqns:
        invars = [of(atom) for atom in equation.invars]
        outvars = [new(variable.aval) for variable in equation.outvars]
        known |= zip(equation.outvars, outvars, strict=True)
        equations.append(equation.replace(invars=invars, outvars=outvars))
    return equations, [of(atom) for atom in jaxpr.outvars]
